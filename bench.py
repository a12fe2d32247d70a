"""How fast a model really is, in ratios taken in one run: `python bench.py train`.

FLOPs promise a speed-up (flops.py, exact count); a clock says how much of it arrives. What is compared
takes turns, round after round, and a ratio is the median of the ratios within a round, so a machine
that drifts slows both sides alike. Weights and tokens are random: speed does not ask for meaning.
"""

import argparse
import ctypes
import difflib
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import router as routing
from flops import exact_flops, parameters, short
from model import MoR
from modelconfig import SIZES, ModelConfig, preset

TRAINED = {  # rows of `bench.py train`; every ratio is to the first
    "vanilla": ("vanilla", {}),
    "recursive R=3": ("recursive", {}),
    "MoR expert R=2": ("mor", {"n_recursion": 2}),
    "MoR expert R=3": ("mor", {}),
    "MoR token R=3": ("mor", {"routing": "token", "balancing": "loss_free"}),
}
SEED = 1337


# ---- what every benchmark needs ----------------------------------------------------------------------


class Machine:
    """The device that is measured, and how to compute, wait and weigh there."""

    def __init__(self, device: str):
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        here = ["cpu", *(["cuda"] if gpus else []), *gpus]
        self.device = here[min(1, len(here) - 1)] if device == "auto" else device
        if self.device not in here:
            raise ValueError(f"--device={device} is not on this machine; there is {', '.join(here)}.")
        self.on_gpu = self.device != "cpu"
        self.dtype = "bfloat16" if self.on_gpu else "float32"

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {self.dtype}"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.on_gpu)

    def clock(self) -> float:
        """Seconds, after all work that was asked for is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def reset_peak(self) -> int | None:
        """Bytes held now, from which on `peak` counts anew; None where nobody counts."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        try:
            # What earlier models freed must go back first, or this one would fill it unseen.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, AttributeError):  # not Linux, another C library, or not allowed
            return None

    def peak(self) -> int:
        """The most bytes held since `reset_peak`."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their widest entry; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for first, *others in [head, *rows]:
        cells = [first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(others, widths[1:]))]
        print("  ".join(cells))


# ---- python bench.py train ---------------------------------------------------------------------------


def train_step(model: MoR, ids: Tensor, machine: Machine) -> tuple[float, list[float]]:
    """Seconds of a forward and a backward pass, and the share of tokens active per recursion step."""
    targets = ids.roll(-1, 1)
    start = machine.clock()
    with machine.autocast():
        loss, figures = model(ids, targets)
    loss.backward()
    seconds = machine.clock() - start
    model.zero_grad(set_to_none=True)
    return seconds, figures["active"].tolist()


@torch.no_grad()
def even_depths(model: MoR, ids: Tensor, machine: Machine) -> None:
    """Moves the loss-free bias until these tokens choose all depths about equally often.

    Training does the same, a little per step; untrained, most tokens would leave early.
    """
    router, caught = model.router[0], []
    hook = router.register_forward_hook(lambda module, args, output: caught.append(output))
    with machine.autocast():
        model(ids, ids, max_depth=1)
    hook.remove()
    p = routing.gate(caught[0], model.config)
    for i in range(300):
        choice = (p + router.balance_bias).argmax(1)
        counts = torch.bincount(choice, minlength=p.shape[1])
        routing.update_balance_bias(router.balance_bias, counts, rate=0.1 * 0.97**i)


def bench_train(args: argparse.Namespace) -> None:
    """Times a training step of every model, without the optimizer, and prints a row for each."""
    machine, seconds, peaks, active = Machine(args.device), {}, {}, {}
    torch.manual_seed(SEED)
    ids = torch.randint(preset("vanilla-" + args.preset)["vocab_size"], (args.batch, args.seq))
    ids = ids.to(machine.device)
    print(
        f"training step of {args.preset}: forward and backward, without the optimizer and its memory\n"
        f"{machine.describe()}, seq {args.seq}, batch {args.batch}"
    )
    models, configs = {}, {}
    with tqdm(total=len(TRAINED) * (args.rounds + 1), unit="step", disable=None) as bar:
        for name, (kind, given) in TRAINED.items():  # the warm-up round
            config = ModelConfig(**preset(f"{kind}-{args.preset}", block_size=args.seq, **given))
            before = machine.reset_peak()
            model = MoR(config).to(machine.device)
            if config.routing == "token":
                even_depths(model, ids, machine)
            _, active[name] = train_step(model, ids, machine)
            peaks[name] = "–" if before is None else short(machine.peak() - before, 1024) + "B"
            models[name], configs[name], seconds[name] = model, config, []
            bar.update()
        for _ in range(args.rounds):
            for name, model in models.items():
                taken, active[name] = train_step(model, ids, machine)
                seconds[name].append(taken)
                bar.update()
    # Every row's FLOPs follow the tokens that were active, not those that should have been.
    flops = {
        name: exact_flops(config, [share * args.seq for share in active[name]])
        for name, config in configs.items()
    }
    rows = []
    for name, config in configs.items():
        measured = statistics.median(a / b for a, b in zip(seconds["vanilla"], seconds[name]))
        implied = flops["vanilla"] / flops[name]
        rows.append(
            [
                name,
                str(config.n_layer),
                short(parameters(config).non_embedding),
                f"{ids.numel() / statistics.median(seconds[name]):.1f}",
                peaks[name],
                f"{measured:.3f}x",
                f"{implied:.3f}x",
                f"{measured / implied:.3f}",
            ]
        )
    print_table(
        ["model", "layers", "params", "tokens/s", "peak memory", "measured", "implied", "ratio"], rows
    )
    shares = " ".join(f"{share:.1%}" for share in active["MoR token R=3"])
    print(
        f"Medians of {args.rounds} rounds; params outside the embedding; implied: exact FLOPs of a "
        "sequence of mean activity.\nToken-choice: the loss-free bias was tuned on this batch; active "
        f"per step are {shares} of its tokens."
    )


# ---- the command line --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence; subcommands inherit it."""

    def error(self, message: str):
        raise ValueError(f"{message}; --help lists what there is.")


def size(text: str) -> str:
    if text not in SIZES:
        near = difflib.get_close_matches(text, SIZES, 1, 0)[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} is not known, the nearest is {near!r} of {', '.join(SIZES)}"
        )
    return text


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.py", description=__doc__.split(":")[0] + ".", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    train = commands.add_parser("train", help=bench_train.__doc__, allow_abbrev=False)
    train.set_defaults(run=bench_train)
    train.add_argument("--preset", type=size, default="135m", help=f"135m; one of {', '.join(SIZES)}")
    train.add_argument("--seq", type=count, default=1024, help="1024 tokens a sequence")
    train.add_argument("--batch", type=count, default=1, help="1 sequence a step")
    train.add_argument("--rounds", type=count, default=5, help="5 timed rounds, after one to warm up")
    train.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, …; auto: a GPU if any")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    try:
        args = read_arguments(argv)
        args.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

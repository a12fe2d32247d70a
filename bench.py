"""How fast a model really is, in ratios taken in one run: `python bench.py train`.

FLOPs promise a speed-up (flops.py, exact count); a clock says how much of it arrives. What is compared
takes turns, round after round, and a ratio is the median of the ratios within a round, so a machine
that drifts slows both sides alike. Weights and tokens are random: speed does not ask for meaning.
"""

import argparse
import difflib
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import router as routing
from bench_generate import bench_generate
from bench_gpu import SECTIONS, bench_gpu
from bench_kernels import bench_kernels
from command import exit_status
from flops import exact_flops, parameters, short
from measure import Machine, print_table
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


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def share(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or float(text) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return float(text)


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

    generate = commands.add_parser("generate", help=bench_generate.__doc__, allow_abbrev=False)
    generate.set_defaults(run=bench_generate)
    generate.add_argument("--preset", type=size, default="135m", help="135m; the models' size")
    generate.add_argument("--checkpoint", type=Path, help="a trained model, whose own depths are taken")
    generate.add_argument("--recursions", type=counts, default=[2, 3, 4], help="2,3,4; R of the models")
    generate.add_argument("--batch", type=count, default=16, help="16 requests at once, for vanilla")
    generate.add_argument("--tokens", type=count, default=64, help="64 new tokens a request, on average")
    generate.add_argument("--requests", type=count, help="requests; by default twice the batch")
    generate.add_argument(
        "--gather",
        type=share,
        default=0.5,
        help="0.5; share in flight that must be done for any to leave",
    )
    generate.add_argument("--compile", action="store_true", help="compiled passes; on a GPU, graphs")
    generate.add_argument("--rounds", type=count, default=1, help="1 timed round")
    generate.add_argument("--transformers", action="store_true", help="beside that library's generate")
    generate.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, …; auto: a GPU if any")

    kernel = commands.add_parser("kernels", help=bench_kernels.__doc__, allow_abbrev=False)
    kernel.set_defaults(run=bench_kernels)
    kernel.add_argument("--aot", action="store_true", help="compile ahead of time, for three GPUs")
    kernel.add_argument("--seq", type=count, default=2048, help="2048 tokens in the counted sequence")
    kernel.add_argument("--group", type=count, default=3, help="3 query heads per key head")

    gpu = commands.add_parser("gpu", help=bench_gpu.__doc__, allow_abbrev=False)
    gpu.set_defaults(run=bench_gpu)
    gpu.add_argument(
        "--limit", type=count, default=450, help="450 seconds; what no longer fits is left out"
    )
    gpu.add_argument("--only", default=",".join(SECTIONS), help=f"sections; all: {', '.join(SECTIONS)}")
    gpu.add_argument("--out", default="results", help="folder of the JSON file; results")
    gpu.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, interpreted; no file")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    def work() -> None:
        args = read_arguments(argv)
        args.run(args)

    return exit_status(work, instead="smaller sizes")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

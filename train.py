"""Trains a model: `python train.py [config/file.py] [--key=value …]`, `--help` for all settings.

Without arguments it is the main job: a small MoR on the Python standard library's own sources, in a few
minutes on a laptop. The recipe is the paper's (section 3): AdamW, clipping, trapezoid or cosine. A step
is a function of its number alone, so a run that stops, or is killed, goes on with --resume as if
nothing had happened.
"""

import math
import signal
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor
from tqdm import tqdm

import checkpoint
import router as routing
from dataset import Windows, open_dataset
from engine import generate, out_of_memory, pick_device, pieces, tokens_with_depths
from flops import run_steps, train_step_flops
from measure import PEAK_FLOPS
from model import MoR
from modelconfig import ModelConfig
from settings import TrainConfig, build, help_text, lasting_output, merge, parse, split_batch
from tokenizer import get_encoding, token_bytes

# Settings that decide which tokens a step reads: a resumed run must have them as they were.
FIXED = ("dataset", "seed", "global_batch_size")


# ---- setting up --------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run, set up."""

    t: TrainConfig
    settings: dict  # as given, for the checkpoint
    device: str
    autocast: torch.autocast
    encoding: Encoding
    rows: Windows
    val: Windows
    data: dict  # the checksums of both
    model: MoR
    compiled: torch.nn.Module  # the same model, or compiled
    optimizer: torch.optim.AdamW
    start: int  # steps that are done already

    @property
    def checkpoint(self) -> Path:
        return Path(self.t.out_dir) / "checkpoint.pt"


def read_checkpoint(given: dict, folder: Path) -> tuple[dict, dict | None]:
    """The settings, and the checkpoint to go on from, whose settings hold unless given anew."""
    path, log = folder / "checkpoint.pt", folder / "metrics.jsonl"
    if not given.get("resume"):
        if path.exists():
            raise ValueError(
                f"{path} exists already; add --resume to go on from it, or give another --out_dir."
            )
        if log.exists() and log.stat().st_size:
            raise ValueError(f"{log} exists already; move it away, or give another --out_dir.")
        return given, None
    state = checkpoint.load(path, tuple(checkpoint.TYPES))
    if not given.get("batch_size"):  # 0 is "as the device likes", and that is settled
        given = {k: v for k, v in given.items() if k != "batch_size"}
    with checkpoint.this_version():
        before = ModelConfig(**state["model_config"]), build(state["settings"])[1]
        given = merge(state["settings"], given) | {"out_dir": str(folder)}
    for old, new, names in zip(before, build(given), ([f.name for f in fields(ModelConfig)], FIXED)):
        for name in names:
            if getattr(old, name) != getattr(new, name):
                raise ValueError(
                    f"{path} was trained with {name}={getattr(old, name)}, not {getattr(new, name)}; "
                    "resume without that setting, or start anew in another --out_dir."
                )
    return given, state


def set_up(given: dict, state: dict | None) -> Run:
    """All that the steps of a run need; what cannot run is refused here, before anything is written."""
    config, t = build(given)
    device = pick_device(t.device)
    on_gpu = device.startswith("cuda")
    t = split_batch(t, 64 if on_gpu else 8)
    t = replace(t, max_iters=run_steps(config, t, t.batch_size))
    own = ("resume", "out_dir", "gradient_accumulation_steps")  # of this start alone
    settings = {k: v for k, v in given.items() if k not in own}
    settings |= {"batch_size": t.batch_size, "global_batch_size": t.global_batch_size}
    start = state["step"] if state else 0
    if start >= t.max_iters:
        raise ValueError(
            f"{t.out_dir} is at step {start} of {t.max_iters}; go on with a larger --max_iters."
        )
    train_tokens, val_tokens = open_dataset(t.dataset)
    data = {"train": train_tokens.checksums, "val": val_tokens.checksums}
    if state and state["data"] != data:
        raise ValueError(
            f"dataset {t.dataset!r} is not the one that {t.out_dir} was trained on; "
            "bring that back, or start anew in another --out_dir."
        )
    encoding = get_encoding(train_tokens.encoding)
    if config.vocab_size < encoding.n_vocab:
        raise ValueError(
            f"vocab_size={config.vocab_size} is smaller than the {encoding.n_vocab} tokens of encoding "
            f"{encoding.name!r}; set --vocab_size={encoding.n_vocab} or more."
        )
    rows, val = (Windows(tokens, config.block_size, t.seed) for tokens in (train_tokens, val_tokens))
    torch.manual_seed(t.seed)
    model = checkpoint.load_model(state, device).train() if state else MoR(config).to(device)
    optimizer = make_optimizer(model, t)
    if state:
        checkpoint.load_moments(state, optimizer)
    model.attention = t.attention
    bfloat16 = t.dtype == "bfloat16" or (t.dtype == "auto" and on_gpu)
    return Run(
        t=t,
        settings=settings,
        device=device,
        autocast=torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bfloat16),
        encoding=encoding,
        rows=rows,
        val=val,
        data=data,
        model=model,
        compiled=torch.compile(model) if compiles(config, t, on_gpu) else model,
        optimizer=optimizer,
        start=start,
    )


def make_optimizer(model: MoR, t: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": t.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, t.learning_rate, (t.beta1, t.beta2), fused=True)


def compiles(config: ModelConfig, t: TrainConfig, on_gpu: bool) -> bool:
    """Whether to compile; "auto" leaves out what would compile anew whenever shapes change."""
    # The active tokens of token-choice and of capacity warm-up differ in number from pass to pass.
    one_graph = config.routing != "token" and not config.capacity_warmup
    return t.compile == "yes" or (t.compile == "auto" and on_gpu and one_graph)


def peak_flops(t: TrainConfig, device: str) -> float:
    """FLOP/s that MFU is measured against; 0 where it is not known."""
    if t.peak_flops or not device.startswith("cuda"):
        return t.peak_flops
    name = torch.cuda.get_device_name(device)
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), 0.0)


# ---- steps -------------------------------------------------------------------------------------------


def learning_rate(t: TrainConfig, step: int) -> float:
    """The rate of a step: linear warm-up, then a plateau with a linear end, or a cosine, down to 0."""
    warm = min(1.0, (step + 1) / max(1, t.warmup_iters))
    if t.schedule == "cosine":
        done = max(0, step - t.warmup_iters) / max(1, t.max_iters - t.warmup_iters)
        return t.learning_rate * min(warm, 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    left = (t.max_iters - step) / max(1.0, t.cooldown * t.max_iters)
    return t.learning_rate * min(warm, left, 1.0)


def update(run: Run, step: int) -> tuple[Tensor, list[dict]]:
    """One optimizer step; returns the gradient's norm and the figures of each forward pass."""
    t, model = run.t, run.model
    config, n_passes = model.config, t.gradient_accumulation_steps
    passes = []
    for number in range(step * n_passes, (step + 1) * n_passes):
        torch.manual_seed(t.seed + (number + 1) * 1_000_003)  # random routing: a function of the pass
        if config.capacity_warmup:
            model.warm_up_capacity(number)
        x, y = run.rows.rows(number * t.batch_size, t.batch_size)
        with run.autocast:
            loss, figures = run.compiled(x.to(run.device), y.to(run.device))
        (loss / n_passes).backward()
        passes.append({"total_loss": loss.detach(), **figures})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip or math.inf)
    if not torch.stack([norm, *(p["total_loss"] for p in passes)]).isfinite().all():
        path = run.checkpoint
        again = (
            f"go on from {path} with --resume and" if path.exists() else "start in a new --out_dir with"
        )
        raise ValueError(
            f"the loss or its gradient is not finite at step {step + 1}; "
            f"{again} a lower --learning_rate or --grad_clip."
        )
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(t, step)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if config.routing == "token" and config.balancing == "loss_free":
        counts = sum(p["counts"] for p in passes)
        routing.update_balance_bias(model.router[0].balance_bias, counts, config.balance_rate)
    return norm, passes


def mean_figures(passes: list[dict]) -> dict:
    """Figures of several passes as plain numbers and lists; `loss` is the cross entropy alone.

    Means over the passes, except for the choice counts, which are summed, and the load and MaxVio that
    follow from the sums: batches that are uneven in opposite ways are even together.
    """
    out = {name: torch.stack([p[name] for p in passes]).float().mean(0) for name in passes[0]}
    if "counts" in out:
        counts = sum(p["counts"] for p in passes)
        load = counts / counts.sum()
        out |= {"counts": counts, "load": load, "max_vio": load.max() / load.mean() - 1}
    out["loss"] = out.pop("lm_loss")
    return {name: value.tolist() for name, value in out.items()}


@torch.no_grad()
def evaluate(run: Run) -> dict[str, dict]:
    """Validation loss in nats per token and bits per byte, and routing figures, under each rule.

    Expert-choice has two: "top-k" as trained, which looks ahead, and "causal" as generated. For all
    other models they are one and the same.
    """
    t, model, device = run.t, run.model, run.device
    model.eval()
    x, y = run.val.in_order(t.eval_iters * t.batch_size)
    n_bytes = int(token_bytes(run.encoding)[y.numpy()].sum())
    results = {}
    for rule in ("top-k", "causal") if model.config.routing == "expert" else ("causal",):
        passes, nats = [], 0.0
        for xs, ys in zip(x.split(t.batch_size), y.split(t.batch_size)):
            with run.autocast:
                _, figures = model(xs.to(device), ys.to(device), rule=rule)
            nats += figures["lm_loss"].item() * ys.numel()
            passes.append(figures)
        results[rule] = mean_figures(passes) | {
            "loss": nats / y.numel(),
            "bits_per_byte": nats / math.log(2) / max(1, n_bytes),
        }
    model.train()
    return results


def describe(results: dict[str, dict]) -> str:
    return "; ".join(
        f"{rule} {r['loss']:.4f} nats/token, {r['bits_per_byte']:.4f} bits/byte"
        for rule, r in results.items()
    )


def save(run: Run, step: int) -> None:
    checkpoint.save(
        run.checkpoint,
        run.model,
        optimizer=run.optimizer.state_dict(),
        encoding=run.encoding.name,
        step=step,
        settings=run.settings,
        data=run.data,
    )


@contextmanager
def stop_on_signals():
    """Collects what asks to stop, for the loop to finish its step and save; a second Ctrl-C breaks."""
    received, asking = [], [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        asking.append(signal.SIGHUP)

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in asking}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the run -----------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Steps until the budget is spent or a signal comes, with a checkpoint at the end either way.

    Logs to metrics.jsonl; returns the number of steps done.
    """
    t, config = run.t, run.model.config
    tokens_per_step = t.global_batch_size * config.block_size
    n_parameters = sum(p.numel() for p in run.model.parameters())
    print(
        f"{n_parameters / 1e6:.2f}M parameters in {max(config.plan) + 1} layers, unrolled to "
        f"{config.n_layer}; {t.max_iters} steps of {tokens_per_step} tokens on {run.device}, "
        f"to {run.checkpoint}"
    )
    step_flops, peak = train_step_flops(config, tokens_per_step), peak_flops(t, run.device)
    log = checkpoint.Log(run.checkpoint.with_name("metrics.jsonl"), run.start)
    clock = began = time.perf_counter()
    clock_step, saved, evaluating = run.start, run.start, 0.0
    with (
        stop_on_signals() as signals,
        closing(log.file),
        tqdm(total=t.max_iters, initial=run.start, unit="step", disable=None) as bar,
    ):
        for step in range(run.start, t.max_iters):
            norm, passes = update(run, step)
            done, news = step + 1, []  # told once they are saved
            ends = done == t.max_iters or bool(signals)  # asked once: what ends, logs and saves first
            if done % t.log_interval == 0 or ends:
                rate = (done - clock_step) / (time.perf_counter() - clock)  # steps per second
                line = {"step": done, "lr": learning_rate(t, step)}
                line |= {"tokens_per_s": rate * tokens_per_step}
                line |= {"mfu": rate * step_flops / peak} if peak else {}
                line |= {"grad_norm": norm.item(), **mean_figures(passes)}
                log.add(line)
                shown = {"loss": f"{line['loss']:.3f}", "lr": f"{line['lr']:.1e}"}
                shown |= {"tok/s": f"{line['tokens_per_s']:.0f}"}
                bar.set_postfix(shown | ({"mfu": f"{line['mfu']:.1%}"} if peak else {}), refresh=False)
                clock, clock_step = time.perf_counter(), done
            if done % t.eval_interval == 0 or done == t.max_iters:
                paused = time.perf_counter()
                results = evaluate(run)
                log.add({"step": done, "val": results})
                news.append(f"step {done}: validation " + describe(results))
                paused = time.perf_counter() - paused
                evaluating, clock = evaluating + paused, clock + paused
            if done % t.eval_interval == 0 or ends:
                try:
                    log.flush()
                    save(run, done)
                    saved = done
                except OSError as error:
                    path = log.path if log.waiting else run.checkpoint
                    then = f"--resume goes on from step {saved}" if saved else "nothing is saved yet"
                    problem = f"{path} cannot be written: {error.strerror}; free space; {then}."
                    if ends:
                        raise ValueError(problem) from None
                    news.append(f"warning: {problem}")
            bar.update()
            for line in news:
                bar.write(line)
            if ends:
                break
    seconds = time.perf_counter() - began
    rate = (done - run.start) * tokens_per_step / (seconds - evaluating)
    print(f"{done - run.start} steps in {seconds:.0f} s, {rate:.0f} tokens/s between evaluations")
    return done


def sample_text(model: MoR, encoding: Encoding) -> str:
    """What the model makes of a function's beginning."""
    model.eval()
    prompt = encoding.encode_ordinary("def ")[: model.config.block_size]
    steps = generate(model, [prompt], encoding, max_new_tokens=300, temperature=0.6)
    return "".join(text for text, _ in pieces(tokens_with_depths(steps, 0), encoding))


def run_in(folder: Path, given: dict) -> None:
    """Trains in a folder and shows what came of it."""
    settings, state = read_checkpoint(given, folder)
    run = set_up(settings, state)
    done = train(run)
    if done < run.t.max_iters:
        print(f"stopped and saved at step {done}; the same command with --resume goes on.")
        return
    print("\n" + sample_text(run.model, run.encoding))
    print(f"\nNext: python sample.py --checkpoint={run.checkpoint} --prompt='def ' --show_depth")
    if not given:
        print(
            "      python train.py config/demo_vanilla.py   (the demo's FLOPs without recursion)\n"
            "      python train.py --routing=token --out_dir=out-token, and --help for every setting"
        )


def main(argv: list[str]) -> int:
    """The exit status: 0, 2 where a sentence tells what is wrong, 130 after Ctrl-C outside the steps."""
    with lasting_output():
        try:
            if "--help" in argv or "-h" in argv:
                print(help_text("train.py"))
                return 0
            given = parse(argv)
            folder = Path(given.get("out_dir", TrainConfig.out_dir))
            with checkpoint.sole_writer(folder):
                run_in(folder, given)
            return 0
        except ValueError as error:
            problem = error
        except OSError as error:
            problem = f"{error.filename or 'a file'}: {error.strerror}; mend that or the folder given."
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            problem = "there is too little memory; give a smaller --batch_size, --block_size or model."
        except KeyboardInterrupt:
            print("interrupted; the last checkpoint, if there is one, stays.", file=sys.stderr)
            return 130
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Trains a model: `python train.py [config/file.py] [--key=value …]`, `--help` for all settings.

Without arguments it is the main job: a small MoR on the Python standard library's own sources, in a few
minutes on a laptop. The recipe is the paper's (section 3): AdamW, clipping, trapezoid or cosine. A step
is a function of its number alone, so a run that stops, or is killed, goes on with --resume as if
nothing had happened.
"""

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from tiktoken import Encoding
from tqdm import tqdm

import checkpoint
import router as routing
from dataset import Tokens, Windows, whole_file
from engine import generate, pick_device, pieces, tokens_with_depths
from flops import budget_steps, train_step_flops
from model import MoR
from settings import TrainConfig, build, help_text, merge, parse
from tokenizer import get_encoding, token_bytes

ROOT = Path(__file__).parent
# Dense bfloat16 FLOP/s as the makers state them; for MFU.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "RTX 4090": 165e12}
# Settings that decide what a step does: a resumed run must have them as they were.
FIXED = ("dataset", "seed", "batch_size", "gradient_accumulation_steps")


def learning_rate(t: TrainConfig, step: int) -> float:
    """The rate of a step: linear warm-up, then a plateau with a linear end, or a cosine, down to 0."""
    warm = min(1.0, (step + 1) / max(1, t.warmup_iters))
    if t.schedule == "cosine":
        done = max(0, step - t.warmup_iters) / max(1, t.max_iters - t.warmup_iters)
        return t.learning_rate * min(warm, 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    left = (t.max_iters - step) / max(1.0, t.cooldown * t.max_iters)
    return t.learning_rate * min(warm, left, 1.0)


def make_optimizer(model: MoR, t: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": t.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, t.learning_rate, (t.beta1, t.beta2), fused=True)


def mean_figures(passes: list[dict]) -> dict:
    """Figures of several passes as plain numbers and lists: means, and sums of the choice counts."""
    out = {}
    for name in passes[0]:
        stacked = torch.stack([p[name] for p in passes])
        out[name] = (stacked.sum(0) if name == "counts" else stacked.float().mean(0)).tolist()
    return out


@torch.no_grad()
def evaluate(model: MoR, val: Windows, t: TrainConfig, autocast, device: str) -> dict[str, dict]:
    """Validation loss in nats per token and bits per byte, and routing figures, under each rule.

    Expert-choice has two: "top-k" as trained, which looks ahead, and "causal" as generated. For all
    other models they are one and the same.
    """
    model.eval()
    x, y = val.in_order(t.eval_iters * t.batch_size)
    n_bytes = int(token_bytes(get_encoding(val.tokens.encoding))[y.numpy()].sum())
    results = {}
    for rule in ("top-k", "causal") if model.config.routing == "expert" else ("causal",):
        passes, nats = [], 0.0
        for xs, ys in zip(x.split(t.batch_size), y.split(t.batch_size)):
            with autocast:
                _, figures = model(xs.to(device), ys.to(device), rule=rule)
            nats += figures["lm_loss"].item() * ys.numel()
            passes.append(figures)
        results[rule] = {
            "loss": nats / y.numel(),
            "bits_per_byte": nats / math.log(2) / max(1, n_bytes),
            **mean_figures(passes),
        }
    model.train()
    return results


def describe(results: dict[str, dict]) -> str:
    return "; ".join(
        f"{rule} {r['loss']:.4f} nats/token, {r['bits_per_byte']:.4f} bits/byte"
        for rule, r in results.items()
    )


def open_dataset(name: str) -> tuple[Tokens, Tokens]:
    """The training and validation tokens; the embedded dataset is made here if it is missing."""
    folder = ROOT / "data" / name
    if name == "pystdlib" and not (folder / "meta.json").exists():
        subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    if not (folder / "meta.json").exists():
        at_hand = ", ".join(sorted(p.parent.name for p in ROOT.glob("data/*/prepare.py")))
        raise ValueError(
            f"dataset {name!r} is not prepared in {folder}; run its prepare.py (there are: {at_hand})."
        )
    return Tokens(folder, "train"), Tokens(folder, "val")


def read_settings(argv: list[str]) -> tuple[dict, dict | None]:
    """The settings given, and the checkpoint to go on from, whose settings hold unless given anew."""
    given = parse(argv)
    path = Path(given.get("out_dir", TrainConfig.out_dir)) / "checkpoint.pt"
    if not given.get("resume"):
        if path.exists():
            raise ValueError(
                f"{path} exists already; add --resume to go on from it, or give another --out_dir."
            )
        return given, None
    state = checkpoint.load(path)
    before = {**vars(build(state["settings"])[1]), **state["model_config"]}
    given = merge(state["settings"], given)
    config, t = build(given)
    now = {name: getattr(t, name) for name in FIXED} | {
        f: getattr(config, f) for f in state["model_config"]
    }
    for name, value in now.items():
        if value != before[name]:
            raise ValueError(
                f"{path} was trained with {name}={before[name]}, not {value}; "
                "resume without that setting, or start anew in another --out_dir."
            )
    return given, state


def keep_metrics_up_to(path: Path, step: int) -> None:
    """Drops what a killed run logged after its last checkpoint; those steps are about to be redone."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:  # a line cut short by the kill
            continue
    with whole_file(path) as file:
        file.write("".join(kept).encode())


def train(given: dict, state: dict | None) -> None:
    config, t = build(given)
    device = pick_device(t.device)
    on_gpu = device.startswith("cuda")
    t.batch_size = given["batch_size"] = t.batch_size or (64 if on_gpu else 8)
    bfloat16 = t.dtype == "bfloat16" or (t.dtype == "auto" and on_gpu)
    autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bfloat16)

    train_tokens, val_tokens = open_dataset(t.dataset)
    encoding = get_encoding(train_tokens.encoding)
    if config.vocab_size < encoding.n_vocab:
        raise ValueError(
            f"vocab_size={config.vocab_size} is smaller than the {encoding.n_vocab} tokens of encoding "
            f"{encoding.name!r}; set --vocab_size={encoding.n_vocab} or more."
        )
    windows = Windows(train_tokens, config.block_size, t.seed)
    val = Windows(val_tokens, config.block_size, t.seed)

    tokens_per_step = t.batch_size * t.gradient_accumulation_steps * config.block_size
    if t.max_flops:
        t.max_iters = budget_steps(config, t.max_flops, tokens_per_step)
    elif t.max_tokens:
        t.max_iters = max(1, round(t.max_tokens / tokens_per_step))
    start = state["step"] if state else 0
    if start >= t.max_iters:
        raise ValueError(
            f"{t.out_dir} is at step {start} of {t.max_iters}; go on with a larger --max_iters."
        )

    torch.manual_seed(t.seed)
    model = MoR(config).to(device)
    optimizer = make_optimizer(model, t)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    compiled = torch.compile(model) if t.compile == "yes" or (t.compile == "auto" and on_gpu) else model

    out_dir = Path(t.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "checkpoint.pt"
    keep_metrics_up_to(out_dir / "metrics.jsonl", start)

    def save(step: int) -> None:
        settings = {k: v for k, v in given.items() if k != "resume"}
        checkpoint.save(
            path,
            model,
            optimizer=optimizer.state_dict(),
            encoding=encoding.name,
            step=step,
            settings=settings,
        )

    n_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{n_parameters / 1e6:.2f}M parameters in {max(config.plan) + 1} layers, unrolled to "
        f"{config.n_layer}; {t.max_iters} steps of {tokens_per_step} tokens on {device}, to {path}"
    )
    step_flops, peak = train_step_flops(config, tokens_per_step), peak_flops(t, device)
    with (
        stop_on_signals() as signals,
        open(out_dir / "metrics.jsonl", "a") as metrics,
        tqdm(total=t.max_iters, initial=start, unit="step", disable=None) as bar,
    ):

        def log(line: dict) -> None:
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()

        clock, clock_step = time.perf_counter(), start
        for step in range(start, t.max_iters):
            torch.manual_seed(t.seed + (step + 1) * 1_000_003)  # random routing resumes as it was
            if config.routing == "expert" and config.capacity_warmup:
                model.warm_up_capacity(step * t.gradient_accumulation_steps)
            passes = []
            for micro in range(t.gradient_accumulation_steps):
                number = step * t.gradient_accumulation_steps + micro
                x, y = windows.rows(number * t.batch_size, t.batch_size)
                with autocast:
                    loss, figures = compiled(x.to(device), y.to(device))
                (loss / t.gradient_accumulation_steps).backward()
                passes.append({"loss": loss.detach(), **figures})
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip or math.inf)
            if not torch.stack([norm, *(p["loss"] for p in passes)]).isfinite().all():
                raise ValueError(
                    f"the loss or its gradient is not finite at step {step + 1}; the last good "
                    f"checkpoint is {path if path.exists() else 'not written yet'}; go on from it with "
                    "--resume and a lower --learning_rate or --grad_clip."
                )
            lr = learning_rate(t, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            if config.routing == "token" and config.balancing == "loss_free":
                counts = sum(p["counts"] for p in passes)
                routing.update_balance_bias(model.router[0].balance_bias, counts, config.balance_rate)
            bar.update()

            done = step + 1
            ends = done == t.max_iters or bool(signals)
            if done % t.log_interval == 0 or ends:
                rate = (done - clock_step) / (time.perf_counter() - clock)  # steps per second
                line = {"step": done, "lr": lr, "tokens_per_s": rate * tokens_per_step}
                line |= {"mfu": rate * step_flops / peak} if peak else {}
                line |= {"grad_norm": norm.item(), **mean_figures(passes)}
                log(line)
                shown = {"loss": f"{line['loss']:.3f}", "lr": f"{lr:.1e}"}
                shown |= {"tok/s": f"{line['tokens_per_s']:.0f}"}
                bar.set_postfix(shown | ({"mfu": f"{line['mfu']:.1%}"} if peak else {}))
                clock, clock_step = time.perf_counter(), done
            if done % t.eval_interval == 0 or done == t.max_iters:
                began = time.perf_counter()
                results = evaluate(model, val, t, autocast, device)
                log({"step": done, "val": results})
                bar.write(f"step {done}: validation " + describe(results))
                clock += time.perf_counter() - began
            if done % t.eval_interval == 0 or ends:
                save(done)
            if signals:
                break
    if done < t.max_iters:
        print(f"stopped and saved at step {done}; the same command with --resume goes on.")
        return
    print("\n" + sample_text(model, encoding))
    print(
        f"\nNext: python sample.py --checkpoint={path} --prompt='def ' --show_depth\n"
        "      python train.py config/demo_vanilla.py   (the same FLOPs without recursion)\n"
        "      python train.py --routing=token --out_dir=out-token, and --help for every setting"
    )


def sample_text(model: MoR, encoding: Encoding) -> str:
    """What the model makes of a function's beginning."""
    model.eval()
    prompt = encoding.encode_ordinary("def ")
    steps = generate(model, [prompt], encoding, max_new_tokens=300, temperature=0.6)
    return "".join(text for text, _ in pieces(tokens_with_depths(steps, 0), encoding))


def peak_flops(t: TrainConfig, device: str) -> float:
    """FLOP/s that MFU is measured against; 0 where it is not known."""
    if t.peak_flops or not device.startswith("cuda"):
        return t.peak_flops
    name = torch.cuda.get_device_name(device)
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), 0.0)


@contextmanager
def stop_on_signals():
    """Collects Ctrl-C and SIGTERM, for the loop to finish its step and save; a second Ctrl-C breaks."""
    received = []

    def note(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(help_text("train.py"))
        return 0
    try:
        train(*read_settings(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Trains a model: `python train.py [config/file.py] [--key=value …]`, `--help` for all settings.

Without arguments it is the main job: a small MoR on the Python standard library's own sources, in a few
minutes on a laptop. The recipe is the paper's (section 3): AdamW, clipping, trapezoid or cosine. A step
is a function of its number alone, so a run that stops, or is killed, goes on with --resume as if
nothing had happened.
"""

import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor
from tqdm import tqdm

import checkpoint
import distributed
import router as routing
from branches import Branch, check_resumed, learning_rate, plan, warmup_iters
from command import lasting_output, out_of_memory, stop_on_signals
from dataset import Windows, document_cu_seqlens, open_dataset
from distributed import RANK, WORLD
from engine import Engine, pick_device
from flops import run_steps, train_step_flops
from measure import PEAK_FLOPS, fitting_batch
from model import MoR
from modelconfig import ModelConfig
from sampling import SamplingParams
from settings import TrainConfig, build, help_text, parse, split_batch
from text import pieces
from tokenizer import get_encoding
from validation import batches_of, mean_figures, rules, validate

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
    module: torch.nn.Module  # what a step calls: the same model, compiled, or among processes
    optimizer: torch.optim.AdamW
    branches: list[Branch]
    start: int  # steps that are done already
    end: int  # steps to do: all, or those of the plateau that the branches share

    @property
    def checkpoint(self) -> Path:
        return Path(self.t.out_dir) / "checkpoint.pt"


def set_up(given: dict, state: dict | None) -> Run:
    """All that the steps of a run need; what cannot run is refused here, before anything is written."""
    config, t = build(given)
    device = pick_device(t.device)
    on_gpu = device.startswith("cuda")
    bfloat16 = t.dtype == "bfloat16" or (t.dtype == "auto" and on_gpu)
    autocast = torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bfloat16)
    if t.wandb:
        checkpoint.import_wandb()
    with distributed.rank_0_first():
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
    model.attention, model.recompute = t.attention, t.activation_checkpointing
    most = 64 if on_gpu else 8
    if on_gpu and not t.batch_size and ("batch_size" in given or t.global_batch_size):
        most = min(distributed.gather([fitting_batch(model, autocast)]))
    t = split_batch(t, most, WORLD)
    t = replace(t, max_iters=run_steps(config, t))
    branches, start, end = plan(config, t), state["step"] if state else 0, t.max_iters
    if branches:
        end = branches[-1].start
        t = t if "warmup_iters" in given else replace(t, warmup_iters=warmup_iters(branches))
        check_resumed(branches, state, t.out_dir)
    if start >= t.max_iters or start > end:
        raise ValueError(
            f"{t.out_dir} is at step {start} of {end}; go on with a larger --max_iters or budget."
        )
    of_this_start = ("resume", "out_dir", "gradient_accumulation_steps")
    settings = {k: v for k, v in given.items() if k not in of_this_start}
    for name in ("batch_size", "global_batch_size", "warmup_iters"):
        settings[name] = getattr(t, name)
    if t.parallel == "fsdp":
        distributed.shard(model)
    optimizer = make_optimizer(model, t)
    if state:
        checkpoint.load_moments(state, optimizer)
    module = torch.compile(model) if compiles(config, t, on_gpu) else model
    if t.parallel == "ddp":
        module = distributed.replicate(module)
    return Run(
        t=t,
        settings=settings,
        device=device,
        autocast=autocast,
        encoding=encoding,
        rows=rows,
        val=val,
        data=data,
        model=model,
        module=module,
        optimizer=optimizer,
        branches=branches,
        start=start,
        end=end,
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
    # Active tokens of token-choice and warm-up, and documents, differ in number from pass to pass.
    changes = config.routing == "token" or config.capacity_warmup or t.within_documents
    return t.compile == "yes" or (t.compile == "auto" and on_gpu and not changes)


def peak_flops(t: TrainConfig, device: str) -> float:
    """FLOP/s of all devices together, which MFU is a share of; 0 where it is not known."""
    of_one = t.peak_flops
    if not of_one and device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        of_one = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), 0.0)
    return WORLD * of_one


# ---- steps -------------------------------------------------------------------------------------------


def update(run: Run, step: int) -> tuple[Tensor, list[dict]]:
    """One optimizer step; returns the gradient's norm and the figures of each forward pass."""
    t, model = run.t, run.model
    config, n_passes = model.config, t.gradient_accumulation_steps
    passes = []
    for n in range(n_passes):
        number = (step * n_passes + n) * WORLD + RANK
        torch.manual_seed(t.seed + (number + 1) * 1_000_003)  # random routing: a function of the pass
        if config.capacity_warmup:
            model.warm_up_capacity(number)
        x, y = run.rows.rows(number * t.batch_size, t.batch_size)
        bounds = None
        if t.within_documents:
            bounds = document_cu_seqlens(x, run.encoding.eot_token).to(run.device)
        distributed.average_gradients(run.module, n == n_passes - 1)
        with run.autocast:
            loss, figures = run.module(x.to(run.device), y.to(run.device), documents=bounds)
        (loss / n_passes).backward()
        passes.append({"total_loss": loss.detach(), **figures})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip or math.inf)
    norm = distributed.whole(norm)
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
        counts = distributed.total(sum(p["counts"] for p in passes))
        routing.update_balance_bias(model.router[0].balance_bias, counts, config.balance_rate)
    return norm, passes


def evaluate(run: Run) -> dict[str, dict]:
    """Figures of the validation split under each rule."""
    t, model = run.t, run.model
    model.eval()
    batches = batches_of(run.val, t.batch_size, t.eval_iters)
    with run.autocast:
        results = {
            rule: validate(model, batches, run.encoding, rule, within_documents=t.within_documents)
            for rule in rules(model.config)
        }
    model.train()
    return results


def describe(results: dict[str, dict]) -> str:
    return "; ".join(
        f"{rule} {r['loss']:.4f} nats/token, {r['bits_per_byte']:.4f} bits/byte"
        for rule, r in results.items()
    )


def save(run: Run, step: int, path: Path) -> None:
    checkpoint.save(
        path,
        run.model,
        optimizer=run.optimizer.state_dict(),
        encoding=run.encoding.name,
        step=step,
        settings=run.settings,
        data=run.data,
    )


def save_plateau(run: Run, branch: Branch, saved: int) -> None:
    """The checkpoint that a cool-down begins with; without it, its budget would be lost."""
    try:
        branch.folder.mkdir(exist_ok=True)
        save(run, branch.start, branch.plateau)
    except OSError as error:
        raise ValueError(unwritten(branch.plateau, error, saved)) from None


def unwritten(path: Path, error: OSError, saved: int) -> str:
    then = f"--resume goes on from step {saved}" if saved else "nothing is saved yet"
    return f"{path} cannot be written: {error.strerror}; free space; {then}."


# ---- the run -----------------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Steps until the budget or the plateau ends or a signal comes, with a checkpoint at the end.

    Logs to metrics.jsonl; returns the number of steps done.
    """
    t, config, done = run.t, run.model.config, run.start
    for branch in run.branches:  # a budget that was added may leave just here, or a folder be gone
        if done == branch.start and distributed.any_of(not branch.ready()):
            save_plateau(run, branch, done)
    if done == run.end:
        return done
    tokens_per_step = t.global_batch_size * config.block_size
    n_parameters = sum(p.numel() for p in run.model.parameters())
    print(
        f"{n_parameters / 1e6:.2f}M parameters in {max(config.plan) + 1} layers, unrolled to "
        f"{config.n_layer}; {run.end} steps of {tokens_per_step} tokens on {run.device}, "
        f"to {run.checkpoint}"
    )
    epochs = run.end * t.global_batch_size / run.rows.per_epoch
    if epochs > 1:
        print(f"note: that is {epochs:.1f} times the training data of {t.dataset!r}")
    step_flops, peak = train_step_flops(config, tokens_per_step), peak_flops(t, run.device)
    log_path = run.checkpoint.with_name("metrics.jsonl")
    log = checkpoint.Log(log_path, run.start, t.wandb, run.settings)
    clock = began = time.perf_counter()
    clock_step, saved, evaluating = run.start, run.start, 0.0
    with (
        stop_on_signals() as signals,
        closing(log),
        tqdm(total=run.end, initial=run.start, unit="step", disable=RANK > 0 or None) as bar,
    ):
        for step in range(run.start, run.end):
            norm, passes = update(run, step)
            done, news = step + 1, []  # told once they are saved
            # Asked once, and of all: what ends, logs and saves first.
            ends = distributed.any_of(done == run.end or bool(signals))
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
            for branch in run.branches:
                if done == branch.start:
                    save_plateau(run, branch, saved)
            if done % t.eval_interval == 0 or ends:
                try:
                    log.flush()
                    save(run, done, run.checkpoint)
                    saved = done
                except OSError as error:
                    path = log.path if log.waiting else run.checkpoint
                    problem = unwritten(path, error, saved)
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
    """What a model in eval mode makes of a function's beginning."""
    prompt = encoding.encode_ordinary("def ")[: model.config.block_size]
    engine = Engine(model, max_batch=1, encoding=encoding)
    engine.submit(prompt, SamplingParams(max_new_tokens=300, temperature=0.6))
    events = ((event.token, event.depth) for event in engine.stream())
    return "".join(text for text, _ in pieces(events, encoding))


def run_in(folder: Path, given: dict) -> None:
    """Trains in a folder and shows what came of it."""
    run = set_up(*checkpoint.resume(given, folder))
    done = train(run)
    for branch in run.branches if done == run.end else ():
        with checkpoint.sole_writer(branch.folder):
            branch.begin()
            settings, state = checkpoint.resume(branch.settings(given), branch.folder)
            if state["step"] < branch.steps:
                run = set_up(settings, state)
                if (done := train(run)) < run.end:
                    break
    if done < run.end:
        print(f"stopped and saved at step {done}; the same command with --resume goes on.")
    elif done == run.start:
        print(f"all budgets of {folder} have been trained; give --budgets a larger one to go on.")
    elif RANK == 0:
        model = checkpoint.load_model(checkpoint.load(run.checkpoint), run.device)
        print("\n" + sample_text(model, run.encoding))
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
            with distributed.processes():
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
            if distributed.left_alone(error):
                problem = "another process is gone; it says why."
            elif out_of_memory(error):
                problem = (
                    "there is too little memory; give a smaller --batch_size, --block_size or model."
                )
            elif type(error).__module__ in ("torch._inductor.exc", "torch._dynamo.exc"):
                reason = str(error).split("\n")[0].rstrip(".")
                problem = (
                    f"torch.compile cannot be used here ({reason}); mend that, or set --compile=no."
                )
            else:
                raise
        except KeyboardInterrupt:
            print("interrupted; the last checkpoint, if there is one, stays.", file=sys.stderr)
            return 130
        print(f"{distributed.failure()}: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

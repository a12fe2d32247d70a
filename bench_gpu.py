"""Kernels and training step on a GPU, beside what PyTorch offers there: `python bench.py gpu`.

Made for one short visit to a card: every section has a share of the time, a failure costs one line, and
what was measured is on disk after each section. What is compared takes turns, and a ratio is the median
of the ratios within a round. Without a GPU all of it runs on tiny shapes, to show that it would run.
"""

import argparse
import json
import statistics
import subprocess
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import kernels
from bench_generate import implied, lengths, random_model, serve, warm_up
from dataset import whole_file
from engine import Engine
from flops import exact_flops, train_step_flops
from gpu_cases import (
    COMPETITORS,
    PASSES,
    SHAPES,
    TOLERANCE,
    Run,
    checked_case,
    in_turns,
    make_case,
    padded_attend,
    paged,
    pages_of,
    ratio,
    triton_attend,
)  # fmt: skip
from kernels import depth_mask
from measure import PEAK_FLOPS, print_table
from model import MoR
from modelconfig import ModelConfig, preset

TRAINED = {  # every ratio is to the first
    "vanilla": ("vanilla", {}),
    "MoR expert R=3": ("mor", {}),
    "MoR expert R=2": ("mor", {"n_recursion": 2}),
    "MoR expert R=3 shared": ("mor", {"kv_mode": "shared"}),
}


# ---- sections: each yields rows of figures -----------------------------------------------------------


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    y = attend(q, k, v)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), dy.to(y.dtype))]


def correctness(run: Run):
    """Largest errors against float64, relative to the largest true value; and equal repeats."""
    for width, dtype in run.in_time(run.sizes.checked):
        kind = f"{str(dtype).removeprefix('torch.')}, heads of {width}"
        for mode in ("recursion", "shared"):
            with run.guard(f"{kind}, {mode}"):
                case = checked_case(run, mode)
                given = case.inputs(run, width, dtype)
                exact = [x.detach().double().requires_grad_() for x in given]
                by_torch = padded_attend(run, case, *given[:2])
                ours = partial(with_gradients, triton_attend(run, case, *given[:2]), *given)
                plain, true = (with_gradients(by_torch, *x) for x in (given, exact))
                yield checked(run, f"{kind}, {mode}", dtype, [ours(), ours()], plain, true)
        with run.guard(f"{kind}, paged"):
            n_key = [1, kernels.SPLIT // 2, kernels.SPLIT + 99]  # with more than one program walks
            given, told = pages_of(run, n_key, 16, width, dtype)
            twice = [[paged(given, told, "triton")] for _ in range(2)]
            plain, true = ([paged(x, told, "plain")] for x in (given, [x.double() for x in given]))
            yield checked(run, f"{kind}, paged", dtype, twice, plain, true)


def checked(run: Run, name: str, dtype: torch.dtype, twice, plain: list[Tensor], true: list[Tensor]):
    """The row that holds a result, given twice, to the truth; `plain` is what PyTorch makes of it."""
    errors, of_plain = ([relative_error(*pair) for pair in zip(x, true)] for x in (twice[0], plain))
    equal = all(torch.equal(*pair) for pair in zip(*twice))
    met = equal and all(error <= TOLERANCE[dtype] for error in errors)
    told = [f"{n} {x:.1e} (plain {p:.1e})" for n, x, p in zip(("y", "dq", "dk", "dv"), errors, of_plain)]
    run.say(f"  {name}: {', '.join(told)}; repeats {'equal' if equal else 'DIFFER'}")
    return {"case": name, "errors": errors, "plain": of_plain, "equal": equal, "met": met}


def attention(run: Run):
    """Every kernel that can run a case, in bfloat16; how many times as long as Triton others take."""
    sizes, width = run.sizes, run.sizes.head_dim
    cases = [(*at, heads, *shape) for heads, shape, at in product(sizes.heads, SHAPES, sizes.lengths)]
    for given in run.in_time(cases):
        case = make_case(run, *given)
        with run.guard(case.name):
            q, k, v, dy = case.inputs(run, width)
            calls, expected = {what: {} for what in PASSES}, None
            for name, make in COMPETITORS.items():
                with run.guard(f"{case.name}, {name}", name):
                    attend = make(run, case, q, k) if run.failures[name] < 2 else None
                    if attend is None:
                        continue
                    y = attend(q, k, v)
                    expected = y.detach() if expected is None else expected
                    if not relative_error(y, expected) < 5e-2:
                        raise ArithmeticError("its result is not that of the first")
                    calls["forward"][name] = partial(attend, q, k, v)
                    if y.requires_grad:
                        calls["with backward"][name] = partial(with_gradients, attend, q, k, v, dy)
            row = {"case": case.name, "pairs": case.pairs()}
            for what, passes in PASSES.items():
                ms = in_turns(run, calls[what], f"{case.name}, {what}")
                times = {name: statistics.median(x) for name, x in ms.items()}
                others = {name: ratio(x, ms["triton"]) for name, x in ms.items() if name != "triton"}
                speed = {name: passes * case.flops(width) / x / 1e9 for name, x in times.items()}
                row[what] = {"ms": times, "TFLOP/s": speed, "ratio": others}
                told = f"{times['triton']:.4f} ms, {speed['triton']:.4g} TFLOP/s"
                told += "".join(f", {x:.2f}x {name}" for name, x in others.items())
                run.say(f"  {case.name}, {what}: {told}")
            yield row


def capacity(run: Run):
    """Triton's time at capacity c relative to that of all tokens, recursion-wise, beside c²."""
    shares = (1.0, 2 / 3, 1 / 3)
    for heads, at in run.in_time(list(product(run.sizes.heads, run.sizes.lengths))):
        cases = [make_case(run, *at, heads, "recursion", share) for share in shares]
        calls = {what: {} for what in PASSES}
        for case in cases:
            q, k, v, dy = case.inputs(run, run.sizes.head_dim)
            attend = triton_attend(run, case, q, k)
            calls["forward"][case.name] = partial(attend, q, k, v)
            calls["with backward"][case.name] = partial(with_gradients, attend, q, k, v, dy)
        for what in PASSES:
            ms = in_turns(run, calls[what], f"capacity, {what}")
            for case in cases[1:]:
                took, c2 = ratio(ms[case.name], ms[cases[0].name]), (case.queries.length / at[0]) ** 2
                run.say(f"  {case.name}, {what}: {took:.3f} of the time, c² = {c2:.3f}")
                yield {"case": case.name, "pass": what, "time": took, "c2": c2}


def decode(run: Run):
    """One query per sequence over keys in pages, beside dense caches of equal bytes, layer by layer."""
    n_seq, n_layer, lengths, page_sizes = run.sizes.decode
    for length, page in run.in_time(list(product(lengths, page_sizes))):
        name = f"{n_seq} sequences of {length} keys, pages of {page}"
        with run.guard(name), torch.no_grad():
            given = [pages_of(run, [length] * n_seq, page, run.sizes.head_dim) for _ in range(n_layer)]
            (q, *_), told = given[0]  # for all layers
            pages = [kv for (_, *kv), _ in given]
            dense = [[x[told[2]].flatten(1, 2).transpose(1, 2).contiguous() for x in kv] for kv in pages]
            mask = kernels.paged_mask(q, pages[0][0], *told, "triton")
            sdpa = partial(F.scaled_dot_product_attention, q[:, :, None], enable_gqa=True)
            ours = partial(kernels.paged_attention, q, mask=mask)
            calls = {
                "triton": lambda f=ours, layers=pages: [f(k_pages=k, v_pages=v) for k, v in layers],
                "dense": lambda f=sdpa, layers=dense: [f(key=k, value=v)[:, :, 0] for k, v in layers],
            }
            error = max(relative_error(*pair) for pair in zip(*(call() for call in calls.values())))
            ms = in_turns(run, calls, name)
            moved = sum(x.numel() * x.element_size() for kv in pages for x in kv)
            rates = {n: moved / statistics.median(x) / 1e6 for n, x in ms.items()}
            faster = ratio(ms["dense"], ms["triton"])
            run.say(f"  {name}: {rates['triton']:.4g} GB/s, {faster:.2f}x dense; difference {error:.0e}")
            yield {"case": name, "GB/s": rates, "ratio": faster, "difference": error}


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **options: None


def tuning(run: Run):
    """Other tiles, warps and stages of each kernel alone, beside its own; 40 seconds at most."""
    run.until = min(run.until, run.spent() + 40)
    width, usual = run.sizes.head_dim, kernels.tuned
    case = make_case(run, *run.sizes.lengths[0], run.sizes.heads[0], "recursion", 1.0)
    q, k, v, dy = (x.detach() for x in case.inputs(run, width))
    size = kernels.tile_rows(q.dtype)
    tiles = {rows: depth_mask(q, k, case.queries, None, "triton", rows).tiles
             for rows in {size, *(option[0] for option in run.sizes.tiles)}}  # fmt: skip
    saved = torch.ops.mor.depth_attention(q, k, v, *tiles[size])

    def launch(kernel: str, rows: int, options: dict):
        def tuned(name, *kind):
            return usual(name, *kind) | (options if name == kernel else {})

        if kernel == "forward":
            with patch.object(kernels, "tuned", tuned):
                return torch.ops.mor.depth_attention(q, k, v, *tiles[rows])
        other = "dq_kernel" if kernel == "dkv" else "dkv_kernel"
        with patch.object(kernels, "tuned", tuned), patch.object(kernels, other, NoKernel()):
            return torch.ops.mor.depth_attention_backward(dy, q, k, v, *saved, *tiles[rows])

    best = {}
    tries = list(product(run.sizes.tiles, ("forward", "dq", "dkv")))
    for (rows, warps, stages), kernel in run.in_time(tries):
        name = f"{kernel}, {rows} rows, {warps} warps, {stages} stages"
        other = partial(launch, kernel, rows, {"num_warps": warps, "num_stages": stages})
        ms = in_turns(run, {"tuned": partial(launch, kernel, size, {}), "other": other}, name)
        if len(ms) == 2:
            faster = ratio(ms["tuned"], ms["other"])
            best[kernel] = max(best.get(kernel, (1.0, f"{kernel}, nothing better")), (faster, name))
            yield {"kernel": kernel, "case": name, "ratio": faster}
    for kernel, (faster, name) in best.items():
        run.say(f"  {name}: {faster:.3f}x as fast as {size} rows with {usual(kernel, width, q.dtype)}")


def training(run: Run, batch: int = 0):
    """Forward and backward pass of whole 360M models, compiled, without an optimizer."""
    batch, steps, configs, took, full = batch or run.sizes.batch, {}, {}, 0.0, False
    for name, (kind, given) in TRAINED.items():
        if run.until - run.spent() < took and not run.dry:
            run.say(f"  no time to compile {name}")
            continue
        begin = run.spent()
        try:
            with run.guard(name, name, but=torch.cuda.OutOfMemoryError):
                configs[name] = ModelConfig(**preset(f"{kind}-360m", **given, **run.sizes.model))
                steps[name] = train_step(run, configs[name], batch)
                loss = steps[name]()
                steps[name]()
                took = run.spent() - begin
                run.say(f"  {name}: compiled in {took:.0f} s, loss {loss:.2f} of random tokens")
        except torch.cuda.OutOfMemoryError:
            full = batch > 1
            if not full:
                raise
        if full:  # outside of the handler, whose error holds what it took
            run.say(f"  out of memory at {batch} sequences; half as many")
            steps.clear()
            torch.cuda.empty_cache()
            return (yield from training(run, batch // 2))
        if run.failures[name]:
            steps.pop(name, None)
    seconds = {name: [] for name in steps}
    for _ in range(run.sizes.rounds):
        for name, step in steps.items():
            start = run.machine.clock()
            step()
            seconds[name].append(run.machine.clock() - start)
    card = "" if run.dry else torch.cuda.get_device_name()
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in card), None)
    for name in steps:
        n_token, typical = batch * configs[name].block_size, statistics.median(seconds[name])
        row = {"case": name, "batch": batch, "tokens/s": n_token / typical}
        row["MFU"] = train_step_flops(configs[name], n_token) / typical / peak if peak else None
        if "vanilla" in steps:
            row["measured"] = ratio(seconds["vanilla"], seconds[name])
            row["implied"] = exact_flops(configs["vanilla"]) / exact_flops(configs[name])
            row["ratio"] = row["measured"] / row["implied"]
        told = ", ".join(f"{n} {x:.4g}" for n, x in row.items() if isinstance(x, float))
        run.say(f"  {name}, {batch} sequences: {told}")
        yield row


def train_step(run: Run, config: ModelConfig, batch: int):
    model = MoR(config).to(run.device)
    compiled = torch.compile(model, backend="eager" if run.dry else "inductor", dynamic=False)
    ids = torch.randint(config.vocab_size, (batch, config.block_size), device=run.device)

    def step() -> float:
        with run.machine.autocast():
            loss, _ = compiled(ids, ids.roll(-1, 1))
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def generation(run: Run):
    """360M models through the engine: passes as CUDA graphs beside none, MoR beside vanilla."""
    batch, tokens = (4, 8) if run.dry else (32, 128)
    new_tokens, speeds = lengths(2 * batch, tokens), {}
    ways = {"plain": False} if run.dry else {"plain": False, "graphs": True}
    for name in run.in_time(["vanilla", "MoR expert R=3"]):
        kind, given = TRAINED[name]
        with run.guard(name):
            sizes = {**run.sizes.model, "block_size": 2 * tokens}
            model = random_model(ModelConfig(**preset(f"{kind}-360m", **given, **sizes)), run.machine)
            engines = {
                way: Engine(model, max_batch=batch, compile=compile) for way, compile in ways.items()
            }
            for engine in engines.values():  # captures, and compiles
                warm_up(engine, run.machine)
            outcomes = {way: [] for way in ways}
            for _ in range(run.sizes.rounds // 2 + 1):
                for way, engine in engines.items():
                    outcomes[way].append(serve(engine, new_tokens, run.machine))
            speeds[name] = {way: [o.speed for o in found] for way, found in outcomes.items()}
            row = {"case": name, "tokens/s": {w: statistics.median(x) for w, x in speeds[name].items()}}
            if "vanilla" in speeds:
                row["measured"] = {w: ratio(x, speeds["vanilla"][w]) for w, x in speeds[name].items()}
                row["implied"] = implied(model.config, outcomes["plain"][-1].active, tokens)
            told = ", ".join(f"{way} {speed:.4g} tokens/s" for way, speed in row["tokens/s"].items())
            over = ", ".join(f"{x:.3f}x" for x in row.get("measured", {}).values())
            run.say(f"  {name}: {told}; over vanilla {over}, implied {row.get('implied', 1):.3f}x")
            yield row


SECTIONS = {  # and their shares of the time; none is begun with less than a quarter of its own
    "correctness": (correctness, 40), "attention": (attention, 160), "capacity": (capacity, 10),
    "decode": (decode, 10), "generation": (generation, 50), "tuning": (tuning, 40),
    "training": (training, 190),
}  # fmt: skip


# ---- the whole ---------------------------------------------------------------------------------------


def goals(figures: dict) -> list[dict]:
    """What was to be reached, the worst and the median that was, and the verdict."""

    def rows(section):
        return figures.get(section, [])

    def against(*names):
        given = [row[what]["ratio"] for row in rows("attention") for what in PASSES]
        return [ratios[name] for ratios in given for name in names if name in ratios]

    trained = [row["ratio"] for row in rows("training") if "ratio" in row and row["case"] != "vanilla"]
    table = []
    for goal, values, bound, worst in (
        ("errors within tolerance, repeats equal", [+row["met"] for row in rows("correctness")], 1, min),
        ("at least 1.0x FlexAttention", against("flex"), 1.0, min),
        ("at least 0.85x flash attention, varlen too", against("flash", "varlen"), 0.85, min),
        ("time within 15% of c²", [row["time"] / row["c2"] for row in rows("capacity")], 1.15, max),
        ("training at least 0.9 of the implied speed-up", trained, 0.9, min),
    ):
        row = {
            "goal": goal,
            "cases": len(values),
            "worst": None,
            "median": None,
            "verdict": "not measured",
        }
        if values:
            held = sum(worst(x, bound) == bound for x in values)
            row["verdict"] = "met" if held == len(values) else f"not met ({held} of {len(values)} do)"
            row["worst"], row["median"] = worst(values), statistics.median(values)
        table.append(row)
    return table


def bench_gpu(args: argparse.Namespace) -> None:
    """Kernels and a training step on a GPU, beside PyTorch's own; without one, a dry run."""
    dry, names = args.dry or not torch.cuda.is_available(), args.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ValueError(f"--only={unknown[0]} is not a section; there are {', '.join(SECTIONS)}.")
    if dry and not kernels.INTERPRETED:
        raise ValueError(
            "there is no GPU here, and a dry run interprets the kernels; set TRITON_INTERPRET=1 for one."
        )
    if not dry and (kernels.INTERPRETED or kernels.triton is None):
        raise ValueError("to measure a GPU, install Triton and unset TRITON_INTERPRET.")
    torch.manual_seed(1337)
    torch._dynamo.config.recompile_limit = 64  # a shape of FlexAttention is a compilation of its own
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    run, command = Run(dry, args.limit), "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    about = {
        "card": "none" if dry else torch.cuda.get_device_name(),
        "driver": "none" if dry else subprocess.getoutput(command).split("\n")[0],
        "torch": torch.__version__,
        "triton": kernels.triton.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    if dry:
        run.say(
            "DRY RUN on a CPU, tiny shapes, kernels interpreted: no time or ratio below means anything"
        )
    run.say(", ".join(f"{name} {text}" for name, text in about.items()))
    card = about["card"].lower().removeprefix("nvidia").strip().replace(" ", "-")
    path = Path(args.out) / f"gpu-{card}-{time.strftime('%Y-%m-%d-%H%M')}.json"
    if not dry:
        path.parent.mkdir(parents=True, exist_ok=True)
    shares = [SECTIONS[name][1] for name in names]
    for i, name in enumerate(tqdm(names, unit="section", disable=None)):
        section, share = SECTIONS[name]
        if args.limit - run.spent() < share / 4:
            run.say(f"{name}: skipped, {max(0, args.limit - run.spent()):.0f} seconds are left")
            continue
        run.until = args.limit * sum(shares[: i + 1]) / sum(shares)
        run.say(f"{name}, at {run.spent():.0f} s: {section.__doc__}")
        with run.guard(name):
            if not dry:
                torch.cuda.empty_cache()
            for row in section(run):
                run.figures.setdefault(name, []).append(row)
        if not dry:
            content = {
                **about,
                "seconds": run.spent(),
                "goals": goals(run.figures),
                "failed": run.errors,
            }
            with whole_file(path) as file:
                file.write(json.dumps({**content, "figures": run.figures}, indent=1).encode())
    if dry:
        run.say("DRY RUN: what follows shows the form of the table, and no result")
    rows = [list(row.values()) for row in goals(run.figures)]
    told = [
        ["–" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in r] for r in rows
    ]
    print_table(["goal", "cases", "worst", "median", "verdict"], told)
    print(f"{len(run.errors)} failures in {run.spent():.0f} s; {'no file is written' if dry else path}")

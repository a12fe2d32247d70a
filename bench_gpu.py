"""Kernels and training step on a GPU, beside what PyTorch offers there: `python bench.py gpu`.

Made for one short visit to a card: every section has a share of the time, a failure costs one line, and
what was measured is on disk after each section. What is compared takes turns, and a ratio is the median
of the ratios within a round. Without a GPU all of it runs on tiny shapes, to show that it would run.
"""

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import kernels
from dataset import whole_file
from flops import exact_flops, train_step_flops
from kernels import depth_attention, depth_mask, plain_attention
from measure import Machine, print_table
from model import MoR
from modelconfig import ModelConfig, preset
from ragged import Ragged, ragged_batch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # dense bfloat16
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
PASSES = {"forward": 1.0, "with backward": 3.5}  # FLOPs in forward passes: seven products against two
SHAPES = [  # keys, and share of active tokens (None: token-choice); the most telling first
    ("recursion", 1.0), ("shared", 1 / 3), ("recursion", None), ("recursion", 1 / 3),
    ("shared", None), ("recursion", 2 / 3), ("shared", 2 / 3),
]  # fmt: skip
TRAINED = {  # every ratio is to the first
    "vanilla": ("vanilla", {}),
    "MoR expert R=3": ("mor", {}),
    "MoR expert R=2": ("mor", {"n_recursion": 2}),
    "MoR expert R=3 shared": ("mor", {"kv_mode": "shared"}),
}


class Sizes(NamedTuple):
    lengths: tuple  # (tokens, sequences)
    heads: tuple  # (of queries, of keys)
    head_dim: int
    rounds: int
    longest: int  # of the random sequences whose results are checked
    checked: tuple  # (head width, type)
    decode: tuple  # sequences, layers, numbers of keys, page sizes
    tiles: tuple  # (rows of a tile, warps, stages)
    batch: int
    model: dict  # overrides of the 360M presets


GPU = Sizes(
    ((2048, 16), (8192, 4)), ((9, 3), (15, 5)), 64, 7, 400, tuple(product((64, 128, 32, 16), TOLERANCE)),
    (64, 4, (2048, 8192), (16, 64)),
    ((64, 4, 3), (128, 8, 3), (128, 8, 2), (64, 8, 3), (64, 8, 2), (64, 4, 4)), 16, {},
)  # fmt: skip
DRY = Sizes(
    ((32, 2),), ((3, 1),), 16, 1, 20, tuple(product((16,), TOLERANCE)), (2, 2, (64,), (16,)),
    ((32, 4, 3),), 2, dict(n_layer=8, n_embd=32, n_ffn=48, n_head=4, n_kv_head=2, vocab_size=99,
                           block_size=32),
)  # fmt: skip


class Run:
    """What the sections share: the device, the time that is left, what was measured and what failed."""

    def __init__(self, dry: bool, limit: float):
        self.dry, self.sizes = dry, DRY if dry else GPU
        self.machine = Machine("cpu" if dry else "cuda")
        self.device = self.machine.device
        self.start, self.until = time.monotonic(), limit
        self.figures, self.errors, self.failures, self.flex_shapes = {}, [], Counter(), set()

    def spent(self) -> float:
        return time.monotonic() - self.start

    def say(self, line: str) -> None:
        tqdm.write(line)
        sys.stdout.flush()

    def in_time(self, things):
        """The things one by one, for as long as the section has time."""
        for done, thing in enumerate(things):
            if self.spent() > self.until:
                self.say(f"  out of time after {done} of {len(things)}")
                return
            yield thing

    @contextmanager
    def guard(self, what: str, who: str = "", but=()):
        """A failure inside, unless it is a `but`, costs one line and counts against `who`."""
        try:
            yield
        except but:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["without a word"])[0][:200]
            self.errors.append(f"{what}: {type(error).__name__}: {reason}")
            self.failures[who] += 1
            self.say(f"  failed: {self.errors[-1]}")

    def randn(self, *shape: int, dtype=torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


# ---- time --------------------------------------------------------------------------------------------


def device_ms(run: Run, call, repeats: int, queued: float) -> float:
    """Milliseconds of a call on the device, which first idles until Python has queued all of them."""
    if run.dry:
        return 1000 * queued
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e9 * min(0.05, 1.5 * queued * repeats)))  # ticks of about 2 GHz
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def in_turns(run: Run, calls: dict, what: str) -> dict[str, list[float]]:
    """Milliseconds of every call in every round; a call that fails is left out."""
    ready = {}
    for name, call in calls.items():
        with run.guard(f"{what}, {name}", name):
            for _ in range(0 if run.dry else 2):  # compiles, and makes what is cached
                call()
            start = run.machine.clock()
            call()
            queued = time.perf_counter() - start
            repeats = max(2, min(30, int(0.005 / (run.machine.clock() - start))))
            ready[name] = partial(device_ms, run, call, repeats, queued)
    ms = {name: [] for name in ready}
    for _ in range(run.sizes.rounds):
        for name, turn in ready.items():
            ms[name].append(turn())
    return ms


def ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b))


# ---- batches -----------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    heads: tuple[int, int]  # of queries, of keys
    queries: Ragged
    keys: Ragged | None  # None: the queries' own rows

    def inputs(self, run: Run, width: int, dtype=torch.bfloat16) -> list[Tensor]:
        """Random q, k, v, which want gradients, and the gradient of the output."""
        (n_head, n_kv_head), n_key = self.heads, len((self.keys or self.queries).pos)
        q, dy = (run.randn(len(self.queries.pos), n_head, width, dtype=dtype) for _ in range(2))
        k, v = (run.randn(n_key, n_kv_head, width, dtype=dtype) for _ in range(2))
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dy]

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees; where keys are others, they are whole sequences."""
        if self.keys is not None:
            return int((self.queries.pos + 1).sum())
        n = self.queries.cu_seqlens.diff()
        return int((n * (n + 1) // 2).sum())

    def flops(self, width: int) -> int:
        """Of a forward pass: two products over the visible pairs of every query head."""
        return 4 * width * self.heads[0] * self.pairs()


def make_case(run: Run, length: int, n_seq: int, heads, mode: str, share: float | None) -> Case:
    """Random active tokens, equally many in batches of as many tokens: those share a compilation."""
    shortest = run.sizes.lengths[0][0]
    if share is None:  # pairs of sequences of length/4 to 3/4 length, together a whole one
        spread = torch.randint(length // 4, (n_seq // 2,))
        counts = torch.cat((length // 2 + spread, length // 2 - spread)).tolist()
    else:
        counts = [int(share * shortest) // 8 * 8 * (length // shortest)] * n_seq
    pos = torch.cat([torch.randperm(length)[:n].sort()[0] for n in counts]).to(run.device)
    cu_seqlens = F.pad(torch.tensor(counts).cumsum(0), (1, 0)).to(run.device)
    whole = ragged_batch(torch.arange(n_seq + 1, device=run.device) * length, length)
    active = f"capacity {share:.3g}" if share else "token-choice"
    name = f"{heads[0]}/{heads[1]} heads, T={length}, {active}, {mode}"
    queries = Ragged(pos, cu_seqlens, counts[0] if share else None, None)
    return Case(name, heads, queries, whole if mode == "shared" else None)


def checked_case(run: Run, mode: str) -> Case:
    """Sequences of random lengths, one of a single row; shared: a random half of the rows asks."""
    lengths = torch.cat((torch.tensor([1]), torch.randint(1, run.sizes.longest, (5,))))
    whole = ragged_batch(F.pad(lengths.cumsum(0), (1, 0)).to(run.device))
    if mode == "recursion":
        return Case(mode, run.sizes.heads[0], whole, None)
    asks = (torch.rand(len(whole.pos), device=run.device) < 0.5) | (whole.pos == 0)
    return Case(mode, run.sizes.heads[0], whole.take(asks.nonzero().squeeze(1)), whole)


def pages_of(run: Run, n_key: list[int], page: int, width: int, dtype=torch.bfloat16):
    """(q, k_pages, v_pages) for one query per sequence, and (queries, n_key, page table)."""
    n_seq, n_page, (n_head, n_kv_head) = len(n_key), -(-max(n_key) // page), run.sizes.heads[0]
    q = run.randn(n_seq, n_head, width, dtype=dtype)
    k, v = (run.randn(n_seq * n_page, page, n_kv_head, width, dtype=dtype) for _ in range(2))
    table = torch.randperm(n_seq * n_page).view(n_seq, n_page).to(run.device)
    seen = torch.tensor(n_key, device=run.device)
    rows = Ragged(seen - 1, torch.arange(n_seq + 1, device=run.device), 1, None)
    return (q, k, v), (rows, seen, table)


def paged(qkv, told, attention: str) -> Tensor:
    mask = kernels.paged_mask(*qkv[:2], *told, attention)
    return kernels.paged_attention(*qkv, mask)


# ---- competitors: functions of q (Nq, H, D), k and v (Nk, Hkv, D); None where one can't do a case ----


def triton_attend(run: Run, case: Case, q: Tensor, k: Tensor):
    return partial(depth_attention, mask=depth_mask(q, k, case.queries, case.keys, "triton"))


def flash_attend(run: Run, case: Case, q: Tensor, k: Tensor):
    if case.keys is not None or case.queries.length is None:
        return None
    backend = SDPBackend.MATH if run.dry else SDPBackend.FLASH_ATTENTION

    def attend(q, k, v):
        q, k, v = (x.unflatten(0, (-1, case.queries.length)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(0, 1)

    return attend


def varlen_attend(run: Run, case: Case, q: Tensor, k: Tensor):
    if case.keys is not None:  # it has no rule for some queries among all keys
        return None
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, group = case.queries.cu_seqlens.int(), case.heads[0] // case.heads[1]
    longest = int(cu_seqlens.diff().max())
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0), **({"enable_gqa": True} if grouped else {})}

    def attend(q, k, v):
        if not grouped:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)

    return attend


@cache
def compiled(function):
    return torch.compile(function, dynamic=False)


def flex_attend(run: Run, case: Case, q: Tensor, k: Tensor):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = q.shape, k.shape
    if shape not in run.flex_shapes and run.until - run.spent() < 40 and not run.dry:
        run.say("  flex: no time to compile it for this shape")
        return None
    run.flex_shapes.add(shape)
    keys = case.keys or case.queries
    q_sequence, q_pos = case.queries.sequence().int(), case.queries.pos.int()
    k_sequence, k_pos = keys.sequence().int(), keys.pos.int()

    def sees(batch, head, i, j):
        return (q_sequence[i] == k_sequence[j]) & (k_pos[j] <= q_pos[i])

    mask = create_block_mask(sees, None, None, len(q_pos), len(k_pos), device=run.device)
    flex = flex_attention if run.dry else compiled(flex_attention)

    def attend(*qkv):
        q, k, v = (x.detach() if run.dry else x for x in qkv)  # on a CPU it has no backward pass
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return flex(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def padded_attend(run: Run, case: Case, q: Tensor, k: Tensor):
    if case.keys is None and case.queries.length is not None:  # nothing to pad: what flash_attend is
        return None
    return partial(plain_attention, queries=case.queries, keys=case.keys)


COMPETITORS = {"triton": triton_attend, "flash": flash_attend, "varlen": varlen_attend,
               "flex": flex_attend, "padded": padded_attend}  # fmt: skip


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


SECTIONS = {  # and their shares of the time; none is begun with less than a quarter of its own
    "correctness": (correctness, 40), "attention": (attention, 160), "capacity": (capacity, 10),
    "decode": (decode, 10), "tuning": (tuning, 40), "training": (training, 190),
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
        raise ValueError("a dry run interprets the kernels; set TRITON_INTERPRET=1 in the environment.")
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

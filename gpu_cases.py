"""What `bench.py gpu` measures with: a budget of time, device time in turns, random ragged batches, and
the kernels that PyTorch offers for them, each as a function of q, k and v."""

import inspect
import statistics
import sys
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import kernels
from kernels import depth_attention, depth_mask, plain_attention
from measure import Machine
from ragged import Ragged, ragged_batch

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
PASSES = {"forward": 1.0, "with backward": 3.5}  # FLOPs in forward passes: seven products against two
SHAPES = [  # keys, and share of active tokens (None: token-choice); the most telling first
    ("recursion", 1.0), ("shared", 1 / 3), ("recursion", None), ("recursion", 1 / 3),
    ("shared", None), ("recursion", 2 / 3), ("shared", 2 / 3),
]  # fmt: skip


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

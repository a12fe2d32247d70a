"""Attention over ragged batches, the one kernel that every mode of MoR needs (paper section 2.2).

A ragged batch is the live rows of several sequences back to back. Queries and keys carry positions,
ascending inside a sequence, and a key is visible iff it belongs to the same sequence and its
position is not above the query's. Dense causal attention, expert-choice and token-choice steps and
shared caches are all this one rule: the keys that a query sees are a prefix of its sequence's keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ModuleNotFoundError:  # it is built for Linux alone; elsewhere PyTorch computes everything
    triton, jit, constexpr = None, lambda function: function, lambda value: value

QUERY_CHUNK = 256  # query rows per call where queries and keys are different rows
FAR = 2**30  # the position of padding: above every true one
HEAD_DIMS = (16, 32, 64, 128)  # what the Triton kernels are made for
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_GROUP = 16  # query heads that share a key head
DECODE_ROWS = 16  # rows of a tile where every sequence has one query; tensor cores take no fewer
SPLIT = 1024  # keys that one program walks in decoding, a multiple of KEYS; more go to several
LOG2E = constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and exp2 is what hardware has
PRECISION = constexpr("tf32x3")  # of float32 products on tensor cores: three tf32 ones, nearly exact
INTERPRETED = constexpr(triton is not None and triton.knobs.runtime.interpret)


def tile_rows(dtype: torch.dtype) -> int:
    """Rows of a tile. Tensor cores are fed by 64; three-fold float32 products leave registers for 32."""
    return 32 if dtype == torch.float32 else 64


def tuned(kernel: str, head_dim: int, dtype: torch.dtype) -> dict:
    """How many keys (or, in dkv_kernel, rows) a kernel takes at a time, and its warps and stages."""
    if kernel == "paged":
        return {"KEYS": 32 if dtype == torch.float32 else 64, "num_warps": 4, "num_stages": 2}
    wide = dtype == torch.float32 or head_dim == 128
    options = {"num_warps": 8 if wide else 4, "num_stages": 2}
    if kernel == "dkv":
        return {"ROWS": 32 if wide else 64, **options}
    return {"KEYS": 32 if dtype == torch.float32 else 64, **options}


class Ragged(NamedTuple):
    """Which rows of a batch are live, and which of them belong together."""

    pos: Tensor  # (N,) position of each row in its sequence, ascending inside a sequence
    cu_seqlens: Tensor  # (B+1,) rows cu_seqlens[b] to cu_seqlens[b+1] are sequence b
    length: int | None  # rows per sequence if all have the same number, else None
    index: Tensor | None  # (N,) row numbers in the batch they were taken from; None: all of it

    def take(self, keep: Tensor, length: int | None = None) -> "Ragged":
        """The rows `keep` (ascending row numbers) alone; `length` of them per sequence, if known."""
        n_seq = len(self.cu_seqlens) - 1
        if n_seq == 1:
            length = len(keep)
        if length is None:
            cu_seqlens = torch.searchsorted(keep, self.cu_seqlens)
        else:
            cu_seqlens = torch.arange(n_seq + 1, device=keep.device) * length
        index = keep if self.index is None else self.index[keep]
        return Ragged(self.pos[keep], cu_seqlens, length, index)

    def sequence(self) -> Tensor:
        """(N,) the sequence that each row belongs to."""
        n_seq = len(self.cu_seqlens) - 1
        return torch.arange(n_seq, device=self.pos.device).repeat_interleave(
            self.cu_seqlens.diff(), output_size=len(self.pos)
        )


def ragged_batch(cu_seqlens: Tensor, length: int | None = None, start: Tensor | None = None) -> Ragged:
    """A batch of whole sequences, each counted from position 0 or from `start` (B,)."""
    n_seq = len(cu_seqlens) - 1
    if length is not None and start is None:
        pos = torch.arange(length, device=cu_seqlens.device).repeat(n_seq)
        return Ragged(pos, cu_seqlens, length, None)
    n_rows = int(cu_seqlens[-1])
    first = cu_seqlens[:-1] if start is None else cu_seqlens[:-1] - start
    pos = torch.arange(n_rows, device=cu_seqlens.device) - first.repeat_interleave(cu_seqlens.diff())
    return Ragged(pos, cu_seqlens, n_rows if n_seq == 1 else None, None)


class Tiles(NamedTuple):
    """What the Triton kernels need to know of a mask, all int32."""

    n_key: Tensor  # (Nq,) how many keys of its sequence a query sees: the first n_key
    first_query: Tensor  # (Nk,) the first query of its sequence that sees a key, counted inside of it
    cu_q: Tensor  # (B+1,)
    cu_k: Tensor  # (B+1,)
    q_tiles: Tensor  # (n, 2) sequence and first query of each tile, those with most keys first
    k_tiles: Tensor  # (n, 2) sequence and first key of each tile, those with most queries first
    size: int  # rows of a tile: keys, or queries times the heads of a group


class DepthMask(NamedTuple):
    """Which keys each query sees, and who computes it."""

    queries: Ragged
    keys: Ragged | None  # None: the queries' own rows
    tiles: Tiles | None  # None: PyTorch computes


def depth_mask(
    q: Tensor, k: Tensor, queries: Ragged, keys: Ragged | None, attention="auto", size: int | None = None
) -> DepthMask:
    """The mask of ragged queries over ragged keys of the same sequences, for any number of layers.

    q (Nq, H, D) and k (Nk, Hkv, D) are one layer's, for their shapes and type. keys=None: the queries'
    own rows. attention: "plain", "triton" or "auto"; size: rows of a tile, if not the tuned number.
    """
    tiles = None
    if runs_triton(attention, q, k, dense=keys is None and queries.length is not None):
        group = q.shape[1] // k.shape[1]
        tiles = make_tiles(queries, keys or queries, group, size or tile_rows(q.dtype))
    return DepthMask(queries, keys, tiles)


def make_tiles(queries: Ragged, keys: Ragged, group: int, size: int) -> Tiles:
    """The mask in numbers: a query sees the first n_key keys of its sequence, for positions ascend."""
    q_sequence, k_sequence = queries.sequence(), keys.sequence()
    q_at, k_at = q_sequence * FAR + queries.pos, k_sequence * FAR + keys.pos  # ascending throughout
    n_key = torch.searchsorted(k_at, q_at, right=True) - keys.cu_seqlens[q_sequence]
    first_query = torch.searchsorted(q_at, k_at) - queries.cu_seqlens[k_sequence]
    n_query = queries.cu_seqlens.diff()
    q_tiles = cut(queries, size // group, lambda _, first, last: n_key[last])
    k_tiles = cut(keys, size, lambda sequence, first, _: n_query[sequence] - first_query[first])
    tensors = n_key, first_query, queries.cu_seqlens, keys.cu_seqlens, q_tiles, k_tiles
    return Tiles(*(t.int() for t in tensors), size)


def runs_triton(attention: str, q: Tensor, k: Tensor, dense: bool) -> bool:
    """Who computes attention. This is the one place that decides.

    PyTorch does on a CPU, for which its kernels are tuned, and on a GPU where the batch is dense: an
    expert-choice step is, once its tokens are gathered, plain causal attention over k rows, which
    scaled_dot_product_attention hands to flash attention. Triton does where lengths differ or the keys
    are more than the queries: there PyTorch pads, and computes what a mask then throws away.
    """
    head_dim, group, device = q.shape[2], q.shape[1] // k.shape[1], q.device.type
    fits = head_dim in HEAD_DIMS and group <= MAX_GROUP and q.dtype in DTYPES
    if attention == "auto":
        return device == "cuda" and not dense and fits and triton is not None
    if attention == "plain":
        return False
    if not fits:
        raise ValueError(
            f"attention='triton' takes heads of width {', '.join(map(str, HEAD_DIMS))} in float32, "
            f"bfloat16 or float16, at most {MAX_GROUP} per key head, not {group} of width {head_dim} in "
            f"{q.dtype}; set attention='plain'."
        )
    if triton is None or not (device == "cuda" or INTERPRETED):
        raise ValueError(
            f"attention='triton' does not run on {device} here; set attention='auto', "
            "or TRITON_INTERPRET=1 in the environment to try the kernels, slowly, on a CPU."
        )
    return True


def cut(rows: Ragged, size: int, work) -> Tensor:
    """Cuts every sequence into tiles of `size` rows: (n, 2) sequence and first row inside of it.

    work(sequence, first row, last row), rows numbered through the batch, says how much a tile has to
    do. The longest come first, so that no processor begins one when the others are done.
    """
    per_sequence = (rows.cu_seqlens.diff() + size - 1) // size
    n_seq = len(per_sequence)
    n_tile = int(per_sequence.sum()) if rows.length is None else n_seq * -(-rows.length // size)
    device = rows.pos.device
    sequence = torch.arange(n_seq, device=device).repeat_interleave(per_sequence, output_size=n_tile)
    before = per_sequence.cumsum(0) - per_sequence
    first = (torch.arange(n_tile, device=device) - before[sequence]) * size
    begin, end = rows.cu_seqlens[sequence], rows.cu_seqlens[sequence + 1]
    amount = work(sequence, begin + first, torch.minimum(begin + first + size, end) - 1)
    return torch.stack((sequence, first), 1)[amount.argsort(descending=True, stable=True)]


# ---- attention over whole sequences ------------------------------------------------------------------


def depth_attention(q: Tensor, k: Tensor, v: Tensor, mask: DepthMask) -> Tensor:
    """Softmax attention of ragged queries over the keys they see, at scale D**-0.5.

    q (Nq, H, D); k, v (Nk, Hkv, D) with H a multiple of Hkv; returns (Nq, H, D), zeros for a query
    that sees no key.
    """
    if mask.tiles is not None:
        return torch.ops.mor.depth_attention(q, k, v, *mask.tiles)[0]
    return plain_attention(q, k, v, mask.queries, mask.keys)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, queries: Ragged, keys: Ragged | None) -> Tensor:
    """depth_attention by PyTorch, and what the kernels below are held to.

    Sequences are padded to the longest, and where that would more than double the rows (one long
    document among short ones), first grouped with those of about their length.
    """
    counted = queries if keys is None else keys
    lengths = counted.cu_seqlens.diff()
    if counted.length is not None or len(lengths) * int(lengths.max()) <= 2 * len(counted.pos):
        return padded_attention(q, k, v, queries, keys)
    y = torch.zeros_like(q)
    size_class = lengths.clamp(min=1).log2().ceil()
    for members in (size_class == c for c in size_class.unique()):
        q_rows, some_queries = those_of(members, queries)
        k_rows, some_keys = (q_rows, None) if keys is None else those_of(members, keys)
        if len(q_rows):
            some = padded_attention(q[q_rows], k[k_rows], v[k_rows], some_queries, some_keys)
            y = y.index_copy(0, q_rows, some)
    return y


def those_of(members: Tensor, rows: Ragged) -> tuple[Tensor, Ragged]:
    """The row numbers of the sequences that `members` (B,) marks, and these sequences alone."""
    keep = members[rows.sequence()].nonzero().squeeze(1)
    cu_seqlens = F.pad(rows.cu_seqlens.diff()[members].cumsum(0), (1, 0))
    return keep, Ragged(rows.pos[keep], cu_seqlens, None, None)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, queries: Ragged, keys: Ragged | None) -> Tensor:
    if keys is None:  # padding stands behind the true rows, where no causal query looks
        place = padded_place(queries)
        q, k, v = pad(q, place), pad(k, place), pad(v, place)  # (B, H or Hkv, T, D)
        return unpad(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), place)
    q_place, k_place = padded_place(queries), padded_place(keys)
    q_pos = pad(queries.pos, q_place, fill=FAR)  # padded queries see all, so none sees nothing
    k_pos = pad(keys.pos, k_place, fill=FAR)
    y = attention_by_position(pad(q, q_place), pad(k, k_place), pad(v, k_place), q_pos, k_pos)
    return unpad(y, q_place)


def attention_by_position(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Padded attention: q (B, H, Tq, D), k and v (B, Hkv, Tk, D), positions (B, Tq) and (B, Tk).

    Queries go in chunks, each over just the keys that one of its rows can see: what causal masking
    saves is saved here too, and no mask is larger than (B, QUERY_CHUNK, Tk).
    """
    chunks = []
    on_host = q.device.type == "cpu" and not torch.compiler.is_compiling()
    for q_chunk, pos in zip(q.split(QUERY_CHUNK, 2), q_pos.split(QUERY_CHUNK, 1)):
        n_key = int((k_pos <= pos.amax(1, keepdim=True)).sum(1).max()) if on_host else k.shape[2]
        mask = k_pos[:, None, None, :n_key] <= pos[:, None, :, None]
        chunks.append(
            F.scaled_dot_product_attention(
                q_chunk, k[:, :, :n_key], v[:, :, :n_key], mask, enable_gqa=True
            )
        )
    return torch.cat(chunks, 2)


class Place(NamedTuple):
    """Where the rows of a ragged batch stand in its padded form (B, T)."""

    n_seq: int
    length: int  # T, the longest sequence
    slot: Tensor | None  # (N,) row of the flattened padded form; None: no padding is needed


def padded_place(rows: Ragged) -> Place:
    n_seq = len(rows.cu_seqlens) - 1
    if rows.length is not None:
        return Place(n_seq, rows.length, None)
    length = int(rows.cu_seqlens.diff().max())
    rank = torch.arange(len(rows.pos), device=rows.pos.device)
    sequence = rows.sequence()
    return Place(n_seq, length, rank + sequence * length - rows.cu_seqlens[sequence])


def pad(x: Tensor, place: Place, fill: int = 0) -> Tensor:
    """(N, H, D) -> (B, H, T, D), or (N,) -> (B, T); empty places hold `fill`."""
    if place.slot is not None:
        empty = x.new_full((place.n_seq * place.length, *x.shape[1:]), fill)
        x = empty.index_copy(0, place.slot, x)
    x = x.view(place.n_seq, place.length, *x.shape[1:])
    return x.transpose(1, 2) if x.dim() == 4 else x


def unpad(y: Tensor, place: Place) -> Tensor:
    """(B, H, T, D) -> (N, H, D)"""
    y = y.transpose(1, 2).reshape(place.n_seq * place.length, y.shape[1], y.shape[3])
    return y if place.slot is None else y[place.slot]


# ---- the kernels -------------------------------------------------------------------------------------
#
# A tile of ROWS rows is ROWS // GROUP queries of one sequence times the GROUP query heads that share a
# key head. So keys are read once per group, and their gradients are summed over it inside the kernel. A
# tile walks the keys that its queries see, KEYS at a time: first those that all of them see, without a
# mask, then the boundary, where a key is compared with each query's count. Keys beyond are not touched.
# Every program owns the rows that it writes: no atomics, and the same result in every run.


@jit
def query_rows(tile, head, TILES, CU_Q, HEADS: constexpr, GROUP: constexpr, ROWS: constexpr):
    """A tile's sequence, first and last query and place among the rows (query, head) of (Nq, H), and
    for each of its rows: the query, the place counted from the tile's, and whether it is live."""
    sequence = tl.load(TILES + 2 * tile)
    first = tl.load(TILES + 2 * tile + 1)
    begin, end = tl.load(CU_Q + sequence), tl.load(CU_Q + sequence + 1)
    first += begin
    last = tl.minimum(first + ROWS // GROUP, end) - 1
    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    live = (row < ROWS // GROUP * GROUP) & (query <= last)
    base = first.to(tl.int64) * HEADS + head * GROUP
    return sequence, first, last, base, query, row // GROUP * HEADS + row % GROUP, live


@jit
def load_rows(X, place, live, D: constexpr):
    """Rows of X (…, D); zeros where not live."""
    return tl.load(X + place[:, None] * D + tl.arange(0, D), mask=live[:, None], other=0.0)


@jit
def store_rows(X, x, place, live, D: constexpr):
    tl.store(X + place[:, None] * D + tl.arange(0, D), x.to(X.dtype.element_ty), mask=live[:, None])


@jit
def dot(a, b, y):
    """a @ b + y, in float32."""
    if INTERPRETED:  # numpy has no bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, y, input_precision=PRECISION)


@jit
def softmax_block(q, k, v, seen, column, most, total, y, log2_scale, BOUNDARY: constexpr):
    """One block of keys into the running maximum, total and weighted sum of every row."""
    s = dot(q, tl.trans(k), None) * log2_scale  # (ROWS, keys) in powers of two
    if BOUNDARY:
        s = tl.where(column[None, :] < seen[:, None], s, float("-inf"))
    now = tl.maximum(most, tl.max(s, 1))
    base = now
    if BOUNDARY:  # a row that has seen nothing yet has no maximum to subtract
        base = tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(p, 1)
    y = dot(p.to(v.dtype), v, y * shrink[:, None])
    return now, total, y


@jit
def forward_kernel(
    Q, K, V, OUT, LSE, N_KEY, CU_Q, CU_K, TILES, scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence, first, last, base, query, place, live = query_rows(
        tl.program_id(0), head, TILES, CU_Q, HEADS, GROUP, ROWS
    )
    n_all, n_any = tl.load(N_KEY + first), tl.load(N_KEY + last)  # keys that all, that any query sees
    seen = tl.load(N_KEY + query, mask=live, other=0)
    q = load_rows(Q + base * D, place, live, D)
    column = tl.arange(0, KEYS)
    k_base = (tl.load(CU_K + sequence).to(tl.int64) * (HEADS // GROUP) + head) * D
    K += k_base
    V += k_base
    k_place = column * (HEADS // GROUP)
    STRIDE: constexpr = HEADS // GROUP * D

    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, D), tl.float32)
    log2_scale = scale * LOG2E
    boundary = n_all // KEYS * KEYS
    for start in range(0, boundary, KEYS):
        k = tl.load(K + start * STRIDE + k_place[:, None] * D + tl.arange(0, D))
        v = tl.load(V + start * STRIDE + k_place[:, None] * D + tl.arange(0, D))
        most, total, y = softmax_block(q, k, v, seen, start + column, most, total, y, log2_scale, False)
    for start in range(boundary, n_any, KEYS):
        k = load_rows(K + start * STRIDE, k_place, start + column < n_any, D)
        v = load_rows(V + start * STRIDE, k_place, start + column < n_any, D)
        most, total, y = softmax_block(q, k, v, seen, start + column, most, total, y, log2_scale, True)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, 0.0, most + tl.log2(total)) / LOG2E
    store_rows(OUT + base * D, y / total[:, None], place, live, D)
    tl.store(LSE + base + place, lse, mask=live)


@jit
def dq_block(q, k, v, dy, lse, delta, seen, column, dq, log2_scale, BOUNDARY: constexpr):
    p = tl.exp2(dot(q, tl.trans(k), None) * log2_scale - lse[:, None])
    if BOUNDARY:
        p = tl.where(column[None, :] < seen[:, None], p, 0.0)
    ds = p * (dot(dy, tl.trans(v), None) - delta[:, None])
    return dot(ds.to(k.dtype), k, dq)


@jit
def dq_kernel(
    Q, K, V, OUT, LSE, DY, DQ, DELTA, N_KEY, CU_Q, CU_K, TILES, scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Gradients of queries, and for dkv_kernel DELTA: each row's sum of OUT * DY."""
    head = tl.program_id(1)
    sequence, first, last, base, query, place, live = query_rows(
        tl.program_id(0), head, TILES, CU_Q, HEADS, GROUP, ROWS
    )
    n_all, n_any = tl.load(N_KEY + first), tl.load(N_KEY + last)
    seen = tl.load(N_KEY + query, mask=live, other=0)
    q, dy = load_rows(Q + base * D, place, live, D), load_rows(DY + base * D, place, live, D)
    out = load_rows(OUT + base * D, place, live, D)
    delta = tl.sum(out.to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(DELTA + base + place, delta, mask=live)
    lse = tl.load(LSE + base + place, mask=live, other=0.0) * LOG2E
    column = tl.arange(0, KEYS)
    k_base = (tl.load(CU_K + sequence).to(tl.int64) * (HEADS // GROUP) + head) * D
    K += k_base
    V += k_base
    k_place = column * (HEADS // GROUP)
    STRIDE: constexpr = HEADS // GROUP * D

    dq = tl.zeros((ROWS, D), tl.float32)
    log2_scale = scale * LOG2E
    boundary = n_all // KEYS * KEYS
    for start in range(0, boundary, KEYS):
        k = tl.load(K + start * STRIDE + k_place[:, None] * D + tl.arange(0, D))
        v = tl.load(V + start * STRIDE + k_place[:, None] * D + tl.arange(0, D))
        dq = dq_block(q, k, v, dy, lse, delta, seen, start + column, dq, log2_scale, False)
    for start in range(boundary, n_any, KEYS):
        k = load_rows(K + start * STRIDE, k_place, start + column < n_any, D)
        v = load_rows(V + start * STRIDE, k_place, start + column < n_any, D)
        dq = dq_block(q, k, v, dy, lse, delta, seen, start + column, dq, log2_scale, True)
    store_rows(DQ + base * D, dq * scale, place, live, D)


@jit
def dkv_block(
    Q, DY, LSE, DELTA, N_KEY, k, v, column, dk, dv, begin, n_query, log2_scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, BOUNDARY: constexpr,
):  # fmt: skip
    """What ROWS // GROUP queries from `begin` on, with all heads of the group, add to dk and dv."""
    row = tl.arange(0, ROWS)
    query = begin + row // GROUP
    live = (row < ROWS // GROUP * GROUP) & (query < n_query)
    place = query * HEADS + row % GROUP
    q, dy = load_rows(Q, place, live, D), load_rows(DY, place, live, D)
    lse = tl.load(LSE + place, mask=live, other=float("inf")) * LOG2E  # rows that are not live weigh 0
    delta = tl.load(DELTA + place, mask=live, other=0.0)
    p = tl.exp2(dot(k, tl.trans(q), None) * log2_scale - lse[None, :])  # (keys, rows)
    if BOUNDARY:
        seen = tl.load(N_KEY + query, mask=live, other=0)
        p = tl.where(column[:, None] < seen[None, :], p, 0.0)
    dv = dot(p.to(dy.dtype), dy, dv)
    ds = p * (dot(v, tl.trans(dy), None) - delta[None, :])
    dk = dot(ds.to(q.dtype), q, dk)
    return dk, dv


@jit
def dkv_kernel(
    Q, K, V, LSE, DY, DELTA, DK, DV, N_KEY, FIRST_QUERY, CU_Q, CU_K, TILES, scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Gradients of keys and values: a tile of keys walks the queries that see them."""
    head = tl.program_id(1)
    sequence = tl.load(TILES + 2 * tl.program_id(0))
    first = tl.load(TILES + 2 * tl.program_id(0) + 1)
    q_begin, k_begin = tl.load(CU_Q + sequence), tl.load(CU_K + sequence)
    n_query = tl.load(CU_Q + sequence + 1) - q_begin
    last = tl.minimum(first + KEYS, tl.load(CU_K + sequence + 1) - k_begin) - 1
    any_sees = tl.load(FIRST_QUERY + k_begin + first)  # queries from here on see some of the keys
    all_see = tl.load(FIRST_QUERY + k_begin + last)  # and from here on all of them
    column = first + tl.arange(0, KEYS)
    k_base = ((k_begin + first).to(tl.int64) * (HEADS // GROUP) + head) * D
    k_place = tl.arange(0, KEYS) * (HEADS // GROUP)
    k_live = column <= last
    k, v = load_rows(K + k_base, k_place, k_live, D), load_rows(V + k_base, k_place, k_live, D)
    q_base = q_begin.to(tl.int64) * HEADS + head * GROUP
    Q += q_base * D
    DY += q_base * D
    LSE += q_base
    DELTA += q_base
    N_KEY += q_begin

    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
    log2_scale = scale * LOG2E
    STEP: constexpr = ROWS // GROUP
    for begin in range(any_sees, all_see, STEP):
        dk, dv = dkv_block(
            Q, DY, LSE, DELTA, N_KEY, k, v, column, dk, dv, begin, n_query, log2_scale,
            HEADS, GROUP, D, ROWS, True,
        )  # fmt: skip
    for begin in range(any_sees + tl.cdiv(all_see - any_sees, STEP) * STEP, n_query, STEP):
        dk, dv = dkv_block(
            Q, DY, LSE, DELTA, N_KEY, k, v, column, dk, dv, begin, n_query, log2_scale,
            HEADS, GROUP, D, ROWS, False,
        )  # fmt: skip
    store_rows(DK + k_base, dk * scale, k_place, k_live, D)
    store_rows(DV + k_base, dv, k_place, k_live, D)


# ---- the operators that torch knows ------------------------------------------------------------------
#
# As custom operators with shapes and gradients of their own, torch.compile takes them into one graph.


@torch.library.custom_op("mor::depth_attention", mutates_args=())
def depth_attention_op(
    q: Tensor, k: Tensor, v: Tensor, n_key: Tensor, first_query: Tensor, cu_q: Tensor, cu_k: Tensor,
    q_tiles: Tensor, k_tiles: Tensor, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (Nq, H, D), and the log of each row's sum of exponentials, (Nq, H) float32."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    launch_forward(q, k, v, out, lse, Tiles(n_key, first_query, cu_q, cu_k, q_tiles, k_tiles, size))
    return out, lse


@depth_attention_op.register_fake
def _(q, k, v, *tiles):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("mor::depth_attention_backward", mutates_args=())
def depth_attention_backward_op(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, n_key: Tensor,
    first_query: Tensor, cu_q: Tensor, cu_k: Tensor, q_tiles: Tensor, k_tiles: Tensor, size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dy, q, k, v = dy.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tiles = Tiles(n_key, first_query, cu_q, cu_k, q_tiles, k_tiles, size)
    launch_backward(dy, q, k, v, out, lse, dq, dk, dv, tiles)
    return dq, dk, dv


@depth_attention_backward_op.register_fake
def _(dy, q, k, v, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def save_for_backward(ctx, inputs, output):
    q, k, v, *tiles, ctx.size = inputs
    ctx.save_for_backward(q, k, v, *output, *tiles)
    ctx.mark_non_differentiable(output[1])


def backward(ctx, dy, _):
    q, k, v, out, lse, *tiles = ctx.saved_tensors
    grads = torch.ops.mor.depth_attention_backward(dy, q, k, v, out, lse, *tiles, ctx.size)
    return *grads, *[None] * (len(tiles) + 1)


depth_attention_op.register_autograd(backward, setup_context=save_for_backward)


def launch_forward(q, k, v, out, lse, tiles: Tiles) -> None:
    (_, n_head, head_dim), n_kv_head = q.shape, k.shape[1]
    sizes = n_head, n_head // n_kv_head, head_dim
    with torch.cuda.device_of(q):
        forward_kernel[len(tiles.q_tiles), n_kv_head](
            q, k, v, out, lse, tiles.n_key, tiles.cu_q, tiles.cu_k, tiles.q_tiles, head_dim**-0.5,
            *sizes, ROWS=tiles.size, **tuned("forward", head_dim, q.dtype),
        )  # fmt: skip


def launch_backward(dy, q, k, v, out, lse, dq, dk, dv, tiles: Tiles) -> None:
    (_, n_head, head_dim), n_kv_head = q.shape, k.shape[1]
    sizes = n_head, n_head // n_kv_head, head_dim
    delta = torch.empty_like(lse)
    with torch.cuda.device_of(q):
        dq_kernel[len(tiles.q_tiles), n_kv_head](
            q, k, v, out, lse, dy, dq, delta, tiles.n_key, tiles.cu_q, tiles.cu_k, tiles.q_tiles,
            head_dim**-0.5, *sizes, ROWS=tiles.size, **tuned("dq", head_dim, q.dtype),
        )  # fmt: skip
        dkv_kernel[len(tiles.k_tiles), n_kv_head](
            q, k, v, lse, dy, delta, dk, dv, tiles.n_key, tiles.first_query, tiles.cu_q, tiles.cu_k,
            tiles.k_tiles, head_dim**-0.5, *sizes, KEYS=tiles.size, **tuned("dkv", head_dim, q.dtype),
        )  # fmt: skip


# ---- attention over pages, for generation ------------------------------------------------------------


class PagedTiles(NamedTuple):
    """What the Triton kernel needs to know of a mask over pages, all int32."""

    n_key: Tensor  # (N,) keys that each query sees: the first n_key of its sequence
    cu_q: Tensor  # (B+1,)
    page_table: Tensor  # (B, P) numbers of the pages that hold a sequence's keys, in order
    q_tiles: Tensor  # (n, 2) as in Tiles
    size: int


class PagedMask(NamedTuple):
    """What one pass of generation attends to: the keys of every sequence stand in pages of its own."""

    queries: Ragged
    n_key: Tensor
    page_table: Tensor
    tiles: PagedTiles | None  # None: PyTorch computes


def paged_mask(
    q: Tensor, k_pages: Tensor, queries: Ragged, n_key: Tensor, page_table: Tensor, attention="auto"
) -> PagedMask:
    """The mask of one or a few queries per sequence, for all layers of a pass.

    q (N, H, D) and k_pages (n_page, page_size, Hkv, D) are one layer's, for their shapes and type;
    n_key (N,), at least 1, ascends inside a sequence; page_table (B, P).
    """
    if not runs_triton(attention, q, k_pages[0], dense=False):
        return PagedMask(queries, n_key, page_table, None)
    size = DECODE_ROWS if queries.length == 1 else tile_rows(q.dtype)
    tiles = cut(queries, size // (q.shape[1] // k_pages.shape[2]), lambda _, first, last: n_key[last])
    tensors = n_key, queries.cu_seqlens, page_table, tiles
    return PagedMask(queries, n_key, page_table, PagedTiles(*(t.int() for t in tensors), size))


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, mask: PagedMask) -> Tensor:
    """Softmax attention of q (N, H, D) over keys in pages (n_page, page_size, Hkv, D): (N, H, D)."""
    if mask.tiles is not None:
        return torch.ops.mor.paged_attention(q, k_pages, v_pages, *mask.tiles)
    place = padded_place(mask.queries)
    n_key = pad(mask.n_key, place, fill=1)  # (B, T); a padded query sees one key, and nobody reads it
    k, v = (x[mask.page_table].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))
    visible = torch.arange(k.shape[2], device=q.device) < n_key[:, None, :, None]
    y = F.scaled_dot_product_attention(pad(q, place), k, v, visible, enable_gqa=True)
    return unpad(y, place)


def store_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, place: Tensor, mask: PagedMask
) -> None:
    """Writes new keys and values (N, Hkv, D) into pages; place (N,) is page * page_size + slot."""
    if mask.tiles is not None:
        torch.ops.mor.store_pages(k, v, k_pages, v_pages, place)
    else:
        k_pages.flatten(0, 1)[place] = k.to(k_pages.dtype)
        v_pages.flatten(0, 1)[place] = v.to(v_pages.dtype)


@jit
def paged_kernel(
    Q, K, V, OUT, LSE, N_KEY, CU_Q, PAGES, TILES, scale, n_row, table_width,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
    PAGE: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """A tile of queries over the SPLIT keys from split * SPLIT on; OUT (splits, N, H, D)."""
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, first, last, base, query, place, live = query_rows(
        tl.program_id(0), head, TILES, CU_Q, HEADS, GROUP, ROWS
    )
    n_any = tl.load(N_KEY + last)
    if (split == 0) | (split * SPLIT < n_any):
        seen = tl.load(N_KEY + query, mask=live, other=0)
        q = load_rows(Q + base * D, place, live, D)
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        y = tl.zeros((ROWS, D), tl.float32)
        for start in range(split * SPLIT, tl.minimum(n_any, (split + 1) * SPLIT), KEYS):
            column = start + tl.arange(0, KEYS)
            held = column < n_any
            page = tl.load(PAGES + sequence * table_width + column // PAGE, mask=held, other=0)
            k_place = (page.to(tl.int64) * PAGE + column % PAGE) * (HEADS // GROUP) + head
            k, v = load_rows(K, k_place, held, D), load_rows(V, k_place, held, D)
            most, total, y = softmax_block(q, k, v, seen, column, most, total, y, scale * LOG2E, True)
        nothing = total == 0.0
        total = tl.where(nothing, 1.0, total)
        base += split.to(tl.int64) * n_row * HEADS
        store_rows(OUT + base * D, y / total[:, None], place, live, D)
        tl.store(LSE + base + place, tl.where(nothing, float("-inf"), most + tl.log2(total)), mask=live)


@jit
def combine_kernel(
    PART, LSE, OUT, N_KEY, n_row, HEADS: constexpr, D: constexpr, SPLIT: constexpr
):  # fmt: skip
    """The splits of one row (query, head), each weighted by its share of the exponentials."""
    row = tl.program_id(0).to(tl.int64)
    n_split = tl.cdiv(tl.load(N_KEY + row // HEADS), SPLIT)
    most, total = float("-inf"), 0.0
    y = tl.zeros((D,), tl.float32)
    for split in range(n_split):
        place = split * n_row * HEADS + row
        lse = tl.load(LSE + place)
        now = tl.maximum(most, lse)
        shrink, weight = tl.exp2(most - now), tl.exp2(lse - now)
        y = y * shrink + weight * tl.load(PART + place * D + tl.arange(0, D))
        total = total * shrink + weight
        most = now
    y = y / tl.where(n_split == 0, 1.0, total)
    tl.store(OUT + row * D + tl.arange(0, D), y.to(OUT.dtype.element_ty))


@torch.library.custom_op("mor::paged_attention", mutates_args=())
def paged_attention_op(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, n_key: Tensor, cu_q: Tensor, page_table: Tensor,
    q_tiles: Tensor, size: int,
) -> Tensor:  # fmt: skip
    q = q.contiguous()
    (n_row, n_head, head_dim), (_, page_size, n_kv_head, _) = q.shape, k_pages.shape
    out = torch.empty_like(q)
    n_split = -(-page_table.shape[1] * page_size // SPLIT)
    part = out if n_split == 1 else q.new_empty((n_split, *q.shape), dtype=torch.float32)
    lse = q.new_empty((n_split, n_row, n_head), dtype=torch.float32)
    with torch.cuda.device_of(q):
        paged_kernel[len(q_tiles), n_kv_head, n_split](
            q, k_pages, v_pages, part, lse, n_key, cu_q, page_table, q_tiles, head_dim**-0.5, n_row,
            page_table.shape[1], n_head, n_head // n_kv_head, head_dim, ROWS=size, PAGE=page_size,
            SPLIT=SPLIT, **tuned("paged", head_dim, q.dtype),
        )  # fmt: skip
        if n_split > 1:
            combine_kernel[(n_row * n_head,)](part, lse, out, n_key, n_row, n_head, head_dim, SPLIT)
    return out


@paged_attention_op.register_fake
def _(q, *others):
    return q.new_empty(q.shape)


@jit
def store_kernel(K, V, K_PAGES, V_PAGES, PLACE, WIDTH: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    place = tl.load(PLACE + row)
    k = tl.load(K + row * WIDTH + column, mask=column < WIDTH)
    v = tl.load(V + row * WIDTH + column, mask=column < WIDTH)
    tl.store(K_PAGES + place * WIDTH + column, k.to(K_PAGES.dtype.element_ty), mask=column < WIDTH)
    tl.store(V_PAGES + place * WIDTH + column, v.to(V_PAGES.dtype.element_ty), mask=column < WIDTH)


@torch.library.custom_op("mor::store_pages", mutates_args=("k_pages", "v_pages"))
def store_pages_op(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, place: Tensor) -> None:
    k, v = k.contiguous(), v.contiguous()
    width = k.shape[1] * k.shape[2]
    with torch.cuda.device_of(k):
        store_kernel[(len(k),)](k, v, k_pages, v_pages, place, width, triton.next_power_of_2(width))


@store_pages_op.register_fake
def _(k, v, k_pages, v_pages, place):
    return None

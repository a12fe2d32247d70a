"""Attention over ragged batches, the one kernel that every mode of MoR needs (paper section 2.2).

Queries and keys carry positions, ascending inside a sequence, and a key is visible iff it belongs to the
same sequence and its position is not above the query's. Dense causal attention, expert-choice and
token-choice steps, shared caches and documents packed in a row are all this one rule. Since positions
ascend, a query sees a prefix of its sequence's keys: variable-length attention with a prefix mask.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ragged import Ragged, pad, padded_place, unpad

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ModuleNotFoundError:  # it is built for Linux alone; elsewhere PyTorch computes everything
    triton, constexpr = None, lambda value: value

    def jit(function=None, **options):
        return function or jit


INTERPRETED = constexpr(triton is not None and triton.knobs.runtime.interpret)
HEAD_DIMS = (16, 32, 64, 128)  # what the Triton kernels are made for
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_GROUP = 16  # query heads that share a key head


# ---- who computes ------------------------------------------------------------------------------------


def runs_triton(attention: str, q: Tensor, k: Tensor, dense: bool) -> bool:
    """Who computes attention. This is the one place that decides; ValueError where Triton cannot.

    PyTorch does on a CPU, for which its kernels are tuned, and on a GPU where the batch is dense: an
    expert-choice step is, once its tokens are gathered, plain causal attention over k rows, which
    scaled_dot_product_attention hands to flash attention. Triton does where lengths differ or the keys
    are more than the queries: there PyTorch pads, and computes what a mask then throws away.
    """
    head_dim, group, device = q.shape[2], q.shape[1] // k.shape[1], q.device.type
    fits = head_dim in HEAD_DIMS and group <= MAX_GROUP and q.dtype in DTYPES
    fits = fits and q.shape[1] == group * k.shape[1]
    if attention == "auto":
        recent = device == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)
        return recent and not dense and fits and triton is not None
    if attention == "plain":
        return False
    if not fits:
        raise ValueError(
            f"attention='triton' takes heads of width {', '.join(map(str, HEAD_DIMS))} in float32, "
            f"bfloat16 or float16, the same number per key head and at most {MAX_GROUP}, not "
            f"{q.shape[1]} on {k.shape[1]} of width {head_dim} in {q.dtype}; set attention='plain'."
        )
    if triton is None or not (device == "cuda" or INTERPRETED):
        raise ValueError(
            f"attention='triton' does not run on {device} here; set attention='auto', "
            "or TRITON_INTERPRET=1 in the environment to try the kernels, slowly, on a CPU."
        )
    return True


class DepthMask(NamedTuple):
    """Which keys each query sees."""

    queries: Ragged  # queries and keys are what PyTorch computes from,
    keys: Ragged | None  # None: the queries' own rows
    tiles: "Tiles | None"  # … and tiles what Triton does; None: PyTorch computes


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


def depth_attention(q: Tensor, k: Tensor, v: Tensor, mask: DepthMask) -> Tensor:
    """Softmax attention of ragged queries over the keys they see, at scale D**-0.5.

    q (Nq, H, D); k, v (Nk, Hkv, D) with H a multiple of Hkv; returns (Nq, H, D), zeros for a query
    that sees no key.
    """
    if mask.tiles is not None:
        return torch.ops.mor.depth_attention(q, k, v, *mask.tiles)[0]
    return plain_attention(q, k, v, mask.queries, mask.keys)


# ---- by PyTorch --------------------------------------------------------------------------------------

QUERY_CHUNK = 256  # query rows per call where queries and keys are different rows
FAR = 2**30  # the position of padding: above every true one


def plain_attention(q: Tensor, k: Tensor, v: Tensor, queries: Ragged, keys: Ragged | None) -> Tensor:
    """depth_attention by PyTorch, and what the kernels below are held to.

    Sequences are padded to the longest, and where that would more than double the rows (one long
    document among short ones), first grouped with those of about their length.
    """
    if len(queries.pos) == 0:
        return q.clone()
    groups = groups_alike(queries if keys is None else keys)
    if groups is None:
        return padded_attention(q, k, v, queries, keys)
    y = torch.zeros_like(q)
    for members in groups:
        q_rows, some_queries = select_sequences(members, queries)
        k_rows, some_keys = (q_rows, None) if keys is None else select_sequences(members, keys)
        if len(q_rows):
            some = padded_attention(q[q_rows], k[k_rows], v[k_rows], some_queries, some_keys)
            y = y.index_copy(0, q_rows, some)
    return y


def groups_alike(rows: Ragged) -> list[Tensor] | None:
    """Marks (B,) for groups of sequences of about one length; None: padding all of them costs little."""
    lengths = rows.cu_seqlens.diff()
    if rows.length is not None or len(lengths) * int(lengths.max()) <= 2 * len(rows.pos):
        return None
    size_class = lengths.clamp(min=1).log2().ceil()
    return [size_class == c for c in size_class.unique()]


def select_sequences(members: Tensor, rows: Ragged) -> tuple[Tensor, Ragged]:
    """The row numbers of the sequences that `members` (B,) marks, and these sequences alone."""
    keep = members[rows.sequence()].nonzero().squeeze(1)
    cu_seqlens = F.pad(rows.cu_seqlens.diff()[members].cumsum(0), (1, 0))
    return keep, Ragged(rows.pos[keep], cu_seqlens, None, None)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, queries: Ragged, keys: Ragged | None) -> Tensor:
    """plain_attention with every sequence padded to the longest."""
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


# ---- by Triton: tiles --------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """What the Triton kernels need to know of a mask, all int32."""

    n_key: Tensor  # (Nq,) how many keys of its sequence a query sees: the first n_key
    first_query: Tensor  # (Nk,) the first query of its sequence that sees a key, counted inside of it
    cu_q: Tensor  # (B+1,)
    cu_k: Tensor  # (B+1,)
    q_tiles: Tensor  # (n, 2) sequence and first query of each tile, those with most keys first
    k_tiles: Tensor  # (n, 2) sequence and first key of each tile, those with most queries first
    size: int  # rows of a tile: keys, or queries times the heads of a group


def make_tiles(queries: Ragged, keys: Ragged, group: int, size: int) -> Tiles:
    """The mask in numbers, and the work cut into tiles, the longest first, so that no processor begins
    one when the others are done. size is in rows, of which each query has `group`."""
    q_sequence, k_sequence = queries.sequence(), keys.sequence()
    q_at, k_at = q_sequence * FAR + queries.pos, k_sequence * FAR + keys.pos  # ascending throughout
    n_key = torch.searchsorted(k_at, q_at, right=True) - keys.cu_seqlens[q_sequence]
    first_query = torch.searchsorted(q_at, k_at) - queries.cu_seqlens[k_sequence]
    q_tiles, last = cut(queries, size // group)
    q_tiles = q_tiles[n_key[last].argsort(descending=True)]
    k_tiles, _ = cut(keys, size)
    sequence, first = k_tiles.T
    work = queries.cu_seqlens.diff()[sequence] - first_query[keys.cu_seqlens[sequence] + first]
    k_tiles = k_tiles[work.argsort(descending=True)]
    tensors = n_key, first_query, queries.cu_seqlens, keys.cu_seqlens, q_tiles, k_tiles
    return Tiles(*(t.int().contiguous() for t in tensors), size)


def cut(rows: Ragged, size: int) -> tuple[Tensor, Tensor]:
    """Every sequence in tiles of `size` rows: (n, 2) its number and the first row inside of it, and (n,)
    the last row, numbered through the batch."""
    per_sequence = (rows.cu_seqlens.diff() + size - 1) // size
    n_seq = len(per_sequence)
    n_tile = int(per_sequence.sum()) if rows.length is None else n_seq * -(-rows.length // size)
    device = rows.pos.device
    sequence = torch.arange(n_seq, device=device).repeat_interleave(per_sequence, output_size=n_tile)
    before = per_sequence.cumsum(0) - per_sequence
    first = (torch.arange(n_tile, device=device) - before[sequence]) * size
    begin, end = rows.cu_seqlens[sequence], rows.cu_seqlens[sequence + 1]
    return torch.stack((sequence, first), 1), torch.minimum(begin + first + size, end) - 1


def tile_rows(dtype: torch.dtype) -> int:
    """Rows of a tile. Tensor cores are fed by 64; three-fold float32 products leave registers for 32."""
    return 32 if dtype == torch.float32 else 64


def tuned(kernel: str, head_dim: int, dtype: torch.dtype) -> dict:
    """How many keys (or, in dkv_kernel, rows) a kernel takes at a time, and its warps and stages."""
    n = tile_rows(dtype)
    if kernel == "paged":  # Triton spends stages on the page numbers; with 5 the keys are prefetched too
        return {"KEYS": n // 2, "num_warps": 4, "num_stages": 5}
    wide = kernel == "prefill" or head_dim == 128 or (head_dim == 64 and dtype == torch.float32)
    options = {"num_warps": 8 if wide else 4, "num_stages": 2}
    if kernel == "dkv":
        return {"ROWS": 32 if head_dim >= 64 else n, **options}
    return {"KEYS": n, **options}


# ---- by Triton: kernels ------------------------------------------------------------------------------
#
# A tile of ROWS rows is ROWS // GROUP queries of one sequence times the GROUP query heads that share a
# key head. So keys are read once per group, and their gradients are summed over it inside the kernel. A
# tile walks the keys that its queries see, KEYS at a time: first those that all of them see, without a
# mask, then the boundary, where a key is compared with each query's count. Keys beyond are not touched.
# Every program owns the rows that it writes: no atomics, and the same result in every run.
#
# Pointers: Q, OUT, DY, DQ (Nq, H, D); K, V, DK, DV (Nk, Hkv, D); LSE, DELTA (Nq, H) in float32; N_KEY
# (Nq,); FIRST_QUERY (Nk,); CU_Q, CU_K (B+1,); TILES (n, 2), as in Tiles. Exponentials are powers of two,
# which is what hardware has, so LSE is a logarithm to base two, and log2_scale = D**-0.5 * log2(e).
# Offsets inside of one sequence are 32 bits wide: up to 2**31 elements of Q there.

LOG2E = 1.4426950408889634
PRECISION = constexpr("tf32x3")  # of float32 products on tensor cores: three tf32 ones, nearly exact


@jit
def dot(a, b, acc):
    """a @ b + acc, in float32."""
    if INTERPRETED:  # numpy has no bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@jit
def query_tile(tile, head, TILES, CU_Q, N_KEY, HEADS: constexpr, GROUP: constexpr, ROWS: constexpr):
    """A tile's sequence, the place of its first row in (Nq, H), each row's offset from it and whether it
    is live, the keys that each row sees, those that all of them see, and those that any does."""
    sequence = tl.load(TILES + 2 * tile)
    first = tl.load(CU_Q + sequence) + tl.load(TILES + 2 * tile + 1)
    last = tl.minimum(first + ROWS // GROUP, tl.load(CU_Q + sequence + 1)) - 1
    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    live = (row < ROWS // GROUP * GROUP) & (query <= last)
    base = first.to(tl.int64) * HEADS + head * GROUP
    n_key = tl.load(N_KEY + query, mask=live, other=0)
    n_all, n_any = tl.load(N_KEY + first), tl.load(N_KEY + last)
    return sequence, base, row // GROUP * HEADS + row % GROUP, live, n_key, n_all, n_any


@jit
def load_rows(X, offset, live, D: constexpr):
    """Rows of X (…, D); zeros where not live."""
    return tl.load(X + offset[:, None] * D + tl.arange(0, D), mask=live[:, None], other=0.0)


@jit
def store_rows(X, x, offset, live, D: constexpr):
    tl.store(X + offset[:, None] * D + tl.arange(0, D), x.to(X.dtype.element_ty), mask=live[:, None])


@jit
def load_keys(X, start, n_any, STRIDE: constexpr, D: constexpr, KEYS: constexpr, BOUNDARY: constexpr):
    """KEYS rows of one sequence and head from `start` on; at the boundary, zeros from n_any on."""
    row = start + tl.arange(0, KEYS)[:, None]
    X += row * STRIDE + tl.arange(0, D)
    if BOUNDARY:
        return tl.load(X, mask=row < n_any, other=0.0)
    else:
        return tl.load(X)


@jit
def softmax_block(q, k, v, n_key, column, m, z, acc, log2_scale, BOUNDARY: constexpr):
    """One block of keys into each row's running maximum m, sum of exponentials z and output acc."""
    s = dot(q, tl.trans(k), None)  # (ROWS, KEYS)
    if BOUNDARY:
        s = tl.where(column[None, :] < n_key[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
    base = m_new
    if BOUNDARY:  # a row that has seen nothing yet has no maximum to subtract
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * log2_scale - base[:, None])
    alpha = tl.exp2(m - base)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, z * alpha + tl.sum(p, 1), acc


@jit
def forward_kernel(
    Q, K, V, OUT, LSE, N_KEY, CU_Q, CU_K, TILES, log2_scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Outputs and LSE of a tile of queries."""
    STRIDE: constexpr = HEADS // GROUP * D
    tile, head = tl.program_id(0) // (HEADS // GROUP), tl.program_id(0) % (HEADS // GROUP)
    sequence, base, offset, live, n_key, n_all, n_any = query_tile(
        tile, head, TILES, CU_Q, N_KEY, HEADS, GROUP, ROWS
    )
    q = load_rows(Q + base * D, offset, live, D)
    first_key = tl.load(CU_K + sequence).to(tl.int64) * STRIDE + head * D
    K += first_key
    V += first_key

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    z = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    column = tl.arange(0, KEYS)
    boundary = n_all // KEYS * KEYS
    for start in range(0, boundary, KEYS):
        k = load_keys(K, start, n_any, STRIDE, D, KEYS, False)
        v = load_keys(V, start, n_any, STRIDE, D, KEYS, False)
        m, z, acc = softmax_block(q, k, v, n_key, start + column, m, z, acc, log2_scale, False)
    for start in range(boundary, n_any, KEYS):
        k = load_keys(K, start, n_any, STRIDE, D, KEYS, True)
        v = load_keys(V, start, n_any, STRIDE, D, KEYS, True)
        m, z, acc = softmax_block(q, k, v, n_key, start + column, m, z, acc, log2_scale, True)
    nothing = z == 0.0
    z = tl.where(nothing, 1.0, z)
    store_rows(OUT + base * D, acc / z[:, None], offset, live, D)
    tl.store(LSE + base + offset, tl.where(nothing, 0.0, m + tl.log2(z)), mask=live)


@jit
def dq_block(q, k, v, dy, lse, delta, n_key, column, dq, log2_scale, BOUNDARY: constexpr):
    """What one block of keys adds to the queries' gradients, before their scale."""
    p = tl.exp2(dot(q, tl.trans(k), None) * log2_scale - lse[:, None])
    if BOUNDARY:
        p = tl.where(column[None, :] < n_key[:, None], p, 0.0)
    ds = p * (dot(dy, tl.trans(v), None) - delta[:, None])
    return dot(ds.to(k.dtype), k, dq)


@jit
def dq_kernel(
    Q, K, V, OUT, LSE, DY, DQ, DELTA, N_KEY, CU_Q, CU_K, TILES, log2_scale, scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and for dkv_kernel DELTA: each row's sum of OUT * DY."""
    STRIDE: constexpr = HEADS // GROUP * D
    tile, head = tl.program_id(0) // (HEADS // GROUP), tl.program_id(0) % (HEADS // GROUP)
    sequence, base, offset, live, n_key, n_all, n_any = query_tile(
        tile, head, TILES, CU_Q, N_KEY, HEADS, GROUP, ROWS
    )
    q, dy = load_rows(Q + base * D, offset, live, D), load_rows(DY + base * D, offset, live, D)
    out = load_rows(OUT + base * D, offset, live, D)
    delta = tl.sum(out.to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(DELTA + base + offset, delta, mask=live)
    lse = tl.load(LSE + base + offset, mask=live, other=0.0)
    first_key = tl.load(CU_K + sequence).to(tl.int64) * STRIDE + head * D
    K += first_key
    V += first_key

    dq = tl.zeros((ROWS, D), tl.float32)
    column = tl.arange(0, KEYS)
    boundary = n_all // KEYS * KEYS
    for start in range(0, boundary, KEYS):
        k = load_keys(K, start, n_any, STRIDE, D, KEYS, False)
        v = load_keys(V, start, n_any, STRIDE, D, KEYS, False)
        dq = dq_block(q, k, v, dy, lse, delta, n_key, start + column, dq, log2_scale, False)
    for start in range(boundary, n_any, KEYS):
        k = load_keys(K, start, n_any, STRIDE, D, KEYS, True)
        v = load_keys(V, start, n_any, STRIDE, D, KEYS, True)
        dq = dq_block(q, k, v, dy, lse, delta, n_key, start + column, dq, log2_scale, True)
    store_rows(DQ + base * D, dq * scale, offset, live, D)


@jit
def dkv_block(
    Q, DY, LSE, DELTA, N_KEY, k, v, column, dk, dv, begin, n_query, log2_scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, BOUNDARY: constexpr,
):  # fmt: skip
    """What ROWS // GROUP queries from `begin` on, with all heads of the group, add to dk and dv."""
    row = tl.arange(0, ROWS)
    query = begin + row // GROUP
    live = (row < ROWS // GROUP * GROUP) & (query < n_query)
    offset = query * HEADS + row % GROUP
    q, dy = load_rows(Q, offset, live, D), load_rows(DY, offset, live, D)
    lse = tl.load(LSE + offset, mask=live, other=float("inf"))  # rows that are not live weigh 0
    delta = tl.load(DELTA + offset, mask=live, other=0.0)
    p = tl.exp2(dot(k, tl.trans(q), None) * log2_scale - lse[None, :])  # (keys, rows)
    if BOUNDARY:
        n_key = tl.load(N_KEY + query, mask=live, other=0)
        p = tl.where(column[:, None] < n_key[None, :], p, 0.0)
    dv = dot(p.to(dy.dtype), dy, dv)
    ds = p * (dot(v, tl.trans(dy), None) - delta[None, :])
    dk = dot(ds.to(q.dtype), q, dk)
    return dk, dv


@jit
def dkv_kernel(
    Q, K, V, LSE, DY, DELTA, DK, DV, N_KEY, FIRST_QUERY, CU_Q, CU_K, TILES, log2_scale, scale,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Gradients of keys and values: a tile of KEYS keys walks the queries that see them."""
    tile, head = tl.program_id(0) // (HEADS // GROUP), tl.program_id(0) % (HEADS // GROUP)
    sequence, first = tl.load(TILES + 2 * tile), tl.load(TILES + 2 * tile + 1)
    q_begin, k_begin = tl.load(CU_Q + sequence), tl.load(CU_K + sequence)
    n_query = tl.load(CU_Q + sequence + 1) - q_begin
    last = tl.minimum(first + KEYS, tl.load(CU_K + sequence + 1) - k_begin) - 1
    any_sees = tl.load(FIRST_QUERY + k_begin + first)  # queries from here on see some of the keys
    all_see = tl.load(FIRST_QUERY + k_begin + last)  # and from here on all of them
    column = first + tl.arange(0, KEYS)
    k_base = ((k_begin + first).to(tl.int64) * (HEADS // GROUP) + head) * D
    k_offset = tl.arange(0, KEYS) * (HEADS // GROUP)
    k_live = column <= last
    k, v = load_rows(K + k_base, k_offset, k_live, D), load_rows(V + k_base, k_offset, k_live, D)
    q_base = q_begin.to(tl.int64) * HEADS + head * GROUP
    Q += q_base * D
    DY += q_base * D
    LSE += q_base
    DELTA += q_base
    N_KEY += q_begin

    dk = tl.zeros((KEYS, D), tl.float32)
    dv = tl.zeros((KEYS, D), tl.float32)
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
    store_rows(DK + k_base, dk * scale, k_offset, k_live, D)
    store_rows(DV + k_base, dv, k_offset, k_live, D)


# ---- by Triton: what torch is told -------------------------------------------------------------------
#
# As custom operators with shapes and gradients of their own, torch.compile takes them into one graph.


@torch.library.custom_op("mor::depth_attention", mutates_args=())
def depth_attention_op(
    q: Tensor, k: Tensor, v: Tensor, n_key: Tensor, first_query: Tensor, cu_q: Tensor, cu_k: Tensor,
    q_tiles: Tensor, k_tiles: Tensor, size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (Nq, H, D), and log2 of each row's sum of exponentials, (Nq, H) float32."""
    if not (k.shape == v.shape and q.shape[2] == k.shape[2] and q.dtype == k.dtype == v.dtype):
        kinds = ", ".join(f"{tuple(x.shape)} in {x.dtype}" for x in (q, k, v))
        raise ValueError(f"q, k and v must agree in type and head width, k and v in shape, not {kinds}.")
    if (len(q), len(k)) != (len(n_key), len(first_query)):
        raise ValueError(
            f"the mask is of {len(n_key)} queries and {len(first_query)} keys, not {len(q)} and {len(k)}"
        )
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
    """Gradients of q, k and v, given that of the output, dy (Nq, H, D)."""
    dy, q, k, v = dy.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tiles = Tiles(n_key, first_query, cu_q, cu_k, q_tiles, k_tiles, size)
    launch_backward(dy, q, k, v, out, lse, dq, dk, dv, tiles)
    return dq, dk, dv


@depth_attention_backward_op.register_fake
def _(dy, q, k, v, *others):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def setup_context(ctx, inputs, output):
    q, k, v, *tiles, ctx.size = inputs
    ctx.save_for_backward(q, k, v, *output, *tiles)
    ctx.mark_non_differentiable(output[1])


def backward(ctx, dy, _):
    q, k, v, out, lse, *tiles = ctx.saved_tensors
    grads = torch.ops.mor.depth_attention_backward(dy, q, k, v, out, lse, *tiles, ctx.size)
    return *grads, *[None] * (len(tiles) + 1)


depth_attention_op.register_autograd(backward, setup_context=setup_context)


def launch_forward(q, k, v, out, lse, tiles: Tiles) -> None:
    (_, n_head, head_dim), n_kv_head = q.shape, k.shape[1]
    with torch.cuda.device_of(q):
        forward_kernel[(len(tiles.q_tiles) * n_kv_head,)](
            q, k, v, out, lse, tiles.n_key, tiles.cu_q, tiles.cu_k, tiles.q_tiles,
            head_dim**-0.5 * LOG2E, n_head, n_head // n_kv_head, head_dim,
            ROWS=tiles.size, **tuned("forward", head_dim, q.dtype),
        )  # fmt: skip


def launch_backward(dy, q, k, v, out, lse, dq, dk, dv, tiles: Tiles) -> None:
    (_, n_head, head_dim), n_kv_head = q.shape, k.shape[1]
    scale, delta = head_dim**-0.5, torch.empty_like(lse)
    sizes = n_head, n_head // n_kv_head, head_dim
    with torch.cuda.device_of(q):
        dq_kernel[(len(tiles.q_tiles) * n_kv_head,)](
            q, k, v, out, lse, dy, dq, delta, tiles.n_key, tiles.cu_q, tiles.cu_k, tiles.q_tiles,
            scale * LOG2E, scale, *sizes, ROWS=tiles.size, **tuned("dq", head_dim, q.dtype),
        )  # fmt: skip
        dkv_kernel[(len(tiles.k_tiles) * n_kv_head,)](
            q, k, v, lse, dy, delta, dk, dv, tiles.n_key, tiles.first_query, tiles.cu_q, tiles.cu_k,
            tiles.k_tiles, scale * LOG2E, scale, *sizes,
            KEYS=tiles.size, **tuned("dkv", head_dim, q.dtype),
        )  # fmt: skip


# ---- attention over pages, for generation ------------------------------------------------------------

DECODE_ROWS = 16  # rows of a tile of one query; tensor cores take no fewer
SPLIT = 256  # keys that one program walks in decoding, a multiple of KEYS; more go to several


class PagedMask(NamedTuple):
    """What one pass of generation attends to: the keys of every sequence stand in pages of its own."""

    queries: Ragged
    n_key: Tensor  # (N,) int32, keys that each query sees: the first n_key of its sequence
    page_table: Tensor  # (B, P) int32, numbers of the pages that hold a sequence's keys, in order
    q_tiles: Tensor | None  # (n, 2) int32, as in Tiles; None: PyTorch computes
    size: int  # rows of a tile


def paged_mask(
    q: Tensor, k_pages: Tensor, queries: Ragged, n_key: Tensor, page_table: Tensor, attention="auto"
) -> PagedMask:
    """The mask of one or a few queries per sequence, for all layers of a pass.

    q (N, H, D) and k_pages (n_page, page_size, Hkv, D) are one layer's, for their shapes and type;
    n_key (N,), at least 1, ascends inside a sequence; page_table (B, P), padded with any page's number.
    Pages must hold finite numbers everywhere: PyTorch reads slots without keys, and weighs them 0.
    """
    n_key, page_table = n_key.int().contiguous(), page_table.int().contiguous()
    if not runs_triton(attention, q, k_pages[0], dense=False):
        return PagedMask(queries, n_key, page_table, None, 0)
    single = len(queries.pos) < len(queries.cu_seqlens)  # about one query per sequence
    size = DECODE_ROWS if single else tile_rows(q.dtype)
    q_tiles, last = cut(queries, size // (q.shape[1] // k_pages.shape[2]))
    q_tiles = q_tiles[n_key[last].argsort(descending=True)].int()
    queries = queries._replace(cu_seqlens=queries.cu_seqlens.int())  # here, or every layer would
    return PagedMask(queries, n_key, page_table, q_tiles, size)


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, mask: PagedMask) -> Tensor:
    """Softmax attention of q (N, H, D) over keys in pages (n_page, page_size, Hkv, D): (N, H, D)."""
    if mask.q_tiles is not None:
        cu_q = mask.queries.cu_seqlens
        return torch.ops.mor.paged_attention(
            q, k_pages, v_pages, mask.n_key, cu_q, mask.page_table, mask.q_tiles, mask.size
        )
    if mask.queries.length == 1:
        return one_query_each(q, k_pages, v_pages, mask)
    if (groups := groups_alike(mask.queries)) is not None:  # a prompt among single tokens
        y = torch.zeros_like(q)
        for members in groups:
            rows, queries = select_sequences(members, mask.queries)
            if len(rows):
                some = mask._replace(
                    queries=queries, n_key=mask.n_key[rows], page_table=mask.page_table[members]
                )
                y = y.index_copy(0, rows, paged_attention(q[rows], k_pages, v_pages, some))
        return y
    place = padded_place(mask.queries)
    n_key = pad(mask.n_key, place, fill=1)  # (B, T); a padded query sees one key, and nobody reads it
    k, v = (x[mask.page_table].flatten(1, 2).transpose(1, 2) for x in (k_pages, v_pages))
    visible = torch.arange(k.shape[2], device=q.device) < n_key[:, None, :, None]
    return unpad(F.scaled_dot_product_attention(pad(q, place), k, v, visible, enable_gqa=True), place)


def one_query_each(q: Tensor, k_pages: Tensor, v_pages: Tensor, mask: PagedMask) -> Tensor:
    """paged_attention by PyTorch of one query in every sequence: q (B, H, D)."""
    group = q.shape[1] // k_pages.shape[2]
    q = q.unflatten(1, (-1, group))  # (B, Hkv, G, D)
    k, v = (x[mask.page_table].flatten(1, 2) for x in (k_pages, v_pages))  # (B, T, Hkv, D)
    visible = torch.arange(k.shape[1], device=q.device) < mask.n_key[:, None]
    if torch.compiler.is_compiling():  # then products and sums read the pages where they are
        scores = (q[:, None] * k[:, :, :, None]).sum(4) * q.shape[3] ** -0.5  # (B, T, Hkv, G)
        p = scores.masked_fill(~visible[:, :, None, None], float("-inf")).softmax(1)
        return (p[..., None] * v[:, :, :, None]).sum(1).flatten(1, 2)
    k, v, visible = k.transpose(1, 2), v.transpose(1, 2), visible[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, visible).flatten(1, 2)


@torch.no_grad()
def store_pages(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, place: Tensor, mask: PagedMask
) -> None:
    """Writes new keys and values (N, Hkv, D) into pages; place (N,) is page * page_size + slot."""
    if mask.q_tiles is not None:
        return torch.ops.mor.store_pages(k, v, k_pages, v_pages, place)
    # Through a view of the pages, a compiled pass would copy them all.
    page, slot = place // k_pages.shape[1], place % k_pages.shape[1]
    k_pages[page, slot] = k.to(k_pages.dtype)
    v_pages[page, slot] = v.to(v_pages.dtype)


@jit(do_not_specialize=["n_row", "table_width"])  # they change as a batch does
def paged_kernel(
    Q, K, V, OUT, LSE, N_KEY, CU_Q, PAGES, TILES, log2_scale, n_row, table_width,
    HEADS: constexpr, GROUP: constexpr, D: constexpr, ROWS: constexpr, KEYS: constexpr,
    PAGE: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """A tile of queries over the SPLIT keys from split * SPLIT on; OUT (splits, N, H, D)."""
    split = tl.program_id(1)
    tile, head = tl.program_id(0) // (HEADS // GROUP), tl.program_id(0) % (HEADS // GROUP)
    sequence, base, offset, live, n_key, _, n_any = query_tile(
        tile, head, TILES, CU_Q, N_KEY, HEADS, GROUP, ROWS
    )
    if split * SPLIT < n_any:
        q = load_rows(Q + base * D, offset, live, D)
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        z = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, D), tl.float32)
        for start in range(split * SPLIT, tl.minimum(n_any, (split + 1) * SPLIT), KEYS):
            column = start + tl.arange(0, KEYS)
            held = column < n_any
            page = tl.load(PAGES + sequence * table_width + column // PAGE, mask=held, other=0)
            k_offset = (page.to(tl.int64) * PAGE + column % PAGE) * (HEADS // GROUP) + head
            k = load_rows(K, k_offset, held, D).to(q.dtype)
            v = load_rows(V, k_offset, held, D).to(q.dtype)
            m, z, acc = softmax_block(q, k, v, n_key, column, m, z, acc, log2_scale, True)
        z = tl.where(z == 0.0, 1.0, z)  # rows that see nothing of this split
        base += split.to(tl.int64) * n_row * HEADS
        store_rows(OUT + base * D, acc / z[:, None], offset, live, D)
        tl.store(LSE + base + offset, m + tl.log2(z), mask=live)


@jit(do_not_specialize=["n_row"])
def combine_kernel(
    PART, LSE, OUT, N_KEY, n_row, HEADS: constexpr, D: constexpr, SPLIT: constexpr
):  # fmt: skip
    """The splits of one row (query, head), each weighted by its share of the exponentials."""
    row = tl.program_id(0).to(tl.int64)
    m, z = float("-inf"), 0.0
    acc = tl.zeros((D,), tl.float32)
    for split in range(tl.cdiv(tl.load(N_KEY + row // HEADS), SPLIT)):
        place = split * n_row * HEADS + row
        lse = tl.load(LSE + place)
        m_new = tl.maximum(m, lse)
        alpha, weight = tl.exp2(m - m_new), tl.exp2(lse - m_new)
        acc = acc * alpha + weight * tl.load(PART + place * D + tl.arange(0, D))
        z = z * alpha + weight
        m = m_new
    tl.store(OUT + row * D + tl.arange(0, D), (acc / z).to(OUT.dtype.element_ty))


def check_pages(k_pages: Tensor, v_pages: Tensor) -> None:
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("pages must be contiguous; give keys and values each a tensor of its own.")


@torch.library.custom_op("mor::paged_attention", mutates_args=())
def paged_attention_op(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, n_key: Tensor, cu_q: Tensor, page_table: Tensor,
    q_tiles: Tensor, size: int,
) -> Tensor:  # fmt: skip
    """Output (N, H, D)."""
    check_pages(k_pages, v_pages)
    q = q.contiguous()
    (n_row, n_head, head_dim), (_, page_size, n_kv_head, _) = q.shape, k_pages.shape
    out = torch.empty_like(q)
    # Many rows of a sequence are programs enough; a single one is split over its keys.
    split = SPLIT if size == DECODE_ROWS else 2**30
    n_split = max(1, -(-page_table.shape[1] * page_size // split))
    part = out if n_split == 1 else q.new_empty((n_split, *q.shape), dtype=torch.float32)
    lse = q.new_empty((n_split, n_row, n_head), dtype=torch.float32)
    with torch.cuda.device_of(q):
        paged_kernel[len(q_tiles) * n_kv_head, n_split](
            q, k_pages, v_pages, part, lse, n_key, cu_q, page_table, q_tiles, head_dim**-0.5 * LOG2E,
            n_row, page_table.shape[1], n_head, n_head // n_kv_head, head_dim,
            ROWS=size, PAGE=page_size, SPLIT=split,
            **tuned("paged" if size == DECODE_ROWS else "prefill", head_dim, q.dtype),
        )  # fmt: skip
        if n_split > 1:
            combine_kernel[(n_row * n_head,)](
                part, lse, out, n_key, n_row, n_head, head_dim, split, num_warps=1
            )
    return out


@paged_attention_op.register_fake
def _(q, *others):
    return q.new_empty(q.shape)


@jit
def store_kernel(K, V, K_PAGES, V_PAGES, PLACE, WIDTH: constexpr, BLOCK: constexpr):
    """One row of new keys and values, WIDTH = Hkv * D wide, to its place; BLOCK is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    place = tl.load(PLACE + row).to(tl.int64)
    k = tl.load(K + row * WIDTH + column, mask=column < WIDTH)
    v = tl.load(V + row * WIDTH + column, mask=column < WIDTH)
    tl.store(K_PAGES + place * WIDTH + column, k.to(K_PAGES.dtype.element_ty), mask=column < WIDTH)
    tl.store(V_PAGES + place * WIDTH + column, v.to(V_PAGES.dtype.element_ty), mask=column < WIDTH)


@torch.library.custom_op("mor::store_pages", mutates_args=("k_pages", "v_pages"))
def store_pages_op(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, place: Tensor) -> None:
    check_pages(k_pages, v_pages)
    k, v, place = k.contiguous(), v.contiguous(), place.contiguous()
    width = k.shape[1] * k.shape[2]
    block = 1 << (width - 1).bit_length()
    with torch.cuda.device_of(k):
        store_kernel[(len(k),)](k, v, k_pages, v_pages, place, width, block)


@store_pages_op.register_fake
def _(k, v, k_pages, v_pages, place):
    return None

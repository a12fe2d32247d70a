"""Ragged attention, plain and Triton, against a float64 loop over single queries.

The Triton kernels run interpreted on a CPU (TRITON_INTERPRET=1, see conftest.py).
"""

import itertools
import random

import pytest
import torch

import kernels
from kernels import (
    DepthMask,
    attention_by_position,
    depth_attention,
    depth_mask,
    paged_attention,
    paged_mask,
    plain_attention,
    store_pages,
)
from model import MoR
from modelconfig import ModelConfig
from ragged import Ragged, ragged_batch

HEADS = [(1, 1), (3, 1), (3, 3), (5, 1), (6, 2), (10, 2)]  # query heads, key and value heads
BOTH = pytest.mark.parametrize("attention", ["plain", "triton"])


def naive(q, k, v, queries: list[list[int]], keys: list[list[int]]):
    """Every query and head alone, over the keys of its own sequence that are not above it."""
    out, first_q, first_k = [], 0, 0
    group = q.shape[1] // k.shape[1]
    for q_positions, k_positions in zip(queries, keys):
        for i, position in enumerate(q_positions):
            visible = [first_k + j for j, other in enumerate(k_positions) if other <= position]
            heads = []
            for head in range(q.shape[1]):
                score = k[visible, head // group] @ q[first_q + i, head] * q.shape[2] ** -0.5
                heads.append(score.softmax(0) @ v[visible, head // group])
            out.append(torch.stack(heads))
        first_q, first_k = first_q + len(q_positions), first_k + len(k_positions)
    return torch.stack(out) if out else torch.zeros_like(q)


def ragged(positions: list[list[int]]) -> Ragged:
    lengths = [len(p) for p in positions]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    same = lengths[0] if len(set(lengths)) == 1 else None
    return Ragged(torch.tensor(sum(positions, []), dtype=torch.long), cu_seqlens, same, None)


def random_case(seed: int, subset: bool, lengths=None):
    """Positions of queries and keys, ascending with gaps; the queries are a subset of the keys, or they.

    Some sequences are empty, some of one row, some around the edge of a tile; at least one is not empty.
    """
    draw = random.Random(seed)
    if lengths is None:
        lengths = [
            draw.choice((0, 1, 1, 15, 16, 17, draw.randint(2, 14))) for _ in range(draw.randint(1, 5))
        ]
        if draw.random() < 0.2:
            lengths = [max(lengths)] * len(lengths)
    lengths = lengths if any(lengths) else [3]
    keys = [sorted(draw.sample(range(2 * n + draw.randint(0, 9)), n)) for n in lengths]
    if not subset:
        return keys, keys
    queries = [sorted(draw.sample(p, draw.randint(0, len(p)))) for p in keys]
    return (queries if any(queries) else [p[-1:] for p in keys]), keys


def random_qkv(seed: int, queries, keys, head_dim: int | None = None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    width = head_dim or (16, 32, 64)[seed % 3]
    n_query, n_key = sum(map(len, queries)), sum(map(len, keys))
    shapes = (n_query, heads, width), (n_key, kv_heads, width), (n_key, kv_heads, width)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def mask_of(q, k, queries, keys, attention, size=16) -> DepthMask:
    return depth_mask(q, k, ragged(queries), None if queries is keys else ragged(keys), attention, size)


def attend(q, k, v, queries, keys, attention="plain", size=16):
    return depth_attention(q, k, v, mask_of(q, k, queries, keys, attention, size))


def value_and_gradients(function, inputs, weight):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    grads = torch.autograd.grad((y * weight.to(y.dtype)).sum(), inputs, allow_unused=True)
    return y.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs))


def assert_near(actual, expected, tolerance):
    """Relative to the largest expected value, or 1 where all are small."""
    assert actual.shape == expected.shape and actual.isfinite().all()
    if expected.numel():
        scale = max(1.0, expected.abs().max().item())
        assert (actual.double() - expected.double()).abs().max() <= tolerance * scale


@pytest.mark.parametrize(
    "attention, dtype, tolerance",
    [
        ("plain", torch.float64, 1e-12),
        ("plain", torch.float32, 1e-5),
        ("triton", torch.float32, 1e-5),
        ("triton", torch.bfloat16, 2e-2),
        ("triton", torch.float16, 3e-3),
    ],
)
@pytest.mark.parametrize("subset", [False, True])
def test_values_and_gradients_equal_the_loop(attention, dtype, tolerance, subset):
    for seed in range(24 if attention == "plain" else 10 if dtype == torch.float32 else 4):
        queries, keys = random_case(seed, subset)
        inputs = random_qkv(seed, queries, keys, dtype=dtype)
        weight = torch.randn(inputs[0].shape, dtype=torch.float64).to(dtype)
        exact = [x.double() for x in inputs]
        expected = value_and_gradients(lambda *x: naive(*x, queries, keys), exact, weight)
        actual = value_and_gradients(lambda *x: attend(*x, queries, keys, attention), inputs, weight)
        for a, b in zip(actual, expected):
            assert a.dtype == dtype
            assert_near(a, b, tolerance)


@pytest.mark.parametrize("head_dim", kernels.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tuned_tiles_around_their_edges(head_dim, dtype):
    """Tiles of the size that a GPU gets; sequences one row shorter, one longer and twice as long."""
    size = kernels.tile_rows(dtype)
    queries, keys = random_case(head_dim, True, [size - 1, 0, size + 1, 1, 2 * size])
    inputs = random_qkv(head_dim + 1, queries, keys, head_dim, dtype)
    weight = torch.randn(inputs[0].shape)
    expected = value_and_gradients(
        lambda *x: attend(*x, queries, keys), [x.double() for x in inputs], weight
    )
    actual = value_and_gradients(
        lambda *x: attend(*x, queries, keys, "triton", None), inputs, weight.to(dtype)
    )
    for a, b in zip(actual, expected):
        assert_near(a, b, 1e-5 if dtype == torch.float32 else 2e-2)


@BOTH
@pytest.mark.parametrize("subset", [False, True])
def test_a_sequence_does_not_feel_the_others(attention, subset):
    for seed in range(6):
        queries, keys = random_case(seed, subset)
        q, k, v = random_qkv(seed, queries, keys, dtype=torch.float32)
        together = attend(q, k, v, queries, keys, attention)
        first_q = first_k = 0
        for own_queries, own_keys in zip(queries, keys):
            mine = slice(first_q, first_q + len(own_queries)), slice(first_k, first_k + len(own_keys))
            first_q, first_k = mine[0].stop, mine[1].stop
            if not own_queries:
                continue
            # Whatever stands in the others' rows, NaN included, stays there.
            noise = [torch.full_like(x, float("nan")) for x in (q, k, v)]
            noise[0][mine[0]], noise[1][mine[1]], noise[2][mine[1]] = q[mine[0]], k[mine[1]], v[mine[1]]
            disturbed = attend(*noise, queries, keys, attention)
            torch.testing.assert_close(disturbed[mine[0]], together[mine[0]], rtol=1e-6, atol=1e-6)


@BOTH
def test_later_keys_are_not_seen(attention):
    for seed in range(6):
        queries, keys = random_case(seed, True)
        q, k, v = random_qkv(seed, queries, keys, dtype=torch.float32)
        before = attend(q, k, v, queries, keys, attention)
        cut = sum(sum(queries, [])) / sum(map(len, queries))
        late = torch.tensor([p > cut for row in keys for p in row])
        k[late], v[late] = 99.0, -99.0
        early = torch.tensor([p <= cut for row in queries for p in row])
        assert early.any()
        after = attend(q, k, v, queries, keys, attention)
        torch.testing.assert_close(after[early], before[early], rtol=1e-6, atol=1e-6)


@BOTH
def test_depth_mask_equals_dense_attention_masked_by_depth(attention):
    """Whence the name: step r of a recursion attends as full attention in which a key counts only if its
    token is at least r + 1 steps deep. Compact rows give the same, and cost what they are many."""
    generator = torch.Generator().manual_seed(0)
    for n_token in (1, 7, 33):
        q, k, v = (torch.randn(n_token, h, 16, generator=generator) for h in (3, 1, 1))
        depth = torch.randint(1, 4, (n_token,), generator=generator)
        depth[0] = 3
        tokens = torch.arange(n_token)
        for r in range(3):
            active = (depth > r).nonzero().squeeze(1)
            visible = (tokens[None] <= tokens[:, None]) & (depth > r)
            score = torch.einsum("ihd,jd->hij", q, k[:, 0]) * 16**-0.5
            dense = torch.einsum(
                "hij,jd->ihd", score.masked_fill(~visible, -torch.inf).softmax(-1), v[:, 0]
            )
            rows = ragged_batch(torch.tensor([0, n_token])).take(active)
            own = q[active], k[active], v[active]
            compact = depth_attention(*own, depth_mask(*own[:2], rows, None, attention, 16))
            torch.testing.assert_close(compact, dense[active], rtol=1e-5, atol=1e-5)


@BOTH
def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient(attention):
    queries, keys = [[0, 4, 9], [2]], [[5, 6], [3]]
    inputs = random_qkv(1, queries, keys, 16, torch.float32)
    weight = torch.randn(inputs[0].shape)
    y, dq, dk, dv = value_and_gradients(lambda *x: attend(*x, queries, keys, attention), inputs, weight)
    for x in (y, dq):
        assert not x[[0, 1, 3]].any() and x.isfinite().all()
    alone = value_and_gradients(
        lambda q, k, v: naive(q[2:3], k[:2], v[:2], [[9]], [[5, 6]]), inputs, weight[2:3]
    )
    for actual, expected in zip((y[2:3], dq, dk, dv), alone):
        assert_near(actual, expected, 1e-5)


def test_outputs_are_written_whole_and_nothing_else_is_touched():
    """Every tensor stands between rows of NaN: read, they would spread; written, they would vanish."""

    def guarded(x, poison=False):
        whole = torch.full((len(x) + 6, *x.shape[1:]), float("nan"), dtype=x.dtype)
        inside = whole[3:-3]
        if not poison:
            inside.copy_(x)
        return whole, inside

    for seed in range(8):
        queries, keys = random_case(seed, True)
        q, k, v = random_qkv(seed, queries, keys, dtype=torch.float32)
        dy, lse = torch.randn_like(q), torch.empty(q.shape[:2])
        mask = mask_of(q, k, queries, keys, "triton")
        expected = value_and_gradients(
            lambda *x: attend(*x, queries, keys, "plain"),
            (q, k, v),
            dy,
        )
        inputs = [guarded(x) for x in (q, k, v, dy)]
        outputs = [guarded(x, poison=True) for x in (q, lse, q, k, v)]
        (q, k, v, dy), (out, lse, dq, dk, dv) = [x for _, x in inputs], [x for _, x in outputs]
        kernels.launch_forward(q, k, v, out, lse, mask.tiles)
        kernels.launch_backward(dy, q, k, v, out, lse, dq, dk, dv, mask.tiles)
        for actual, wanted in zip((out, dq, dk, dv), expected):
            assert_near(actual, wanted, 1e-5)
        assert lse.isfinite().all()
        for whole, _ in inputs + outputs:
            assert whole[:3].isnan().all() and whole[-3:].isnan().all()


def test_results_do_not_depend_on_the_order_of_tiles():
    queries, keys = random_case(3, True, [40, 3, 17])
    inputs = random_qkv(3, queries, keys, dtype=torch.float32)
    mask, weight = mask_of(*inputs[:2], queries, keys, "triton"), torch.randn(inputs[0].shape)
    tiles = mask.tiles._replace(q_tiles=mask.tiles.q_tiles.flip(0), k_tiles=mask.tiles.k_tiles.flip(0))
    first, turned = (
        value_and_gradients(lambda *x: depth_attention(*x, m), inputs, weight)
        for m in (mask, mask._replace(tiles=tiles))
    )
    for a, b in zip(first, turned):
        assert torch.equal(a, b)


def test_the_kernels_walk_the_visible_blocks_and_no_other(monkeypatch):
    """Counted as they are computed: blocks with a visible pair, masked only where another is not."""
    queries, keys = random_case(7, True, [150, 1, 0, 70])
    inputs = random_qkv(4, queries, keys, 16, torch.float32)
    mask, masked = mask_of(*inputs[:2], queries, keys, "triton", 32), {}
    for name in ("softmax_block", "dq_block", "dkv_block"):
        real = getattr(kernels, name)

        def count(*args, real=real, name=name):
            masked.setdefault(name, []).append(bool(args[-1]))
            return real(*args)

        monkeypatch.setattr(kernels, name, count)
    value_and_gradients(lambda *x: depth_attention(*x, mask), inputs, torch.randn(inputs[0].shape))
    heads, group = inputs[1].shape[1], inputs[0].shape[1] // inputs[1].shape[1]
    step, whole, partly = 32 // group, 0, 0
    for q, k in zip(queries, keys):
        for tile in (q[i : i + step] for i in range(0, len(q), step)):
            for block in (k[i : i + 32] for i in range(0, len(k), 32)):
                seen = sum(key <= query for query in tile for key in block)
                full = len(block) == 32 and seen == len(tile) * 32
                whole, partly = whole + full, partly + (seen > 0 and not full)
    for name in ("softmax_block", "dq_block"):
        assert sorted(masked[name]) == [False] * whole * heads + [True] * partly * heads
    pairs = sum(key <= query for q, k in zip(queries, keys) for query in q for key in k)
    assert pairs <= len(masked["dkv_block"]) * 32 * step / heads <= pairs + 2 * 32 * sum(map(len, keys))


# ---- tiles ---------------------------------------------------------------------------------------


def test_tiles_cover_every_row_once_and_the_longest_come_first():
    for seed in range(20):
        queries, keys = random_case(seed, True)
        q, k, _ = random_qkv(seed, queries, keys)
        tiles = mask_of(q.float(), k.float(), queries, keys, "triton").tiles
        group = q.shape[1] // k.shape[1]
        for cut, rows, step in ((tiles.q_tiles, queries, 16 // group), (tiles.k_tiles, keys, 16)):
            expected = {(b, first) for b, row in enumerate(rows) for first in range(0, len(row), step)}
            assert sorted(map(tuple, cut.tolist())) == sorted(expected)
        work = []
        for b, first in tiles.q_tiles.tolist():
            last = queries[b][min(first + 16 // group, len(queries[b])) - 1]
            work.append(sum(p <= last for p in keys[b]))
        assert work == sorted(work, reverse=True)
        work = [sum(p >= keys[b][first] for p in queries[b]) for b, first in tiles.k_tiles.tolist()]
        assert work == sorted(work, reverse=True)


# ---- what torch is told ----------------------------------------------------------------------------


@pytest.mark.parametrize("subset", [False, True])
def test_the_operators_keep_what_they_tell_torch(subset):
    queries, keys = random_case(5, subset, [9, 0, 20])
    q, k, v = (x.requires_grad_() for x in random_qkv(4, queries, keys, 16, torch.float32))
    mask = mask_of(q, k, queries, keys, "triton")
    torch.library.opcheck(torch.ops.mor.depth_attention, (q, k, v, *mask.tiles))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.ops.mor.depth_attention(q, k, v, *mask.tiles)
    given = (torch.randn_like(out), q, k, v, out, lse, *mask.tiles)
    torch.library.opcheck(torch.ops.mor.depth_attention_backward, given)


@pytest.mark.parametrize(
    "routing, kv_mode, compiles",
    [
        ("expert", "recursion", False),
        ("expert", "shared", False),
        ("expert", "shared_update", True),
        ("token", "recursion", False),
        ("token", "shared_update", False),
    ],
)
def test_a_training_step_is_the_same_by_both_ways(routing, kv_mode, compiles):
    """Loss and every gradient of a whole model, also as one compiled graph."""
    sizes = dict(vocab_size=50, block_size=24, n_layer=5, n_head=6, n_kv_head=2, n_embd=96, n_ffn=32)
    torch.manual_seed(0)
    model = MoR(ModelConfig(**sizes, routing=routing, kv_mode=kv_mode))
    ids = torch.randint(0, 50, (2, 24))

    def step(attention, forward):
        model.attention = attention
        model.zero_grad()
        loss, _ = forward(ids, ids)
        loss.backward()
        return loss.item(), {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }

    loss, grads = step("plain", model)
    ways = [model]
    if compiles:
        ways.append(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for forward in ways:
        same_loss, same_grads = step("triton", forward)
        assert same_loss == pytest.approx(loss, rel=1e-6) and same_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert_near(same_grads[name] / grad.abs().max(), grad / grad.abs().max(), 1e-5)


def test_strided_inputs_are_welcome():
    queries, keys = random_case(2, True, [20, 5])
    q, k, v = random_qkv(2, queries, keys, 16, torch.float32)
    expected = attend(q, k, v, queries, keys)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    assert_near(attend(q, k, v, queries, keys, "triton"), expected, 1e-5)


def test_what_triton_cannot_run_is_refused(monkeypatch):
    q, k = torch.randn(4, 3, 24), torch.randn(4, 1, 24)
    rows = ragged([[0, 1, 2, 3]])
    with pytest.raises(ValueError, match="width 16, 32, 64, 128.*not 3 on 1 of width 24.*'plain'"):
        depth_mask(q, k, rows, None, "triton")
    with pytest.raises(ValueError, match="float64"):
        depth_mask(q[..., :16].double(), k[..., :16].double(), rows, None, "triton")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="does not run on cpu here.*TRITON_INTERPRET=1"):
        depth_mask(q[..., :16], k[..., :16], rows, None, "triton")
    assert depth_mask(q[..., :16], k[..., :16], rows, None).tiles is None


def test_tensors_that_do_not_fit_the_mask_are_refused():
    queries, keys = [[0, 3], [1]], [[0, 1, 2], [1]]
    q, k, v = random_qkv(1, queries, keys, 16, torch.float32)
    mask = mask_of(q, k, queries, keys, "triton")
    for wrong in ((q, k, v[:, :0]), (q, k[..., :8], v[..., :8]), (q, k.half(), v.half())):
        with pytest.raises(ValueError, match="q, k and v must agree"):
            depth_attention(*wrong, mask)
    for wrong in ((q[1:], k, v), (q, k[1:], v[1:])):
        with pytest.raises(ValueError, match="the mask is of 3 queries and 4 keys, not"):
            depth_attention(*wrong, mask)


@BOTH
def test_no_query_is_no_work(attention):
    for keys in ([[], []], [[1, 2], [5]], []):
        queries = [[] for _ in keys]
        q, k, v = random_qkv(1, queries, keys, 16, torch.float32)
        rows = [
            Ragged(
                torch.tensor(sum(p, [])).long(), torch.tensor([0, *map(len, p)]).cumsum(0), None, None
            )
            for p in (queries, keys)
        ]
        y = depth_attention(q.requires_grad_(), k, v, depth_mask(q, k, *rows, attention))
        y.sum().backward()
        assert y.shape == q.shape


@BOTH
def test_masks_may_be_made_of_strided_numbers(attention):
    """A slice of a larger page table, positions with a stride."""
    q, (k, v), k_pages, v_pages, table, place, queries, keys = random_pages(4, [1, 1], [20, 3], 8)
    rows = ragged(queries)
    mask = paged_mask(q, k_pages, rows, rows.pos + 1, table, attention)
    store_pages(k, v, k_pages, v_pages, place, mask)
    expected = paged_attention(q, k_pages, v_pages, mask)
    wide = torch.cat((table, table + 1), 1).int()[:, : table.shape[1]]
    n_key = torch.stack((rows.pos + 1, rows.pos), 1).int()[:, 0]
    k_other, v_other = torch.zeros_like(k_pages), torch.zeros_like(v_pages)
    strided = paged_mask(q, k_pages, rows, n_key, wide, attention)
    store_pages(k, v, k_other, v_other, torch.stack((place, place * 0), 1)[:, 0], strided)
    torch.testing.assert_close(paged_attention(q, k_other, v_other, strided), expected)
    k_both, v_both = torch.zeros(len(k_pages), 2, *k_pages.shape[1:]).unbind(1)
    if attention == "triton":
        with pytest.raises(ValueError, match="pages must be contiguous"):
            store_pages(k, v, k_both, v_both, place, mask)
    else:
        store_pages(k, v, k_both, v_both, place, mask)
        assert torch.equal(k_both, k_other) and torch.equal(v_both, v_other)


# ---- pages -----------------------------------------------------------------------------------------


def random_pages(seed: int, n_query: list[int], n_key: list[int], page_size: int, dtype=torch.float32):
    """Keys of sequences of n_key tokens in pages of no order; the last n_query tokens ask.

    Pages of nobody, and slots that hold no key yet, are full of 1e4.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    needed = [-(-n // page_size) for n in n_key]
    free = draw.sample(range(sum(needed) + 3), sum(needed))
    width = (16, 64)[seed % 2]
    table = torch.full((len(n_key), max(needed) + 1), draw.choice(free))
    k_pages = torch.full((sum(needed) + 3, page_size, kv_heads, width), 1e4, dtype=dtype)
    v_pages = k_pages.clone()
    flat = [torch.randn(sum(n_key), kv_heads, width, generator=generator).to(dtype) for _ in range(2)]
    q = torch.randn(sum(n_query), heads, width, generator=generator).to(dtype)
    place = []
    for b, n in enumerate(n_key):
        own = [free.pop() for _ in range(needed[b])]
        table[b, : len(own)] = torch.tensor(own)
        place += [own[t // page_size] * page_size + t % page_size for t in range(n)]
    keys = [[*range(n)] for n in n_key]
    queries = [[*range(n - m, n)] for n, m in zip(n_key, n_query)]
    return q, flat, k_pages, v_pages, table, torch.tensor(place), queries, keys


@BOTH
def test_paged_attention_equals_attention_over_whole_sequences(monkeypatch, attention):
    for seed in range(8):
        monkeypatch.setattr(kernels, "SPLIT", (64, 1024)[seed // 2 % 2])  # several splits, and one
        draw = random.Random(seed)
        n_key = [draw.choice((1, 15, 16, 63, 64, 65, 150)) for _ in range(draw.randint(1, 4))]
        one = seed % 2
        n_query = [1 if one else draw.randint(0, min(n, 30)) for n in n_key]
        n_query[0] = max(1, n_query[0])
        dtype = torch.bfloat16 if seed == 7 and attention == "triton" else torch.float32
        q, (k, v), k_pages, v_pages, table, place, queries, keys = random_pages(
            seed, n_query, n_key, draw.choice((1, 8, 16)), dtype
        )
        rows = ragged(queries)
        mask = paged_mask(q, k_pages, rows, rows.pos + 1, table, attention)
        untouched = torch.ones(len(k_pages) * k_pages.shape[1], dtype=torch.bool)
        untouched[place] = False
        store_pages(k, v, k_pages, v_pages, place, mask)
        assert torch.equal(k_pages.flatten(0, 1)[place], k) and torch.equal(
            v_pages.flatten(0, 1)[place], v
        )
        assert (k_pages.flatten(0, 1)[untouched] == 1e4).all()
        expected = plain_attention(q.double(), k.double(), v.double(), rows, ragged(keys))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert_near(paged_attention(q, k_pages, v_pages, mask), expected, tolerance)


def test_the_paged_operators_keep_what_they_tell_torch():
    q, (k, v), k_pages, v_pages, table, place, queries, _ = random_pages(4, [1, 1], [20, 3], 8)
    mask = paged_mask(q, k_pages, ragged(queries), ragged(queries).pos + 1, table, "triton")
    torch.library.opcheck(torch.ops.mor.store_pages, (k, v, k_pages, v_pages, place))
    told = mask.n_key, mask.queries.cu_seqlens, mask.page_table, mask.q_tiles, mask.size
    torch.library.opcheck(torch.ops.mor.paged_attention, (q, k_pages, v_pages, *told))


# ---- plain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 8, 256])
def test_query_chunks_do_not_show(monkeypatch, chunk):
    monkeypatch.setattr(kernels, "QUERY_CHUNK", chunk)
    for seed in range(12):
        queries, keys = random_case(seed, True)
        inputs = random_qkv(seed, queries, keys)
        weight = torch.randn(inputs[0].shape, dtype=torch.float64)
        expected = value_and_gradients(lambda *x: naive(*x, queries, keys), inputs, weight)
        for a, b in zip(
            value_and_gradients(lambda *x: attend(*x, queries, keys), inputs, weight),
            expected,
        ):
            assert_near(a, b, 1e-11)


def test_chunks_look_at_no_more_keys_than_they_can_see(monkeypatch):
    """Half of all pairs, as in causal attention, not all of them."""
    monkeypatch.setattr(kernels, "QUERY_CHUNK", 8)
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def note(q, k, *args, **kwargs):
        seen.append((q.shape[2], k.shape[2]))
        return real(q, k, *args, **kwargs)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", note)
    q, k = torch.randn(2, 3, 64, 16), torch.randn(2, 1, 64, 16)
    pos = torch.arange(64).repeat(2, 1)
    attention_by_position(q, k, k, pos, pos)
    assert seen == [(8, n) for n in range(8, 65, 8)]


@pytest.mark.parametrize("subset", [False, True])
def test_one_long_sequence_does_not_stretch_the_short_ones(monkeypatch, subset):
    """Padding at most doubles each length, and the result is that of every sequence alone."""
    areas = []
    real = torch.nn.functional.scaled_dot_product_attention

    def note(q, k, *args, **kwargs):
        areas.append(q.shape[0] * k.shape[2])
        return real(q, k, *args, **kwargs)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", note)
    lengths = [200, *range(1, 20), 0]
    queries, keys = random_case(1, subset, lengths)
    inputs = random_qkv(1, queries, keys)
    weight = torch.randn(inputs[0].shape, dtype=torch.float64)
    actual = value_and_gradients(lambda *x: attend(*x, queries, keys), inputs, weight)
    assert sum(areas) <= 2 * sum(lengths) + len(lengths)
    for a, b in zip(actual, value_and_gradients(lambda *x: naive(*x, queries, keys), inputs, weight)):
        assert_near(a, b, 1e-12)


def test_long_rows_cross_the_real_chunk_boundary():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(700, 1, 16, dtype=torch.float64, generator=generator) for _ in range(3))
    keep = torch.randperm(700, generator=generator)[:600].sort().values
    keys = ragged_batch(torch.tensor([0, 300, 700]))
    actual = plain_attention(q[keep], k, v, keys.take(keep), keys)
    positions = [list(range(300)), list(range(400))]
    kept = [[i for i in keep.tolist() if i < 300], [i - 300 for i in keep.tolist() if i >= 300]]
    expected = naive(q[keep], k, v, kept, positions)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# ---- ragged batches ------------------------------------------------------------------------------


def test_take_keeps_positions_sequences_and_row_numbers():
    for seed in range(40):
        draw = random.Random(seed)
        lengths = [draw.choice((0, 1, draw.randint(2, 9))) for _ in range(draw.randint(1, 5))]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        rows = ragged_batch(cu_seqlens)
        table = [(b, t) for b, n in enumerate(lengths) for t in range(n)]  # (sequence, position)
        index = list(range(len(table)))
        for _ in range(3):  # subset of subset of subset
            assert list(zip(rows.sequence().tolist(), rows.pos.tolist())) == table
            assert rows.cu_seqlens.diff().tolist() == [
                [b for b, _ in table].count(b) for b in range(len(lengths))
            ]
            if rows.length is not None:
                assert rows.cu_seqlens.diff().tolist() == [rows.length] * len(lengths)
            keep = sorted(draw.sample(range(len(table)), draw.randint(0, len(table))))
            rows = rows.take(torch.tensor(keep, dtype=torch.long))
            table, index = [table[i] for i in keep], [index[i] for i in keep]
            assert rows.index.tolist() == index


def test_whole_sequences_of_one_length():
    rows = ragged_batch(torch.arange(4) * 5, 5)
    assert rows.pos.tolist() == [*range(5)] * 3 and rows.index is None and rows.length == 5
    taken = rows.take(torch.tensor([0, 4, 6, 7, 13, 14]), 2)
    assert taken.cu_seqlens.tolist() == [0, 2, 4, 6] and taken.length == 2
    assert taken.pos.tolist() == [0, 4, 1, 2, 3, 4]

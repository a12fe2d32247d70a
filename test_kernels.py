"""Ragged attention against a float64 loop over single queries: values, gradients, no crosstalk."""

import itertools
import random

import pytest
import torch

import kernels
from kernels import Ragged, attention_by_position, depth_attention, ragged_batch

HEADS = [(1, 1), (3, 1), (3, 3), (5, 1), (6, 2), (10, 2)]  # query heads, key and value heads
WIDTHS = [16, 32, 64]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that hand each other tensors this small take longer than one alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
                weight = (score - score.max()).exp()
                heads.append((weight / weight.sum()) @ v[visible, head // group])
            out.append(torch.stack(heads))
        first_q, first_k = first_q + len(q_positions), first_k + len(k_positions)
    return torch.stack(out) if out else torch.zeros_like(q)


def ragged(positions: list[list[int]]) -> Ragged:
    lengths = [len(p) for p in positions]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    same = lengths[0] if len(set(lengths)) == 1 else None
    return Ragged(torch.tensor(sum(positions, []), dtype=torch.long), cu_seqlens, same, None)


def random_positions(draw: random.Random, n_seq: int) -> list[list[int]]:
    """Ascending with gaps; some sequences are empty, some of one row; at least one is not empty."""
    lengths = [draw.choice((0, 1, 1, draw.randint(2, 14))) for _ in range(n_seq)]
    if not any(lengths):
        lengths[0] = 3
    if draw.random() < 0.2:
        lengths = [max(lengths)] * n_seq
    return [sorted(draw.sample(range(2 * n + draw.randint(0, 9)), n)) for n in lengths]


def random_case(seed: int, subset: bool):
    """Positions of queries and keys; the queries are a subset of the keys if asked for."""
    draw = random.Random(seed)
    keys = random_positions(draw, draw.randint(1, 5))
    if not subset:
        return keys, keys
    queries = [sorted(draw.sample(p, draw.randint(0, len(p)))) for p in keys]
    if not any(queries):
        queries = [p[-1:] for p in keys]
    return queries, keys


def random_qkv(seed: int, n_query: int, n_key: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = HEADS[seed % len(HEADS)]
    width = WIDTHS[seed % len(WIDTHS)]
    shapes = (n_query, heads, width), (n_key, kv_heads, width), (n_key, kv_heads, width)
    return [2 * torch.randn(s, dtype=dtype, generator=generator) for s in shapes]


def attend(q, k, v, queries, keys):
    rows = ragged(queries)
    return depth_attention(q, k, v, rows, rows if queries is keys else ragged(keys))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("subset", [False, True])
def test_values_and_gradients_equal_the_loop(subset, dtype, tolerance):
    for seed in range(36):
        queries, keys = random_case(seed, subset)
        inputs = random_qkv(seed, sum(map(len, queries)), sum(map(len, keys)))
        for x in inputs:
            x.requires_grad_()
        expected = naive(*inputs, queries, keys)
        weight = torch.randn(expected.shape, dtype=torch.float64)
        expected_grads = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
        cast = [x.detach().to(dtype).requires_grad_() for x in inputs]
        actual = attend(*cast, queries, keys)
        assert actual.dtype == dtype and actual.shape == expected.shape
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
        grads = torch.autograd.grad((actual * weight.to(dtype)).sum(), cast)
        for grad, expected_grad in zip(grads, expected_grads):
            assert grad.isfinite().all()
            scale = max(1.0, expected_grad.abs().max().item())
            torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=tolerance * scale)


def test_queries_that_are_all_keys_need_not_be_the_same_object():
    """The two ways through depth_attention, causal and by position, agree."""
    for seed in range(12):
        _, keys = random_case(seed, False)
        q, k, v = random_qkv(seed, sum(map(len, keys)), sum(map(len, keys)))
        same, other = ragged(keys), ragged(keys)
        torch.testing.assert_close(
            depth_attention(q, k, v, same, same), depth_attention(q, k, v, same, other)
        )


@pytest.mark.parametrize("subset", [False, True])
def test_a_sequence_does_not_feel_the_others(subset):
    for seed in range(12):
        queries, keys = random_case(seed, subset)
        q, k, v = random_qkv(seed, sum(map(len, queries)), sum(map(len, keys)))
        together = attend(q, k, v, queries, keys)
        first_q = first_k = 0
        for own_queries, own_keys in zip(queries, keys):
            mine = slice(first_q, first_q + len(own_queries)), slice(first_k, first_k + len(own_keys))
            first_q, first_k = mine[0].stop, mine[1].stop
            if not own_queries:
                continue
            alone = attend(
                q[mine[0]], k[mine[1]], v[mine[1]], [own_queries], [own_keys]
            ) if subset else attend(q[mine[0]], k[mine[1]], v[mine[1]], *[[own_keys]] * 2)  # fmt: skip
            torch.testing.assert_close(together[mine[0]], alone, rtol=1e-10, atol=1e-10)
            # Whatever stands in the others' rows, NaN included, stays there.
            noise = [torch.full_like(x, float("nan")) for x in (q, k, v)]
            noise[0][mine[0]], noise[1][mine[1]], noise[2][mine[1]] = q[mine[0]], k[mine[1]], v[mine[1]]
            disturbed = attend(*noise, queries, keys)
            torch.testing.assert_close(disturbed[mine[0]], alone, rtol=1e-10, atol=1e-10)


def test_later_keys_are_not_seen():
    for seed in range(12):
        queries, keys = random_case(seed, True)
        q, k, v = random_qkv(seed, sum(map(len, queries)), sum(map(len, keys)))
        before = attend(q, k, v, queries, keys)
        cut = 6
        late = torch.tensor([p > cut for row in keys for p in row])
        k[late], v[late] = 99.0, -99.0
        early = torch.tensor([p <= cut for row in queries for p in row])
        torch.testing.assert_close(
            attend(q, k, v, queries, keys)[early], before[early], rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 256])
def test_query_chunks_do_not_show(monkeypatch, chunk):
    monkeypatch.setattr(kernels, "QUERY_CHUNK", chunk)
    for seed in range(12):
        queries, keys = random_case(seed, True)
        inputs = random_qkv(seed, sum(map(len, queries)), sum(map(len, keys)))
        for x in inputs:
            x.requires_grad_()
        expected, actual = naive(*inputs, queries, keys), attend(*inputs, queries, keys)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
        weight = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad((actual * weight).sum(), inputs),
            torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True),
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


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


def test_long_rows_cross_the_real_chunk_boundary():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(700, 1, 16, dtype=torch.float64, generator=generator) for _ in range(3))
    keep = torch.randperm(700, generator=generator)[:600].sort().values
    keys = ragged_batch(torch.tensor([0, 300, 700]))
    queries = keys.take(keep)
    actual = depth_attention(q[keep], k, v, queries, keys)
    positions = [list(range(300)), list(range(400))]
    kept = [[i for i in keep.tolist() if i < 300], [i - 300 for i in keep.tolist() if i >= 300]]
    expected = naive(q[keep], k, v, kept, positions)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# ---- ragged batches ------------------------------------------------------------------------------


def test_take_keeps_positions_sequences_and_row_numbers():
    for seed in range(40):
        draw = random.Random(seed)
        lengths = [draw.choice((0, 1, draw.randint(2, 9))) for _ in range(draw.randint(1, 5))]
        start = [draw.randint(0, 5) for _ in lengths]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        rows = ragged_batch(cu_seqlens, start=torch.tensor(start))
        table = [
            (b, start[b] + t) for b, n in enumerate(lengths) for t in range(n)
        ]  # (sequence, position)
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

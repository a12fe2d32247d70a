"""Incremental decoding equals the full causal pass, for every kind of model and cache."""

import itertools

import pytest
import torch

from kvcache import KVCache
from model import MoR
from modelconfig import ModelConfig
from ragged import ragged_batch

SMALL = dict(
    vocab_size=61, block_size=64, n_layer=8, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, init_std=0.2
)
PLANS = {"cycle": 8, "middle_cycle": 8, "sequence": 8, "middle_sequence": 8}
KINDS = {
    "vanilla": dict(sharing="none", n_recursion=1, routing="none"),
    **{p: dict(sharing=p, n_recursion=2 if "middle" not in p else 3, routing="none") for p in PLANS},
    "expert_aux_loss": dict(routing="expert"),
    "expert_aux_router": dict(routing="expert", sampling="aux_router", router_type="mlp"),
    "expert_tanh_cycle": dict(routing="expert", router_func="tanh", sharing="cycle", n_recursion=4),
    "expert_random": dict(routing="expert", router_type="random", sampling="none"),
    "expert_first_step_partial": dict(routing="expert", capacity=(0.8, 0.5, 0.3)),
    "token_softmax": dict(routing="token"),
    "token_loss_free": dict(routing="token", balancing="loss_free", router_func="sigmoid"),
}


def valid(kind: str, kv_mode: str) -> bool:
    routed = KINDS[kind]["routing"] != "none"
    if kind == "vanilla" or kind == "expert_first_step_partial":
        return kv_mode == "recursion"
    return routed or kv_mode != "shared_update"


CASES = [
    (kind, mode)
    for kind, mode in itertools.product(KINDS, ("recursion", "shared", "shared_update"))
    if valid(kind, mode)
]


def random_model(kind: str, kv_mode: str, seed: int) -> MoR:
    """Router weights are large, so that every depth occurs."""
    torch.manual_seed(seed)
    model = MoR(ModelConfig(**SMALL | KINDS[kind], kv_mode=kv_mode)).eval()
    for name, p in model.named_parameters():
        if "router" in name:
            torch.nn.init.normal_(p, std=1.0)
        elif "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    if kind == "token_loss_free":
        model.router[0].balance_bias.uniform_(-0.02, 0.02)
    return model


def decode(model: MoR, sequences, cache: KVCache, chunk_lengths, max_depth=None):
    """Feeds chunk_lengths[i][b] tokens of sequence b in call i; logits and depths per sequence."""
    at = [0] * len(sequences)
    logits, depths = [[] for _ in sequences], [[] for _ in sequences]
    for lengths in chunk_lengths:
        ids = torch.cat([s[a : a + n] for s, a, n in zip(sequences, at, lengths)])
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        x, routed = model.hidden(
            ids, ragged_batch(cu_seqlens, start=cache.seen), cache, max_depth=max_depth
        )
        for b, (y, d) in enumerate(zip(model.logits(x).split(lengths), routed.depth.split(lengths))):
            logits[b].append(y)
            depths[b].append(d)
        at = [a + n for a, n in zip(at, lengths)]
    return [torch.cat(y) for y in logits], [torch.cat(d) for d in depths]


def random_chunks(totals: list[int], generator) -> list[list[int]]:
    """Prefill chunks and single tokens at random; a sequence may get nothing in a call."""
    left, calls = list(totals), []
    while any(left):
        longest = (
            int(torch.randint(1, 12, (), generator=generator))
            if torch.rand((), generator=generator) < 0.4
            else 1
        )
        lengths = [int(torch.randint(0, min(n, longest) + 1, (), generator=generator)) for n in left]
        if any(lengths):
            calls.append(lengths)
            left = [n - m for n, m in zip(left, lengths)]
    return calls


@torch.no_grad()
@pytest.mark.parametrize("kind, kv_mode", CASES)
def test_decoding_equals_full_pass(kind, kv_mode):
    all_depths = set()
    for seed in range(3):
        model = random_model(kind, kv_mode, seed)
        generator = torch.Generator().manual_seed(seed)
        totals = [int(n) for n in torch.randint(1, 50, (4,), generator=generator)]
        sequences = [torch.randint(0, 61, (n,), generator=generator) for n in totals]
        full, full_depth = [], []
        for s in sequences:  # each alone, without a cache
            x, routed = model.hidden(s, ragged_batch(torch.tensor([0, len(s)])))
            full.append(model.logits(x))
            full_depth.append(routed.depth)
            all_depths |= set(routed.depth.tolist())
        cache = KVCache(model.config, len(sequences), 64)
        logits, depth = decode(model, sequences, cache, random_chunks(totals, generator))
        for b in range(len(sequences)):
            assert depth[b].tolist() == full_depth[b].tolist()
            torch.testing.assert_close(logits[b], full[b], rtol=0, atol=1e-4)
        assert cache.seen.tolist() == totals
    if model.config.routing != "none":
        assert all_depths >= set(range(1, model.config.n_recursion + 1))


@torch.no_grad()
@pytest.mark.parametrize("kind, kv_mode", CASES)
def test_ragged_batch_equals_each_sequence_alone(kind, kv_mode):
    model = random_model(kind, kv_mode, 7)
    totals = [1, 33, 0, 12]
    ids = torch.randint(0, 61, (sum(totals),))
    x, routed = model.hidden(ids, ragged_batch(torch.tensor([0, *itertools.accumulate(totals)])))
    for y, d, s in zip(x.split(totals), routed.depth.split(totals), ids.split(totals)):
        if len(s):
            alone, alone_routed = model.hidden(s, ragged_batch(torch.tensor([0, len(s)])))
            assert d.tolist() == alone_routed.depth.tolist()
            torch.testing.assert_close(y, alone, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["middle_sequence", "cycle", "expert_aux_loss", "token_softmax"])
def test_max_depth_caps_decoding_as_it_caps_the_full_pass(kind):
    model = random_model(kind, "recursion", 3)
    ids = torch.randint(0, 61, (40,))
    rows = ragged_batch(torch.tensor([0, 40]))
    x, routed = model.hidden(ids, rows, max_depth=1)
    uncapped, _ = model.hidden(ids, rows)
    assert routed.depth.max() == 1
    assert (x - uncapped).abs().max() > 1e-2
    cache = KVCache(model.config, 1, 64)
    logits, depth = decode(model, [ids], cache, [[25]] + [[1]] * 15, max_depth=1)
    torch.testing.assert_close(logits[0], model.logits(x), rtol=0, atol=1e-4)
    assert depth[0].tolist() == routed.depth.tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind, kv_mode", CASES)
def test_bytes_in_use_counts_the_rows_that_were_made(kind, kv_mode):
    model = random_model(kind, kv_mode, 5)
    c = model.config
    ids = torch.randint(0, 61, (40,))
    cache = KVCache(c, 2, 64)
    _, routed = model.hidden(ids, ragged_batch(torch.tensor([0, 15, 40]), start=cache.seen), cache)
    rows = 0
    for layer, step in enumerate(c.steps):
        if not c.makes_keys(layer):
            continue
        everyone = step is None or c.routing == "none" or kv_mode != "recursion"
        rows += 40 if everyone else int((routed.depth > step).sum())
    assert cache.bytes_in_use() == rows * 2 * c.n_kv_head * c.head_dim * 4

"""The pool of pages never loses one or gives it twice, and holds what flops.py says."""

import itertools

import numpy as np
import pytest
import torch

from engine import Engine
from flops import cache_bytes
from kvcache import PAGE_SIZE, PagedKV
from model import MoR
from modelconfig import ModelConfig
from ragged import ragged_batch
from sampling import SamplingParams

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


def random_model(kind: str, kv_mode: str, seed: int, **sizes) -> MoR:
    """Router weights are large, so that every depth occurs."""
    torch.manual_seed(seed)
    model = MoR(ModelConfig(**SMALL | KINDS[kind] | sizes, kv_mode=kv_mode)).eval()
    for name, p in model.named_parameters():
        if "router" in name:
            torch.nn.init.normal_(p, std=1.0)
        elif "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    if kind == "token_loss_free":
        model.router[0].balance_bias.uniform_(-0.02, 0.02)
    return model


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


def check_books(kv: PagedKV, rows: np.ndarray) -> None:
    """Every page is free or in one place; every layer has the pages of its rows (n_seq, n_layer)."""
    held = kv.table[kv.table > 0]
    free = kv.free[: kv.n_free]
    assert sorted([*held, *free]) == list(range(1, kv.n_page + 1))
    assert kv.bytes_in_use() == len(held) * kv.page_bytes
    assert ((kv.table > 0).sum(2)[:-1, :-1] == -(-rows // PAGE_SIZE)).all()
    filled = (kv.table > 0).astype(int)
    assert (np.diff(filled, axis=2) <= 0).all()  # no gap


@pytest.mark.parametrize("kind, kv_mode", CASES)
def test_pool_fills_and_drains_at_random(kind, kv_mode):
    c = ModelConfig(**SMALL | KINDS[kind], kv_mode=kv_mode)
    g = np.random.default_rng(sum(map(ord, kind + kv_mode)))
    probe = PagedKV(c, 6, 64, c.n_recursion, 0)
    kv = PagedKV(c, 6, 64, c.n_recursion, int(1.5 * probe.pages(64) * probe.page_bytes))
    rows, refused = np.zeros((6, c.n_layer), int), 0
    for _ in range(300):
        seq = np.flatnonzero(g.random(6) < 0.6)
        if g.random() < 0.06:
            kv.release(seq)
            rows[seq] = 0
        elif kv.by_step and g.random() < 0.7:
            step = g.integers(0, c.n_recursion, len(seq))
            layers = kv.in_step[step]
            n_new = np.minimum(g.integers(0, 9, len(seq)), 64 - rows[seq, layers[:, 0]])
            if kv.reserve(seq, n_new, step):
                rows[seq[:, None], layers] += n_new[:, None]
            else:
                refused += 1
        else:
            layers = kv.grown_by_all
            before = rows[seq][:, layers].max(1, initial=0) if len(layers) else kv.rows[seq, 0]
            n_new = np.minimum(g.integers(0, 20, len(seq)), 64 - before)
            if kv.reserve(seq, n_new):
                rows[seq[:, None], layers] += n_new[:, None]
            else:
                refused += 1
        check_books(kv, rows)
    assert refused > 5
    kv.release(np.arange(6))
    check_books(kv, rows * 0)
    assert kv.n_free == kv.n_page and kv.least_free < 0.2 * kv.n_page


@pytest.mark.parametrize("kind, kv_mode", CASES)
def test_bytes_in_use_are_those_of_the_formula(kind, kv_mode):
    """With the depths that the tokens took, and rows rounded up to pages."""
    model = random_model(kind, kv_mode, 5)
    c = model.config
    ids = torch.randint(0, 61, (45,))
    depth = model.hidden(ids, ragged_batch(torch.tensor([0, 45])))[1].depth
    engine = Engine(model, max_batch=2, chunk=20)
    engine.submit(ids.tolist(), SamplingParams(max_new_tokens=0))
    while engine.busy():
        in_use = engine.kv.bytes_in_use()
        engine.step()
    per_step = [int((depth > r).sum()) for r in range(c.n_recursion)]
    assert in_use == cache_bytes(c, 45, 4, per_step, PAGE_SIZE) == engine.kv.most_bytes()
    assert engine.kv.bytes_in_use() == 0

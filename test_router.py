"""Who takes which step: choices against plain sorting, scores, gates, losses and balancing."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import router as routing
from modelconfig import ModelConfig
from ragged import ragged_batch
from router import causal_choice, gate, random_scores, top_k, update_balance_bias

SMALL = dict(vocab_size=20, n_embd=12, n_head=2, n_ffn=8)


def rows_of(n_seq: int, length: int):
    return ragged_batch(torch.arange(n_seq + 1) * length, length)


# ---- top-k ---------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_top_k_takes_the_best_and_of_equals_the_earlier(data):
    n_seq, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, length))
    levels = data.draw(st.sampled_from([1, 2, 3, 1000]))  # one to three: nearly all are ties
    p = data.draw(
        st.lists(st.integers(-levels, levels), min_size=n_seq * length, max_size=n_seq * length)
    )
    expected = []
    for b in range(n_seq):
        own = range(b * length, (b + 1) * length)
        expected += sorted(sorted(own, key=lambda row: (-p[row], row))[:k])
    assert top_k(torch.tensor(p, dtype=torch.float32), n_seq, k).tolist() == expected


def test_top_k_breaks_ties_to_the_earlier_also_in_long_sequences():
    """Sorts that are stable by luck on short inputs are not on long ones."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        p = torch.randint(0, 3, (2 * 3000,), generator=generator).float()
        rows = top_k(p, 2, 1100).view(2, -1)
        for b in range(2):
            own = range(b * 3000, (b + 1) * 3000)
            assert rows[b].tolist() == sorted(sorted(own, key=lambda row: (-p[row], row))[:1100])


# ---- the causal rule -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["aux_loss", "aux_router", "none"])
@pytest.mark.parametrize("func", ["sigmoid", "tanh"])
def test_causal_rule_keeps_what_scores_at_least_even(func, sampling):
    config = ModelConfig(**SMALL, router_func=func, sampling=sampling, capacity=(1, 1, 0.3))
    scores = torch.tensor([-1e4, -3.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, 1e4])
    assert causal_choice(scores, config, 0).all()  # a step of capacity 1 keeps all that reach it
    assert causal_choice(scores, config, 1).all()
    assert causal_choice(scores, config, 2).tolist() == [False] * 3 + [True] * 5


def test_causal_rule_of_random_scores_keeps_the_share_of_each_step():
    config = ModelConfig(**SMALL, router_type="random", sampling="none", capacity=(0.9, 0.6, 0.15))
    pos, kept = torch.arange(200_000), torch.arange(200_000)
    for step, capacity in enumerate(config.capacity):
        kept = kept[causal_choice(random_scores(pos[kept], step, fresh=False), config, step)]
        assert len(kept) / len(pos) == pytest.approx(capacity, abs=0.005)


def test_selection_reports_losses_and_figures_of_its_own_choice():
    for seed in range(20):
        torch.manual_seed(seed)
        sampling = ("aux_loss", "aux_router")[seed % 2]
        config = ModelConfig(**SMALL, sampling=sampling, router_func=("sigmoid", "tanh")[seed // 2 % 2])
        routers = [routing.make_router(config, 1) for _ in range(2)]
        for router in routers:
            torch.nn.init.normal_(router.weight)
        h = torch.randn(3 * 9, 12, requires_grad=True)
        aux_router = routers[1] if sampling == "aux_router" else None
        choice = routing.select(config, 1, h, rows_of(3, 9), routers[0], aux_router, 4, 3)
        s = (h @ routers[0].weight[0]).detach().double()
        causal_s = s if aux_router is None else (h @ routers[1].weight[0]).detach().double()
        p = 0.1 * (s.sigmoid() if config.router_func == "sigmoid" else s.tanh())
        taken = sorted(
            r for b in range(3) for r in sorted(range(9 * b, 9 * b + 9), key=lambda r: -p[r])[:4]
        )
        assert choice.keep.tolist() == taken
        torch.testing.assert_close(choice.gate.double(), p, rtol=1e-5, atol=1e-6)
        label = torch.tensor([r in taken for r in range(27)])
        bce = -torch.where(label, causal_s.sigmoid(), 1 - causal_s.sigmoid()).log().mean()
        assert choice.losses["aux_loss"].item() == pytest.approx(bce.item(), rel=1e-5)
        assert choice.losses["z_loss"].item() == pytest.approx((s**2).mean().item(), rel=1e-5)
        agreement = ((causal_s >= 0) == label).double().mean().item()
        assert choice.figures["accuracy"].item() == pytest.approx(agreement)
        assert choice.figures["gate"].item() == pytest.approx(p[taken].mean().item(), rel=1e-4)
        (grad,) = torch.autograd.grad(choice.losses["aux_loss"], h, allow_unused=True)
        assert (grad is None) == (sampling == "aux_router")  # the auxiliary router works on h.detach()


def test_dead_tokens_are_positions_taken_in_no_sequence():
    draw = random.Random(0)
    for _ in range(20):
        n_seq, length = draw.randint(1, 4), draw.randint(1, 12)
        taken = sorted(draw.sample(range(n_seq * length), draw.randint(1, n_seq * length)))
        expected = 1 - len({row % length for row in taken}) / length
        assert routing.dead_tokens(torch.tensor(taken), length).item() == pytest.approx(
            expected, abs=1e-6
        )


# ---- random scores -------------------------------------------------------------------------------


def correlation(a, b) -> float:
    return np.corrcoef(a, b)[0, 1].item()


@pytest.mark.parametrize("fresh", [True, False])
def test_random_scores_are_uniform_and_unrelated(fresh):
    """n = 100,000 draws: a mean strays by 0.0009 (one sigma), a correlation by 0.0032."""
    torch.manual_seed(0)
    pos = torch.arange(100_000)
    steps = [random_scores(pos, step, fresh).numpy().astype(np.float64) for step in range(4)]
    for s in steps:
        assert 0 <= s.min() < 1e-3 and 1 - 1e-3 < s.max() < 1
        for power in range(1, 5):
            assert (s**power).mean() == pytest.approx(1 / (power + 1), abs=0.005)
        histogram = np.histogram(s, 50, (0, 1))[0]
        chi_square = ((histogram - 2000) ** 2 / 2000).sum()
        assert 15 < chi_square < 100  # 49 degrees of freedom
        for distance in (1, 2, 3, 64):  # neighbouring positions
            assert abs(correlation(s[distance:], s[:-distance])) < 0.015
            assert abs(correlation(s[distance:] > 0.5, s[:-distance] > 0.5)) < 0.015
    for a in range(4):
        for b in range(a):  # and steps
            assert abs(correlation(steps[a], steps[b])) < 0.015
            assert abs(correlation(steps[a][1:], steps[b][:-1])) < 0.015


def test_hashed_scores_are_evenly_spread_over_one_sequence_too():
    for step in range(4):
        s = random_scores(torch.arange(2048), step, fresh=False)
        assert s.mean().item() == pytest.approx(0.5, abs=0.03)
        assert (s < 1 / 3).float().mean().item() == pytest.approx(1 / 3, abs=0.04)


def test_hashed_scores_depend_on_step_and_position_alone():
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        alone = torch.cat([random_scores(torch.tensor([t]), step, fresh=False) for t in range(50)])
        pos = torch.randint(0, 50, (300,), generator=generator)
        torch.manual_seed(int(pos.sum()))  # also not on torch's generator
        assert torch.equal(random_scores(pos, step, fresh=False), alone[pos])
        assert torch.equal(random_scores(pos.int(), step, fresh=False), alone[pos])
    assert not torch.equal(random_scores(pos, 0, fresh=False), random_scores(pos, 1, fresh=False))


def test_fresh_scores_follow_the_seed():
    pos = torch.zeros(5, dtype=torch.long)
    torch.manual_seed(3)
    a, b = random_scores(pos, 0, fresh=True), random_scores(pos, 0, fresh=True)
    torch.manual_seed(3)
    assert torch.equal(a, random_scores(pos, 0, fresh=True)) and not torch.equal(a, b)


# ---- routers and gates ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "mlp", "wide_mlp"])
@pytest.mark.parametrize("temperature", [1.0, 0.25, 4.0])
def test_routers_are_the_networks_that_they_are_named_for(kind, temperature):
    config = ModelConfig(**SMALL, router_type=kind)
    router = routing.make_router(config, 3)
    for p in router.parameters():
        torch.nn.init.normal_(p)
    weights = [p.detach().double().numpy() for p in router.parameters()]
    shapes = {"linear": [(3, 12)], "mlp": [(24, 12), (3, 24)], "wide_mlp": [(48, 12), (3, 48)]}
    assert [w.shape for w in weights] == shapes[kind]
    h = torch.randn(7, 12)
    x = h.double().numpy().T / temperature
    for n, w in enumerate(weights):
        x = w @ x
        if n < len(weights) - 1:
            x = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    actual = routing.router_logits(router, h, temperature)
    np.testing.assert_allclose(actual.detach().numpy(), x.T, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(actual, routing.router_logits(router, h, temperature))
    assert routing.router_logits(router, h.bfloat16(), temperature).dtype == torch.float32


def test_gates():
    logits = torch.randn(50, 4) * 5
    x = logits.double().numpy()
    for func, alpha, expected in (
        ("sigmoid", 0.1, 1 / (1 + np.exp(-x))),
        ("tanh", 0.1, np.tanh(x)),
        ("softmax", 1.0, np.exp(x) / np.exp(x).sum(1, keepdims=True)),
        ("sigmoid", 0.7, 1 / (1 + np.exp(-x))),
    ):
        config = SimpleNamespace(router_type="linear", router_func=func, alpha=alpha)
        np.testing.assert_allclose(gate(logits, config), alpha * expected, rtol=1e-4, atol=1e-6)
    config = SimpleNamespace(router_type="random", router_func="sigmoid", alpha=0.1)
    assert torch.equal(gate(logits, config), 0.1 * logits)


@pytest.mark.parametrize("given_settings, func, alpha", [
    (dict(), "sigmoid", 0.1), (dict(router_func="tanh"), "tanh", 0.1), (dict(alpha=0.4), "sigmoid", 0.4),
    (dict(routing="token"), "softmax", 1.0),
    (dict(routing="token", router_func="sigmoid"), "sigmoid", 0.1),
])  # fmt: skip
def test_default_gates_are_the_published_ones(given_settings, func, alpha):
    config = ModelConfig(**SMALL, **given_settings)
    assert (config.router_func, config.alpha) == (func, alpha)


# ---- token-choice --------------------------------------------------------------------------------


def test_balance_loss_and_load_figures():
    for seed in range(20):
        torch.manual_seed(seed)
        n_recursion = 1 + seed % 4
        p = torch.rand(30, n_recursion) + 0.01
        depth = torch.randint(0, n_recursion, (30,))
        counts = [depth.tolist().count(r) for r in range(n_recursion)]
        mean_p = p.double().mean(0).numpy()
        expected = n_recursion * sum(n / 30 * q for n, q in zip(counts, mean_p))
        assert routing.balance_loss(p, depth).item() == pytest.approx(expected, rel=1e-5)
        figures = routing.load_figures(p, depth)
        assert figures["counts"].tolist() == counts
        assert figures["load"].tolist() == pytest.approx([n / 30 for n in counts])
        mean = 30 / n_recursion
        assert figures["max_vio"].item() == pytest.approx((max(counts) - mean) / mean, abs=1e-5)
        share = mean_p / mean_p.sum()
        assert figures["entropy"].item() == pytest.approx(-(share * np.log(share)).sum(), abs=1e-5)


def test_balance_loss_is_least_where_depths_are_even():
    even = torch.full((30, 3), 1 / 3)
    assert routing.balance_loss(even, torch.arange(30) % 3).item() == pytest.approx(1)
    for seed in range(20):
        torch.manual_seed(seed)
        logits = torch.randn(3) + torch.randn(200, 3)
        p = logits.softmax(1)
        assert routing.balance_loss(p, p.argmax(1)) > 1


def test_entropy_of_a_depth_that_nobody_wants_is_finite():
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    entropy = routing.load_figures(p, torch.tensor([1, 2]))["entropy"]
    assert entropy.item() == pytest.approx(math.log(2))


def test_bias_moves_by_the_rate_towards_the_mean():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(4, generator=generator)
        counts = torch.randint(0, 5, (4,), generator=generator)
        mean = counts.sum().item() / 4
        step = [0.01 * ((n < mean) - (n > mean)) for n in counts.tolist()]
        expected = [b + s for b, s in zip(bias.tolist(), step)]
        update_balance_bias(bias, counts, 0.01)
        assert bias.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("func", ["softmax", "sigmoid"])
def test_loss_free_balancing_evens_a_skewed_load(func):
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(
        router_type="linear", router_func=func, alpha=1.0 if func == "softmax" else 0.1
    )
    skew, bias, violations = torch.tensor([2.0, 0.0, -1.0]), torch.zeros(3), []
    for _ in range(1500):
        p = gate(torch.randn(600, 3, generator=generator) + skew, config)
        counts = torch.bincount((p + bias).argmax(1), minlength=3)
        violations.append(routing.load_figures(p, (p + bias).argmax(1))["max_vio"].item())
        update_balance_bias(bias, counts, 0.001)
    assert violations[0] > 1.2
    assert np.mean(violations[-100:]) < 0.15
    assert bias[0] < bias[1] < bias[2]

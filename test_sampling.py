"""Distributions by the book, and noise that is a function of seed and count alone."""

import math

import numpy as np
import pytest
import torch

from sampling import SamplingParams, draw, probabilities, uniform


def weights_of(logits, temperature=1.0, top_k=0, top_p=1.0) -> torch.Tensor:
    """`probabilities` with the same settings for every row."""
    n = len(logits)
    settings = (
        torch.full((n,), temperature, dtype=torch.double),
        torch.full((n,), top_k),
        torch.full((n,), top_p, dtype=torch.double),
    )
    return probabilities(torch.tensor(logits), *settings)


def expected(logits, temperature, top_k, top_p):
    """By the book: soften, keep the k best, then the fewest that together weigh top_p, and rescale."""
    p = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    best = sorted(p, key=p.get, reverse=True)[: top_k or None]
    total, kept = sum(p[i] for i in best), []
    for i in best:
        kept.append(i)
        if sum(p[j] for j in kept) >= top_p * total:
            break
    return np.array([p[i] / sum(p[j] for j in kept) if i in kept else 0 for i in range(len(logits))])


SETTINGS = [
    (1, 0, 1),
    (0.5, 0, 1),
    (2, 3, 1),
    (1, 0, 0.6),
    (1.5, 4, 0.7),
    (1, 99, 0.01),
    (1, 0, 0.999999),
    (1, 2, 0.5),
]
LOGITS = [0.3, 2.0, -1.0, 1.1, 1.9, -0.2]


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_frequencies_match_the_distribution(temperature, top_k, top_p):
    p = expected(LOGITS, temperature, top_k, top_p)
    weights = weights_of([LOGITS, LOGITS[::-1]], temperature, top_k, top_p)
    got = (weights / weights.sum(1, keepdim=True)).numpy()
    np.testing.assert_allclose(got, [p, p[::-1]], atol=1e-7)
    n = 10000
    index = np.arange(n, dtype=np.uint64)
    u = torch.from_numpy(uniform(index % np.uint64(100), index // np.uint64(100)))
    counts = np.bincount(draw(weights[:1].expand(n, -1), u), minlength=6)
    assert (counts[p == 0] == 0).all()
    chi_square = ((counts - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum()
    assert chi_square < 25  # five degrees of freedom exceed it once in 7,000 times


def test_every_row_has_settings_of_its_own():
    columns = (torch.tensor(c) for c in zip(*[*SETTINGS, (0, 0, 1), (0, 3, 0.5)]))
    together = probabilities(torch.tensor([LOGITS] * 10), *columns)
    for row, given in zip(together, SETTINGS):
        np.testing.assert_allclose(row / row.sum(), expected(LOGITS, *given), atol=1e-6)
    for row in together[-2:]:  # greedy
        assert row.nonzero().tolist() == [[1]]


def test_ties_go_to_the_first():
    for settings in ((1.0, 1, 1.0), (0.0, 0, 1.0)):
        assert (weights_of([[0.0] * 5], *settings) > 0).tolist() == [[True] + [False] * 4]


def test_top_p_keeps_no_token_beyond_an_exact_sum():
    tied = [[0.0] * 4]  # a quarter each, exactly
    assert [(weights_of(tied, 1.0, 0, p) > 0).sum() for p in (0.25, 0.5, 0.51)] == [1, 2, 3]


def test_the_best_token_stays_under_any_top_p():
    for top_k in (0, 2):
        assert (weights_of([[1.0, 3.0, 2.0]], 100.0, top_k, 5e-324) > 0).tolist() == [
            [False, True, False]
        ]


def test_any_noise_draws_a_token_that_has_weight():
    weights = torch.tensor([[0, 0.25, 0, 0.75, 0]], dtype=torch.double)
    for u, token in ((0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert draw(weights, torch.tensor([u], dtype=torch.double)).tolist() == [token]
    even = weights_of([[0.0] * 7])
    assert draw(even, torch.tensor([1 - 2**-53], dtype=torch.double)).tolist() == [6]
    assert weights_of([[1.0, 3.0, 2.0]], 1e-320).tolist() == [[0, 1, 0]]


def test_noise_is_even_and_differs_between_seeds_and_counts():
    seed, index = (x.ravel().astype(np.uint64) for x in np.meshgrid(np.arange(300), np.arange(300)))
    u = uniform(seed, index)
    assert len(set(u)) == len(u) and u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 155  # 99 degrees of freedom exceed it once in 3,000 times
    table = u.reshape(300, 300)
    for lines in (table, table.T):  # neighbours know nothing of each other
        assert abs(np.corrcoef(lines[:-1].ravel(), lines[1:].ravel())[0, 1]) < 0.015
    largest = uniform(np.array([2**64 - 1], np.uint64), np.array([2**40], np.uint64))
    assert 0 <= largest[0] < 1


@pytest.mark.parametrize(
    "asked, says",
    [
        (dict(max_new_tokens=-1), "max_new_tokens=-1"),
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=math.nan), "temperature=nan"),
        (dict(temperature=math.inf), "temperature=inf"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_k=2**63), "top_k=9223372036854775808"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.01), "top_p=1.01"),
        (dict(top_p=math.nan), "top_p=nan"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=2**64), "seed=18446744073709551616"),
        (dict(stop=("a", "")), "stop is an empty text"),
        (dict(stop="ab"), "stop is one text"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(asked, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**asked)

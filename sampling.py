"""Which token comes next: temperature, top-k, top-p, and noise that depends on nothing but a seed.

Every request has settings of its own, so they are arrays over the rows of a batch. Noise is a hash of a
request's seed and of how many tokens it has made: what it draws is the same whatever runs beside it.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. ValueError where it cannot be."""

    max_new_tokens: int = 256  # 0: the prompt is read, and that is all
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # draw from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that together weigh this much; 1: from all
    seed: int = 1337
    stop_tokens: tuple[int, ...] = ()  # end with one of these
    stop: tuple[str, ...] = ()  # end with the token that completes one of these texts

    def __post_init__(self):
        for fine, message in (
            (self.max_new_tokens >= 0, f"max_new_tokens={self.max_new_tokens} must not be negative."),
            (
                0 <= self.temperature < math.inf,
                f"temperature={self.temperature} must be 0 (greedy) or more.",
            ),
            (
                0 <= self.top_k < 2**63,
                f"top_k={self.top_k} must be the number of tokens to draw from, or 0 for all.",
            ),
            (0 < self.top_p <= 1, f"top_p={self.top_p} must lie above 0 and up to 1 (off)."),
            (0 <= self.seed <= LARGEST_SEED, f"seed={self.seed} must lie from 0 to {LARGEST_SEED}."),
            (not isinstance(self.stop, str), "stop is one text; give a tuple of texts."),
            ("" not in self.stop, "stop is an empty text, which stands everywhere; leave it out."),
        ):
            if not fine:
                raise ValueError(message)


def uniform(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Seeds (B,) and counts (B,), uint64, to float64 in [0, 1) (SplitMix64, twice)."""
    x = seed
    for added in (np.uint64(0), index + np.uint64(1)):
        x = x + (added + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) / 2.0**53


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits (B, V) and settings (B,) to float64 weights (B, V); tokens cut off weigh 0.

    top_k cuts first, then top_p. Temperature 0 leaves the likeliest token alone.
    """
    logits = logits.double()
    above = logits - logits.amax(1, keepdim=True)
    p = (above / temperature.where(temperature > 0, 1.0)[:, None]).softmax(1)
    top_k = top_k.where(temperature > 0, 1)
    if not top_k.any() and (top_p == 1).all():
        return p
    best, order = p.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(best.shape[1], device=best.device)
    best[(rank >= top_k[:, None]) & (top_k > 0)[:, None]] = 0
    above = F.pad(best.cumsum(1)[:, :-1], (1, 0))  # weight of all better tokens
    beyond = (above >= (top_p * best.sum(1))[:, None]) & (top_p < 1)[:, None]
    beyond[:, 0] = False  # whatever top_p rounds to, the best token stays
    best[beyond] = 0
    return torch.zeros_like(p).scatter(1, order, best)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Weights (B, V) and u (B,) in [0, 1) to tokens (B,): where the running sum first exceeds u."""
    running = weights.cumsum(1)
    return (running > u[:, None] * running[:, -1:]).int().argmax(1)

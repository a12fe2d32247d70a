"""Who takes which recursion step: routers, active sets, gates and their losses (paper section 2.2).

Expert-choice: every step has a router that scores the tokens still in play; the step takes the
best of each sequence up to its capacity. Top-k looks at the future, so an auxiliary loss (or an
auxiliary router) teaches a causal rule, token by token, for generation.
Token-choice: one router, asked once, gives each token its depth; a balancing loss, or a bias
outside the gate (loss-free), keeps the depths evenly used.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelconfig import ModelConfig
from ragged import Ragged


def make_router(config: ModelConfig, n_out: int) -> nn.Module:
    """A router d -> n_out without biases; its input is the residual stream."""
    d = config.n_embd
    if config.router_type == "random":
        return nn.Identity()
    if config.router_type == "linear":
        return nn.Linear(d, n_out, bias=False)
    hidden = {"mlp": 2, "wide_mlp": 4}[config.router_type] * d
    return nn.Sequential(
        nn.Linear(d, hidden, bias=False), nn.GELU(), nn.Linear(hidden, n_out, bias=False)
    )


def router_logits(router: nn.Module, h: Tensor, temperature: float) -> Tensor:
    """(N, d) -> (N, n_out), in float32 also under autocast: a rounded score is a wrong choice."""
    with torch.autocast(h.device.type, enabled=False):
        return router(h.float() / temperature)


def random_scores(pos: Tensor, step: int, fresh: bool) -> Tensor:
    """(N,) uniform scores in [0, 1), the baseline without a learned router.

    Top-k draws fresh ones from torch's seeded generator. The causal rule hashes step and position, so
    that a token is treated alike whether it comes alone or in a long prompt.
    """
    if fresh:
        return torch.rand(len(pos), device=pos.device)
    x = (pos.long() * 2654435761 + step * 40503 + 1) & 0xFFFFFFFF
    for _ in range(2):  # xor-shift and multiply: every bit of the position reaches every bit of x
        x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 8).float() / 2**24


def gate(logits: Tensor, config: ModelConfig) -> Tensor:
    """The weights p of a step's output; softmax runs over the last axis, the depths."""
    if config.router_type == "random":
        return config.alpha * logits
    if config.router_func == "softmax":
        return config.alpha * logits.softmax(-1)
    return config.alpha * {"sigmoid": torch.sigmoid, "tanh": torch.tanh}[config.router_func](logits)


# ---- expert-choice -------------------------------------------------------------------------------


class Selection(NamedTuple):
    """One expert-choice step: which of the n tokens in play it takes, and how it weights them."""

    keep: Tensor  # (k,) ascending numbers of the rows it takes
    gate: Tensor  # (n,)
    losses: dict[str, Tensor]  # scalars, before their coefficients
    figures: dict[str, Tensor]  # scalars


class Scores(NamedTuple):
    """What the routers of one expert-choice step say of n tokens."""

    logits: Tensor  # (n,) raw, of the main router
    gate: Tensor  # (n,)
    causal_logits: Tensor  # (n,) raw, of the auxiliary router where there is one
    causal: Tensor  # (n,) bool, whether the causal rule takes a token


def score(
    config: ModelConfig, step: int, h: Tensor, pos: Tensor, router: nn.Module,
    aux_router: nn.Module | None, fresh: bool = False,
) -> Scores:  # fmt: skip
    """Scores tokens h (n, d) at positions pos (n,); fresh: see random_scores."""
    if config.router_type == "random":
        logits = random_scores(pos, step, fresh)
    else:
        logits = router_logits(router, h, config.router_temperature).squeeze(1)
    causal_logits = logits
    if aux_router is not None:
        causal_logits = router_logits(aux_router, h.detach(), config.router_temperature).squeeze(1)
    return Scores(
        logits, gate(logits, config), causal_logits, causal_choice(causal_logits, config, step)
    )


def select(
    config: ModelConfig, step: int, h: Tensor, rows: Ragged, router: nn.Module,
    aux_router: nn.Module | None, k: int | None, n_seq: int | None,
) -> Selection:  # fmt: skip
    """Scores the tokens in play, h (n, d), and takes the best k of each of n_seq sequences (all have the
    same number in play), or, where k is None, those that the causal rule takes."""
    scores = score(config, step, h, rows.pos, router, aux_router, fresh=k is not None)
    if k is None:
        return Selection(scores.causal.nonzero().squeeze(1), scores.gate, {}, {})
    keep = top_k(scores.gate, n_seq, k)
    taken = torch.zeros_like(scores.causal).index_fill(0, keep, True)
    losses = {"z_loss": scores.logits.square().mean()}  # the logsumexp of one logit is itself
    if config.sampling != "none":
        losses["aux_loss"] = F.binary_cross_entropy_with_logits(scores.causal_logits, taken.float())
    accuracy = (scores.causal == taken).float().mean()
    figures = {"accuracy": accuracy, "gate": scores.gate[keep].detach().mean()}
    return Selection(keep, scores.gate, losses, figures)


def top_k(p: Tensor, n_seq: int, k: int) -> Tensor:
    """Row numbers, ascending, of each sequence's k largest p; ties go to the earlier position.

    p (N,) of n_seq sequences of equal length; returns (n_seq * k,).
    """
    length = len(p) // n_seq
    # torch.topk leaves the order of equal values open; a stable sort does not.
    best = p.view(n_seq, length).sort(dim=1, descending=True, stable=True).indices[:, :k]
    first_row = torch.arange(n_seq, device=p.device)[:, None] * length
    return (best.sort(dim=1).values + first_row).flatten()


def causal_choice(scores: Tensor, config: ModelConfig, step: int) -> Tensor:
    """(N,) bool: what generation does with each token in play, from that token alone.

    `scores` are the raw logits of the main router, or of the auxiliary router if there is one.
    """
    if config.capacity[step] == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    if config.router_type == "random":  # the share that this step keeps of those in play
        in_play = config.capacity[step - 1] if step else 1
        return scores >= 1 - config.capacity[step] / in_play
    return scores >= 0  # where sigmoid reaches 0.5, and tanh 0


def dead_tokens(taken: Tensor, length: int) -> Tensor:
    """The share of positions that a step takes in no sequence; taken: its row numbers in the batch."""
    seen = torch.zeros(length, device=taken.device).index_fill(0, taken % length, 1)
    return 1 - seen.mean()


# ---- token-choice --------------------------------------------------------------------------------


def choose_depth(config: ModelConfig, x: Tensor, router: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """States (N, d) to raw logits (N, R), gates (N, R), and the index of the depth chosen (N,)."""
    logits = router_logits(router, x, config.router_temperature)
    p = gate(logits, config)
    return logits, p, (p + router.balance_bias if config.balancing == "loss_free" else p).argmax(1)


def balance_loss(p: Tensor, depth: Tensor) -> Tensor:
    """R * sum_i f_i P_i over gates p (N, R) and chosen depth indices (N,): least when both are even."""
    n_recursion = p.shape[1]
    f = F.one_hot(depth, n_recursion).float().mean(0)
    return n_recursion * (f * p.mean(0)).sum()


@torch.no_grad()
def update_balance_bias(bias: Tensor, counts: Tensor, rate: float) -> None:
    """Loss-free balancing: after an optimizer step, lift the depths that too few tokens chose.

    counts (R,) are the choices of the global batch. The bias moves choices, never gates.
    """
    counts = counts.float()
    bias += rate * torch.sign(counts.mean() - counts)


def load_figures(p: Tensor, depth: Tensor) -> dict[str, Tensor]:
    """How evenly depths are used: counts and load (R,), MaxVio, entropy of the mean probabilities."""
    counts = F.one_hot(depth, p.shape[1]).sum(0)
    load = counts / counts.sum()
    mean_p = p.mean(0) / p.mean(0).sum()
    return {
        "counts": counts,
        "load": load,
        "max_vio": load.max() / load.mean() - 1,
        "entropy": torch.special.entr(mean_p).sum(),
    }

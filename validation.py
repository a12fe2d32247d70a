"""Validation: the loss on held-out windows under each rule, and what the routers did there.

Expert-choice has two rules: "top-k" as trained, which looks ahead, and "causal" as generated (paper
section 2.2.1); for all other models they are one and the same. Losses are in nats per token and in
bits per byte, in which vocabularies compare. Several processes share the batches.
"""

import math

import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

import distributed
from dataset import Windows, document_cu_seqlens
from distributed import RANK, WORLD
from model import MoR
from modelconfig import ModelConfig
from tokenizer import token_bytes


def rules(config: ModelConfig) -> tuple[str, ...]:
    return ("top-k", "causal") if config.routing == "expert" else ("causal",)


def batches_of(val: Windows, batch_size: int, n_batch: int | None) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, T): n_batch batches spread evenly over the split, or (None) all of it."""
    x, y = val.in_order(n_batch * batch_size if n_batch else val.per_epoch)
    batches = list(zip(x.split(batch_size), y.split(batch_size)))
    if val.left_over and not n_batch:  # too few for a window
        rest = val.tokens.read(len(val.tokens) - 1 - val.left_over, val.left_over + 1)
        batches.append((torch.from_numpy(rest)[None, :-1], torch.from_numpy(rest)[None, 1:]))
    return batches


@torch.no_grad()
def validate(
    model: MoR, batches: list[tuple[Tensor, Tensor]], encoding: tiktoken.Encoding, rule: str,
    max_depth: int | None = None, within_documents: bool = False,
) -> dict:  # fmt: skip
    """The `mean_figures` of a model in eval mode, per token of all batches, and bits_per_byte."""
    device, passes, n_tokens = model.cos.device, [], []
    # Each process makes as many passes: a sharded model's weights come from all of them.
    for first in tqdm(
        range(0, len(batches), WORLD), unit="batch", disable=RANK > 0 or None, leave=False
    ):
        number = first + RANK
        x, y = batches[min(number, len(batches) - 1)]
        bounds = document_cu_seqlens(x, encoding.eot_token).to(device) if within_documents else None
        _, figures = model(x.to(device), y.to(device), rule, max_depth, bounds)
        if number < len(batches):
            passes.append(figures)
            n_tokens.append(y.numel())
    out, sizes = mean_figures(passes, n_tokens), token_bytes(encoding)
    nats = out["loss"] * sum(y.numel() for _, y in batches)
    n_bytes = sum(int(sizes[y.numpy()].sum()) for _, y in batches)
    return out | {"bits_per_byte": nats / math.log(2) / max(1, n_bytes)}


def mean_figures(passes: list[dict], weights: list[int] | None = None) -> dict:
    """Figures of all processes' passes as plain numbers and lists; `loss` is the cross entropy alone.

    Means over the passes, except for the choice counts, which are summed, and the load and MaxVio that
    follow from the sums: batches that are uneven in opposite ways are even together.
    """
    weights = torch.tensor(distributed.gather(weights or [1] * len(passes)), dtype=torch.double)
    passes = distributed.gather([{name: x.cpu() for name, x in p.items()} for p in passes])
    share = weights / weights.sum()
    out = {k: torch.tensordot(share, torch.stack([p[k] for p in passes]).double(), 1) for k in passes[0]}
    if "counts" in out:
        counts = sum(p["counts"] for p in passes)
        load = counts / counts.sum()
        out |= {"counts": counts, "load": load, "max_vio": load.max() / load.mean() - 1}
    out["loss"] = out.pop("lm_loss")
    return {name: value.tolist() for name, value in out.items()}

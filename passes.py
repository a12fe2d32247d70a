"""The three passes that a token takes through the model while it is generated (paper section 2.2).

`enter` embeds tokens and runs the first layer, `block` runs the shared block once over tokens of any
recursion step, since its weights are the same in all of them, and `leave` runs the last layer and the
head for those that are done. Models without routing do the same, their tokens taking every step.
"""

import copy
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import router as routing
from kvcache import PagedKV, PagedPass
from model import MoR


class Tokens(NamedTuple):
    """What the passes hand on, a row for each token in flight; None where a model has no use for it."""

    x: Tensor  # (n, d) residual stream
    gate: Tensor | None  # (n,) weight of the next step's output, or of the last one (token-choice)
    base: Tensor | None  # (n, d) token-choice: what that output is added to
    depth: Tensor | None  # (n,) token-choice: steps that the token takes

    def take(self, index) -> "Tokens":
        return Tokens(*(t if t is None else t[index] for t in self))

    def put(self, index, new: "Tokens") -> None:
        for t, values in zip(self, new):
            if t is not None:
                t[index] = values

    def join(self, new: "Tokens") -> "Tokens":
        return Tokens(*(t if t is None else torch.cat((t, u)) for t, u in zip(self, new)))


class Passes:
    """The passes of one model over the pages of its cache."""

    def __init__(self, model: MoR, kv: PagedKV):
        self.model, self.config = model, model.config
        self.first, self.last = kv.outer[:1].tolist(), kv.outer[1:].tolist()
        self.shared_block, self.n_step = kv.in_step[0].tolist(), len(kv.in_step)

    def enter(self, ids: Tensor, kv: PagedPass) -> tuple[Tokens, Tensor]:
        """New tokens (n,) to what is handed on, and whether each is done already, (n,) bool."""
        c, model, pos = self.config, self.model, kv.mask.queries.pos
        x = model.run(self.first, model.model.embed_tokens(ids), kv.mask.queries, kv)
        never = torch.zeros_like(ids, dtype=torch.bool)
        if c.routing == "none":
            return Tokens(x, None, None, None), never
        if c.routing == "expert":
            gate, goes_on = self.score(x, pos, torch.zeros_like(ids))
            return Tokens(x, gate, None, None), ~goes_on
        _, p, choice = routing.choose_depth(c, x, model.router[0])
        depth = choice.clamp(max=self.n_step - 1) + 1
        return Tokens(x, p.gather(1, choice[:, None]).squeeze(1), x.clone(), depth), never

    def block(self, tokens: Tokens, step: Tensor, kv: PagedPass) -> tuple[Tokens, Tensor]:
        """Tokens (n,) through the step that is next for each, (n,), and whether each is done then."""
        c, x = self.config, tokens.x
        y = self.model.run(self.shared_block, x, kv.mask.queries, kv)
        done = step + 1 == self.n_step
        # Tokens are made of all their fields: torch 2.11 cannot compile `_replace` here.
        if c.routing == "none":
            return Tokens(y, None, None, None), done
        if c.routing == "token":
            done = step + 1 == tokens.depth
            out = tokens.base + (tokens.gate[:, None] * y).to(x.dtype)
            x = torch.where(done[:, None], out, y)
            return Tokens(x, tokens.gate, tokens.base, tokens.depth), done
        x = x + (tokens.gate[:, None] * y).to(x.dtype)
        gate, goes_on = self.score(x, kv.mask.queries.pos, step + 1)
        return Tokens(x, gate, None, None), done | ~goes_on

    def score(self, x: Tensor, pos: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Gate, and whether the causal rule takes it, of each token (n,) at its own step (n,).

        What it says of a step beyond the last one, nobody asks.
        """
        c, model = self.config, self.model
        aux = model.aux_router if c.sampling == "aux_router" else [None] * c.n_recursion
        each = [routing.score(c, r, x, pos, model.router[r], aux[r]) for r in range(self.n_step)]
        step = step.clamp(max=self.n_step - 1)[:, None]
        gate = torch.stack([s.gate for s in each], 1).gather(1, step).squeeze(1)
        return gate, torch.stack([s.causal for s in each], 1).gather(1, step).squeeze(1)

    def leave(self, x: Tensor, last: Tensor, kv: PagedPass) -> Tensor:
        """Tokens (n, d) that are done to float32 logits (len(last), V) of the rows `last`."""
        x = self.model.run(self.last, x, kv.mask.queries, kv)
        return self.model.logits(self.model.model.norm(x[last]))


# ---- passes of fixed sizes -----------------------------------------------------------------------


def of_fixed_sizes(passes: Passes) -> Passes | None:
    """The same passes for batches of one token each, made once for every number of rows."""
    device = passes.model.cos.device
    if device.type == "cuda":
        # On the model's device, whichever is current; one for all, since cuBLAS keeps memory for each.
        make = partial(captured, stream=torch.cuda.Stream(device))
    elif device.type == "cpu" and any(map(shutil.which, ("g++", "clang++"))):
        make = compiled
    else:
        print(f"note: there is no compiler for {device.type} here; going on without.", file=sys.stderr)
        return None
    fast = copy.copy(passes)
    fast.enter, fast.block, fast.leave = map(make, (passes.enter, passes.block, passes.leave))
    return fast


def compiled(function: Callable) -> Callable:
    """A pass that torch.compile makes anew for every number of rows, its weights packed beforehand.

    PyTorch packs the weights of a linear layer in every call, which for a few rows takes longest;
    `freezing` makes constants of them, and packs them once. For a few rows the calls of the kernels
    count as well: matrices of one input become one, and C++ makes the calls.
    """
    # Read while tracing, so options of torch.compile would come too late.
    inductor = torch._inductor.config
    inductor.freezing = inductor.cpp.enable_concat_linear = inductor.cpp_wrapper = True
    torch._dynamo.config.recompile_limit = 64  # one for every number of rows of every engine
    fast = torch.compile(function, dynamic=False)

    def run(*given):
        torch._dynamo.mark_dynamic(given[-1].mask.page_table, 2)  # it grows with the sequences
        return fast(*given)

    return run


def captured(function: Callable, stream: torch.cuda.Stream) -> Callable:
    """A pass that is captured as a CUDA graph for every number of rows, and then replayed.

    A replay reads and writes the memory of the capture: what it is given is copied there, and what it
    made is copied out before another graph runs, so all share one pool. Pages stay where they are.
    """
    graphs, pool = {}, torch.cuda.graph_pool_handle()

    def run(*given):
        size = tuple(x.shape for x in tree_leaves(given) if isinstance(x, Tensor))
        if size not in graphs:
            fixed = tree_map_only(Tensor, torch.clone, given)
            function(*fixed)  # Triton compiles, which it cannot in a capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream):
                made = function(*fixed)
            graphs[size] = graph, fixed, made
        graph, fixed, made = graphs[size]
        for mine, new in zip(tree_leaves(fixed), tree_leaves(given)):
            if isinstance(mine, Tensor):
                mine.copy_(new)
        graph.replay()
        return tree_map_only(Tensor, torch.clone, made)

    return run

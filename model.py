"""Mixture-of-Recursions: a Llama whose shared block runs a different number of times per token.

`MoR.hidden` is the recursion loop: each step picks the tokens that go on (router.py), runs the shared
block on those alone and weights what it adds by the router's gate (paper sections 2.1 and 2.2).
Layers see a ragged batch, rows (N, d) of live tokens back to back, in training, prefill and decoding
alike; only attention (kvcache.py, kernels.py) knows which rows belong together.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import router as routing
from kvcache import PagedPass, PassKV
from modelconfig import ModelConfig
from ragged import Ragged, ragged_batch

CHUNK_LOGITS = 2**25  # logits that the loss holds at a time: 128 MiB in float32


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `kv` keeps keys and values, and attends."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        d, kv_width = config.n_embd, config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv_width, bias=False)
        self.v_proj = nn.Linear(d, kv_width, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: PassKV | PagedPass, layer: int) -> Tensor:
        q = rotate(self.q_proj(x).view(len(x), -1, self.head_dim), cos, sin)  # (N, H, D)
        k = v = None
        if kv.config.makes_keys(layer):
            k = rotate(self.k_proj(x).view(len(x), -1, self.head_dim), cos, sin)  # (N, Hkv, D)
            v = self.v_proj(x).view(len(x), -1, self.head_dim)
        return self.o_proj(kv.attend(layer, q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_ffn, bias=False)
        self.down_proj = nn.Linear(config.n_ffn, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A physical layer; every unrolled layer that the plan maps to it is this one module."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv: PassKV | PagedPass, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, kv, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves paired as in Hugging Face Llama: x (N, H, D), cos and sin (N, 1, D/2)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@dataclass
class Routing:
    """What the routers did in one pass."""

    depth: Tensor  # (N,) recursion steps that each token took
    losses: dict[str, Tensor] = field(default_factory=dict)  # before their coefficients
    figures: dict[str, Tensor] = field(default_factory=dict)


class MoR(nn.Module):
    """A vanilla, recursive or Mixture-of-Recursions language model; names follow HF Llama."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        c = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab_size, c.n_embd),  # tied to the output head
                "layers": nn.ModuleList(Layer(c) for _ in range(max(c.plan) + 1)),
                "norm": nn.RMSNorm(c.n_embd, c.norm_eps),
            }
        )
        if c.routing == "expert":
            self.router = nn.ModuleList(routing.make_router(c, 1) for _ in range(c.n_recursion))
            if c.sampling == "aux_router":
                self.aux_router = nn.ModuleList(routing.make_router(c, 1) for _ in range(c.n_recursion))
        if c.routing == "token":
            self.router = nn.ModuleList([routing.make_router(c, c.n_recursion)])
            if c.balancing == "loss_free":
                self.router[0].register_buffer("balance_bias", torch.zeros(c.n_recursion))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=c.init_std)
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).double() / c.head_dim)
        angle = torch.arange(c.block_size).double()[:, None, None] * frequency  # (T, 1, D/2)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.attention = "auto"  # who computes attention over whole sequences: kernels.runs_triton
        self.recompute = False  # whether the backward pass computes layers again, to hold less
        self.capacity = c.capacity  # what training uses now; capacity warm-up moves it

    def warm_up_capacity(self, passes: int) -> None:
        """Capacities after `passes` forward passes: from 1 down to their values, half a cosine long."""
        done = min(1.0, passes / self.config.capacity_warmup)
        above = 0.5 * (1 + math.cos(math.pi * done))
        self.capacity = tuple(x + (1 - x) * above for x in self.config.capacity)

    # ---- the recursion loop ----

    def hidden(
        self, ids: Tensor, rows: Ragged, rule="causal", max_depth: int | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Routing]:  # fmt: skip
        """Token ids (N,) of a ragged batch to normed final states (N, d).

        rule: how expert-choice picks tokens: "top-k" as trained, among the `window` tokens of each
        training sequence (default: the rows' own length), "causal" as generated. max_depth caps the
        recursion steps. The sequences are whole; engine.py continues some that are not.
        """
        c = self.config
        if rule not in ("top-k", "causal"):
            raise ValueError(f"rule={rule!r} is not known; there are 'top-k' and 'causal'.")
        window = window or rows.length
        if rule == "top-k" and window is None and c.routing == "expert":
            raise ValueError("rule='top-k' takes sequences of one length; use rule='causal' for these.")
        max_depth = c.n_recursion if max_depth is None else max_depth
        if not 1 <= max_depth <= c.n_recursion:
            raise ValueError(
                f"max_depth={max_depth} must lie between 1 and n_recursion={c.n_recursion}."
            )
        kv = PassKV(c, self.attention, rows)
        x = self.model.embed_tokens(ids)
        if c.routing == "none":
            layers = [n for n, step in enumerate(c.steps) if step is None or step < max_depth]
            x = self.run(layers, x, rows, kv.enter(rows))
            routed = Routing(depth=torch.full_like(ids, max_depth))
        else:
            own = self.layers_of(None)  # first and last of Middle-Cycle
            x = self.run(own[:1], x, rows, kv.enter(rows))
            if c.routing == "expert":
                x, routed = self.expert_choice(
                    x, rows, kv, window if rule == "top-k" else None, max_depth
                )
            else:
                x, routed = self.token_choice(x, rows, kv, max_depth)
            x = self.run(own[1:], x, rows, kv.enter(rows))
        return self.model.norm(x), routed

    def layers_of(self, step: int | None) -> list[int]:
        """The unrolled layers of a recursion step, or those outside the shared block."""
        return [layer for layer, s in enumerate(self.config.steps) if s == step]

    def run(self, layers: list[int], x: Tensor, rows: Ragged, kv: PassKV | PagedPass) -> Tensor:
        """Applies unrolled layers to x (n, d)."""
        cos, sin = self.cos[rows.pos], self.sin[rows.pos]
        recompute = self.recompute and torch.is_grad_enabled()
        for layer in layers:
            apply = self.model.layers[self.config.plan[layer]]
            if recompute:
                apply = partial(checkpoint, apply, use_reentrant=False, preserve_rng_state=False)
            x = apply(x, cos, sin, kv, layer)
        return x

    def expert_choice(self, x: Tensor, rows: Ragged, kv, window: int | None, max_depth: int):
        """Each step's router scores the tokens still in play and takes the best of each window, or,
        without windows, those that the causal rule takes; the rest are done."""
        n_row, dense = len(x), rows.length is not None
        routed = Routing(depth=torch.zeros(n_row, dtype=torch.long, device=x.device))
        figures = []
        for r in range(max_depth):
            h = x if rows.index is None else x[rows.index]
            k = max(1, int(self.capacity[r] * window)) if window else None
            aux_router = self.aux_router[r] if self.config.sampling == "aux_router" else None
            keep, gate, losses, step_figures = routing.select(
                self.config, r, h, rows, self.router[r], aux_router, k, window and n_row // window
            )
            for name, loss in losses.items():
                routed.losses[name] = routed.losses.get(name, 0.0) + loss
            figures.append(step_figures)
            if len(keep) < len(h):
                rows, h, gate = rows.take(keep, k if dense else None), h[keep], gate[keep]
            if len(keep) == 0:
                break
            y = self.run(self.layers_of(r), h, rows, kv.enter(rows))
            y = (gate[:, None] * y).to(x.dtype)
            index = torch.arange(n_row, device=x.device) if rows.index is None else rows.index
            x = x.index_add(0, index, y)  # x[A_r] += g * y
            routed.depth = routed.depth.index_fill(0, index, r + 1)
        if window:
            routed.figures = {n: torch.stack([f[n] for f in figures]) for n in figures[0]}
            routed.figures["dead"] = routing.dead_tokens(index, window)
        return x, routed

    def token_choice(self, x: Tensor, rows: Ragged, kv, max_depth: int):
        """One router gives every token its depth before step 0; causal, so one rule serves both uses."""
        c = self.config
        logits, p, choice = routing.choose_depth(c, x, self.router[0])
        routed = Routing(
            depth=choice.clamp(max=max_depth - 1) + 1,
            losses={"z_loss": logits.logsumexp(1).square().mean()},
            figures=routing.load_figures(p.detach(), choice),
        )
        if c.balancing == "loss":
            routed.losses["balance_loss"] = routing.balance_loss(p, choice)
        gate = p.gather(1, choice[:, None])
        out, h, index = x, x, torch.arange(len(x), device=x.device)
        for r in range(max_depth):
            if len(h) == 0:
                break
            y = self.run(self.layers_of(r), h, rows, kv.enter(rows))
            left = routed.depth[index] - (r + 1)  # steps still to come
            done, keep = (left == 0).nonzero().squeeze(1), left.nonzero().squeeze(1)
            finished = index[done]
            out = out.index_add(0, finished, (gate[finished] * y[done]).to(x.dtype))
            rows, h, index = rows.take(keep), y[keep], index[keep]
        return out, routed

    # ---- head and loss ----

    def logits(self, x: Tensor) -> Tensor:
        """Final states (..., d) to float32 logits (..., V)."""
        return F.linear(x, self.model.embed_tokens.weight).float()

    def forward(
        self, ids: Tensor, targets: Tensor, rule="top-k", max_depth: int | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """Sequences ids (B, T) and targets (B, T), -100 where there is none, to a loss and figures.

        documents: cu_seqlens of the documents in ids.flatten(), each of which attends to itself alone
        and counts its positions from 0; None: every sequence is one.

        The loss is the mean cross entropy plus the routers' losses times their coefficients. Figures
        are detached tensors: each loss alone, and per recursion step the share of tokens active.
        """
        c = self.config
        n_seq, length = ids.shape
        if not 0 < length <= c.block_size:
            raise ValueError(f"sequences of {length} tokens do not fit block_size={c.block_size}.")
        if documents is None:
            rows = ragged_batch(torch.arange(n_seq + 1, device=ids.device) * length, length)
        else:
            rows = ragged_batch(documents)
        x, routed = self.hidden(ids.flatten(), rows, rule, max_depth, window=length)
        losses = {
            "lm_loss": lm_loss(x, self.model.embed_tokens.weight, targets.flatten()),
            **routed.losses,
        }
        weight = {"aux_loss": c.aux_coeff, "balance_loss": c.balance_coeff, "z_loss": c.z_coeff}
        total = sum(weight.get(name, 1.0) * loss for name, loss in losses.items())
        figures = {name: loss.detach() for name, loss in losses.items()} | routed.figures
        steps = torch.arange(c.n_recursion, device=ids.device)
        figures["active"] = (routed.depth > steps[:, None]).float().mean(1)
        return total, figures


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of a linear head, without ever holding all (N, V) logits.

    Rows go in chunks, and a chunk's gradients are made while its logits are at hand, so nothing is
    computed twice.
    """

    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, wants_gradients: bool) -> Tensor:
        valid = targets != -100
        n_valid = valid.sum()
        chunk = max(1, CHUNK_LOGITS // len(head))
        loss = x.new_zeros((), dtype=torch.float32)
        x_grad = head_grad = None
        if wants_gradients:
            x_grad, head_grad = torch.empty_like(x), torch.zeros_like(head)
        for i in range(0, len(x), chunk):
            xs, rows = x[i : i + chunk], slice(i, i + chunk)
            target = torch.where(valid[rows], targets[rows], 0)[:, None]
            log_p = F.linear(xs, head).float().log_softmax(1)
            loss -= (log_p.gather(1, target).squeeze(1) * valid[rows]).sum()
            if wants_gradients:
                p = log_p.exp_()
                p.scatter_add_(1, target, p.new_full(target.shape, -1.0))
                p.mul_((valid[rows] / n_valid)[:, None])
                p = p.to(x.dtype)
                x_grad[rows] = p @ head
                if torch.is_autocast_enabled(x.device.type):  # which in-place operations escape
                    head_grad += p.T @ xs
                else:
                    head_grad.addmm_(p.T, xs)
        ctx.save_for_backward(x_grad, head_grad)
        return loss / n_valid

    @staticmethod
    def backward(ctx, grad: Tensor):
        x_grad, head_grad = ctx.saved_tensors
        return x_grad * grad, head_grad * grad, None, None


def lm_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of targets (N,) under states x (N, d) and head (V, d); -100 is no target."""
    wants_gradients = torch.is_grad_enabled() and (x.requires_grad or head.requires_grad)
    return LinearCrossEntropy.apply(x, head, targets, wants_gradients)

"""What a model costs: FLOPs in two conventions, parameters, cache memory (paper sections 2.2.2 and 3).

The paper's count makes runs of equal cost comparable: forward pass, weights of the layers and causal
attention, in shares c_r of the tokens. The exact count (true key and value heads, output head,
routers, whole tokens) is for model FLOPs utilisation. `python flops.py` recomputes the published
figures; with a config file or settings, as `python flops.py --max_iters=700`, it tells what one run
costs.
"""

import math
import sys
from dataclasses import replace
from typing import NamedTuple

from modelconfig import CHOICES, ModelConfig, preset
from settings import TrainConfig, build, help_text, parse, split_batch

TRAINING = 3  # a training step is a forward pass and a backward pass of twice its FLOPs
ROUTER_HIDDEN = {"linear": 0, "mlp": 2, "wide_mlp": 4}  # hidden widths in n_embd; 0: one matrix


# ---- who computes what -----------------------------------------------------------------------------


def shares(config: ModelConfig) -> list[float]:
    """Each unrolled layer's share of active tokens, 0 to 1 (section 2.2.1; token-choice balanced)."""
    n = config.n_recursion
    if config.routing == "expert":
        per_step = config.capacity
    else:
        per_step = [(n - r) / n if config.routing == "token" else 1.0 for r in range(n)]
    return [1.0 if step is None else per_step[step] for step in config.steps]


def active_tokens(config: ModelConfig, seq_len: int) -> list[int]:
    """Each unrolled layer's active tokens in a sequence: shares floored to whole tokens, at least 1."""
    return [max(1, int(share * seq_len)) for share in shares(config)]


def sees_all_keys(config: ModelConfig, layer: int) -> bool:
    """Whether an unrolled layer attends over every token's keys, not just those of active tokens."""
    return config.kv_mode != "recursion" and config.first_use[layer] != layer


# ---- FLOPs -----------------------------------------------------------------------------------------


def paper_flops(config: ModelConfig) -> float:
    """Forward FLOPs per token at block_size, as the paper counts (section 3).

    2 per weight, key and value heads as many as query heads; no embedding, head, router, norm or
    softmax. Shares are exact fractions: floored to whole tokens, they would miss published runs.
    """
    d, total = config.n_embd, 0.0
    for layer, share in enumerate(shares(config)):
        projections = 4 if config.makes_keys(layer) else 2
        keys = 1.0 if sees_all_keys(config, layer) else share
        total += share * 2 * (projections * d * d + 3 * d * config.n_ffn)
        total += share * keys * 2 * config.block_size * d
    return total


def exact_flops(config: ModelConfig, per_step: list[float] | None = None) -> float:
    """Forward FLOPs per token of a block_size sequence: every multiply-add of a matrix, twice.

    A pair of query and visible key costs 4 * head_dim per head. n active tokens make n(n+1)/2 pairs
    among themselves; over all T keys n(T+1)/2, the expectation with active positions spread evenly.
    Token-choice counts as balanced, expert-choice at its final capacities, unless `per_step` tells how
    many tokens of the sequence took each recursion step.
    """
    length, d = config.block_size, config.n_embd
    active = active_tokens(config, length)
    if per_step is not None:
        active = [length if step is None else per_step[step] for step in config.steps]
    total = 2.0 * d * config.vocab_size * length
    for layer, n in enumerate(active):
        keys = length if sees_all_keys(config, layer) else n
        total += 2 * n * layer_matrices(config, config.makes_keys(layer))
        total += 4 * d * n * (keys + 1) / 2
    if config.routing == "token":
        total += 2 * length * router_weights(config)
    if config.routing == "expert":
        in_play = length  # a step scores the tokens that took the step before
        for step in range(config.n_recursion):
            total += 2 * in_play * router_weights(config) / config.n_recursion
            in_play = active[config.steps.index(step)]
    return total / length


def train_step_flops(config: ModelConfig, tokens_per_step: int) -> float:
    """FLOPs of one optimizer step, forward and backward, in the exact convention (for MFU)."""
    return TRAINING * exact_flops(config) * tokens_per_step


def budget_tokens(config: ModelConfig, flops: float) -> float:
    """Tokens that a budget of forward FLOPs pays, as the paper counts (section 3)."""
    return flops / paper_flops(config)


def budget_steps(config: ModelConfig, flops: float, tokens_per_step: int) -> int:
    """Optimizer steps that a budget of forward FLOPs pays, to the nearest (section 3)."""
    steps = budget_tokens(config, flops) / tokens_per_step
    if not steps < math.inf:
        raise ValueError(f"a budget of {flops} FLOPs never ends; give a finite max_flops.")
    return max(1, round(steps))


def run_steps(config: ModelConfig, train: TrainConfig, batch_size: int) -> int:
    """Optimizer steps of a run: those given, or those that its budget of tokens or FLOPs pays."""
    sequences = train.global_batch_size or batch_size * (train.gradient_accumulation_steps or 1)
    tokens_per_step = sequences * config.block_size
    if flops := max(train.max_flops, *train.budgets, 0):
        return budget_steps(config, flops, tokens_per_step)
    if train.max_tokens:
        return max(1, round(train.max_tokens / tokens_per_step))
    return train.max_iters


# ---- parameters and memory -------------------------------------------------------------------------


class Parameters(NamedTuple):
    non_embedding: int  # physical layers and final norm: what the paper's tables list
    embedding: int  # tied to the output head
    router: int  # auxiliary routers included


def layer_matrices(config: ModelConfig, makes_keys: bool = True) -> int:
    """Weights of the matrices that one layer application multiplies with."""
    kv_width = config.n_kv_head * config.head_dim
    keys = 2 * config.n_embd * kv_width if makes_keys else 0
    return 2 * config.n_embd**2 + keys + 3 * config.n_embd * config.n_ffn


def router_weights(config: ModelConfig) -> int:
    """Weights of all routers; expert-choice has one per step, and auxiliary ones if asked for."""
    if config.routing == "none" or config.router_type == "random":
        return 0
    if config.router_type not in ROUTER_HIDDEN:
        raise ValueError(
            f"router_type={config.router_type!r} has no known cost; add its hidden width, in multiples "
            "of n_embd, to ROUTER_HIDDEN in flops.py."
        )
    n_out = config.n_recursion if config.routing == "token" else 1
    hidden = ROUTER_HIDDEN[config.router_type] * config.n_embd
    one = hidden * (config.n_embd + n_out) if hidden else config.n_embd * n_out
    if config.routing == "token":
        return one
    return one * config.n_recursion * (2 if config.sampling == "aux_router" else 1)


def parameters(config: ModelConfig) -> Parameters:
    """Stored parameters, counted once however often they are applied (section 2.1)."""
    layer = layer_matrices(config) + 2 * config.n_embd
    return Parameters(
        non_embedding=(max(config.plan) + 1) * layer + config.n_embd,
        embedding=config.vocab_size * config.n_embd,
        router=router_weights(config),
    )


def cache_bytes(config: ModelConfig, seq_len: int, bytes_per_element: int) -> int:
    """Bytes of the keys and values that one sequence of seq_len tokens stores (section 2.2.2).

    Recursion-wise a layer stores its active tokens; shared, only first uses store, every token;
    shared with update, every unrolled layer stores a row for every token.
    """
    rows = 0
    for layer, n in enumerate(active_tokens(config, seq_len)):
        if config.makes_keys(layer):
            rows += n if config.kv_mode == "recursion" else seq_len
    return rows * 2 * config.n_kv_head * config.head_dim * bytes_per_element


def relative_batch(n_recursion: int, vanilla: int = 32) -> int:
    """Sequences whose recursion-wise caches fit where `vanilla` full ones do (section 3, throughput)."""
    return vanilla * 2 * n_recursion // (n_recursion + 1)


# ---- python flops.py config/x.py: one run ----------------------------------------------------------


H100_FLOPS = 989e12  # dense bfloat16, as the maker states it
ASSUMED_MFU = 0.4  # of a well-tuned run; not measured here


def describe(config: ModelConfig) -> str:
    routing = f" {config.routing}-choice {config.kv_mode}" if config.routing != "none" else ""
    return f"{config.sharing.replace('none', 'vanilla')} R={config.n_recursion}{routing}"


def short(x: float, base: int = 1000) -> str:
    """A number with a decimal or, for base 1024, a binary prefix: 1.23 G, 4.56 Mi."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"] if base == 1000 else ["", "Ki", "Mi", "Gi", "Ti"]
    while x >= base and len(prefixes) > 1:
        x, prefixes = x / base, prefixes[1:]
    return f"{x:.4g} {prefixes[0]}".rstrip()


def without_routing(config: ModelConfig, **changes) -> ModelConfig:
    unset = dict(routing="none", kv_mode="recursion", capacity=(), capacity_warmup=0)
    return replace(config, **unset, **changes)


def vanilla_of(config: ModelConfig, preset_name: str = "") -> ModelConfig:
    """The unshared model of the same base: depth of the preset's size, or the same unrolled depth."""
    depth = config.n_layer
    if preset_name:
        depth = preset("vanilla-" + preset_name.split("-")[1])["n_layer"]
    return without_routing(config, n_layer=depth, sharing="none", n_recursion=1)


def cost_lines(config: ModelConfig, train: TrainConfig):
    """(name, text) of what one run stores and computes; FLOPs are forward unless told."""
    yield "model", describe(config)
    yield "layers", f"{config.n_layer} unrolled, {max(config.plan) + 1} physical"
    names = ("non-embedding", "embedding", "router")
    yield "parameters", ", ".join(f"{short(n)} {name}" for n, name in zip(parameters(config), names))
    paper, exact = paper_flops(config), exact_flops(config)
    yield "FLOPs per token", f"{short(paper)} as the paper counts, {short(exact)} exact"
    split = split_batch(train)
    batch, passes = split.batch_size, split.gradient_accumulation_steps
    tokens = split.global_batch_size * config.block_size
    note = "" if train.batch_size else " (batch_size=0: as on a CPU)"
    yield "tokens per step", f"{tokens:,} = {batch} sequences x {passes} x {config.block_size}{note}"
    backward = f"{short(train_step_flops(config, tokens))} with backward"
    per_step = f"{short(paper * tokens)} as the paper counts, {short(exact * tokens)} exact"
    yield "FLOPs per step", f"{per_step}, {backward}"
    steps = run_steps(config, train, batch)
    spent = f"{short(steps * tokens)} tokens, {short(steps * tokens * paper)} FLOPs as the paper counts"
    yield "budget", f"{steps:,} steps, {spent}"
    width = 2 if config.vocab_size <= 2**16 else 4
    yield "tokens on disk", f"{short(width * steps * tokens)}B, each read once"
    hours = steps * train_step_flops(config, tokens) / (8 * H100_FLOPS * ASSUMED_MFU) / 3600
    yield "time", f"{hours:.3g} hours on 8 H100, computed for an assumed MFU of {ASSUMED_MFU:.0%}"
    for mode in CHOICES["kv_mode"]:
        try:
            size = cache_bytes(replace(config, kv_mode=mode), config.block_size, 4)
            text = f"{short(size, 1024)}B per sequence of {config.block_size} tokens in float32"
        except ValueError:
            text = "not for this model"
        yield f"cache {mode}", text + (" (chosen)" if mode == config.kv_mode else "")
    vanilla = vanilla_of(config, train.preset)
    by_paper, by_exact = paper_flops(vanilla) / paper, exact_flops(vanilla) / exact
    ratios = f"{by_paper:.3f}x as the paper counts, {by_exact:.3f}x exact"
    yield "implied speed-up", f"{ratios}, over vanilla of {vanilla.n_layer} layers"


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print("Without arguments: the published figures, computed. With any: the cost of one run.\n")
        print(help_text("flops.py"))
        return 0
    if not argv:
        from published import print_comparison  # which needs this module first

        return 1 if print_comparison() else 0
    try:
        lines = list(cost_lines(*build(parse(argv))))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, text in lines:
        print(f"{name:22}{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

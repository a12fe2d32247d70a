"""What a MoR model is made of: sizes, layer plan, routing, caches; and the published presets.

`layer_plan` says which physical layer each unrolled layer applies, and in which recursion step: the
ways to share a block of layers over R steps (paper section 2.1, table 1). A configuration that cannot
exist is refused here, in one sentence that names the nearest valid choice: no other file checks again.
"""

import difflib
import math
from dataclasses import dataclass, field


def nearest(name, options) -> str:
    """The option spelt most like `name`, or with its letters as initials: lr is learning_rate."""
    initials = [o for o in options if "".join(word[:1] for word in o.split("_")) == name]
    return initials[0] if initials else difflib.get_close_matches(str(name), list(options), 1, 0)[0]


def setting(default, help: str):
    """A dataclass field with the line that `train.py --help` prints for it."""
    return field(default=default, metadata={"help": help})


CHOICES = {
    "sharing": ("none", "cycle", "middle_cycle", "sequence", "middle_sequence"),
    "routing": ("none", "expert", "token"),
    "kv_mode": ("recursion", "shared", "shared_update"),
    "router_type": ("linear", "mlp", "wide_mlp", "random"),
    "router_func": ("sigmoid", "tanh", "softmax"),
    "sampling": ("aux_loss", "aux_router", "none"),
    "balancing": ("loss", "loss_free", "none"),
}


# No model is wider than the one number or has more of anything than the other; a typo may ask for it.
WIDEST, MOST = 2**24, 2**12


@dataclass
class ModelConfig:
    vocab_size: int = setting(257, "entries of the vocabulary")
    block_size: int = setting(256, "longest sequence, in tokens")
    n_layer: int = setting(8, "unrolled layers: layer applications from embedding to head")
    n_head: int = setting(6, "query heads")
    n_kv_head: int = setting(2, "key and value heads; n_head is a multiple of it")
    n_embd: int = setting(192, "width of the residual stream")
    n_ffn: int = setting(512, "inner width of the SwiGLU feed-forward")
    rope_theta: float = setting(10000.0, "base of the rotary frequencies")
    norm_eps: float = setting(1e-5, "epsilon of RMSNorm")
    init_std: float = setting(0.02, "standard deviation of the initial weights")
    sharing: str = setting("middle_cycle", "layer plan: " + ", ".join(CHOICES["sharing"]))
    n_recursion: int = setting(3, "R, how often the shared block is applied at most")
    routing: str = setting("expert", "who picks a token's depth: none, expert(-choice), token(-choice)")
    kv_mode: str = setting("recursion", "keys and values: " + ", ".join(CHOICES["kv_mode"]))
    router_type: str = setting("linear", "router network: " + ", ".join(CHOICES["router_type"]))
    router_func: str = setting("", "gate: sigmoid, tanh, softmax; empty: sigmoid, softmax for token")
    alpha: float = setting(0.0, "scale of the gate; 0: 0.1, and 1 for softmax")
    router_temperature: float = setting(1.0, "divides the router's input")
    capacity: tuple[float, ...] = setting((), "expert: share of positions per step; empty: (R-r)/R")
    capacity_warmup: int = setting(0, "expert: forward passes over which capacities fall from 1")
    sampling: str = setting("aux_loss", "expert: causal rule for generation: aux_loss, aux_router, none")
    aux_coeff: float = setting(0.001, "expert: coefficient of the causal rule's loss")
    balancing: str = setting("loss", "token: how depths are kept even: loss, loss_free, none")
    balance_coeff: float = setting(0.1, "token: coefficient of the balancing loss")
    balance_rate: float = setting(0.001, "token: step of the loss-free bias")
    z_coeff: float = setting(0.0, "coefficient of the router z-loss")

    def __post_init__(self):
        if not self.router_func:
            self.router_func = "softmax" if self.routing == "token" else "sigmoid"
        if not self.alpha:
            self.alpha = 1.0 if self.router_func == "softmax" else 0.1
        if self.routing == "expert" and not self.capacity:
            r = min(self.n_recursion, MOST)
            self.capacity = tuple((r - i) / r for i in range(r))
        self.capacity = tuple(self.capacity)
        check(self)
        self.head_dim = self.n_embd // self.n_head
        plan = layer_plan(self.sharing, self.n_layer, self.n_recursion)
        self.plan = [physical for physical, _ in plan]
        self.steps = [step for _, step in plan]
        self.first_use = [self.plan.index(p) for p in self.plan]

    def makes_keys(self, layer: int) -> bool:
        """Whether an unrolled layer computes keys and values of its own (else it reuses some)."""
        return self.kv_mode != "shared" or self.first_use[layer] == layer


def layer_plan(sharing: str, n_layer: int, n_recursion: int) -> list[tuple[int, int | None]]:
    """(physical layer, recursion step) of each unrolled layer (paper section 2.1, table 1).

    The first and last layer of the Middle variants are their own and belong to no step.
    """
    if sharing.startswith("middle"):
        inner = layer_plan(sharing.removeprefix("middle_"), n_layer - 2, n_recursion)
        return [(0, None), *((p + 1, r) for p, r in inner), (inner[-1][0] + 2, None)]
    if sharing == "sequence":
        return [divmod(i, n_recursion) for i in range(n_layer)]
    block = n_layer // n_recursion  # sharing "none" is a cycle of one step
    return [(i % block, i // block) for i in range(n_layer)]


def fitting_depths(sharing: str, n_layer: int, n_recursion: int) -> tuple[int, int]:
    """The valid unrolled depths at or below, and at or above, n_layer."""
    outer = 2 if sharing.startswith("middle") else 0
    n_recursion = max(1, n_recursion)  # `check` refuses what is below
    blocks = (n_layer - outer) / n_recursion
    low, high = max(1, math.floor(blocks)), max(1, math.ceil(blocks))
    return low * n_recursion + outer, high * n_recursion + outer


def check(c: ModelConfig) -> None:
    """Refuses an impossible configuration in one sentence that names the nearest valid choice."""

    def require(condition, message):
        if not condition:
            raise ValueError(message)

    for name, options in CHOICES.items():
        value = getattr(c, name)
        require(
            value in options,
            f"{name}={value!r} is not known; the nearest choice is {nearest(value, options)!r} "
            f"of {', '.join(options)}.",
        )
    for names, largest in (
        (("vocab_size", "block_size", "n_embd", "n_ffn"), WIDEST),
        (("n_layer", "n_head", "n_kv_head", "n_recursion"), MOST),
    ):
        for name in names:
            value = getattr(c, name)
            require(1 <= value <= largest, f"{name}={value} must be at least 1 and at most {largest}.")
    for name in ("rope_theta", "norm_eps", "init_std", "alpha", "router_temperature"):
        require(
            0 < getattr(c, name) < math.inf, f"{name}={getattr(c, name)} must be above 0 and finite."
        )
    for name in ("capacity_warmup", "aux_coeff", "balance_coeff", "balance_rate", "z_coeff"):
        value = getattr(c, name)
        require(0 <= value < math.inf, f"{name}={value} must be finite and not negative; 0 is off.")
    require(
        c.n_embd % (2 * c.n_head) == 0,
        f"n_embd={c.n_embd} does not divide into n_head={c.n_head} heads of even width; "
        f"the nearest width is {max(1, round(c.n_embd / (2 * c.n_head))) * 2 * c.n_head}.",
    )
    divisors = [h for h in range(1, c.n_head + 1) if c.n_head % h == 0]
    near = min(divisors, key=lambda h: abs(h - c.n_kv_head))
    require(
        c.n_kv_head in divisors,
        f"n_head={c.n_head} is not a multiple of n_kv_head={c.n_kv_head}; the nearest is {near}.",
    )
    for name in ("capacity", "capacity_warmup"):
        value = getattr(c, name)
        require(
            c.routing == "expert" or not value,
            f"{name}={value} is for expert-choice; leave it out with routing={c.routing!r}, "
            "or set routing='expert'.",
        )
    if c.sharing == "none":
        require(
            c.n_recursion == 1,
            f"n_recursion={c.n_recursion} needs a layer plan that shares; set sharing='middle_cycle'.",
        )
        require(c.routing == "none", f"routing={c.routing!r} needs sharing='middle_cycle' or 'cycle'.")
        require(
            c.kv_mode == "recursion",
            f"kv_mode={c.kv_mode!r} needs layers that are used again; "
            "set kv_mode='recursion', or sharing='middle_cycle' with n_recursion=2 or more.",
        )
        return
    low, high = fitting_depths(c.sharing, c.n_layer, c.n_recursion)
    near = low if c.n_layer - low < high - c.n_layer else high
    require(
        c.n_layer in (low, high),
        f"n_layer={c.n_layer} does not divide into n_recursion={c.n_recursion} equal steps under "
        f"sharing={c.sharing!r}; the nearest valid n_layer is {near}.",
    )
    if c.routing == "none":
        require(
            c.kv_mode != "shared_update",
            "kv_mode='shared_update' without routing would replace every row; set kv_mode='recursion'.",
        )
        return
    require(
        c.sharing.endswith("cycle"),
        f"routing={c.routing!r} needs the whole block once per step, which sharing={c.sharing!r} "
        f"does not give; the nearest choice is {c.sharing.replace('sequence', 'cycle')!r}.",
    )
    if c.routing == "token":
        require(
            c.router_func != "tanh",
            "router_func='tanh' is for expert-choice; with routing='token' set 'softmax' or 'sigmoid'.",
        )
        require(
            c.router_type != "random",
            "router_type='random' is for expert-choice; with routing='token' set 'linear'.",
        )
        return
    require(
        c.router_func != "softmax",
        "router_func='softmax' over one logit is always 1; with routing='expert' set 'sigmoid'.",
    )
    require(
        c.router_type != "random" or c.sampling == "none",
        f"router_type='random' has nothing to learn a causal rule from; set sampling='none' "
        f"instead of {c.sampling!r}.",
    )
    even = ",".join(f"{(c.n_recursion - r) / c.n_recursion:.4g}" for r in range(c.n_recursion))
    require(
        len(c.capacity) == c.n_recursion,
        f"capacity lists {len(c.capacity)} steps for n_recursion={c.n_recursion}; give one share "
        f"per step, as {even}.",
    )
    falling = tuple(min(c.capacity[: i + 1]) for i in range(c.n_recursion))
    require(
        all(0 < x <= 1 for x in c.capacity),
        f"capacity={c.capacity} must lie above 0 and up to 1; a step cannot take more than all tokens.",
    )
    require(
        c.capacity == falling,
        f"capacity={c.capacity} rises, but a step takes only tokens of the step before; "
        f"the nearest falling list is {falling}.",
    )
    require(
        c.kv_mode == "recursion" or c.capacity[0] == 1,
        f"kv_mode={c.kv_mode!r} needs every token's keys from step 0; set capacity[0] to 1 "
        f"instead of {c.capacity[0]}, or kv_mode='recursion'.",
    )


SIZES = {  # the published bases: paper, appendix
    "135m": dict(n_layer=30, n_embd=576, n_ffn=1536, n_head=9, n_kv_head=3, init_std=1 / 24),
    "360m": dict(n_layer=32, n_embd=960, n_ffn=2560, n_head=15, n_kv_head=5, init_std=0.02),
    "730m": dict(n_layer=26, n_embd=1536, n_ffn=4096, n_head=24, n_kv_head=8, init_std=0.02),
    "1.7b": dict(n_layer=24, n_embd=2048, n_ffn=8192, n_head=32, n_kv_head=32, init_std=0.02),
}
PUBLISHED = dict(vocab_size=49152, block_size=2048)
KINDS = {
    "vanilla": dict(sharing="none", n_recursion=1, routing="none"),
    "recursive": dict(sharing="middle_cycle", n_recursion=3, routing="none"),
    "mor": dict(sharing="middle_cycle", n_recursion=3, routing="expert"),
}
PRESETS = [f"{kind}-{size}" for size in SIZES for kind in KINDS]


def preset(name: str, **overrides) -> dict:
    """Keyword arguments of ModelConfig for "vanilla-135m", "recursive-360m", "mor-1.7b", …

    Overrides win. Unless they set n_layer, the depth is the base's, raised to the next one that the
    recursions divide: 135M has 30 layers as vanilla, 32 with R = 3; 360M 34 with R = 4.
    """
    if name not in PRESETS:
        raise ValueError(
            f"preset {name!r} is not known; the nearest is {nearest(name, PRESETS)!r} "
            f"of {', '.join(PRESETS)}."
        )
    kind, size = name.split("-")
    settings = {**PUBLISHED, **SIZES[size], **KINDS[kind], **overrides}
    if "n_layer" not in overrides and settings["sharing"] != "none":
        settings["n_layer"] = fitting_depths(
            settings["sharing"], settings["n_layer"], settings["n_recursion"]
        )[1]
    return settings

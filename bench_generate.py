"""What depth-wise batching is worth: `python bench.py generate` (throughput, paper section 3).

Requests without a prompt, of normally distributed lengths, first come first served, through one engine:
vanilla, recursive and MoR models, in static and continuous batches, at equal batch and at equal cache
memory, where a recursion-wise cache of (R+1)/2R the size lets more requests run. Every ratio is of runs
of one call; the time is that of the engine's steps, with all that they do.
"""

import argparse
import collections
import importlib.util
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import checkpoint
import kvcache
from engine import Engine
from flops import exact_flops, parameters, relative_batch, short, vanilla_of
from measure import Machine, print_table
from model import MoR
from modelconfig import ModelConfig, preset
from sampling import SamplingParams

SEED = 1337


class DrawnDepth(nn.Module):
    """In place of a router of random weights: keeps a token with a given probability.

    It draws by a hash of the token's state, so no token depends on another.
    """

    def __init__(self, keeps: float):
        super().__init__()
        self.keeps = keeps

    def forward(self, h: Tensor) -> Tensor:
        """(n, d) to logits (n, 1): above 0 where the token is kept."""
        bits = h[:, :8].contiguous().view(torch.int32).long()
        weights = torch.arange(1, 9, device=h.device) * 2654435761
        drawn = ((bits * weights).sum(1) >> 7 & 0xFFFFF).float() / 2**20
        return self.keeps - drawn[:, None]


@dataclass(frozen=True, eq=False)
class Case:
    """A model at the batch it runs at."""

    name: str
    config: ModelConfig
    batch: int
    equal: str  # what it has in common with the vanilla model of its depth: "batch" or "memory"


class Outcome(NamedTuple):
    seconds: float
    n_new: int
    active: list[float]  # share of the tokens that took each step
    n_pass: int  # of the shared block
    occupancy: float  # mean share of the batch in a pass of the shared block
    weight_bytes: float  # read for a token
    cache: int  # bytes in use when they were most
    n_put_back: int

    @property
    def speed(self) -> float:
        return self.n_new / self.seconds


def random_model(config: ModelConfig, machine: Machine) -> MoR:
    torch.manual_seed(SEED)
    model = MoR(config).to(machine.device).eval()
    model.model.to(getattr(torch, machine.dtype))
    if config.routing == "expert":
        shares = itertools.pairwise((1.0, *config.capacity))
        model.router = nn.ModuleList(DrawnDepth(share / before) for before, share in shares)
    return model


def lengths(n: int, mean: int) -> list[int]:
    """New tokens of n requests: normal around the mean, a quarter of it wide, at least one."""
    drawn = np.random.default_rng(SEED).normal(mean, mean / 4, n).round()
    return np.clip(drawn, 1, 2 * mean - 1).astype(int).tolist()


def serve(
    engine: Engine, new_tokens: list[int], machine: Machine, gather=0.5, continuous=True, writes=True
) -> Outcome:
    """All requests through an engine. writes=False: keys and values are made, but not stored."""
    config, n_slot = engine.model.config, len(engine.slots)
    engine.continuous, engine.gather = continuous, gather
    engine.ran.clear()
    engine.n_row = engine.n_put_back = 0
    engine.kv.least_free = engine.kv.n_free
    for number, n in enumerate(new_tokens):
        engine.submit([number % config.vocab_size], SamplingParams(n, temperature=0))
    depths = collections.Counter()
    store = kvcache.store_pages if writes else lambda *given: None
    with mock.patch.object(kvcache, "store_pages", store):
        start = machine.clock()
        while engine.busy():
            depths.update(event.depth for event in engine.step())
        seconds = machine.clock() - start
    del depths[None]  # of the last tokens, which nothing reads
    active = [
        sum(n for depth, n in depths.items() if depth > r) / depths.total()
        for r in range(config.n_recursion)
    ]
    ran = engine.ran
    return Outcome(
        seconds,
        sum(new_tokens),
        active,
        ran["block"],
        engine.n_row / ran["block"] / n_slot,
        weights_read(engine) / sum(new_tokens),
        engine.kv.most_bytes(),
        engine.n_put_back,
    )


def warm_up(engine: Engine, machine: Machine) -> None:
    """Makes the passes of every fixed size, before a clock runs."""
    for size in {*engine.outer_sizes, *engine.block_sizes}:
        serve(engine, [4] * size, machine, continuous=False)  # all enter, and leave, together


def weights_read(engine: Engine) -> int:
    """Bytes of the weights that the passes of an engine have read so far, the head's among them."""
    model, passes = engine.model.model, engine.passes

    def size(layers: list[int]) -> int:
        physical = [model.layers[engine.model.config.plan[n]] for n in layers]
        return sum(weight.nbytes for layer in physical for weight in layer.parameters())

    return (
        engine.ran["enter"] * size(passes.first)
        + engine.ran["block"] * size(passes.shared_block)
        + engine.ran["leave"] * (size(passes.last) + model.embed_tokens.weight.nbytes)
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Vanilla models first, one for each depth that another case has."""
    if args.checkpoint:
        configs = {"checkpoint": args.trained.config}
    else:
        size, sizes = args.preset, dict(block_size=2 * args.tokens)
        middle = args.recursions[len(args.recursions) // 2]
        recursive = preset(f"recursive-{size}", n_recursion=middle, **sizes)
        configs = {f"recursive R={middle}": ModelConfig(**recursive)}
        for r in args.recursions:
            configs[f"MoR R={r}"] = ModelConfig(**preset(f"mor-{size}", n_recursion=r, **sizes))
    vanilla = {
        c.n_layer: Case(baseline(c), vanilla_of(c), args.batch, "batch") for c in configs.values()
    }
    equal = [Case(name, c, args.batch, "batch") for name, c in configs.items()]
    more = [
        Case(name, c, relative_batch(c.n_recursion, args.batch), "memory")
        for name, c in configs.items()
        if c.routing != "none" and c.kv_mode == "recursion"
    ]
    return [*vanilla.values(), *equal, *more]


def baseline(config: ModelConfig) -> str:
    """The name of the vanilla model that a model is compared with: of the same unrolled depth."""
    return f"vanilla {config.n_layer} layers"


def implied(config: ModelConfig, active: list[float], tokens: int) -> float:
    """FLOPs of the vanilla model over this one's, at the depths that its tokens took."""
    config = replace(config, block_size=tokens)
    return exact_flops(vanilla_of(config)) / exact_flops(config, [share * tokens for share in active])


def fastest(machine: Machine, function: Callable) -> float:
    """Seconds of the best of five calls, after one to warm up."""
    seconds = []
    for _ in range(6):
        start = machine.clock()
        function()
        seconds.append(machine.clock() - start)
    return min(seconds[1:])


def peaks(machine: Machine) -> tuple[float, float]:
    """Bytes/s that a sum reads, FLOP/s that a matrix product does."""
    dtype = getattr(torch, machine.dtype)
    much = torch.ones(2**28 // dtype.itemsize, device=machine.device, dtype=dtype)
    square = torch.ones(2048, 2048, device=machine.device, dtype=dtype)
    return much.nbytes / fastest(machine, much.sum), 2 * 2048**3 / fastest(
        machine, lambda: square @ square
    )


@torch.no_grad()
def linear_seconds(engine: Engine, machine: Machine) -> float:
    """Seconds of the matrices of one forward pass, each by itself, for a row of every request; compiled
    where the engine's passes are."""
    model, batch = engine.model.model, len(engine.slots)
    unrolled = [model.layers[physical] for physical in engine.model.config.plan]
    linear = [m for layer in unrolled for m in layer.modules() if isinstance(m, nn.Linear)]
    head = model.embed_tokens.weight
    x = {n: torch.ones(batch, n).to(head) for n in {m.in_features for m in linear}}

    def products():
        return [m(x[m.in_features]) for m in linear], F.linear(x[head.shape[1]], head)

    # One input for all would make one matrix of all.
    with torch._inductor.config.patch({"cpp.enable_concat_linear": False}):
        compiled = engine.fast and not machine.on_gpu  # there they are graphs
        return fastest(machine, torch.compile(products) if compiled else products)


@torch.no_grad()
def beside_transformers(engine: Engine, tokens: int, machine: Machine) -> tuple[float, float]:
    """Seconds that a full batch takes for a token each, greedily, and how many times as long the
    transformers library takes with a Llama of the same size; medians of three turns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, batch = engine.model.config, len(engine.slots)
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.n_ffn,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head, tie_word_embeddings=True,
        )
    ).to(machine.device, getattr(torch, machine.dtype)).eval()  # fmt: skip
    ids = torch.arange(batch, device=machine.device)[:, None]
    given = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=None)
    model.generate(ids, max_new_tokens=2, **given)
    ours, ratios = [], []
    for _ in range(3):
        start = machine.clock()
        model.generate(ids, max_new_tokens=tokens, **given)
        theirs = (machine.clock() - start) / tokens
        ours.append(serve(engine, [tokens] * batch, machine).seconds / tokens)
        ratios.append(theirs / ours[-1])
    return statistics.median(ours), statistics.median(ratios)


def make_engines(args: argparse.Namespace, machine: Machine) -> dict[Case, Engine]:
    """A warm engine for each case; at equal memory it has the pool of the vanilla model of its depth."""
    engines, models = {}, {}
    for case in tqdm(cases_of(args), unit="model", disable=None):
        if case.name not in models:
            trained = case.name == "checkpoint"
            models[case.name] = args.trained if trained else random_model(case.config, machine)
        kv_bytes = None
        if case.equal == "memory":
            kv = next(e.kv for c, e in engines.items() if c.name == baseline(case.config))
            kv_bytes = kv.n_page * kv.page_bytes
        engine = engines[case] = Engine(
            models[case.name], max_batch=case.batch, max_len=2 * args.tokens, kv_bytes=kv_bytes,
            compile=args.compile,
        )  # fmt: skip
        warm_up(engine, machine)
    return engines


def bench_generate(args: argparse.Namespace) -> None:
    """Throughput of vanilla, recursive and MoR models on one engine, static and continuous."""
    machine = Machine(args.device)
    if args.transformers and importlib.util.find_spec("transformers") is None:
        raise ValueError("--transformers needs that library; run: pip install transformers.")
    if args.checkpoint:
        _, args.trained, _ = checkpoint.load_trained(args.checkpoint, machine.device)
        args.trained.model.to(getattr(torch, machine.dtype))  # routers stay as exact as in training
        if 2 * args.tokens > (size := args.trained.config.block_size):
            raise ValueError(f"requests of up to {2 * args.tokens} tokens exceed the context of {size}.")
    new_tokens = lengths(args.requests or 2 * args.batch, args.tokens)
    print(
        f"generation by {args.checkpoint or args.preset}: {len(new_tokens)} requests of about "
        f"{args.tokens} tokens, no prompt, first come first served\n{machine.describe()}"
        + (", compiled passes" if args.compile else "")
    )
    ways = {"static": {"continuous": False}, "continuous": {}}
    if not args.compile:
        ways["no writes"] = {"writes": False}
    bandwidth, rate = peaks(machine)
    engines = make_engines(args, machine)
    outcomes = collections.defaultdict(list)
    with tqdm(total=args.rounds * len(engines) * len(ways), unit="run", disable=None) as bar:
        for _ in range(args.rounds):
            for (case, engine), way in itertools.product(engines.items(), ways):
                outcomes[case, way].append(serve(engine, new_tokens, machine, args.gather, **ways[way]))
                bar.update()

    def median_ratio(over: tuple[Case, str], under: tuple[Case, str]) -> float:
        return statistics.median(a.speed / b.speed for a, b in zip(outcomes[over], outcomes[under]))

    vanilla = {case.name: case for case in engines if case.name.startswith("vanilla")}
    rows = []
    for case in engines:
        base, last = vanilla.get(baseline(case.config)), outcomes[case, "continuous"][-1]
        speed = {way: statistics.median(o.speed for o in outcomes[case, way]) for way in ways}
        ratio, promised, reads = 1.0, 1.0, 1.0
        if case is not base:
            ratio = median_ratio((case, "continuous"), (base, "continuous"))
            promised = implied(case.config, last.active, args.tokens)
            reads = outcomes[base, "continuous"][-1].weight_bytes / last.weight_bytes
        rows.append(
            [
                case.name,
                f"{case.batch}",
                *(f"{speed[way]:.1f}" for way in ways),
                f"{sum(last.active):.2f}",
                f"{last.occupancy:.0%}",
                short(last.cache, 1024) + "B",
                f"{last.n_put_back}",
                f"{median_ratio((case, 'continuous'), (case, 'static')):.2f}x",
                f"{ratio:.2f}x",
                f"{reads:.2f}x",
                f"{promised:.2f}x",
                f"{ratio / promised:.2f}" if case.equal == "batch" else "–",
            ]
        )
    heads = ["model", "batch", *ways, "depth", "occupied", "cache", "put back", "over static"]
    print_table([*heads, "over vanilla", "by weights", "implied", "ratio"], rows)
    print(
        "Tokens/s. Over vanilla: continuous, to the vanilla model of the same unrolled depth. By\n"
        "weights: as if reading them took all the time; implied: by exact FLOPs, at these depths.\n"
        "Rows of a larger batch have the vanilla model's pool of keys and values. Occupied: the share\n"
        "of the batch in a pass of the shared block."
    )
    if not args.checkpoint:
        print("Random weights: depths are drawn, token by token, to follow the capacities.")
    print(f"Floor: weights at {bandwidth / 1e9:.1f} GB/s or FLOPs at {rate / 1e9:.0f} G/s, as measured.")
    for name, case in vanilla.items():
        config = replace(case.config, block_size=args.tokens)
        n_byte = sum(parameters(config)) * getattr(torch, machine.dtype).itemsize
        least = max(n_byte / bandwidth, case.batch * exact_flops(config) / rate)
        linear = linear_seconds(engines[case], machine)
        taken = statistics.median(o.seconds / o.n_pass for o in outcomes[case, "continuous"])
        print(
            f"{name}: a pass takes {1e3 * taken:.0f} ms, its matrices alone {1e3 * linear:.0f}, "
            f"the floor {1e3 * least:.0f}"
        )
        if args.transformers:
            seconds, ratio = beside_transformers(engines[case], args.tokens, machine)
            print(
                f"{name}: a full batch at {case.batch / seconds:.1f} tokens/s, {ratio:.2f} times "
                f"transformers; the floor would be {ratio * seconds / least:.2f} times"
            )

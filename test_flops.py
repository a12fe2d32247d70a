"""The counts of flops.py against published figures, loops over tokens and pairs, and the real model."""

import itertools
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flops
import published
from flops import budget_steps, cache_bytes, exact_flops, paper_flops, parameters, run_steps
from model import MoR
from modelconfig import CHOICES, ModelConfig, preset
from ragged import ragged_batch
from settings import TrainConfig, build

FLOPS = Path(__file__).parent / "flops.py"
T = 24  # every share below is a whole number of tokens


def random_configs(n: int, seed: int) -> list[ModelConfig]:
    """Small valid configurations; every plan, routing, kind of cache and router comes up."""
    draw, configs = random.Random(seed), []
    cells = [
        (sharing, routing, kv)
        for sharing, routing, kv in itertools.product(
            CHOICES["sharing"], CHOICES["routing"], CHOICES["kv_mode"]
        )
        if (routing == "none" or sharing.endswith("cycle"))
        and (sharing != "none" or kv == "recursion")
        and (routing != "none" or kv != "shared_update")
    ]
    for sharing, routing, kv_mode in itertools.islice(itertools.cycle(cells), n):
        r = 1 if sharing == "none" else draw.choice((2, 3))
        capacity, router = (), draw.choice(("linear", "mlp", "wide_mlp"))
        if routing == "expert" and draw.random() < 0.7:
            first = T if kv_mode != "recursion" else draw.randint(T // 2, T)
            rest = [draw.randint(1, first) for _ in range(r - 1)]
            capacity = tuple(n / T for n in (first, *sorted(rest, reverse=True)))
        if routing == "expert" and draw.random() < 0.2:
            router = "random"
        sizes = dict(
            vocab_size=draw.randint(5, 50), block_size=T, n_head=4, n_kv_head=draw.choice((1, 2, 4)),
            n_embd=8 * draw.randint(1, 3), n_ffn=draw.randint(5, 40),
            n_layer=draw.randint(1, 3) * r + 2 * sharing.startswith("middle"),
        )  # fmt: skip
        kind = dict(
            sharing=sharing, n_recursion=r, routing=routing, kv_mode=kv_mode, capacity=capacity,
            router_type=router, balancing=draw.choice(("loss", "loss_free")),
            sampling="none" if router == "random" else draw.choice(CHOICES["sampling"]),
        )  # fmt: skip
        configs.append(ModelConfig(**sizes, **kind))
    return configs


def name(c: ModelConfig) -> str:
    return f"{c.sharing}-R{c.n_recursion}-{c.routing}-{c.kv_mode}-{c.router_type}-kv{c.n_kv_head}"


CONFIGS = random_configs(90, seed=1)
each_config = pytest.mark.parametrize("config", CONFIGS, ids=name)


def active_sets(c: ModelConfig, length: int) -> list[set[int]]:
    """Nested random sets of active positions per recursion step."""
    shares, sets = [1.0] * c.n_recursion, []
    if c.routing == "expert":
        shares = c.capacity
    if c.routing == "token":
        shares = [(c.n_recursion - r) / c.n_recursion for r in range(c.n_recursion)]
    left, draw = range(length), random.Random(0)
    for share in shares:
        left = sorted(draw.sample(left, int(share * length + 1e-9)))
        sets.append(set(left))
    return sets


def walk(c: ModelConfig, sets: list[set[int]], length: int):
    """Per unrolled layer: active positions, positions whose keys it sees, whether it makes keys."""
    everyone, used = set(range(length)), set()
    for physical, step in zip(c.plan, c.steps):
        active = everyone if step is None else sets[step]
        if c.kv_mode == "recursion" or physical not in used:
            yield active, active, True
        else:
            yield active, everyone, c.kv_mode == "shared_update"
        used.add(physical)


def count_router(c: ModelConfig, n_out: int) -> int:
    d = c.n_embd
    return {"linear": d * n_out, "mlp": d * 2 * d + 2 * d * n_out,
            "wide_mlp": d * 4 * d + 4 * d * n_out, "random": 0}[c.router_type]  # fmt: skip


# ---- published figures -------------------------------------------------------------------------------


def test_equal_data_flops():
    """At as many tokens as vanilla, MoR takes the FLOPs that the main table lists."""
    vanilla = ModelConfig(**preset("vanilla-360m"))
    equal = [r for r in published.read("main.csv") if r["model"] == "mor" and r["tokens_B"] == "20"]
    for row in equal:
        spent = 16.5 * paper_flops(published.config_of(row)) / paper_flops(vanilla)
        assert f"{spent:.1f}" == row["flops_1e18"], row
    assert len(equal) == 3


# ---- against loops -----------------------------------------------------------------------------------


@each_config
def test_paper_flops_by_loops(config):
    """Square projections and, for the causal half, one multiply-add per channel, query and key."""
    d, total = config.n_embd, 0
    for active, keys, makes_keys in walk(config, active_sets(config, T), T):
        for _ in active:
            total += 2 * d * d * (4 if makes_keys else 2) + 3 * 2 * d * config.n_ffn
            for _ in keys:
                total += 2 * d  # scores and values, 4d, for half of the pairs
    assert paper_flops(config) == pytest.approx(total / T, rel=1e-12)


@each_config
@pytest.mark.parametrize("length", [T, 2 * T])
def test_exact_flops_by_loops(config, length):
    """Every pair of query and visible key; a set of positions and its mirror image, averaged."""
    config = replace(config, block_size=length)
    d, kv_width = config.n_embd, config.n_kv_head * config.n_embd // config.n_head
    sets = active_sets(config, length)
    mirrored = [{length - 1 - i for i in s} for s in sets]
    total = 0
    for which in (sets, mirrored):
        total += 2 * d * config.vocab_size * length
        for active, keys, makes_keys in walk(config, which, length):
            for query in active:
                total += 2 * (d * d + d * d + 3 * d * config.n_ffn + makes_keys * 2 * d * kv_width)
                total += sum(4 * d for key in keys if key <= query)
        if config.routing == "token":
            total += 2 * count_router(config, config.n_recursion) * length
        if config.routing == "expert":
            for scored in [set(range(length)), *which][:-1]:
                routers = 2 if config.sampling == "aux_router" else 1
                total += 2 * routers * count_router(config, 1) * len(scored)
    assert exact_flops(config) == pytest.approx(total / 2 / length, rel=1e-12)
    assert flops.train_step_flops(config, 100) == pytest.approx(300 * exact_flops(config))


@pytest.mark.parametrize("kv_mode", ["recursion", "shared", "shared_update"])
def test_exact_flops_of_counted_tokens(kv_mode):
    """Counted depths cost what capacities of just these shares cost, and the router."""
    token = ModelConfig(block_size=T, routing="token", kv_mode=kv_mode)
    free = dict(block_size=T, router_type="random", sampling="none")
    expert = ModelConfig(kv_mode=kv_mode, capacity=(1, 10 / T, 3 / T), **free)
    router = 2 * parameters(token).router
    assert exact_flops(token, [T, 10, 3]) == pytest.approx(exact_flops(expert) + router)


@each_config
def test_cache_bytes_by_loops(config):
    rows = 0
    for active, _, makes_keys in walk(config, active_sets(config, T), T):
        rows += makes_keys * len(active if config.kv_mode == "recursion" else range(T))
    assert cache_bytes(config, T, 2) == rows * 2 * config.n_kv_head * config.head_dim * 2


def test_cache_ratios():
    """(R+1)/2R of the full caches recursion-wise, 1/R shared, all with update."""
    for r in (2, 3, 4):
        kind = dict(sharing="cycle", n_layer=12, n_recursion=r)
        full = cache_bytes(ModelConfig(**kind, routing="none"), 240, 4)
        assert cache_bytes(ModelConfig(**kind), 240, 4) == full * (r + 1) / (2 * r)
        assert cache_bytes(ModelConfig(**kind, kv_mode="shared"), 240, 4) == full / r
        assert cache_bytes(ModelConfig(**kind, kv_mode="shared_update"), 240, 4) == full


def test_whole_tokens():
    """k = max(1, floor(c * T)): 3 of 10 at a third, and one token where the floor is none."""
    config = ModelConfig(capacity=(1, 1 / 3, 0.01))
    assert flops.active_tokens(config, 10) == [10, 10, 10, 3, 3, 1, 1, 10]


def test_run_steps():
    """Six sequences of 256 a step: 1536 tokens."""
    config, batch = ModelConfig(), dict(global_batch_size=6, max_iters=0)
    assert run_steps(config, TrainConfig(max_iters=7)) == 7
    assert run_steps(config, TrainConfig(**batch, max_tokens=15_000)) == 10
    budget = 9.6 * 1536 * paper_flops(config)
    assert run_steps(config, TrainConfig(**batch, max_flops=budget)) == 10
    with pytest.raises(ValueError, match="finite"):
        budget_steps(config, float("inf"), 1)


def test_a_router_of_ones_own_asks_for_its_cost(monkeypatch):
    monkeypatch.setitem(CHOICES, "router_type", (*CHOICES["router_type"], "deep"))
    with pytest.raises(ValueError, match="'deep'.*ROUTER_HIDDEN in flops.py"):
        exact_flops(ModelConfig(router_type="deep"))
    monkeypatch.setitem(flops.ROUTER_HIDDEN, "deep", 3)
    assert parameters(ModelConfig(router_type="deep")).router == 3 * 3 * 192 * (192 + 1)


# ---- against the real model --------------------------------------------------------------------------


@each_config
def test_parameters_of_the_module(config):
    found = {"router": 0, "embedding": 0, "non_embedding": 0}
    for key, p in MoR(config).named_parameters():
        place = "router" if "router" in key else "embedding" if "embed" in key else "non_embedding"
        found[place] += p.numel()
    assert parameters(config)._asdict() == found


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.routing != "token"], ids=name)
def test_matrices_of_a_real_pass(config):
    """Rows that go through each nn.Linear of a top-k pass, times its weights; 5 is no whole share."""
    length = T + 5
    config = replace(config, block_size=length)
    mor, counted = MoR(config), []

    def count(module, args, output):
        counted.append(2 * module.weight.numel() * args[0].numel() // module.in_features)

    for module in mor.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    rows = ragged_batch(torch.tensor([0, length]), length)
    mor.hidden(torch.randint(config.vocab_size, (length,)), rows, rule="top-k")
    attention, d = 0.0, config.n_embd
    layers = walk(config, active_sets(config, length), length)
    for n, (_, keys, _) in zip(flops.active_tokens(config, length), layers):
        attention += 4 * d * n * (len(keys) + 1) / 2
    head = 2 * d * config.vocab_size * length
    assert exact_flops(config) * length == pytest.approx(sum(counted) + attention + head, rel=1e-12)


# ---- the commands ------------------------------------------------------------------------------------


def run(*args: str) -> str:
    done = subprocess.run([sys.executable, FLOPS, *args], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


def test_table_command():
    lines = run().splitlines()
    compared = [line for line in lines if line.endswith(("  ok", "  DIFFERS"))]
    kinds = [line.split()[0] for line in compared]
    assert [kinds.count(k) for k in ("steps", "tokens", "batch", "params")] == [9, 36, 3, 32]
    assert lines[-1] == "80 figures: 80 ok, 0 differ"
    assert "14160" in lines[-3] and "14163" in lines[-2]


@pytest.mark.parametrize(
    "file, right, wrong",
    [
        ("run_lengths.csv", ",9438", ",9440"),
        ("isoflop.csv", ",53.3,", ",53.4,"),
        ("relative_batch.csv", ",48", ",47"),
        ("main.csv", ",167,", ",168,"),
        ("sharing.csv", ",157,16,sequence", ",157,17,sequence"),
        ("kv_sharing.csv", "vanilla,295", "vanilla,296"),
        ("fixed_params.csv", "mor,2,118", "mor,2,119"),
        ("scale_1p7b.csv", ",0.87,", ",0.88,"),
    ],
)
def test_table_notices_a_wrong_figure(tmp_path, monkeypatch, capsys, file, right, wrong):
    folder = shutil.copytree(published.FOLDER, tmp_path / "published")
    text = (folder / file).read_text()
    assert right in text
    (folder / file).write_text(text.replace(right, wrong, 1))
    monkeypatch.setattr(published, "FOLDER", folder)
    assert flops.main([]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_config_command(tmp_path):
    (tmp_path / "x.py").write_text('preset = "mor-360m"\nmax_flops = 16.5e18\nbatch_size = 64\n')
    out = run(str(tmp_path / "x.py"), "--gradient_accumulation_steps=16", "--n_recursion=4")
    told = {line[:22].strip(): line[22:] for line in out.splitlines()}
    assert told["layers"] == "34 unrolled, 10 physical"
    assert told["tokens per step"] == "2,097,152 = 64 sequences x 16 x 2048"
    assert told["budget"].startswith("14,216 steps")
    row = 2048 * 2 * 5 * 64 * 4  # tokens; keys and values; KV heads; head width; float32
    for mode, rows in ("shared", 10), ("shared_update", 34), ("recursion", 22):
        assert told[f"cache {mode}"].startswith(f"{rows * row / 2**20:.4g} MiB per sequence of 2048")
    assert told["cache recursion"].endswith("in float32 (chosen)")
    assert told["implied speed-up"].startswith(f"{14216 / 9438:.3f}x")
    assert told["implied speed-up"].endswith("over vanilla of 32 layers")


def test_config_command_without_a_file():
    out = run("--max_iters=123", "--capacity=1,.5,.25", "--capacity_warmup=9")
    assert "expert-choice" in out and "123 steps, 251.9 k tokens" in out
    out = run("--sharing=none", "--n_recursion=1", "--routing=none", "--max_tokens=20480")
    assert "1.000x as the paper counts, 1.000x exact" in out
    assert "10 steps" in out and "on a CPU" in out


def test_tokens_of_a_large_vocabulary_take_four_bytes():
    for vocab_size, told in ((2**16, "4.096 MB"), (2**16 + 1, "8.192 MB")):
        lines = dict(flops.cost_lines(*build({"vocab_size": vocab_size, "max_iters": 1000})))
        assert lines["tokens on disk"].startswith(told)


@pytest.mark.parametrize(
    "bad", ["--n_layr=3", "no/such.py", "--n_layer=9", "--preset=mor-9b", "--max_flops=1e999"]
)
def test_bad_input(bad, capsys):
    assert flops.main([bad]) == 2
    done = capsys.readouterr()
    assert done.out == "" and done.err.startswith("error: ") and done.err.count("\n") == 1

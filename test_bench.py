"""The benchmark's tables on a tiny size: rows, ratios and activity agree; no test asserts a time."""

import re

import pytest
import torch

import bench
import bench_generate
import checkpoint
import modelconfig
from flops import exact_flops
from modelconfig import PUBLISHED, SIZES, ModelConfig, preset

SEQ = 48


@pytest.fixture
def tiny(monkeypatch):
    """A size of 14 layers, so that R = 2 and R = 3 both divide the inner ones."""
    size = dict(n_layer=14, n_embd=32, n_ffn=48, n_head=4, n_kv_head=2, init_std=0.1)
    monkeypatch.setitem(SIZES, "tiny", size)
    monkeypatch.setitem(PUBLISHED, "vocab_size", 300)
    monkeypatch.setattr(modelconfig, "PRESETS", [f"{kind}-tiny" for kind in modelconfig.KINDS])


def table(capsys, *options: str) -> tuple[str, dict[str, list[str]], str]:
    """Header, rows by name and closing lines of `bench.py train`."""
    command = ["train", "--preset=tiny", f"--seq={SEQ}", "--device=cpu", "--rounds=2", *options]
    assert bench.main(command) == 0
    what, machine, _, *lines = capsys.readouterr().out.splitlines()
    n = len(bench.TRAINED)
    rows = {name: line[len(name) :].split() for name, line in zip(bench.TRAINED, lines[:n])}
    assert all(line.startswith(name) for name, line in zip(bench.TRAINED, lines))
    return what + machine, rows, " ".join(lines[n:])


def test_rows_and_ratios(tiny, capsys):
    header, rows, _ = table(capsys, "--batch=2")
    for told in ("tiny: forward and backward, without the optimizer and its memory", "cpu", "threads",
                 torch.__version__, "float32", f"seq {SEQ}", "batch 2"):  # fmt: skip
        assert told in header
    for layers, *_, measured, implied, ratio in rows.values():
        assert layers == "14"
        expected = float(measured.rstrip("x")) / float(implied.rstrip("x"))
        assert float(ratio) == pytest.approx(expected, abs=0.003 * (1 + expected))
    assert rows["vanilla"][-3:] == ["1.000x", "1.000x", "1.000"]
    assert rows["recursive R=3"][-2] == "1.000x"  # as many unrolled layers, all tokens in each
    for name, (kind, given) in bench.TRAINED.items():
        if "token" in name:
            continue
        config = ModelConfig(**preset(f"{kind}-tiny", block_size=SEQ, **given))
        vanilla = ModelConfig(**preset("vanilla-tiny", block_size=SEQ))
        assert rows[name][-2] == f"{exact_flops(vanilla) / exact_flops(config):.3f}x"


def test_measured_is_the_median_of_ratios_within_a_round(tiny, capsys, monkeypatch):
    """A machine that grows slower from round to round; recursive takes twice as long as vanilla."""
    rounds, cost = iter(range(100)), {"none": 1, "middle_cycle": 2}

    def train_step(model, ids, machine):
        slowness = 10 ** (next(rounds) // len(bench.TRAINED))
        return slowness * cost[model.config.sharing], [1.0] * model.config.n_recursion

    monkeypatch.setattr(bench, "train_step", train_step)
    _, rows, closing = table(capsys, "--rounds=3")
    assert [row[-3] for row in rows.values()] == ["1.000x", *["0.500x"] * 4]
    assert all(row[-2] == "1.000x" for row in list(rows.values())[:2])
    assert "100.0% 100.0% 100.0%" in closing


@pytest.mark.parametrize("leave", [True, False])
def test_implied_follows_measured_activity(tiny, capsys, monkeypatch, leave):
    """Every token made to leave after the first step, or after the last one."""

    def bias(model, ids, machine):
        model.router[0].balance_bias[0 if leave else -1] = 100

    monkeypatch.setattr(bench, "even_depths", bias)
    _, rows, closing = table(capsys)
    vanilla = ModelConfig(**preset("vanilla-tiny", block_size=SEQ))
    token = ModelConfig(**preset("mor-tiny", block_size=SEQ, routing="token"))
    active = [SEQ, 0, 0] if leave else [SEQ] * 3
    implied = exact_flops(vanilla) / exact_flops(token, active)
    assert rows["MoR token R=3"][-2] == f"{implied:.3f}x"
    assert (implied > 1.5) if leave else (implied < 1)
    assert ("100.0% 0.0% 0.0%" if leave else "100.0% 100.0% 100.0%") in closing


def test_even_depths(tiny):
    given = {**bench.TRAINED["MoR token R=3"][1], "block_size": 300}
    model = bench.MoR(ModelConfig(**preset("mor-tiny", **given)))
    ids, machine = torch.randint(300, (1, 300)), bench.Machine("cpu")
    bench.even_depths(model, ids, machine)
    _, active = bench.train_step(model, ids, machine)
    assert active == pytest.approx([1, 2 / 3, 1 / 3], abs=0.02)


def test_peak_memory_is_that_of_the_model_alone():
    """64 MiB freed before and 64 MiB held throughout do not count; 32 MiB freed since do."""
    machine, mib = bench.Machine("cpu"), 2**20
    held, freed = (torch.ones(16 * mib) for _ in range(2))
    del freed
    before = machine.reset_peak()
    if before is None:
        pytest.skip("this system does not tell the peak of resident memory")
    x = torch.ones(8 * mib)
    del x
    y = torch.ones(mib)
    assert (machine.peak() - before) / mib == pytest.approx(32, abs=8)
    assert held.sum() + y.sum() == 17 * mib


# ---- python bench.py generate ------------------------------------------------------------------------


def generated(capsys, *options: str) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """Header, rows and closing lines of `bench.py generate`."""
    command = ["generate", "--preset=tiny", "--tokens=12", "--batch=6", "--device=cpu", *options]
    assert bench.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = re.split(r"  +", lines[2])
    end = next(i for i, line in enumerate(lines) if line.startswith("Tokens/s."))
    rows = [dict(zip(heads, re.split(r"  +", line), strict=True)) for line in lines[3:end]]
    return lines[:2], rows, lines[end:]


def test_generation_in_equal_batches_and_equal_memory(tiny, capsys):
    _, rows, closing = generated(capsys, "--requests=14")
    assert [(row["model"], row["batch"]) for row in rows] == [
        ("vanilla 14 layers", "6"), ("recursive R=3", "6"), ("MoR R=2", "6"), ("MoR R=3", "6"),
        ("MoR R=4", "6"), ("MoR R=2", "8"), ("MoR R=3", "9"), ("MoR R=4", "9"),
    ]  # fmt: skip
    for row in rows:
        over, implied = (float(row[name].rstrip("x")) for name in ("over vanilla", "implied"))
        if row["ratio"] != "–":
            assert float(row["ratio"]) == pytest.approx(over / implied, abs=0.02)
        if row["model"].startswith("MoR"):  # drawn depths follow the capacities 1, (R-1)/R, …
            r = int(row["model"][-1])
            assert float(row["depth"]) == pytest.approx((r + 1) / 2, rel=0.15)
            assert implied > 1.1
    assert rows[0]["over vanilla"] == "1.00x"
    for row in rows[:2]:  # recursion alone saves neither
        assert row["by weights"] == row["implied"] == "1.00x"
    assert "depths are drawn" in " ".join(closing)
    assert "its matrices alone" in closing[-1]


def test_generation_of_one_recursion_number(tiny, capsys):
    _, rows, _ = generated(capsys, "--requests=6", "--recursions=3")
    names = ["vanilla 14 layers", "recursive R=3", "MoR R=3", "MoR R=3"]
    assert [row["model"] for row in rows] == names


def test_generation_takes_the_depths_of_a_checkpoint(tiny, capsys, monkeypatch, tmp_path):
    """And computes in the machine's dtype: rows of its cache take as many bytes as those of vanilla."""

    class LikeGPU(bench_generate.Machine):
        def __init__(self, device):
            super().__init__(device)
            self.dtype = "bfloat16"

    monkeypatch.setattr(bench_generate, "Machine", LikeGPU)
    torch.manual_seed(0)
    model = bench.MoR(ModelConfig(**preset("mor-tiny", block_size=32, n_recursion=2)))
    torch.nn.init.zeros_(model.router[1].weight)  # scores of 0: the causal rule keeps every token
    checkpoint.save(tmp_path / "c.pt", model, encoding="bytes", step=0)
    _, rows, closing = generated(capsys, f"--checkpoint={tmp_path}/c.pt", "--requests=8")
    assert [row["model"] for row in rows] == ["vanilla 14 layers", "checkpoint", "checkpoint"]
    assert [row["depth"] for row in rows] == ["1.00", "2.00", "2.00"]
    assert rows[0]["cache"] == rows[1]["cache"]
    assert "drawn" not in " ".join(closing)
    command = ["generate", "--device=cpu", f"--checkpoint={tmp_path}/c.pt", "--tokens=17"]
    assert bench.main(command) == 2
    assert "34 tokens exceed the context of 32" in capsys.readouterr().err


@pytest.mark.parametrize("keeps", [0.25, 0.5, 2 / 3, 1.0])
def test_drawn_depths_keep_their_share(keeps):
    h = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0))
    kept = bench_generate.DrawnDepth(keeps)(h)[:, 0] > 0
    assert kept.float().mean() == pytest.approx(keeps, abs=0.015)
    assert (kept == (bench_generate.DrawnDepth(keeps)(h.flip(0)) > 0)[:, 0].flip(0)).all()
    last = kept & torch.roll(kept, 1)
    assert last.float().mean() == pytest.approx(keeps**2, abs=0.015)  # neighbours are independent


def test_a_missing_library_is_told_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(bench_generate.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["generate", "--transformers", "--device=cpu"]) == 2
    assert capsys.readouterr().err.endswith("run: pip install transformers.\n")


@pytest.mark.parametrize("kind", ["vanilla", "recursive"])
def test_a_pass_of_all_steps_reads_every_unrolled_layer_and_the_head(tiny, kind):
    config, machine = ModelConfig(**preset(f"{kind}-tiny", block_size=16)), bench.Machine("cpu")
    unrolled = bench_generate.random_model(bench_generate.vanilla_of(config), machine)
    n_weight = sum(p.numel() for p in unrolled.parameters()) - config.n_embd  # the last norm is small
    engine = bench_generate.Engine(bench_generate.random_model(config, machine), max_batch=2)
    outcome = bench_generate.serve(engine, [5, 5], machine)
    assert outcome.weight_bytes == 4 * n_weight * 5 / 10  # 5 passes made 10 tokens


def test_lengths_are_normal_around_the_mean():
    drawn = bench_generate.lengths(1000, 256)
    assert min(drawn) >= 1 and max(drawn) < 512
    assert sum(drawn) / 1000 == pytest.approx(256, abs=8)
    assert torch.tensor(drawn).double().std() == pytest.approx(64, abs=6)


@pytest.mark.parametrize(
    "options, told",
    [
        ((), "command"),
        (("generate", "--gather=1.5"), "--gather"),
        (("generate", "--tokens=0"), "--tokens"),
        (("generate", "--recursions=2,"), "--recursions"),
        (("generate", "--checkpoint=nowhere.pt"), "nowhere.pt"),
        (("trian",), "trian"),
        (("train", "--preset=135"), "'135m'"),
        (("train", "--seq=0"), "--seq"),
        (("train", "--batch=-1"), "--batch"),
        (("train", "--rounds=two"), "--rounds"),
        (("train", "--round=2"), "--round"),
        (("train", "--device=tpu"), "cpu"),
        (("train", "--device=cuda:99"), "cpu"),
    ],
)
def test_bad_options(options, told, capsys):
    assert bench.main(list(options)) == 2
    done = capsys.readouterr()
    assert done.out == "" and told in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1

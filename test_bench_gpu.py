"""The GPU benchmark where there is no GPU: all of it runs, counts are right, failures stay apart."""

import pytest
import torch

import bench
import kernels
from bench_gpu import SECTIONS, goals
from gpu_cases import PASSES, SHAPES, Run, make_case


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_dry_run(capsys, tmp_path):
    assert bench.main(["gpu", "--dry", f"--out={tmp_path}/results"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("DRY RUN") and not any(tmp_path.iterdir())
    for name in SECTIONS:
        assert f"\n{name}, at" in out
    failed = [line for line in out.splitlines() if "failed:" in line]
    assert len(failed) == 2 and all("varlen" in line for line in failed)  # it has no code for a CPU
    for goal in goals({}):
        row = next(line for line in out.splitlines() if line.startswith(goal["goal"]))
        assert "not measured" not in row


def test_a_failure_costs_one_line(capsys, monkeypatch):
    def breaks(run):
        """Breaks."""
        yield {"pass": "forward", "case": "one", "time": 0.5, "c2": 0.25}
        raise RuntimeError("no such thing\nas this")

    monkeypatch.setitem(SECTIONS, "capacity", (breaks, 10))
    monkeypatch.setattr(kernels, "paged_attention", None)
    assert bench.main(["gpu", "--dry", "--only=capacity,decode,tuning"]) == 0
    out = capsys.readouterr().out
    assert "failed: capacity: RuntimeError: no such thing\n" in out
    assert "failed: 2 sequences of 64 keys, pages of 16: TypeError" in out
    assert "fast as 64 rows" in out and "2 failures" in out
    assert next(line for line in out.splitlines() if "15% of c²" in line).split()[-6:-3] == [
        "not",
        "met",
        "(0",
    ]


def test_sections_that_do_not_fit_are_named(capsys):
    assert bench.main(["gpu", "--dry", "--only=attention,training", "--limit=1"]) == 0
    out = capsys.readouterr().out
    assert "attention: skipped" in out and "training: skipped" in out


@pytest.mark.parametrize("mode, share", SHAPES)
def test_pairs_and_flops(mode, share):
    torch.manual_seed(0)
    run = Run(dry=True, limit=100)
    short, long = (make_case(run, *at, (3, 1), mode, share) for at in ((32, 4), (64, 2)))
    for case in (short, long):
        keys = case.keys or case.queries
        same = case.queries.sequence()[:, None] == keys.sequence()
        pairs = (same & (keys.pos <= case.queries.pos[:, None])).sum()
        assert case.pairs() == pairs and case.flops(16) == pairs * 3 * 16 * 2 * 2
        steps = case.queries.pos.diff()[case.queries.sequence().diff() == 0]
        assert (steps > 0).all()
    assert len(short.queries.pos) == len(long.queries.pos)


def test_goals():
    row = {what: {"ratio": {"flex": 1.5, "varlen": 0.8}} for what in PASSES}
    trained = [{"case": "vanilla", "ratio": 1.0}, {"case": "MoR", "ratio": 0.95}]
    figures = {
        "correctness": [{"met": True}, {"met": False}],
        "attention": [row],
        "capacity": [{"time": 0.5, "c2": 0.45}],
        "training": trained,
    }
    verdicts = [(goal["verdict"], goal["worst"]) for goal in goals(figures)]
    assert verdicts == [("not met (1 of 2 do)", 0), ("met", 1.5), ("not met (0 of 2 do)", 0.8),
                        ("met", pytest.approx(10 / 9)), ("met", 0.95)]  # fmt: skip
    assert {goal["verdict"] for goal in goals({})} == {"not measured"}


@pytest.mark.parametrize(
    "interpreted, options, told",
    [
        (False, (), "TRITON_INTERPRET=1"),
        (True, ("--only=atention",), "atention"),
        (True, ("--limit=0",), "--limit"),
    ],
)
def test_refused(interpreted, options, told, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", interpreted)
    assert bench.main(["gpu", *options]) == 2
    done = capsys.readouterr()
    assert done.out == "" and told in done.err and done.err.count("\n") == 1

"""Cool-downs off one plateau: each as a run of its budget alone, whatever stops it in between."""

import errno
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import checkpoint
import train
from branches import learning_rate, plan
from flops import paper_flops
from settings import TrainConfig, build
from test_train import TINY_MODEL, arguments, assert_same_run, dataset, one_sentence, start  # noqa: F401

STEP = 64 * paper_flops(build(TINY_MODEL)[0])  # FLOPs of a step: 2 sequences of 32 tokens


def budgets(*steps: int) -> str:
    return ",".join(repr(n * STEP) for n in steps)


def folder(out_dir: Path, steps: int) -> Path:
    """Of the budget that pays so many steps."""
    (config, t), size = build(TINY_MODEL | {"budgets": (steps * STEP,), "out_dir": str(out_dir)}), 2
    t.global_batch_size = size
    (branch,) = plan(config, t)
    assert branch.steps == steps
    return branch.folder


def branched(data: str, out_dir: Path, *steps: int, **more) -> list[str]:
    given = {"budgets": budgets(*steps), **more}
    argv = arguments(data, out_dir, **given)
    return [a for a in argv if not a.startswith("--warmup_iters") or "warmup_iters" in more]


def alone(data: str, out_dir: Path, steps: int, **more) -> Path:
    assert train.main(arguments(data, out_dir, max_flops=steps * STEP, **more)) == 0
    return out_dir


def test_folders_bear_the_names_of_their_budgets():
    config, t = build(
        {"preset": "mor-360m", "budgets": (5e18, 2e18, 16.5e18), "global_batch_size": 1024}
    )
    branches = plan(config, t)
    assert [str(b.folder) for b in branches] == [
        "out/budget-2e18", "out/budget-5e18", "out/budget-1.65e19",
    ]  # fmt: skip
    assert [b.steps for b in branches] == [1716, 4291, 14160]
    config, t = build({"budgets": (8e10, 1e12), "global_batch_size": 8})
    assert [b.folder.name for b in plan(config, t)] == ["budget-8e10", "budget-1e12"]


@pytest.mark.parametrize("cooldown", [0.2, 0.0, 0.5, 0.37])
@pytest.mark.parametrize("warmup_iters", [0, 3, 60])
def test_the_plateau_is_what_all_budgets_share(cooldown, warmup_iters):
    steps = (2, 3, 7, 10, 41, 100)
    given = {**TINY_MODEL, "budgets": tuple(n * STEP for n in steps), "global_batch_size": 2}
    config, t = build({**given, "cooldown": cooldown, "warmup_iters": warmup_iters})
    longest = TrainConfig(max_iters=100, cooldown=cooldown, warmup_iters=warmup_iters)
    for branch, n in zip(plan(config, t), steps):
        single = TrainConfig(max_iters=n, cooldown=cooldown, warmup_iters=warmup_iters)
        assert branch.steps == n and 0 < branch.start < n
        for step in range(branch.start):
            assert learning_rate(single, step) == learning_rate(longest, step)
        assert n - branch.start <= cooldown * n + 2  # and the plateau is as long as it can be


@pytest.mark.parametrize("more", [
    {"routing": "token", "balancing": "loss_free", "warmup_iters": 4},
    {"router_type": "random", "sampling": "none", "capacity_warmup": 15},
], ids=["token", "expert"])  # fmt: skip
def test_each_budget_ends_as_a_run_of_its_own(more, dataset, tmp_path, capsys):  # noqa: F811
    all_steps = (6, 11, 20)
    assert train.main(branched(dataset, tmp_path / "all", *all_steps, eval_interval=4, **more)) == 0
    out = capsys.readouterr().out
    given = {"warmup_iters": 1, "eval_interval": 4, **more}  # 1 is 5% of 6 steps, at least 1
    for steps in all_steps:
        branch = folder(tmp_path / "all", steps)
        assert_same_run(branch, alone(dataset, tmp_path / str(steps), steps, **given))
        assert f"to {branch / 'checkpoint.pt'}" in out
        assert checkpoint.load(branch / "plateau.pt")["step"] == int(steps * 0.8)
    assert checkpoint.load(tmp_path / "all" / "checkpoint.pt")["step"] == 16
    # What is done stays done, and larger budgets prolong the plateau; one of them leaves it at its end.
    again = [f"--out_dir={tmp_path / 'all'}", "--resume"]
    assert train.main(again) == 0 and "all budgets" in capsys.readouterr().out
    assert train.main([*again, f"--budgets={budgets(6, 21, 25)}"]) == 0
    for steps in (21, 25):
        one = alone(dataset, tmp_path / str(steps), steps, **given)
        assert_same_run(folder(tmp_path / "all", steps), one)


def test_a_stop_in_a_cool_down_goes_on_there(dataset, tmp_path, monkeypatch):  # noqa: F811
    real, stops = train.update, [3, 9, 10]  # the plateau, the first and the second cool-down

    def interrupt(run, step):
        if stops and step == stops[0]:
            stops.pop(0)
            signal.raise_signal(signal.SIGTERM)
        return real(run, step)

    argv = branched(dataset, tmp_path / "all", 10, 12)
    monkeypatch.setattr(train, "update", interrupt)
    for resume in ([], ["--resume"], ["--resume"]):
        assert train.main([*argv, *resume]) == 0
    assert not stops
    monkeypatch.undo()
    assert train.main([*argv, "--resume"]) == 0
    for steps in (10, 12):
        one = alone(dataset, tmp_path / str(steps), steps, warmup_iters=1)
        assert_same_run(folder(tmp_path / "all", steps), one)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_kills_at_random_moments_change_nothing(kills, dataset, tmp_path):  # noqa: F811
    all_steps, out_dir, moments = (60, 90, 120), tmp_path / "all", random.Random(7)
    argv, killed = branched(dataset, out_dir, *all_steps, eval_interval=3), 0

    def written() -> list:
        return [(p, p.stat().st_size) for p in sorted(out_dir.rglob("*.jsonl"))]

    for _ in range(kills):
        before, process = written(), start([*argv, "--resume"])
        # The first steps come after some seconds of imports; then a moment at random.
        while process.poll() is None and written() == before:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 3 / kills))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        for path in out_dir.rglob("*.pt"):
            checkpoint.load(path)
    assert killed >= min(kills, 2)
    assert train.main([*argv, "--resume"]) == 0
    for steps in all_steps:
        one = alone(dataset, tmp_path / str(steps), steps, warmup_iters=3, eval_interval=3)
        assert_same_run(folder(out_dir, steps), one)


def test_budgets_that_cannot_be_served_are_one_sentence(dataset, tmp_path, capsys):  # noqa: F811
    for more, culprit in (
        ({"budgets": budgets(5, 5)}, "must be different"), ({"budgets": "1e9,-1"}, "above 0"),
        ({"budgets": budgets(5), "schedule": "cosine"}, "schedule='trapezoid'"),
        ({"budgets": budgets(1, 5)}, "give 2 or more"), ({"budgets": "1e9", "max_iters": 5}, "budgets"),
    ):  # fmt: skip
        assert train.main(arguments(dataset, tmp_path / "out", **more)) == 2
        assert culprit in one_sentence(capsys) and not (tmp_path / "out").exists()
    assert train.main(branched(dataset, tmp_path / "all", 20)) == 0
    again = ["--resume", f"--budgets={budgets(10, 20)}"]
    assert train.main([f"--out_dir={tmp_path / 'all'}", *again]) == 2
    assert "which" in (error := one_sentence(capsys)) and "has passed" in error
    alone(dataset, tmp_path / "alone", 5)
    assert train.main([f"--out_dir={tmp_path / 'alone'}", *again]) == 2
    assert "was not begun with budgets" in one_sentence(capsys)
    with pytest.raises(ValueError, match="max_flops and budgets"):
        build({"budgets": (1e9,), "max_flops": 1e9})


def test_settings_of_a_branch_are_those_of_its_budget_alone(dataset, tmp_path):  # noqa: F811
    assert train.main(branched(dataset, tmp_path, 10)) == 0
    given = checkpoint.load(folder(tmp_path, 10) / "checkpoint.pt", tuple(checkpoint.TYPES))["settings"]
    assert given["max_flops"] == 10 * STEP and given["warmup_iters"] == 1
    assert "budgets" not in given and torch.is_tensor(
        checkpoint.load(folder(tmp_path, 10) / "plateau.pt")["model"]["model.norm.weight"]
    )


def test_a_branch_whose_folder_is_gone_begins_anew_at_the_end_of_the_plateau(dataset, tmp_path):  # noqa: F811
    argv = branched(dataset, tmp_path / "all", 6, 12)
    assert train.main(argv) == 0
    shutil.rmtree(folder(tmp_path / "all", 12))
    assert train.main([f"--out_dir={tmp_path / 'all'}", "--resume"]) == 0
    assert_same_run(folder(tmp_path / "all", 12), alone(dataset, tmp_path / "12", 12, warmup_iters=1))


def test_a_branch_is_of_one_run_and_of_its_plateau(dataset, tmp_path, capsys):  # noqa: F811
    argv = branched(dataset, tmp_path, 6, 12)
    assert train.main(argv) == 0
    branch = folder(tmp_path, 12)
    (branch / "checkpoint.pt").unlink()
    assert train.main([f"--out_dir={branch}", "--resume"]) == 2
    assert f"resume {tmp_path}, or give that budget" in one_sentence(capsys)
    with checkpoint.sole_writer(branch):
        assert train.main([f"--out_dir={tmp_path}", "--resume"]) == 2
    assert f"another run is writing to {branch}" in one_sentence(capsys)
    for name in ("checkpoint.pt", "metrics.jsonl"):
        (tmp_path / name).unlink()
    before = (folder(tmp_path, 6) / "plateau.pt").read_bytes()
    assert train.main([*argv, "--seed=7"]) == 2
    assert "whose own checkpoint is gone; move it away" in one_sentence(capsys)
    assert (folder(tmp_path, 6) / "plateau.pt").read_bytes() == before


def test_a_full_disk_where_a_budget_leaves_is_told(dataset, tmp_path, monkeypatch, capsys):  # noqa: F811
    real = checkpoint.save

    def full(path, *args, **state):
        if path.name == "plateau.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, *args, **state)

    monkeypatch.setattr(checkpoint, "save", full)
    argv = branched(dataset, tmp_path, 12, eval_interval=4)
    assert train.main(argv) == 2
    error = one_sentence(capsys)
    assert "plateau.pt cannot be written: No space left" in error and "goes on from step 8" in error
    monkeypatch.undo()
    assert train.main([*argv, "--resume"]) == 0

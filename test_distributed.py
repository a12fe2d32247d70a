"""Two processes on one CPU train what one trains; when one fails, all end, with its reason."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import train
from flops import paper_flops, train_step_flops
from settings import build
from test_train import ROOT, TINY_MODEL, arguments, dataset, losses, wait_for, weights  # noqa: F401

STEPS = 6
KINDS = {
    "expert": {"routing": "expert"},
    "token_loss_free": {"routing": "token", "balancing": "loss_free"},
    "random_warm_up": {
        "routing": "expert", "router_type": "random", "sampling": "none", "capacity_warmup": 15,
    },
    "vanilla": {"routing": "none", "sharing": "none", "n_recursion": 1},
    "shared": {"routing": "expert", "kv_mode": "shared", "activation_checkpointing": True},
}  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
FLOPS = paper_flops(build(TINY_MODEL)[0])  # per token
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def torchrun(argv: list[str], status: int = 0, program: Path = ROOT / "train.py") -> tuple[str, str]:
    done = subprocess.run(
        [*TORCHRUN, str(program), *argv], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done.stdout, done.stderr


def assert_close(a: Path, b: Path) -> None:
    """The same figures, weights and bias, but for the order in which numbers were added."""
    ones, twos = losses(a), losses(b)
    assert len(ones) == len(twos) == STEPS
    for step, one in ones.items():
        assert one.keys() == twos[step].keys()
        for name, value in one.items():
            assert twos[step][name] == pytest.approx(value, abs=1e-5, rel=1e-5), (step, name)
    for name, w in weights(a).items():
        torch.testing.assert_close(w, weights(b)[name], rtol=1e-3, atol=1e-5)


slow = pytest.mark.slow
QUICK = ("token_loss_free", "ddp"), ("expert", "fsdp")


@pytest.mark.parametrize("kind, parallel", [
    pytest.param(kind, parallel, marks=() if (kind, parallel) in QUICK else slow)
    for kind in KINDS for parallel in ("ddp", "fsdp")
])  # fmt: skip
def test_two_processes_train_what_one_trains(kind, parallel, dataset, tmp_path):  # noqa: F811
    more = dict(max_iters=STEPS, global_batch_size=8, eval_interval=3, eval_iters=3, peak_flops=1e9)
    more |= KINDS[kind]
    assert train.main(arguments(dataset, tmp_path / "one", **more)) == 0
    out, _ = torchrun(arguments(dataset, tmp_path / "two", parallel=parallel, **more))
    assert out.count(" steps of 256 tokens on cpu") == 1  # rank 0 alone speaks
    assert_close(tmp_path / "one", tmp_path / "two")
    state = checkpoint.load(tmp_path / "two" / "checkpoint.pt")
    assert state["settings"]["batch_size"] == 2 and state["settings"]["global_batch_size"] == 8
    flops = train_step_flops(build(TINY_MODEL | KINDS[kind])[0], 1)
    for out_dir, n_device in (("one", 1), ("two", 2)):  # a share of what all devices could do
        line = json.loads((tmp_path / out_dir / "metrics.jsonl").read_text().splitlines()[0])
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / (n_device * 1e9))


@pytest.mark.parametrize("first, parallel, kind", [
    (2, "ddp", "expert"), *(pytest.param(*case, "token_loss_free", marks=slow) for case in (
        (1, "fsdp"), (1, "ddp"), (2, "fsdp"), (2, "ddp"))),
])  # fmt: skip
def test_a_run_goes_on_with_another_number_of_processes(
    first, parallel, kind, dataset, tmp_path  # noqa: F811
):  # fmt: skip
    more = dict(global_batch_size=4, parallel=parallel, cooldown=0, **KINDS[kind])
    assert train.main(arguments(dataset, tmp_path / "one", max_iters=STEPS, **more)) == 0
    halves = tmp_path / "halves"
    # Without a cool-down, all steps but the last are the same whatever the budget.
    parts = (
        arguments(dataset, halves, max_iters=3, **more),
        [f"--out_dir={halves}", "--resume", f"--max_iters={STEPS}"],
    )
    for argv, n_process in zip(parts, (first, 3 - first)):
        torchrun(argv) if n_process == 2 else train.main(argv)
    assert_close(tmp_path / "one", halves)


CULPRIT = """
import os, sys
sys.path.insert(0, {root!r})
import train
real = train.update
def update(run, step):
    if step == 2 and os.environ["RANK"] == "1":
        raise ValueError("the culprit is process 1.")
    return real(run, step)
train.update = update
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_failing_process_ends_the_job_with_its_reason(dataset, tmp_path):  # noqa: F811
    program = tmp_path / "culprit.py"
    program.write_text(CULPRIT.format(root=str(ROOT)))
    _, errors = torchrun(arguments(dataset, tmp_path / "out", max_iters=10**6), 1, program)
    assert "the culprit is process 1." in errors


def test_variables_that_are_not_torchruns_are_told_or_left_alone(monkeypatch):
    program = str(ROOT / "distributed.py")
    monkeypatch.setenv("RANK", "1")  # a rank that writes nothing
    assert runpy.run_path(program)["RANK"] == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert runpy.run_path(program)["RANK"] == 1
    monkeypatch.delenv("RANK")
    refused = pytest.raises(ValueError, match="WORLD_SIZE=2 says .* or unset WORLD_SIZE.$")
    with refused, runpy.run_path(program)["processes"]():
        pass


def test_what_all_processes_refuse_is_told_once(dataset, tmp_path):  # noqa: F811
    _, errors = torchrun(arguments(dataset, tmp_path / "out", global_batch_size=7), 1)
    assert errors.count("global_batch_size=7 does not divide among 2 processes") == 1
    assert "process 0 of 2" in errors and not (tmp_path / "out").exists()


@slow
def test_a_stop_saves_and_branches_go_on_with_one_process(dataset, tmp_path):  # noqa: F811
    """Two processes along the plateau, SIGTERM to torchrun, the rest by one process."""
    out_dir, budgets = tmp_path / "all", ",".join(str(n * 128 * FLOPS) for n in (60, 200))
    more = dict(global_batch_size=4, eval_interval=20)
    argv = arguments(dataset, out_dir, budgets=budgets, **more)
    process = subprocess.Popen(
        [*TORCHRUN, str(ROOT / "train.py"), *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    wait_for(lambda: list(out_dir.glob("budget-*/plateau.pt")), process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "stopped and saved at step" in out
    assert 48 <= checkpoint.load(out_dir / "checkpoint.pt")["step"] < 160
    assert train.main([f"--out_dir={out_dir}", "--resume"]) == 0
    assert train.main(arguments(dataset, tmp_path / "one", max_iters=60, **more)) == 0
    (branch,) = (f for f in out_dir.glob("budget-*") if max(losses(f)) == 60)
    ones, twos = losses(tmp_path / "one"), losses(branch)
    assert ones.keys() == twos.keys()
    for step in (1, 10, 30):  # rounding grows with the steps
        assert twos[step]["loss"] == pytest.approx(ones[step]["loss"], abs=1e-4)
    assert twos[60]["loss"] == pytest.approx(ones[60]["loss"], abs=1e-2)


@slow
def test_two_nodes_are_as_one(dataset, tmp_path):  # noqa: F811
    more = dict(max_iters=STEPS, global_batch_size=8, **KINDS["token_loss_free"])
    assert train.main(arguments(dataset, tmp_path / "one", **more)) == 0
    argv = arguments(dataset, tmp_path / "two", **more)
    nodes = [
        subprocess.Popen(
            [*TORCHRUN[:3], "--nnodes=2", "--nproc_per_node=2", f"--node_rank={rank}",
             "--master_addr=127.0.0.1", "--master_port=29591", str(ROOT / "train.py"), *argv],
            env=ENVIRONMENT,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    assert_close(tmp_path / "one", tmp_path / "two")

"""Training as a user meets it: runs that resume bit for bit, kills, signals, refusals."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import checkpoint
import train
from dataset import write_dataset
from settings import TrainConfig, build
from tokenizer import get_encoding

ROOT = Path(__file__).parent
TINY = {
    "n_layer": 5, "n_embd": 16, "n_ffn": 32, "n_head": 2, "n_kv_head": 1, "block_size": 32,
    "batch_size": 2, "warmup_iters": 3, "log_interval": 1, "eval_interval": 1000, "eval_iters": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    """A small dataset of random words; its folder serves as --dataset."""
    folder, words = tmp_path_factory.mktemp("data"), random.Random(1)
    text = {
        split: [" ".join(f"w{words.randrange(50)}" for _ in range(900))] for split in ("train", "val")
    }
    write_dataset(folder, get_encoding("bytes"), text)
    return str(folder)


def arguments(data: str, out_dir: Path, **more) -> list[str]:
    return [f"--{k}={v}" for k, v in {**TINY, "dataset": data, "out_dir": out_dir, **more}.items()]


def losses(out_dir: Path) -> dict[int, dict]:
    """Logged lines by step, without the clock's figures."""
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in x.items() if k != "tokens_per_s"} for x in lines if "loss" in x]
    assert [x["step"] for x in kept] == list(range(1, len(kept) + 1))  # each step once, in order
    return {x["step"]: x for x in kept}


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(out_dir / "checkpoint.pt")["model"]


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    for name, w in weights(a).items():
        assert torch.equal(w, weights(b)[name]), name


KINDS = {
    "expert": {"routing": "expert"},
    "expert_warm_up": {"routing": "expert", "capacity_warmup": 15, "gradient_accumulation_steps": 2},
    "expert_random": {"routing": "expert", "router_type": "random", "sampling": "none"},
    "token_loss_free": {"routing": "token", "balancing": "loss_free"},
    "token_loss": {"routing": "token", "schedule": "cosine"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_equals_straight_run_bit_for_bit(kind, dataset, tmp_path, monkeypatch):
    assert train.main(arguments(dataset, tmp_path / "straight", max_iters=20, **KINDS[kind])) == 0

    # Stop the second run at step 10, as Ctrl-C would.
    real_evaluate = train.learning_rate

    def interrupt_at_10(t, step):
        if step == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return real_evaluate(t, step)

    monkeypatch.setattr(train, "learning_rate", interrupt_at_10)
    argv = arguments(dataset, tmp_path / "halves", max_iters=20, **KINDS[kind])
    assert train.main(argv) == 0
    assert checkpoint.load(tmp_path / "halves" / "checkpoint.pt")["step"] == 10
    monkeypatch.undo()
    assert train.main([f"--out_dir={tmp_path / 'halves'}", "--resume"]) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "halves")


def start(argv: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, ROOT / "train.py", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_kills_at_random_moments_lose_nothing(dataset, tmp_path):
    common = dict(max_iters=80, eval_interval=2)
    assert train.main(arguments(dataset, tmp_path / "straight", **common)) == 0
    argv, moments, kills = arguments(dataset, tmp_path / "killed", **common), random.Random(5), 0
    path = tmp_path / "killed" / "checkpoint.pt"
    while True:
        process = start([*argv, "--resume"] if path.exists() else argv)
        # The first steps come after some seconds of imports; then a moment at random, mid-write or not.
        metrics, before = tmp_path / "killed" / "metrics.jsonl", kills
        size = metrics.stat().st_size if metrics.exists() else -1
        while kills < 10 and process.poll() is None:
            if metrics.exists() and metrics.stat().st_size > max(0, size):
                time.sleep(moments.uniform(0, 0.06))
                process.kill()
                process.wait()
                kills += 1
                break
            time.sleep(0.005)
        if path.exists():
            assert checkpoint.load(path)["step"] % 2 == 0
        if kills == before:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            break
    assert kills >= 10
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_exit_cleanly(number, dataset, tmp_path):
    process = start(arguments(dataset, tmp_path, max_iters=100000))
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "--resume" in out and not errors
    step = checkpoint.load(tmp_path / "checkpoint.pt")["step"]
    assert step == max(losses(tmp_path))
    assert not list(tmp_path.glob("tmp_*"))


def test_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(dataset, tmp_path, capsys):
    argv = arguments(dataset, tmp_path, max_iters=4, eval_interval=2)
    assert train.main(argv) == 0
    good = weights(tmp_path)
    # An overflow in the weights: one huge step, the loss after it is not a number.
    argv = [
        f"--out_dir={tmp_path}",
        "--resume",
        "--max_iters=40",
        "--learning_rate=1e30",
        "--warmup_iters=0",
    ]
    assert train.main(argv) == 2
    error = capsys.readouterr().err
    assert "not finite at step" in error and str(tmp_path / "checkpoint.pt") in error
    assert all(torch.equal(w, good[name]) for name, w in weights(tmp_path).items())


def test_learning_rate_schedules():
    t = TrainConfig(max_iters=100, learning_rate=2.0, warmup_iters=10, cooldown=0.2)
    rate = [train.learning_rate(t, s) for s in range(100)]
    assert rate[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rate[9:81] == pytest.approx([2.0] * 72)
    assert rate[81:] == pytest.approx([2.0 * (100 - s) / 20 for s in range(81, 100)])
    t.schedule = "cosine"
    rate = [train.learning_rate(t, s) for s in range(101)]
    assert rate[9:11] == pytest.approx([2.0, 2.0])
    assert rate[55] == pytest.approx(1.0) and rate[100] == pytest.approx(0.0)
    assert all(a >= b for a, b in zip(rate[10:], rate[11:]))


def test_only_matrices_decay():
    model = train.MoR(build({k: TINY[k] for k in list(TINY)[:6]})[0])
    decayed, plain = train.make_optimizer(model, TrainConfig()).param_groups
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_budgets_in_tokens_and_flops_give_their_steps(dataset, tmp_path, capsys):
    assert train.main(arguments(dataset, tmp_path / "tokens", max_tokens=5 * 64)) == 0
    assert max(losses(tmp_path / "tokens")) == 5
    config, _ = build({k: TINY[k] for k in list(TINY)[:6]})
    flops = 3 * 64 * train.budget_steps(config, 1e12, 1) ** -1 * 1e12
    assert train.main(arguments(dataset, tmp_path / "flops", max_flops=flops)) == 0
    assert max(losses(tmp_path / "flops")) == 3


def test_evaluation_is_the_mean_over_the_validation_windows(dataset, tmp_path):
    assert train.main(arguments(dataset, tmp_path, max_iters=3)) == 0
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["val"]
    model = checkpoint.load_model(checkpoint.load(tmp_path / "checkpoint.pt"))
    x, y = train.Windows(train.Tokens(dataset, "val"), 32, 0).in_order(4)
    for rule in ("top-k", "causal"):
        with torch.no_grad():
            nats = [model(a[None], b[None], rule)[1]["lm_loss"].item() for a, b in zip(x, y)]
        assert last[rule]["loss"] == pytest.approx(sum(nats) / 4, abs=1e-5)
        # One byte a token, except where a document ends.
        n_bytes = int((y != 256).sum())
        assert last[rule]["bits_per_byte"] == pytest.approx(
            sum(nats) * 32 / math.log(2) / n_bytes, rel=1e-5
        )
    assert 0 <= last["top-k"]["dead"] <= 1 and len(last["causal"]["active"]) == 3


REFUSED = {
    "other_model": (["--resume", "--n_embd=32"], "n_embd=16"),
    "other_seed": (["--resume", "--seed=5"], "seed=1337"),
    "nothing_left": (["--resume"], "larger --max_iters"),
    "no_resume": ([], "--resume"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_finished_run_is_not_overwritten(case, dataset, tmp_path, capsys):
    argv = arguments(dataset, tmp_path, max_iters=2)
    assert train.main(argv) == 0
    before = (tmp_path / "checkpoint.pt").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()
    more, culprit = REFUSED[case]
    assert train.main([*argv, *more]) == 2
    error = capsys.readouterr().err
    assert culprit in error and error.count("\n") == 1
    assert before == (
        (tmp_path / "checkpoint.pt").read_bytes(),
        (tmp_path / "metrics.jsonl").read_bytes(),
    )


def test_bad_input_is_one_sentence(dataset, tmp_path, capsys):
    for more, culprit in (
        ({"dataset": "nowhere"}, "nowhere"),
        ({"vocab_size": 100}, "vocab_size=100"),
        ({"block_size": 100000}, "block_size"),
        ({"n_layer": 6}, "n_layer"),
        ({"device": "cuda:9"}, "cuda:9"),
    ):
        out_dir = tmp_path / "out"
        assert train.main(arguments(dataset, out_dir, **more)) == 2, more
        error = capsys.readouterr().err
        assert culprit in error and error.count("\n") == 1, error
        assert not out_dir.exists()


def test_damaged_checkpoints_are_refused(dataset, tmp_path, capsys):
    argv = arguments(dataset, tmp_path, max_iters=2)
    assert train.main(argv) == 0
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a checkpoint", b""):
        path.write_bytes(damaged)
        assert train.main([*argv, "--resume", "--max_iters=4"]) == 2
        assert str(path) in capsys.readouterr().err
    torch.save({"model": {}}, path)
    assert train.main([*argv, "--resume", "--max_iters=4"]) == 2
    assert "not a checkpoint" in capsys.readouterr().err

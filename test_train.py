"""Training as a user meets it: runs that resume bit for bit, kills, signals, refusals."""

import json
import math
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import checkpoint
import train
from dataset import Tokens, Windows, write_dataset
from flops import paper_flops
from measure import fitting_batch
from settings import TrainConfig, build
from tokenizer import get_encoding

ROOT = Path(__file__).parent
TINY_MODEL = {"n_layer": 5, "n_embd": 16, "n_ffn": 32, "n_head": 2, "n_kv_head": 1, "block_size": 32}
TINY = {
    **TINY_MODEL, "batch_size": 2, "warmup_iters": 3, "log_interval": 1, "eval_interval": 1000,
    "eval_iters": 2,
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
    clocked = ("tokens_per_s", "mfu")
    kept = [{k: v for k, v in x.items() if k not in clocked} for x in lines if "loss" in x]
    assert [x["step"] for x in kept] == list(range(1, len(kept) + 1))  # each step once, in order
    return {x["step"]: x for x in kept}


def one_sentence(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


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

    # Stop the second run in step 10, as Ctrl-C would.
    real_update = train.update

    def interrupt_in_10(run, step):
        if step == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return real_update(run, step)

    monkeypatch.setattr(train, "update", interrupt_in_10)
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


def wait_for(condition, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_at_random_moments_lose_nothing(kills, dataset, tmp_path):
    common = dict(max_iters=100, eval_interval=2)
    assert train.main(arguments(dataset, tmp_path / "straight", **common)) == 0
    argv, moments = arguments(dataset, tmp_path / "killed", **common), random.Random(5)
    path, metrics = tmp_path / "killed" / "checkpoint.pt", tmp_path / "killed" / "metrics.jsonl"
    for _ in range(kills):
        size = metrics.stat().st_size if metrics.exists() else 0
        process = start([*argv, "--resume"] if path.exists() else argv)
        # The first steps come after some seconds of imports; then a moment at random, mid-write or not.
        wait_for(lambda size=size: metrics.exists() and metrics.stat().st_size > size, process)
        time.sleep(moments.uniform(0, 0.06))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        if path.exists():
            assert checkpoint.load(path)["step"] % 2 == 0
        else:
            metrics.unlink()  # a new run does not write over another's log
        assert {f.name for f in path.parent.glob("*.tmp")} <= {"checkpoint.pt.tmp", "metrics.jsonl.tmp"}
    assert train.main([*argv, "--resume"] if path.exists() else argv) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    assert not list(path.parent.glob("*.tmp"))


def test_a_signal_saves_and_exits_cleanly(dataset, tmp_path):
    process = start(arguments(dataset, tmp_path, max_iters=100000))
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, process)
    process.send_signal(signal.SIGTERM)  # Ctrl-C: see the resumed runs above
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "--resume" in out and not errors
    step = checkpoint.load(tmp_path / "checkpoint.pt")["step"]
    assert step == max(losses(tmp_path))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_signal_at_any_moment_saves_before_it_stops(dataset, tmp_path, monkeypatch, capsys):
    real, calls = train.mean_figures, []

    def interrupt_while_logging(passes):
        calls.append(passes)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(passes)

    monkeypatch.setattr(train, "mean_figures", interrupt_while_logging)
    assert train.main(arguments(dataset, tmp_path, max_iters=20)) == 0
    step = checkpoint.load(tmp_path / "checkpoint.pt")["step"]
    assert f"stopped and saved at step {step};" in capsys.readouterr().out
    assert step == max(losses(tmp_path)) < 20


def test_settings_given_anew_hold_from_there_on(dataset, tmp_path):
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 0
    argv = [f"--out_dir={tmp_path}", "--resume", "--max_iters=4", "--weight_decay=0.5", "--beta1=0.8"]
    assert train.main(argv) == 0
    matrices, vectors = checkpoint.load(tmp_path / "checkpoint.pt")["optimizer"]["param_groups"]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.5, 0)
    assert matrices["betas"] == vectors["betas"] == (0.8, 0.95)


def test_capacity_warm_up_counts_forward_passes(dataset, tmp_path, monkeypatch):
    passes = []
    monkeypatch.setattr(train.MoR, "warm_up_capacity", lambda model, number: passes.append(number))
    more = dict(max_iters=3, gradient_accumulation_steps=2, capacity_warmup=9)
    assert train.main(arguments(dataset, tmp_path, **more)) == 0
    assert passes == list(range(6))


def test_balance_is_that_of_all_passes_together():
    passes = [
        {"lm_loss": torch.tensor(x), "counts": torch.tensor(n), "load": None, "max_vio": None}
        for x, n in ((1.0, [6, 0, 0]), (2.0, [0, 3, 3]))
    ]
    for p in passes:
        p["load"] = p["counts"] / p["counts"].sum()
        p["max_vio"] = p["load"].max() / p["load"].mean() - 1
    figures = train.mean_figures(passes)
    assert figures["counts"] == [6, 3, 3] and figures["load"] == [0.5, 0.25, 0.25]
    assert figures["max_vio"] == pytest.approx(0.5) and figures["loss"] == 1.5


@pytest.mark.parametrize("kind", ["expert", "token_loss"])
def test_loss_is_the_cross_entropy_and_total_loss_what_is_minimised(kind, dataset, tmp_path):
    assert train.main(arguments(dataset, tmp_path, max_iters=2, **KINDS[kind])) == 0
    coefficients = {"aux_loss": 0.001, "balance_loss": 0.1}
    for line in losses(tmp_path).values():
        added = sum(c * line.get(name, 0) for name, c in coefficients.items())
        assert line["total_loss"] == pytest.approx(line["loss"] + added) != line["loss"]
        assert "lm_loss" not in line


@pytest.mark.parametrize("routing", ["expert", "token"])
def test_documents_on_their_own_train_and_resume(routing, tmp_path):
    """One short document after another: each is learned without a look at those before it."""
    folder = tmp_path / "data"
    texts = [f"n{n} = {n * n}\n" for n in range(400)]
    write_dataset(folder, get_encoding("bytes"), {"train": texts, "val": texts})

    def run(name: str, max_iters: int, within_documents: bool = True) -> Path:
        more = {"routing": routing, "max_iters": max_iters, "cooldown": 0.0}
        argv = arguments(folder, tmp_path / name, **more, within_documents=within_documents)
        assert train.main(argv) == 0
        return tmp_path / name

    straight, halves = run("straight", 6), run("halves", 3)
    assert losses(straight)[1]["loss"] != losses(run("across", 1, False))[1]["loss"]
    assert train.main([f"--out_dir={halves}", "--resume", "--max_iters=6"]) == 0
    assert_same_run(straight, halves)


def test_compile_auto_is_for_one_graph_on_a_gpu():
    def compiles(on_gpu=True, **given):
        return train.compiles(*build(given), on_gpu)

    assert compiles() and compiles(routing="none")
    for given in ({"on_gpu": False}, {"routing": "token"}, {"capacity_warmup": 5}, {"compile": "no"}):
        assert not compiles(**given)
        if "compile" not in given:
            assert compiles(**given, compile="yes")


def test_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(dataset, tmp_path, capsys):
    argv = arguments(dataset, tmp_path, max_iters=4, eval_interval=2)
    assert train.main(argv) == 0
    good = weights(tmp_path)
    # An overflow in the weights: one huge step, the loss after it is not a number.
    argv = [f"--out_dir={tmp_path}", "--resume", "--max_iters=40"]
    assert train.main([*argv, "--learning_rate=1e30", "--warmup_iters=0"]) == 2
    error = one_sentence(capsys)
    assert "not finite at step" in error and f"go on from {tmp_path / 'checkpoint.pt'}" in error
    assert all(torch.equal(w, good[name]) for name, w in weights(tmp_path).items())
    argv = arguments(dataset, tmp_path / "new", learning_rate=1e30, warmup_iters=0)
    assert train.main(argv) == 2
    error = one_sentence(capsys)
    assert "in a new --out_dir" in error and "--resume" not in error


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
    model = train.MoR(build(TINY_MODEL)[0])
    decayed, plain = train.make_optimizer(model, TrainConfig()).param_groups
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_budgets_in_tokens_and_flops_give_their_steps(dataset, tmp_path, capsys):
    assert train.main(arguments(dataset, tmp_path / "tokens", max_tokens=5 * 64)) == 0
    assert max(losses(tmp_path / "tokens")) == 5
    config, _ = build(TINY_MODEL)
    flops = 3 * 64 * paper_flops(config)
    assert train.main(arguments(dataset, tmp_path / "flops", max_flops=flops)) == 0
    assert max(losses(tmp_path / "flops")) == 3


def test_evaluation_is_the_mean_over_the_validation_windows(dataset, tmp_path):
    assert train.main(arguments(dataset, tmp_path, max_iters=3)) == 0
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["val"]
    model = checkpoint.load_model(checkpoint.load(tmp_path / "checkpoint.pt"))
    x, y = Windows(Tokens(dataset, "val"), 32, 0).in_order(4)
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


def test_a_finished_run_is_not_overwritten(dataset, tmp_path, capsys):
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 0
    files = (tmp_path / "checkpoint.pt", tmp_path / "metrics.jsonl")
    before = [file.read_bytes() for file in files]
    for more, culprit in (
        ({"resume": True, "n_embd": 32}, "n_embd=16"), ({"resume": True, "seed": 5}, "seed=1337"),
        ({"resume": True}, "larger --max_iters"), ({}, "--resume"),
    ):  # fmt: skip
        assert train.main(arguments(dataset, tmp_path, max_iters=2, **more)) == 2
        assert culprit in one_sentence(capsys)
        assert before == [file.read_bytes() for file in files]


def test_bad_input_is_one_sentence(dataset, tmp_path, capsys):
    for more, culprit in (
        ({"dataset": "nowhere"}, "nowhere"), ({"vocab_size": 100}, "vocab_size=100"),
        ({"block_size": 100000}, "block_size"), ({"n_layer": 6}, "n_layer"),
        ({"device": "cuda:9"}, "cuda:9"), ({"device": "meta"}, "device=meta"),
        ({"n_embd": 2**24, "vocab_size": 2**24}, "memory"), ({"batch_size": 10**12}, "batch_size"),
        ({"gradient_accumulation_steps": 10**18}, "gradient"),
    ):  # fmt: skip
        assert train.main(arguments(dataset, tmp_path / "out", **more)) == 2, more
        assert culprit in one_sentence(capsys) and not (tmp_path / "out").exists()


def test_damaged_checkpoints_are_refused(dataset, tmp_path, capsys):
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 0
    argv = arguments(dataset, tmp_path, max_iters=4, resume=True)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a checkpoint", b""):
        path.write_bytes(damaged)
        assert train.main(argv) == 2
        assert str(path) in one_sentence(capsys)
    path.write_bytes(whole)
    state = checkpoint.load(path)
    for w in state["model"].values():
        at = whole.index(w.numpy().tobytes())
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="is damaged .*checksum|is damaged .*CRC"):
            checkpoint.load(path)
    moments = state["optimizer"]["state"][0]
    for foreign, says in (
        ({"model": {}}, "not a checkpoint"),
        ({k: v for k, v in state.items() if k != "settings"}, "lacks settings"),
        ({k: v for k, v in state.items() if k != "optimizer"}, "lacks optimizer"),
        ({**state, "model_config": state["model_config"] | {"n_expert": 4}}, "n_expert"),
        ({**state, "settings": state["settings"] | {"n_expert": 4}}, "n_expert"),
        ({**state, "optimizer": {}}, "does not fit this version"),
        ({**state, "optimizer": {"state": {0: moments | {"exp_avg": torch.zeros(1)}}}}, "another shape"),
        ({**state, "optimizer": {"state": {999: moments}}}, "does not fit this version"),
        ({**state, "model": dict.fromkeys(state["model"], 5)}, "does not fit this version"),
        ({**state, "model": {}}, "does not fit this version"),
        ({**state, "model_config": state["model_config"] | {"n_layer": [5]}}, "n_layer takes one int"),
        ({**state, "settings": state["settings"] | {"seed": None}}, "seed takes one int"),
        ({**state, "settings": {5: 5}}, "no setting 5"),
        *(({**state, k: v}, f"lacks {k}") for k, v in (
            ("step", 2.5), ("step", True), ("encoding", 5), ("settings", []), ("model_config", None),
            ("model", torch.zeros(1)), ("optimizer", "x"), ("data", 5))),
        ({**state, "step": -1}, "lacks a step"),
        ([state], "lacks model"),
    ):  # fmt: skip
        torch.save(foreign, path)
        assert train.main(argv) == 2
        assert says in one_sentence(capsys)


def test_a_context_shorter_than_the_closing_prompt_is_no_error(dataset, tmp_path, capsys):
    assert train.main(arguments(dataset, tmp_path, max_iters=1, block_size=2)) == 0
    out = capsys.readouterr().out
    assert "sample.py" in out and "demo_vanilla" not in out  # advice for the demo alone


def test_a_failing_preparation_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "pystdlib").mkdir(parents=True)
    (tmp_path / "data" / "pystdlib" / "prepare.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr("dataset.ROOT", tmp_path)
    assert train.main([f"--out_dir={tmp_path / 'out'}"]) == 2
    assert "prepare.py failed" in one_sentence(capsys)


# ---- memory, reports, the published sizes -------------------------------------------------------------


def test_a_batch_size_of_auto_is_what_a_gpu_has_memory_for(monkeypatch):
    model = train.MoR(build(TINY_MODEL | {"capacity_warmup": 9})[0])
    weights, real, calls, room = sum(p.nbytes for p in model.parameters()), model.forward, [], 2

    def forward(ids, targets):
        calls.append((len(ids), model.capacity))
        if len(ids) > room:
            raise torch.OutOfMemoryError
        return real(ids, targets)

    monkeypatch.setattr(model, "forward", forward)
    free = (1000 + 3 * weights + 25 * 100) / 0.9 + 1  # room for 26
    for name, value in {
        "reset_peak_memory_stats": None, "memory_allocated": 5000, "empty_cache": None,
        "mem_get_info": (free, 10 * free),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5000 + 900 + 100 * calls[-1][0])
    assert fitting_batch(model, torch.autocast("cpu", enabled=False)) == 16
    room = 1
    assert fitting_batch(model, torch.autocast("cpu", enabled=False)) == 1
    assert calls == [(n, (1.0, 1.0, 1.0)) for n in (1, 2, 1, 2)]  # as at the start of a warm-up
    assert all(p.grad is None for p in model.parameters())


def test_weights_and_biases_gets_what_the_log_gets(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(arguments(dataset, tmp_path / "out", wandb="mor")) == 2
    assert "pip install wandb" in one_sentence(capsys) and not (tmp_path / "out").exists()
    calls = []

    class Project:
        def log(self, line, step):
            calls.append((step, line))

        def finish(self):
            calls.append("finished")

    class Wandb:
        @staticmethod
        def init(**given):
            calls.append(given)
            return Project()

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    assert train.main(arguments(dataset, tmp_path / "out", wandb="mor", max_iters=2)) == 0
    lines = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert calls[0]["project"] == "mor" and calls[0]["config"]["max_iters"] == 2
    assert [c[1] for c in calls[1:-1]] == lines and [c[0] for c in calls[1:-1]] == [1, 2, 2]
    assert calls[-1] == "finished"


def test_layers_computed_again_train_the_same_bits(dataset, tmp_path):
    for again in (False, True):
        argv = arguments(dataset, tmp_path / str(again), max_iters=3, activation_checkpointing=again)
        assert train.main(argv) == 0
    assert_same_run(tmp_path / "False", tmp_path / "True")


PUBLISHED = {path.stem: [str(path)] for path in sorted((ROOT / "config").glob("*_135m*.py"))} | {
    " ".join(more): [str(ROOT / "config" / f"mor_135m_{base}_r3.py"), *more]
    for base, more in (
        ("expert", ["--router_type=mlp"]), ("expert", ["--router_type=wide_mlp", "--router_func=tanh"]),
        ("expert", ["--router_type=random", "--sampling=none"]), ("expert", ["--sampling=aux_router"]),
        ("expert", ["--kv_mode=shared_update", "--activation_checkpointing"]),
        ("token", ["--balancing=loss_free"]), ("token", ["--router_type=mlp", "--router_func=sigmoid"]),
        ("token", ["--kv_mode=shared"]), ("token", ["--kv_mode=shared_update"]),
    )
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("run", PUBLISHED)
def test_the_published_135m_models_take_two_steps(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "sample_text", lambda *_: "")  # 300 passes through 32 layers
    small = dict(dataset="pystdlib", batch_size=1, block_size=64, max_iters=2, eval_iters=1)
    small |= dict(log_interval=1, out_dir=tmp_path)
    assert train.main([*PUBLISHED[run], *(f"--{k}={v}" for k, v in small.items())]) == 0
    assert all(8 < line["loss"] < 16 for line in losses(tmp_path).values())
    assert (tmp_path / "checkpoint.pt").stat().st_size > 3 * 4 * 60e6
    (tmp_path / "checkpoint.pt").unlink()


# ---- what the world does to a run --------------------------------------------------------------------


def test_kernels_and_plain_attention_train_alike(dataset, tmp_path):
    more = dict(max_iters=3, n_embd=32, n_layer=4, n_recursion=2, eval_iters=1)  # heads as kernels take
    runs = {}
    for attention in ("plain", "triton"):
        out_dir = tmp_path / attention
        assert train.main(arguments(dataset, out_dir, attention=attention, **more)) == 0
        runs[attention] = [line["loss"] for line in losses(out_dir).values()]
    assert runs["triton"] == pytest.approx(runs["plain"], rel=1e-5)


def test_a_copied_folder_goes_on_by_itself(dataset, tmp_path):
    first, copy = tmp_path / "first", tmp_path / "copy"
    assert train.main(arguments(dataset, first, max_iters=4)) == 0
    shutil.copytree(first, copy)
    before = (first / "checkpoint.pt").read_bytes()
    assert train.main([f"--out_dir={copy}", "--resume", "--max_iters=6", "--batch_size=0"]) == 0
    assert (first / "checkpoint.pt").read_bytes() == before and max(losses(copy)) == 6


@pytest.mark.parametrize(
    "streams",
    [
        ">/dev/full 2>&1",
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in (">/dev/full", "2>&1 | head -1", "<&- >&- 2>&-")
        ),
    ],
)
def test_broken_streams_stop_no_run(streams, dataset, tmp_path):
    words = [sys.executable, str(ROOT / "train.py"), *arguments(dataset, tmp_path / "out", max_iters=4)]
    command = f"set -o pipefail; {shlex.join(words)} {streams}"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert checkpoint.load(tmp_path / "out" / "checkpoint.pt")["step"] == 4


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_and_saves_except_under_nohup(ignored, dataset, tmp_path, monkeypatch):
    real = train.update

    def hang_up(run, step):
        os.kill(os.getpid(), signal.SIGHUP)
        return real(run, step)

    monkeypatch.setattr(train, "update", hang_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert train.main(arguments(dataset, tmp_path, max_iters=3)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == (3 if ignored else 1)


def test_a_machine_without_a_compiler_is_told(dataset, tmp_path, monkeypatch, capsys):
    failure = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})

    def compiling(run, step):
        raise failure("No working C++ compiler found in cxx: ('g++',)\n\nSet TORCH_LOGS")

    monkeypatch.setattr(train, "update", compiling)
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 2
    error = one_sentence(capsys)
    assert "No working C++ compiler found" in error and "or set --compile=no" in error


def test_ctrl_c_before_the_steps_is_one_line(dataset, tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "set_up", interrupt)
    assert train.main(arguments(dataset, tmp_path / "out")) == 130
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_full_disk_is_waited_for_until_the_end(dataset, tmp_path, monkeypatch, capsys):
    limit, real = resource.getrlimit(resource.RLIMIT_FSIZE), train.update
    full = range(5, 9)  # steps

    def fill_up(run, step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 if step in full else limit[0], limit[1]))
        return real(run, step)

    monkeypatch.setattr(train, "update", fill_up)
    try:
        assert train.main(arguments(dataset, tmp_path / "waits", max_iters=10, eval_interval=3)) == 0
        out = capsys.readouterr().out
        assert out.count("warning: ") == 2 and "free space; --resume goes on from step 3." in out
        assert train.main(arguments(dataset, tmp_path / "ends", max_iters=8, eval_interval=3)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "cannot be written: File too large; free space; --resume" in one_sentence(capsys)
    assert max(losses(tmp_path / "waits")) == 10
    assert checkpoint.load(tmp_path / "ends" / "checkpoint.pt")["step"] == 3
    monkeypatch.undo()
    assert train.main([f"--out_dir={tmp_path / 'ends'}", "--resume", "--max_iters=10"]) == 0
    assert max(losses(tmp_path / "ends")) == 10


def test_a_folder_is_of_one_run_and_its_log_is_kept(dataset, tmp_path, capsys):
    argv = arguments(dataset, tmp_path, max_iters=2)
    with checkpoint.sole_writer(tmp_path):
        assert train.main(argv) == 2
    assert "another run is writing" in one_sentence(capsys) and not list(tmp_path.iterdir())
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    assert train.main(argv) == 2
    assert "metrics.jsonl exists already" in one_sentence(capsys)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"


def test_a_link_to_a_checkpoint_stays_one(dataset, tmp_path):
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 0
    target = (tmp_path / "checkpoint.pt").rename(tmp_path / "elsewhere.pt")
    (tmp_path / "checkpoint.pt").symlink_to(target.name)
    assert train.main([f"--out_dir={tmp_path}", "--resume", "--max_iters=3"]) == 0
    assert (tmp_path / "checkpoint.pt").is_symlink() and checkpoint.load(target)["step"] == 3


def test_a_link_to_nowhere_is_told_before_the_steps(dataset, tmp_path, capsys):
    (tmp_path / "checkpoint.pt").symlink_to(tmp_path / "unmounted" / "checkpoint.pt")
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 2
    assert f"a link into {tmp_path / 'unmounted'}, which does not exist" in one_sentence(capsys)
    assert not (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "unmounted").mkdir()
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 0


def test_a_damaged_log_goes_on(dataset, tmp_path):
    assert train.main(arguments(dataset, tmp_path, max_iters=2)) == 0
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'5\n{"x": 1}\n\xff\n{"step": "2"}\n{"step": 1')
    assert train.main([f"--out_dir={tmp_path}", "--resume", "--max_iters=3"]) == 0
    assert max(losses(tmp_path)) == 3


def test_another_dataset_is_noticed(tmp_path, capsys):
    data, out_dir = tmp_path / "data", tmp_path / "out"
    for text, status in (("abc " * 300, 0), ("abd " * 300, 2)):
        write_dataset(data, get_encoding("bytes"), {"train": [text], "val": [text]})
        assert (
            train.main(arguments(str(data), out_dir, max_iters=2 + status, resume=bool(status)))
            == status
        )
    assert "is not the one" in one_sentence(capsys)


def test_folders_that_cannot_be_used_are_one_sentence(dataset, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "busy" / "metrics.jsonl").mkdir(parents=True)
    for out_dir in ("/proc/x", tmp_path / "file", tmp_path / "file" / "g", "x" * 300, tmp_path / "busy"):
        assert train.main(arguments(dataset, out_dir)) == 2
        assert str(out_dir) in one_sentence(capsys)

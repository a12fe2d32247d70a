"""Preparing datasets: every document once and in order, whatever kills, fills or damages the disk.

Kills are real: a process that prepares is ended by SIGKILL, then the same command is run again, and
what it leaves must be, byte for byte, what an undisturbed run leaves.
"""

import importlib.util
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import prepare
from dataset import Tokens, write_dataset
from tokenizer import get_encoding

ROOT = Path(__file__).resolve().parent
BYTES = get_encoding("bytes")
END = BYTES.eot_token


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", ROOT / "data" / name / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FINEWEB, TEXT = load("fineweb_edu"), load("text")


def one_sentence(message: str) -> str:
    assert message.endswith(".") and "\n" not in message and not re.search(r"\.\s+[A-Z]", message)
    return message


def texts(seed: int, n: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}:{i} " + "naïve text, 12 " * rng.randrange(60) for i in range(n)]


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder of three files, 900 documents."""
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(3):
        lines = [json.dumps({"text": text, "id": i}) for text in texts(i, 300)]
        (folder / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


ALL_TEXTS = [text for i in range(3) for text in texts(i, 300)]


def command(source, out, **options) -> list[str]:
    options = {"encoding": "bytes", "val_tokens": 5000, "shard_tokens": 30_000, "workers": 2} | options
    return [str(source), "--out", str(out), *(f"--{name}={value}" for name, value in options.items())]


def run(argv: list[str], script=FINEWEB) -> None:
    """The script, in this process; SystemExit with its message if it refuses."""
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = ["prepare.py", *argv]
    try:
        script.main()
    except ValueError as error:
        raise SystemExit(one_sentence(f"error: {error}")) from error
    finally:
        sys.argv, sys.stdout, sys.stderr = before


def forked(argv: list[str], seconds: float = 60, before=lambda: None) -> int | None:
    """The script in a process of its own: its exit status, or None if it was killed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            before()
            run(argv)
            status = 0
        except OSError:
            status = 3
        finally:
            os._exit(status)
    end = time.time() + seconds
    while time.time() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stream(folder: Path) -> list[int]:
    splits = [Tokens(folder, split) for split in ("val", "train")]
    for tokens in splits:
        tokens.verify(257)
    return [token for tokens in splits for token in tokens.read(0, len(tokens)).tolist()]


def tokens_of(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [*text.encode(), END]]


# --- what is written ------------------------------------------------------------------------------


def test_every_document_once_in_order_in_whole_shards(source, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    run(command(source, out))
    assert stream(out) == tokens_of(ALL_TEXTS)
    meta = json.loads((out / "meta.json").read_text())
    longest = max(len(text.encode()) + 1 for text in ALL_TEXTS)
    for shard in meta["shards"]:
        goal = 5000 if shard["file"] == "val_0000.bin" else 30_000
        assert shard == meta["shards"][-1] or goal <= shard["tokens"] < goal + longest
    for split in ("train", "val"):
        sums = meta["splits"][split]
        assert sums["tokens"] == len(Tokens(out, split)) == sums["bytes"] + sums["documents"]
    n = len(meta["splits"]["train"]["shards"])
    assert n > 5 and sum(s["documents"] for s in meta["splits"].values()) == 900
    names = {"meta.json", "val_0000.bin", *(f"train_{i:04}.bin" for i in range(n))}
    assert {path.name for path in out.iterdir()} == names
    said = capsys.readouterr()
    assert "GB of disk" in said.out and "complete after" in said.out and not said.err


def test_number_of_processes_changes_nothing(source, tmp_path, monkeypatch):
    run(command(source, tmp_path / "a"))
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)
    run(command(source, tmp_path / "b", workers=3))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_max_tokens_stops_at_a_document(source, tmp_path):
    run(command(source, tmp_path / "out", max_tokens="7e4"))
    train = Tokens(tmp_path / "out", "train")
    assert 70_000 <= len(train) < 71_000 and train.read(len(train) - 1, 1)[0] == END
    found = stream(tmp_path / "out")
    assert found == tokens_of(ALL_TEXTS)[: len(found)]


def test_large_vocabularies_take_four_bytes(source, tmp_path, monkeypatch):
    class Wide:
        n_vocab, eot_token = 100_000, 99_999

        def encode_ordinary(self, text):
            return [70_000 + len(text)]

    monkeypatch.setattr(prepare, "get_encoding", lambda name: Wide())
    monkeypatch.setattr(prepare, "sizes_of", lambda name: prepare.np.ones(100_000, dtype=int))
    run(command(source, tmp_path / "out", shard_tokens=1000, val_tokens=10))
    found = Tokens(tmp_path / "out", "val")
    assert found.shards[0].tokens.itemsize == 4
    assert found.read(0, 4).tolist() == [
        n for text in ALL_TEXTS[:2] for n in (70_000 + len(text), 99_999)
    ]


def test_text_goes_to_a_folder_in_data(tmp_path, monkeypatch):
    monkeypatch.setattr(TEXT, "ROOT", tmp_path)
    (tmp_path / "book.txt").write_text("One line of the book.\n" * 20_000)
    run(command(tmp_path / "book.txt", "mine"), TEXT)
    decoded = BYTES.decode(stream(tmp_path / "data" / "mine"))
    assert decoded.replace("<|endoftext|>", "") == "One line of the book.\n" * 20_000
    assert decoded.count("<|endoftext|>") == 7


def test_files_of_the_user_in_the_folder_stay(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("notes.tmp", "mine.bin.tmp", "train_0000.bin.ab12.tmp", "progress.json.tmp"):
        (out / name).write_text("someone's, or left by a kill")
    run(command(source, out))
    assert {path.name for path in out.glob("*.tmp")} == {"notes.tmp", "mine.bin.tmp"}


@pytest.mark.parametrize("number", ["inf", "nan", "0.5", "-1", "1e30", "many"])
def test_counts_that_are_none_are_named(source, tmp_path, capsys, number):
    with pytest.raises(SystemExit):
        run([*command(source, tmp_path / "out"), f"--max_tokens={number}"])
    assert f"--max_tokens: {number!r} is no number from 1 up" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", ".", "../data"])
def test_text_needs_a_name(source, out):
    with pytest.raises(SystemExit, match="names no folder in data/; give the dataset a name"):
        run([str(source), f"--out={out}"], TEXT)


def test_all_for_validation_is_refused_and_leaves_nothing(source, tmp_path):
    with pytest.raises(SystemExit, match="none for training; give more text, or fewer --val_tokens"):
        run(command(source, tmp_path / "out", val_tokens="1e9"))
    run(command(source, tmp_path / "out"))


# --- kills ----------------------------------------------------------------------------------------


def test_killed_at_random_moments(source, tmp_path):
    began = time.time()
    assert forked(command(source, tmp_path / "whole")) == 0
    took, rng, kills = time.time() - began, random.Random(0), 0
    while kills < 5:
        if forked(command(source, tmp_path / "out"), rng.uniform(0.05, 0.8) * took) is None:
            kills += 1
        else:  # done before the kill: again, from somewhere in the middle
            rng.choice(sorted((tmp_path / "out").glob("train_*.bin"))).unlink()
    assert forked(command(source, tmp_path / "out")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert stream(tmp_path / "out") == tokens_of(ALL_TEXTS)


def kill_at(function: str, call: int, first: bool):
    """Ends this process at that call of os.fsync or os.replace, before or after it is done."""
    whole, left = getattr(os, function), call

    def counted(*args):
        nonlocal left
        left -= 1
        if not left and first:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(*args)
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, function, counted)


def test_killed_at_every_kind_of_write(source, tmp_path):
    options = {"shard_tokens": 250_000, "workers": 1}
    assert forked(command(source, tmp_path / "whole", **options)) == 0
    whole = contents(tmp_path / "whole")
    writes = 2 * (len(whole) - 1) + 2  # each shard and its record, the empty record, meta.json
    for function, first in (("fsync", True), ("replace", False)):
        for call in range(1, writes + 1):
            out = tmp_path / f"{function}{call}"
            arm = lambda: kill_at(function, call, first)  # noqa: E731
            assert forked(command(source, out, **options), before=arm) is None
            if call < writes or first:
                with pytest.raises(ValueError, match="not finished"):
                    Tokens(out, "train")
            assert forked(command(source, out, **options)) == 0
            assert contents(out) == whole


def cli(argv: list[str]) -> subprocess.Popen:
    script = ROOT / "data" / "fineweb_edu" / "prepare.py"
    return subprocess.Popen(
        [sys.executable, script, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_killed_command_leaves_no_process(source, tmp_path):
    with open(source / "1.jsonl", "a") as file:
        file.writelines(json.dumps({"text": "a long document " * 4000}) + "\n" for _ in range(300))
    process, out = cli(command(source, tmp_path / "out")), tmp_path / "out"
    while not (out / "train_0001.bin").exists() and process.poll() is None:
        time.sleep(0.01)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    end = time.time() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.time() < end:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert (out / "progress.json").exists()


@pytest.mark.slow
def test_killed_twenty_times(source, tmp_path):
    for i in range(3):
        lines = [json.dumps({"text": text}) for text in texts(i, 4000)]
        (source / f"{i}.jsonl").write_text("\n".join(lines))
    options = {"shard_tokens": 50_000, "workers": 2}
    began = time.time()
    whole = cli(command(source, tmp_path / "whole", **options))
    assert whole.communicate() and whole.returncode == 0
    took, rng, kills, middle = time.time() - began, random.Random(0), 0, 0
    while kills < 20:
        process = cli(command(source, tmp_path / "out", **options))
        try:
            process.communicate(timeout=rng.uniform(0.3, 1) * took)
            # Done before the kill: begin again, from somewhere in the middle.
            shards = sorted((tmp_path / "out").glob("train_*.bin"))
            shards[rng.randrange(len(shards))].unlink()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            middle += (tmp_path / "out" / "progress.json").exists()
    process = cli(command(source, tmp_path / "out", **options))
    assert process.communicate() and process.returncode == 0 and middle > 5
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# --- disks ----------------------------------------------------------------------------------------


def test_too_small_a_disk_is_refused_beforehand(source, tmp_path, monkeypatch, capsys):
    real = prepare.shutil.disk_usage
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: real(path)._replace(free=10**5))
    with pytest.raises(SystemExit, match="0.00 GB free of about 0.00 needed; make room"):
        run(command(source, tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())
    assert "about 0.00 GB of disk" in capsys.readouterr().out
    run(command(source, tmp_path / "out", max_tokens=20_000))  # which fits


def test_full_disk_says_so_and_goes_on_later(source, tmp_path):
    out, script = tmp_path / "out", ROOT / "data" / "fineweb_edu" / "prepare.py"
    run(command(source, tmp_path / "whole"))

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        [sys.executable, script, *command(source, out)], preexec_fn=full, capture_output=True, text=True
    )
    assert done.returncode == 1 and "File too large" in one_sentence(done.stderr.strip())
    assert str(out / "train_0000.bin") in done.stderr
    assert {path.name for path in out.iterdir()} == {"progress.json", "val_0000.bin"}
    run(command(source, out))
    assert contents(out) == contents(tmp_path / "whole")


DAMAGE = {
    "cut short": (lambda raw: raw[:-7], "is cut short"),
    "empty": (lambda raw: b"", "is not a shard"),
    "flipped byte": (lambda raw: raw[:99] + bytes([raw[99] ^ 4]) + raw[100:], "is damaged"),
    "another shard": (None, "is not the file that was written"),
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shard_is_refused_then_made_anew(source, tmp_path, damage, finished):
    out, (edit, problem) = tmp_path / "out", DAMAGE[damage]
    run(command(source, out))
    whole = contents(out)
    if not finished:
        record = json.loads(whole["meta.json"])
        kept = {"plan": record["plan"], "shards": record["shards"][:4]}
        (out / "progress.json").write_text(json.dumps(kept))
        (out / "meta.json").unlink()
        (out / "train_0003.bin").unlink()
    path = out / "train_0001.bin"
    path.write_bytes(edit(path.read_bytes()) if edit else whole["train_0000.bin"])
    before = contents(out)
    with pytest.raises(
        SystemExit, match=f"train_0001.bin {problem}.*; remove that file, and this command"
    ):
        run(command(source, out))
    assert contents(out) == before
    path.unlink()
    run(command(source, out))
    assert contents(out) == whole


def test_finished_dataset_is_checked_and_left_alone(source, tmp_path):
    run(command(source, tmp_path / "out"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    run(command(source, tmp_path / "out"))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_other_plans_and_changed_inputs_are_refused(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(command(source, out))
    before = contents(out)
    for name, value in {"val_tokens": 6000, "shard_tokens": 7, "max_tokens": 9}.items():
        with pytest.raises(SystemExit, match=f"begun with {name} = .*, not {value}; repeat"):
            run(command(source, out, **{name: value}))
    monkeypatch.setattr(prepare, "sizes_of", lambda name: b"another tokenizer.json of that name")
    with pytest.raises(SystemExit, match="begun with vocabulary = "):
        run(command(source, out))
    monkeypatch.undo()
    with open(source / "1.jsonl", "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(SystemExit, match="begun with inputs = 3 files"):
        run(command(source, out))
    assert contents(out) == before


def test_folders_of_other_datasets_are_refused(source, tmp_path):
    for name in ("written", "stray", "garbage"):
        (tmp_path / name).mkdir()
    write_dataset(tmp_path / "written", BYTES, {"train": ["a"], "val": ["b"]})
    (tmp_path / "stray" / "train_0000.bin").write_text("someone's")
    (tmp_path / "garbage" / "meta.json").write_text('{"plan": {}, "shards": [{}]}')
    for name in ("written", "stray", "garbage"):
        before = contents(tmp_path / name)
        with pytest.raises(SystemExit, match=f"{name}.* some other dataset; give another --out"):
            run(command(source, tmp_path / name))
        assert contents(tmp_path / name) == before


def test_second_run_at_once_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(prepare, "PATIENCE", 0.2)
    with (
        prepare.locked(tmp_path / "out", "--out"),
        pytest.raises(SystemExit, match="another run is writing to .*give another --out"),
    ):
        run(command(source, tmp_path / "out"))


def die(name, batch):
    os._exit(9)


def test_killed_worker_ends_the_command(source, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "encode_batch", die)
    with pytest.raises(SystemExit, match="fewer --workers") as ended, prepare.command():
        run(command(source, tmp_path / "out"))
    one_sentence(str(ended.value))


# --- the hub --------------------------------------------------------------------------------------


class Stream:
    """What is used of a streamed dataset: its files, and the rows of each."""

    def __init__(self, rows, breaks_at=None):
        self.rows, self.num_shards, self.breaks_at = rows, 3, breaks_at

    def select_columns(self, names):
        assert names == ["text"]
        return self

    def shard(self, n, index):
        return Stream(self.rows[index * 300 : (index + 1) * 300], self.breaks_at)

    def skip(self, n):
        return Stream(self.rows[n:], self.breaks_at)

    def __iter__(self):
        for row in self.rows:
            if row == self.breaks_at:
                raise ConnectionResetError("peer")
            yield {"text": row}


@pytest.fixture
def hub(monkeypatch):
    """Stand-ins for the packages datasets and huggingface_hub, and what they were asked."""
    asked = types.SimpleNamespace(revisions=[], head="first", breaks_at=None)

    def load_dataset(repository, config, split, streaming, revision):
        assert (repository, config) == ("HuggingFaceTB/smollm-corpus", "fineweb-edu-dedup") and streaming
        asked.revisions.append(revision)
        return Stream(ALL_TEXTS, asked.breaks_at)

    datasets, client = types.ModuleType("datasets"), types.ModuleType("huggingface_hub")
    datasets.load_dataset = load_dataset
    client.HfApi = lambda: types.SimpleNamespace(
        dataset_info=lambda repository: types.SimpleNamespace(sha=asked.head)
    )
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    monkeypatch.setattr(FINEWEB, "TEXT_BYTES", 10**6)
    return asked


def test_stream_that_breaks_off_goes_on_in_the_same_revision(hub, tmp_path, monkeypatch):
    hub.breaks_at = ALL_TEXTS[500]
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 20)
    with pytest.raises(SystemExit, match="broke off .ConnectionResetError.; the same command goes on"):
        run(command("", tmp_path / "out", workers=1)[1:])
    assert (tmp_path / "out" / "train_0000.bin").exists()
    hub.breaks_at, hub.head = None, "second"
    run(command("", tmp_path / "out", workers=1)[1:])
    assert hub.revisions == ["first", "first"] and stream(tmp_path / "out") == tokens_of(ALL_TEXTS)


def test_whole_corpus_wants_a_large_disk(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FINEWEB, "TEXT_BYTES", 10**18)
    with pytest.raises(
        SystemExit, match="make room, give an --out on a larger disk, or fewer --max_tokens"
    ):
        run(command("", tmp_path / "out")[1:])


@pytest.mark.parametrize("package", ["datasets", "huggingface_hub"])
def test_missing_hub_package_is_named(hub, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        SystemExit, match=f"needs the package {package}; run pip install datasets, or give"
    ):
        run(command("", tmp_path / "out")[1:])


def test_hub_out_of_reach_is_told(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules["huggingface_hub"], "HfApi", lambda: (_ for _ in ()).throw(OSError())
    )
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", None)
    with pytest.raises(
        SystemExit, match="cannot be reached .*; try again with internet access, or give"
    ):
        run(command("", tmp_path / "out")[1:])

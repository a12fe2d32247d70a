"""Shards, windows and the pystdlib dataset: what goes in comes out, or is refused.

Damaged files are made by editing real ones; kills are real kills of a process that is writing.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dataset
from dataset import (
    HEADER_SIZE,
    Tokens,
    Windows,
    document_cu_seqlens,
    open_shard,
    write_dataset,
    write_shard,
)
from tokenizer import get_encoding, token_bytes

ROOT = Path(__file__).resolve().parent
PREPARE = ROOT / "data" / "pystdlib" / "prepare.py"
BYTES = get_encoding("bytes")
END = BYTES.eot_token

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def one_sentence(refused) -> str:
    """The message of a refusal, which must be a single sentence."""
    message = str(refused.value)
    assert message.endswith(".") and "\n" not in message and not re.search(r"\.\s+[A-Z]", message)
    return message


def tokens_of(folder: Path, array: np.ndarray, shard_size: int) -> Tokens:
    """A dataset of exactly these tokens as its "train" split, in shards of the size asked."""
    shards = {}
    for i, start in enumerate(range(0, len(array), shard_size)):
        name = f"train_{i:04}.bin"
        shards[name] = write_shard(folder / name, array[start : start + shard_size], "bytes")
    meta = {"encoding": "bytes", "splits": {"train": {"shards": shards}}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return Tokens(folder, "train")


def numbered(folder: Path, n: int, shard_size: int = 1000) -> Tokens:
    """A stream whose token number i is i, so that a row shows where it came from."""
    return tokens_of(folder, np.arange(n), shard_size)


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest, width", [(256, 2), (2**16 - 1, 2), (2**16, 4), (2**32 - 1, 4)])
def test_shard_round_trip(tmp_path, largest, width):
    tokens = np.random.default_rng(0).integers(0, largest, 999).tolist() + [largest]
    checksum = write_shard(tmp_path / "train_0000.bin", np.array(tokens), "o200k_base")
    shard = open_shard(tmp_path / "train_0000.bin")
    assert shard.tokens.tolist() == tokens and shard.tokens.dtype.itemsize == width
    assert (shard.encoding, shard.checksum) == ("o200k_base", checksum)
    raw = (tmp_path / "train_0000.bin").read_bytes()[HEADER_SIZE:]
    assert raw == b"".join(t.to_bytes(width, "little") for t in tokens)
    assert [f.name for f in tmp_path.iterdir()] == ["train_0000.bin"]


@pytest.mark.parametrize(
    "tokens, name",
    [([], "bytes"), ([-1], "bytes"), ([2**32], "bytes"), ([0.5], "bytes"), ([[1]], "bytes"),
     ([1], "b" * 37)],
)  # fmt: skip
def test_shard_refuses_what_it_cannot_hold(tmp_path, tokens, name):
    with pytest.raises(ValueError) as refused:
        write_shard(tmp_path / "train_0000.bin", np.array(tokens), name)
    one_sentence(refused)
    assert not list(tmp_path.iterdir())


DAMAGE = {
    "empty": (lambda raw: b"", "not a shard"),
    "foreign": (lambda raw: b"\x89PNG\r\n\x1a\n" + raw[8:], "not a shard"),
    "foreign and short": (lambda raw: b"hello", "not a shard"),
    "header cut": (lambda raw: raw[:40], "cut short"),
    "one byte cut": (lambda raw: raw[:-1], "cut short"),
    "no tokens left": (lambda raw: raw[:HEADER_SIZE], "cut short"),
    "one byte more": (lambda raw: raw + b"\0", "too long"),
    "other version": (lambda raw: raw[:8] + b"\2" + raw[9:], "version 2, not 1"),
    "other dtype": (lambda raw: raw.replace(b"<u2", b"<f2", 1), "damaged header"),
    "wider dtype": (lambda raw: raw.replace(b"<u2", b"<u4", 1), "cut short"),
    "no count": (lambda raw: raw[:16] + bytes(8) + raw[24:], "damaged header"),
    "other encoding": (lambda raw: raw.replace(b"bytes", b"bites", 1), "checksum|not the shard"),
    "other checksum": (lambda raw: raw[:60] + bytes([raw[60] ^ 1]) + raw[61:], "checksum|not the shard"),
    "first token": (lambda raw: raw[:64] + bytes([raw[64] ^ 1]) + raw[65:], "checksum"),
    "last byte": (lambda raw: raw[:-1] + bytes([raw[-1] ^ 128]), "checksum"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shard_is_refused(tmp_path, damage):
    tokens = numbered(tmp_path, 500)
    path = tmp_path / "train_0000.bin"
    edit, problem = DAMAGE[damage]
    raw = path.read_bytes()
    assert edit(raw) != raw
    path.write_bytes(edit(raw))
    for opening in (lambda: open_shard(path).verify(), lambda: Tokens(tmp_path, "train").verify()):
        with pytest.raises(ValueError, match=problem) as refused:
            opening()
        message = one_sentence(refused)
        assert str(path) in message and "prepare.py again" in message
    assert len(tokens) == 500


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "train_0000.bin"
    write_shard(path, np.arange(40), "bytes")
    raw = bytearray(path.read_bytes())
    for i in range(len(raw)):
        raw[i] ^= 0x10
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            open_shard(path).verify()
        raw[i] ^= 0x10
    path.write_bytes(raw)
    assert open_shard(path).tokens.tolist() == list(range(40))


def test_opening_does_not_load_the_file(tmp_path):
    size = 32 * 2**20
    write_shard(tmp_path / "a.bin", np.random.default_rng(0).integers(0, 257, size // 2), "bytes")
    tracemalloc.start()
    shard = open_shard(tmp_path / "a.bin")
    shard.verify()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shard.tokens.nbytes == size and peak < size / 3


# --- a split as one stream ------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_read_sees_one_stream_over_shards(tmp_path_factory, n, shard_size, data):
    tokens = numbered(tmp_path_factory.mktemp("stream"), n, shard_size)
    start = data.draw(st.integers(0, n))
    length = data.draw(st.integers(0, n - start))
    assert len(tokens) == n
    assert tokens.read(start, length).tolist() == list(range(start, start + length))


def test_read_outside_is_refused(tmp_path):
    tokens = numbered(tmp_path, 10, 4)
    for start, n in [(-1, 2), (9, 2), (10, 1), (3, -1)]:
        with pytest.raises(ValueError, match="has no tokens"):
            tokens.read(start, n)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    tokens = numbered(tmp_path, 258, 100)  # token number i is i
    tokens.verify(258)
    with pytest.raises(ValueError, match="train_0002.bin holds token 257") as refused:
        tokens.verify(257)
    one_sentence(refused)


def test_unfinished_folder_or_split_is_refused(tmp_path):
    def refuse(folder, split):
        with pytest.raises(ValueError, match="run the dataset's prepare.py") as refused:
            Tokens(folder, split)
        assert str(folder) in one_sentence(refused)

    refuse(tmp_path / "nowhere", "train")
    numbered(tmp_path, 500, 100)
    refuse(tmp_path, "val")
    (tmp_path / "train_0001.bin").unlink()
    refuse(tmp_path, "train")
    numbered(tmp_path, 500, 100)
    for damaged in ("", "{", "[]", '{"encoding": "bytes"}', '{"encoding": "b", "splits": []}',
                    '{"encoding": "b", "splits": {"train": {"shards": {}}}}'):  # fmt: skip
        (tmp_path / "meta.json").write_text(damaged)
        refuse(tmp_path, "train")
    (tmp_path / "meta.json").unlink()
    refuse(tmp_path, "train")


def test_shard_of_another_run_or_encoding_is_refused(tmp_path):
    for content, encoding in [(np.arange(1, 101), "bytes"), (np.arange(100), "gpt2")]:
        numbered(tmp_path, 300, 100)
        write_shard(tmp_path / "train_0001.bin", content, encoding)
        with pytest.raises(ValueError, match="train_0001.bin.*prepare.py again") as refused:
            Tokens(tmp_path, "train")
        one_sentence(refused)
    numbered(tmp_path, 300, 100)
    meta = tmp_path / "meta.json"
    meta.write_text(meta.read_text().replace('"bytes"', '"gpt2"'))
    with pytest.raises(ValueError, match="train_0000.bin.*bytes.*gpt2"):
        Tokens(tmp_path, "train")


# --- windows --------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 9), st.integers(0, 2))
def test_every_token_once_an_epoch(tmp_path_factory, n, block_size, seed, pair):
    block_size = min(block_size, n - 1)
    tokens = numbered(tmp_path_factory.mktemp("windows"), n, 57)
    windows = Windows(tokens, block_size, seed)
    seen = set()
    for epoch in (2 * pair, 2 * pair + 1):
        x, y = windows.rows(epoch * windows.per_epoch, windows.per_epoch)
        assert torch.equal(y, x + 1) and x.shape == (windows.per_epoch, block_size)
        assert x.dtype == y.dtype == torch.int64
        inputs = x.flatten().tolist()
        assert len(set(inputs)) == len(inputs) == n - 1 - (n - 1) % block_size
        seen.update(inputs)
    assert seen == set(range(n - 1))


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path):
    tokens = numbered(tmp_path, 20 * 50 + 1)
    orders = set()
    for seed in (0, 1, 2):
        windows = Windows(tokens, 20, seed)
        for epoch in range(4):
            orders.add(tuple(windows.rows(epoch * 50, 50)[0][:, 0].tolist()))
    assert len(orders) == 12
    assert tuple(range(0, 1000, 20)) not in orders


def test_rows_do_not_depend_on_what_was_read_before(tmp_path):
    tokens = numbered(tmp_path, 1234, 100)
    asked = [(int(a), int(b)) for a, b in np.random.default_rng(0).integers(0, 300, (40, 2))]

    def answer(first, n):
        dataset.shuffled.cache_clear()
        return Windows(tokens, 16, 3).rows(first, n)

    windows, other = Windows(tokens, 16, 3), Windows(tokens, 8, 4)
    for first, n in asked:
        other.rows(n, 2)
        for ours, alone in zip(windows.rows(first, n), answer(first, n), strict=True):
            assert torch.equal(ours, alone)
    whole = windows.rows(0, 600)[0]
    assert torch.equal(torch.cat([windows.rows(i, 1)[0] for i in range(600)]), whole)
    assert dataset.shuffled.cache_info().currsize <= 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_batch_is_the_same_for_any_number_of_processes(tmp_path, ranks):
    tokens = numbered(tmp_path, 700, 64)
    global_batch, batch = 8, 8 // ranks
    processes = [Windows(tokens, 16, 5) for _ in range(ranks)]
    one = Windows(tokens, 16, 5)
    for step in (0, 1, 5, 6, 40):
        parts = [
            windows.rows(step * global_batch + rank * batch, batch)
            for rank, windows in enumerate(processes)
        ]
        x, y = one.rows(step * global_batch, global_batch)
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)


def test_in_order_is_fixed_spread_and_capped(tmp_path):
    tokens = numbered(tmp_path, 10 * 30 + 7)
    x, y = Windows(tokens, 10, 0).in_order(4)
    assert x[:, 0].tolist() == [0, 70, 150, 220] and torch.equal(y, x + 1)
    assert torch.equal(Windows(tokens, 10, 1).in_order(4)[0], x)
    everything = Windows(tokens, 10, 0).in_order(10**9)[0]
    assert everything.flatten().tolist() == list(range(300))


def test_too_short_for_one_window_is_refused(tmp_path):
    tokens = numbered(tmp_path, 33)
    assert Windows(tokens, 32, 0).rows(5, 1)[0].tolist() == [list(range(32))]
    with pytest.raises(ValueError, match="largest block_size that fits is 32") as refused:
        Windows(tokens, 33, 0)
    assert str(tmp_path) in one_sentence(refused)


# --- documents in a batch -------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_documents_begin_after_an_end_and_with_each_window(batch, length, data):
    rows = [[data.draw(st.sampled_from([0, 1, END])) for _ in range(length)] for _ in range(batch)]
    expected, flat = [], [token for row in rows for token in row]
    for i in range(len(flat)):
        if i % length == 0 or flat[i - 1] == END:
            expected.append(i)
    found = document_cu_seqlens(torch.tensor(rows), END)
    assert found.tolist() == [*expected, len(flat)] and found.dtype == torch.int64


def test_documents_of_a_split_come_back_from_its_windows(tmp_path):
    texts = ["first", "", "the third one", "4"]
    write_dataset(tmp_path, BYTES, {"train": texts})
    tokens = Tokens(tmp_path, "train")
    ids = torch.from_numpy(tokens.read(0, len(tokens)))[None]
    bounds = document_cu_seqlens(ids, END).tolist()
    found = [BYTES.decode(ids[0, a : b - 1].tolist()) for a, b in zip(bounds, bounds[1:])]
    assert found == texts


# --- writing datasets -----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(any_text, min_size=1, max_size=150), st.integers(1, 3000))
def test_dataset_round_trip(tmp_path_factory, documents, shard_tokens):
    folder = tmp_path_factory.mktemp("round") / "made" / "here"
    splits = {"train": iter(documents), "val": documents[:1]}
    meta = write_dataset(folder, BYTES, splits, shard_tokens, source="a test")
    tokens = Tokens(folder, "train")
    expected = [t for text in documents for t in [*text.encode(), END]]
    assert tokens.read(0, len(tokens)).tolist() == expected and tokens.encoding == "bytes"
    assert meta == json.loads((folder / "meta.json").read_text()) and meta["source"] == "a test"
    train = meta["splits"]["train"]
    assert train["tokens"] == len(expected) == train["bytes"] + len(documents)
    assert Tokens(folder, "val").read(0, 1)[0] == expected[0]


def test_split_without_documents_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'val'.*no documents") as refused:
        write_dataset(tmp_path, BYTES, {"train": ["text"], "val": []})
    one_sentence(refused)
    assert not (tmp_path / "meta.json").exists()


def write_until(folder: Path, kill_at: int, text: str) -> int:
    """The status of a process that writes a dataset and is killed at that call of os.fsync."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left, fsync = kill_at, os.fsync

    def kill_at_fsync(file):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(file)

    try:
        os.fsync = kill_at_fsync
        write_dataset(folder, BYTES, {"train": [text * 50] * 65, "val": [text]}, shard_tokens=1)
    finally:
        os._exit(0)


def test_killed_writer_leaves_nothing_that_looks_complete(tmp_path):
    for kill_at in (1, 2, 4):  # in the first shard of two, the second, and meta.json
        folder = tmp_path / str(kill_at)
        assert write_until(folder, kill_at, "abc") == -signal.SIGKILL
        assert len(list(folder.glob("*.tmp"))) == 1
        assert len(list(folder.glob("train_*.bin"))) == min(kill_at - 1, 2)
        with pytest.raises(ValueError, match="not finished"):
            Tokens(folder, "train")

    assert write_until(folder, 99, "abc") == 0  # again, over what the last kill left
    train = Tokens(folder, "train")
    assert len(train) == 65 * 151 and len(Tokens(folder, "val")) == 4

    # Other text, killed between shards: the old meta.json must not vouch for the mixture,
    # while a reader that had opened the old shards goes on reading them.
    before = train.read(0, len(train))
    assert write_until(folder, 2, "xyz") == -signal.SIGKILL
    with pytest.raises(ValueError, match="train_0000.bin.*prepare.py again"):
        Tokens(folder, "train")
    assert np.array_equal(train.read(0, len(train)), before)


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "notes"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), dataset.whole_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# --- data/pystdlib --------------------------------------------------------------------------------


def load_prepare():
    spec = importlib.util.spec_from_file_location("pystdlib_prepare", PREPARE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pystdlib_prepared_twice_at_once(tmp_path):
    command = [sys.executable, PREPARE, "--out_dir", tmp_path / "out"]
    running = [
        subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    for process in running:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert output.count("\n") == 1 and "train" in output
    folder = tmp_path / "out"
    assert {f.name for f in folder.iterdir()} == {"meta.json", "train_0000.bin", "val_0000.bin"}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["python"] == sys.version.split()[0]

    texts = {}
    for split in ("train", "val"):
        tokens = Tokens(folder, split)
        assert len(tokens) == meta["splits"][split]["tokens"]
        stream = tokens.read(0, len(tokens))
        assert token_bytes(BYTES)[stream].sum() == meta["splits"][split]["bytes"]
        texts[split] = BYTES.decode(stream.tolist()).split("<|endoftext|>")
        assert texts[split].pop() == ""
    both = len(texts["train"]) + len(texts["val"])
    assert both > 400 and 0.02 < len(texts["val"]) / both < 0.1
    source = Path(json.__file__).read_text(encoding="utf-8")
    assert (source in texts["train"]) + (source in texts["val"]) == 1


def test_pystdlib_takes_sources_and_no_tests(tmp_path):
    prepare = load_prepare()
    kept = ["ast.py", "json/decoder.py", "json/test_tool.py", "zipfile.py"]
    left = ["test/a.py", "json/tests/a.py", "site-packages/a.py", "_sysconfigdata_x.py", "b.pyc",
            "config-3.11-x86_64-linux-gnu/a.py", "pydoc_data/topics.py"]  # fmt: skip
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    assert prepare.sources(tmp_path) == kept


def test_pystdlib_refuses_a_python_without_sources(tmp_path, monkeypatch):
    prepare = load_prepare()
    monkeypatch.setattr(prepare.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out_dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="holds 0 Python sources"):
        prepare.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["meta.json", "progress.json"])
@pytest.mark.parametrize("content", ['{"encoding": "bytes", "plan": {}}', "no JSON", "7"])
def test_pystdlib_leaves_other_datasets_alone(tmp_path, monkeypatch, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / "train_0000.bin").write_text("someone's")
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out_dir", str(tmp_path)])
    with pytest.raises(ValueError, match=f"{name} is of some other dataset; move it away"):
        load_prepare().main()
    assert (tmp_path / name).read_text() == content and len(list(tmp_path.iterdir())) == 2

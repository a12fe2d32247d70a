"""Documents in files: all of them in order from any place on, or one sentence that names the file."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest

import documents


def one_sentence(message: str) -> str:
    assert message.endswith(".") and "\n" not in message and not re.search(r"\.\s+[A-Z]", message)
    return message


def read(path: Path, skip: int = 0) -> list[str]:
    return list(documents.read_file(path, skip))


def test_text_is_cut_at_marks_and_after_long_stretches(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"\xef\xbb\xbfone\r\ntwo\n<|endoftext|>\n\n  <|endoftext|>\r\n0123456789\nand\rmore\n\nlast"
    )
    expected = ["one\r\ntwo\n", "\n", "0123456789\n", "and\rmore\n\n", "last"]
    assert read(path) == expected and read(path, 3) == expected[3:] and read(path, 9) == []
    assert "".join(expected).encode() == path.read_bytes()[3:].replace(
        b"  <|endoftext|>\r\n", b""
    ).replace(b"<|endoftext|>\n", b"")


def test_compressed_lines(tmp_path):
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n\n" for text in ["a", "", "é\u2028b"])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    assert read(tmp_path / "a.jsonl.gz") == ["a", "", "é\u2028b"]
    assert read(tmp_path / "a.jsonl.gz", 2) == ["é\u2028b"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"plain"))
    assert read(tmp_path / "a.txt.gz") == ["plain"]


def test_zst_is_read_over_all_its_frames(tmp_path):
    compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    line = json.dumps({"text": "a" * 99}).encode() + b"\n"
    (tmp_path / "a.jsonl.zst").write_bytes(compress(line * 3) + compress(line * 2))
    assert read(tmp_path / "a.jsonl.zst", 1) == ["a" * 99] * 4
    (tmp_path / "a.jsonl.zst").write_bytes(b"no frame at all")
    with pytest.raises(ValueError, match="a.jsonl.zst cannot be read") as refused:
        read(tmp_path / "a.jsonl.zst")
    one_sentence(str(refused.value))


def test_parquet_is_read_from_any_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [*map(str, range(999)), None]
    parquet.write_table(
        arrow.table({"text": rows, "id": rows}), tmp_path / "a.parquet", row_group_size=300
    )
    for skip in (0, 1, 256, 299, 300, 301, 599, 899, 900, 999, 1000, 1001):
        assert read(tmp_path / "a.parquet", skip) == [row or "" for row in rows][skip:]
    parquet.write_table(arrow.table({"body": rows}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-50])
    for name, kind, values in [("d", "int64", [1]), ("e", "binary", [b"b"]), ("f", "list", [["c"]])]:
        parquet.write_table(arrow.table({"text": values}), tmp_path / f"{name}.parquet")
        with pytest.raises(ValueError, match=f'{name}.parquet, "text" holds {kind}.*, not strings'):
            read(tmp_path / f"{name}.parquet")
    for name, problem in [("b.parquet", "lacks .text"), ("c.parquet", "cannot be read")]:
        with pytest.raises(ValueError, match=problem) as refused:
            read(tmp_path / name)
        assert str(tmp_path / name) in one_sentence(str(refused.value))


UNREADABLE = {
    "no text.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "line 2 is not a JSON object"),
    "number.jsonl": (b'{"text": 7}', "line 1 is not"),
    "cut.jsonl": (b'{"text": "a"}\n\n{"text": "b', "line 3 is not"),
    "list.jsonl": (b"[1]", "line 1 is not"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "cannot be read .EOFError"),
    "foreign.txt.gz": (b"no gzip", "cannot be read .BadGzipFile"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_are_named(tmp_path, name):
    raw, problem = UNREADABLE[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=problem) as refused:
        read(tmp_path / name)
    assert str(tmp_path / name) in one_sentence(str(refused.value))


@pytest.mark.parametrize("name, package", [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_missing_packages_are_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"something")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(
        ValueError, match=f"needs the package {package}.*pip install {package}"
    ) as refused:
        read(tmp_path / name)
    one_sentence(str(refused.value))


def test_folders_give_their_text_in_order(tmp_path, capsys):
    files = {"b/2.md": b"two", "b/1.py": b"one", "a.txt": b"a", ".git/x": b"hidden"}
    files |= {"z.png": b"\x89\0", "latin": "é".encode("latin-1"), "out/meta.json": b"own"}
    for name, raw in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    parts, source, n_bytes = documents.find_files([tmp_path, tmp_path / ".git" / "x"], tmp_path / "out")
    assert [list(part(0)) for part in parts] == [["a"], ["one"], ["two"], ["hidden"]]
    assert source["inputs"].startswith("4 files") and n_bytes == 13
    assert capsys.readouterr().out == "files left out, for they are not UTF-8 text: 2\n"
    for inputs, problem in [
        ([tmp_path / "no"], "does not exist"),
        ([tmp_path / ".git" / "y"], "no text"),
        ([tmp_path / "latin"], "latin is not UTF-8 text; convert it"),
        ([tmp_path, tmp_path / "b" / ".." / "a.txt"], "a.txt is given twice; give each file once"),
    ]:
        (tmp_path / ".git" / "y").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=problem) as refused:
            documents.find_files(inputs, tmp_path / "out")
        one_sentence(str(refused.value))


def test_folders_with_odd_names_and_replacement_characters_are_read(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("a name in Latin-1")
    (tmp_path / "web.txt").write_text("a \ufffd that was there before")
    parts, _, _ = documents.find_files([tmp_path], tmp_path / "out")
    assert [list(part(0)) for part in parts] == [
        ["a name in Latin-1"],
        ["a \ufffd that was there before"],
    ]

"""The documents in files: .parquet, .jsonl and plain text, the latter two also as .gz or .zst.

A row or line is one document, under "text". A plain text file is one too, but a line that reads
<|endoftext|> ends a document, and long text is cut after the line that completes 65,536 characters.
From a folder all files come in order of name, but for hidden ones and those that are not text.
"""

import functools
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

LONGEST = 2**16
# About how many bytes of text there are to a byte of such a file.
EXPANSION = {".parquet": 1.7, ".gz": 3, ".zst": 3.5}


def find_files(inputs: list[Path], besides: Path) -> tuple[list, dict, int]:
    """The parts that `prepare.prepare` reads, what they are, and about how many bytes of text.

    Nothing below the folder `besides` is taken. ValueError if there is nothing to read.
    """
    files, left_out, taken = [], 0, set()
    for path in inputs:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give files or folders of text.")
        found = [path]
        if path.is_dir():
            below = sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())
            visible = [path / p for p in below if not any(name.startswith(".") for name in p.parts)]
            visible = [p for p in visible if besides.resolve() not in p.resolve().parents]
            found = [p for p in visible if is_text(p)]
            left_out += len(visible) - len(found)
        elif not is_text(path):
            raise ValueError(f"{path} is not UTF-8 text; convert it, as by iconv, or leave it out.")
        for file in found:
            if os.path.abspath(file) in taken:
                raise ValueError(
                    f"{file} is given twice; give each file once, or a folder that holds it."
                )
            taken.add(os.path.abspath(file))
            files.append((path, file))
    if left_out:
        print(f"files left out, for they are not UTF-8 text: {left_out}")
    if not files:
        raise ValueError(
            f"{', '.join(map(str, inputs))} holds no text; give .parquet, .jsonl or text files."
        )
    digest, text_bytes = hashlib.sha256(), 0.0
    for root, file in files:
        state = file.stat()
        name = file.relative_to(root).as_posix() if file != root else file.name
        facts = f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n"
        digest.update(facts.encode(errors="surrogateescape"))  # a name need not be UTF-8
        text_bytes += state.st_size * EXPANSION.get(file.suffix, 1)
    source = {"inputs": f"{len(files)} files, {digest.hexdigest()[:16]}"}
    return [functools.partial(read_file, file) for _, file in files], source, int(text_bytes)


def is_text(path: Path) -> bool:
    """Whether a file starts as UTF-8; one that cannot be read is text until `read_file` complains."""
    if path.suffix == ".parquet":
        return True
    try:
        with open_text(path, "strict") as file:
            return "\0" not in file.read(8192)
    except UnicodeDecodeError:
        return False
    except Exception:
        return True


def read_file(path: Path, skip: int) -> Iterator[str]:
    """The file's documents from number `skip` on; ValueError, in one sentence, if it cannot be read."""
    kind = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    try:
        if kind == ".parquet":
            yield from read_parquet(path, skip)
        else:
            with open_text(path) as file:
                read = read_jsonl(path, file) if kind == ".jsonl" else read_text(file)
                yield from islice(read, skip, None)
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package {error.name}; run pip install {error.name}."
        ) from error
    except Exception as error:
        if str(error).startswith(f"{path}, "):
            raise
        problem = re.split(r"\.(?:\s|$)|\n", str(error))[0]
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {problem}); mend it or leave it out."
        ) from error


def open_text(path: Path, errors: str = "replace"):
    # newline="" keeps a text's own line ends.
    options = {"encoding": "utf-8-sig", "errors": errors, "newline": ""}
    if path.suffix == ".gz":
        return gzip.open(path, "rt", **options)
    if path.suffix == ".zst":
        import zstandard

        # Files that were compressed in pieces have several frames.
        reader = zstandard.ZstdDecompressor(max_window_size=2**31)
        return io.TextIOWrapper(
            reader.stream_reader(open(path, "rb"), read_across_frames=True), **options
        )
    return open(path, **options)


def read_text(file) -> Iterator[str]:
    lines, size = [], 0
    for line in file:
        ends = line.strip() == "<|endoftext|>"
        if not ends:
            lines.append(line)
            size += len(line)
        if lines and (ends or size >= LONGEST):
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def read_jsonl(path: Path, file) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f'{path}, line {number} is not a JSON object with a string "text"; mend it.'
            )
        yield text


def read_parquet(path: Path, skip: int) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if "text" not in file.schema_arrow.names:
            raise ValueError(
                f'{path}, a table of {file.schema_arrow.names}, lacks "text"; rename its column.'
            )
        first = 0
        while first < file.num_row_groups and file.metadata.row_group(first).num_rows <= skip:
            skip -= file.metadata.row_group(first).num_rows
            first += 1
        groups = range(first, file.num_row_groups)
        for batch in file.iter_batches(256, groups, columns=["text"]) if groups else ():
            for text in batch.column(0).to_pylist()[skip:]:
                if not isinstance(text, str | None):
                    kind = file.schema_arrow.field("text").type
                    raise ValueError(f'{path}, "text" holds {kind}, not strings; convert that column.')
                yield text or ""
            skip = max(skip - len(batch), 0)

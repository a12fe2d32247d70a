"""Tokens on disk, and the batches drawn from them.

A dataset is a folder: each split's shards of tokens (train_0000.bin, …) and meta.json, written last,
so a folder without it is unfinished. `Tokens` sees a split's shards as one stream, `Windows` cuts it
into rows. What row number i holds depends on the seed and i alone, so a run may stop anywhere, or
change its number of processes, and still read the same rows.
"""

import functools
import json
import os
import struct
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tiktoken
import torch

from tokenizer import get_encoding, token_bytes

try:
    import fcntl
except ImportError:  # not on Windows, where runs are not kept apart
    fcntl = None

# magic, version, numpy dtype, number of tokens, encoding; then a checksum over these and the tokens
HEADER = struct.Struct("<8sI4sQ36s")
CHECKSUM = struct.Struct("<I")
HEADER_SIZE = HEADER.size + CHECKSUM.size
MAGIC, VERSION, DTYPES = b"MoRtoken", 1, (b"<u2", b"<u4")
ROOT = Path(__file__).parent
# Datasets up to this size are read against their checksums at every start, which takes a second.
CHECKED_BYTES = 2**30
WRITER = f".{uuid.uuid4().hex}"  # two runs that both miss a dataset prepare it at once


class Shard(NamedTuple):
    path: Path
    tokens: np.ndarray
    encoding: str
    checksum: int

    def verify(self) -> None:
        """Reads the file through, in pieces; ValueError if its checksum is another."""
        with open(self.path, "rb") as file:
            found = zlib.crc32(file.read(HEADER_SIZE)[: HEADER.size])
            while piece := file.read(1 << 22):
                found = zlib.crc32(piece, found)
        if found != self.checksum:
            raise ValueError(
                f"{self.path} is damaged (its checksum does not match); "
                "run the dataset's prepare.py again."
            )


@contextmanager
def whole_file(path: Path, writer: str = "") -> Iterator[BinaryIO]:
    """A file to write that takes its name only when it is complete and on the disk.

    What a kill leaves under the temporary name is overwritten by the next to write this file. Where two
    may do so at once, each is a `writer` of its own.
    """
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, option: str, patience: float = 0.0) -> Iterator[None]:
    """Keeps other runs out of a folder, which `option` chose; waits so many seconds for one to end."""
    if not fcntl:
        yield
        return
    descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ValueError(
                        f"another run is writing to {folder}; wait for it, or give another {option}."
                    ) from None
                time.sleep(0.1)
            except OSError:  # some network drives know no locks
                break
        yield
    finally:
        os.close(descriptor)


def write_shard(path: str | Path, tokens: np.ndarray, encoding_name: str) -> int:
    """Writes one shard, two bytes a token where they suffice, else four; returns its checksum."""
    tokens, name = np.asarray(tokens), encoding_name.encode()
    if not tokens.size or tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise ValueError(f"{path} needs a non-empty row of integers, not {tokens.dtype} tokens.")
    if tokens.min() < 0 or tokens.max() >= 2**32:
        raise ValueError(f"{path} can hold tokens from 0 to {2**32 - 1} only.")
    if len(name) > 36:
        raise ValueError(f"the encoding name {encoding_name!r} is longer than 36 bytes.")
    dtype = DTYPES[int(tokens.max() >= 2**16)]
    tokens = np.ascontiguousarray(tokens, dtype.decode())
    header = HEADER.pack(MAGIC, VERSION, dtype, tokens.size, name)
    checksum = zlib.crc32(tokens, zlib.crc32(header))
    with whole_file(Path(path), WRITER) as file:
        file.write(header + CHECKSUM.pack(checksum))
        file.write(tokens.data)  # a full disk is told as such, unlike by tofile
    return checksum


def open_shard(path: str | Path) -> Shard:
    """A shard, memory-mapped; its header and size are checked, its tokens by `Shard.verify` alone."""

    def require(condition, problem):
        if not condition:
            raise ValueError(f"{path} {problem}; run the dataset's prepare.py again.")

    require(Path(path).is_file(), "does not exist")
    with open(path, "rb") as file:
        start, size = file.read(HEADER_SIZE), os.fstat(file.fileno()).st_size
        require(start[:8] == MAGIC[: len(start)] and start, "is not a shard of tokens")
        require(len(start) == HEADER_SIZE, "is cut short")
        _, version, dtype, count, name = HEADER.unpack_from(start)
        (checksum,) = CHECKSUM.unpack_from(start, HEADER.size)
        dtype = dtype.rstrip(b"\0")
        require(version == VERSION, f"has version {version}, not {VERSION}")
        require(dtype in DTYPES and count, "has a damaged header")
        expected = HEADER_SIZE + count * np.dtype(dtype.decode()).itemsize
        require(size >= expected, f"is cut short ({size} of {expected} bytes)")
        require(size == expected, f"is too long ({size} instead of {expected} bytes)")
        tokens = np.memmap(file, dtype.decode(), "r", HEADER_SIZE, (count,)).view(np.ndarray)
    return Shard(Path(path), tokens, name.rstrip(b"\0").decode(errors="replace"), checksum)


def tokenized(
    documents: Iterable[str], encoding: tiktoken.Encoding, shard_tokens: int
) -> Iterator[np.ndarray]:
    """The documents' tokens, each document closed by <|endoftext|>, one array per shard."""
    documents, waiting, size = iter(documents), [], 0
    while batch := list(islice(documents, 64)):
        for tokens in encoding.encode_ordinary_batch(batch):
            waiting.append(np.array([*tokens, encoding.eot_token], dtype=np.uint32))
            size += waiting[-1].size
        if size >= shard_tokens:
            yield np.concatenate(waiting)
            waiting, size = [], 0
    if waiting:
        yield np.concatenate(waiting)


def write_dataset(
    folder: str | Path,
    encoding: tiktoken.Encoding,
    splits: dict[str, Iterable[str]],
    shard_tokens: int = 2**25,
    **facts,
) -> dict:
    """Writes each split's documents as shards, then meta.json (with `facts`), which it returns.

    Safe to run twice at once or to stop: meta.json names the checksum of every shard it counts.
    """
    folder, sizes = Path(folder), token_bytes(encoding)
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"encoding": encoding.name, **facts, "splits": {}}
    for split, documents in splits.items():
        total = meta["splits"][split] = {"tokens": 0, "bytes": 0, "shards": {}}
        for number, tokens in enumerate(tokenized(documents, encoding, shard_tokens)):
            name = f"{split}_{number:04}.bin"
            total["shards"][name] = write_shard(folder / name, tokens, encoding.name)
            total["tokens"] += tokens.size
            total["bytes"] += int(sizes[tokens].sum())
        if not total["tokens"]:
            raise ValueError(f"the split {split!r} of {folder} got no documents; it needs some.")
    with whole_file(folder / "meta.json", WRITER) as file:
        file.write(json.dumps(meta, indent=2).encode() + b"\n")
    return meta


class Tokens:
    """All tokens of one split, "train" or "val", as one stream over its shards."""

    def __init__(self, folder: str | Path, split: str):
        self.name = f"the split {split!r} of {folder}"
        try:
            meta = json.loads((Path(folder) / "meta.json").read_text())
            self.encoding = meta["encoding"]
            checksums = sorted(meta["splits"][split]["shards"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.name} is not there or not finished; run the dataset's prepare.py, "
                "for example python data/pystdlib/prepare.py."
            ) from error
        if not checksums:
            raise ValueError(f"{self.name} has no shards; run the dataset's prepare.py again.")
        self.shards = []
        for file, checksum in checksums:
            shard = open_shard(Path(folder) / file)
            if (shard.encoding, shard.checksum) != (self.encoding, checksum):
                raise ValueError(
                    f"{Path(folder) / file} ({shard.encoding}) is not the shard that meta.json "
                    f"({self.encoding}) names; run the dataset's prepare.py again."
                )
            self.shards.append(shard)
        self.ends = np.cumsum([shard.tokens.size for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def nbytes(self) -> int:
        return sum(shard.tokens.nbytes for shard in self.shards)

    @property
    def checksums(self) -> list[int]:
        return [shard.checksum for shard in self.shards]

    def verify(self, n_vocab: int = 2**32) -> None:
        """Reads all shards against checksums and vocabulary, about a gigabyte a second."""
        for shard in self.shards:
            shard.verify()
            if (highest := shard.tokens.max()) >= n_vocab:
                raise ValueError(
                    f"{shard.path} holds token {highest}, but its encoding {self.encoding!r} has "
                    f"{n_vocab} tokens; run the dataset's prepare.py again."
                )

    def read(self, start: int, n: int) -> np.ndarray:
        """A copy of the n tokens from number `start` on: int64, (n,)."""
        if not 0 <= start <= start + n <= len(self):
            raise ValueError(f"{self.name} has no tokens {start} to {start + n} of {len(self)}.")
        out, filled = np.empty(n, dtype=np.int64), 0
        number = int(np.searchsorted(self.ends, start, side="right"))
        while filled < n:
            shard = self.shards[number].tokens
            first = start + filled - int(self.ends[number]) + shard.size
            piece = shard[first : first + n - filled]
            out[filled : filled + piece.size] = piece
            filled, number = filled + piece.size, number + 1
        return out


@functools.lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


class Windows:
    """Rows of block_size inputs, each with the token that follows, from an endless run of epochs.

    An epoch visits, in its own order, windows that touch but do not overlap: no token is an input
    twice. What does not fill a window is left out at the end in even epochs, at the start in odd
    ones, so every token is an input within two epochs.
    """

    def __init__(self, tokens: Tokens, block_size: int, seed: int):
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.per_epoch, self.left_over = divmod(len(tokens) - 1, block_size)
        if not self.per_epoch:
            raise ValueError(
                f"{tokens.name} has {len(tokens)} tokens, fewer than one window of "
                f"block_size={block_size} and the token after it; the largest block_size that "
                f"fits is {len(tokens) - 1}."
            )

    def rows(self, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows first … first + n - 1: inputs and targets, int64, (n, block_size) each.

        Pass number n of a run, whichever process makes it, reads rows(n * batch_size, batch_size).
        """
        starts = []
        for epoch, place in (divmod(row, self.per_epoch) for row in range(first, first + n)):
            window = int(shuffled(self.per_epoch, self.seed, epoch)[place])
            starts.append(window * self.block_size + (self.left_over if epoch % 2 else 0))
        return self._read(starts)

    def in_order(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At most n windows spread evenly over the stream, always the same: for validation."""
        n = min(n, self.per_epoch)
        return self._read([i * self.per_epoch // n * self.block_size for i in range(n)])

    def _read(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        windows = np.empty((len(starts), self.block_size + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            windows[row] = self.tokens.read(start, self.block_size + 1)
        windows = torch.from_numpy(windows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def document_cu_seqlens(ids: torch.Tensor, eot: int) -> torch.Tensor:
    """Where the documents in a batch of windows begin, for attention that stays within each.

    ids: (B, T) tokens. Returns int64 (n + 1,), from 0 to B * T: rows cu_seqlens[i] to cu_seqlens[i + 1]
    of ids.flatten() are one document. One begins at each window's start and after each `eot`.
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, :-1] == eot
    end = torch.tensor([ids.numel()], device=ids.device)
    return torch.cat([begins.flatten().nonzero().flatten(), end])


def open_dataset(name: str) -> tuple[Tokens, Tokens]:
    """The training and validation tokens; the embedded dataset is made here if it is missing."""
    folder = ROOT / "data" / name
    if name == "pystdlib" and not (folder / "meta.json").exists():
        prepare = folder / "prepare.py"
        if subprocess.run([sys.executable, prepare]).returncode:
            raise ValueError(f"{prepare} failed, as told above; once that is mended, train again.")
    if not (folder / "meta.json").exists():
        script = f"data/{name}/prepare.py"
        if not (ROOT / script).exists():
            script = f"data/text/prepare.py FILES --out={name}"
        made = sorted(p.parent.name for p in ROOT.glob("data/*/meta.json"))
        raise ValueError(
            f"dataset {name!r} is not prepared in {folder}; run python {script} (there "
            f"are: {', '.join(made) or 'none'})."
        )
    splits = Tokens(folder, "train"), Tokens(folder, "val")
    if sum(tokens.nbytes for tokens in splits) <= CHECKED_BYTES:
        for tokens in splits:
            tokens.verify(get_encoding(tokens.encoding).n_vocab)
    return splits

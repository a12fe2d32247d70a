"""Documents to shards of tokens, in parallel; a kill at any moment costs the work on one shard.

Documents come in a fixed order from `parts`, and a shard holds whole ones: the first make up
val_0000.bin, the rest train_0000.bin, train_0001.bin, … Once a shard is on the disk, progress.json
counts it and says where the next document is, so the same command goes on from there, to the same
bytes. meta.json takes its place when all is done. The scripts data/*/prepare.py say which documents.
"""

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
from tqdm import tqdm

from command import lasting_output
from dataset import locked, open_shard, whole_file, write_shard
from tokenizer import get_encoding, token_bytes

# A source in pieces, each an iterator over its documents from a given one on.
Parts = list[Callable[[int], Iterator[str]]]
BYTES_PER_TOKEN = 4  # a low guess for English in a vocabulary of 50,000
BATCH_CHARACTERS, BATCH_DOCUMENTS = 2**19, 256
PATIENCE = 5  # seconds that the workers of a killed run may take to end
# What a kill leaves unfinished; other files of such an end may be the user's.
TEMPORARY = ("val_*.bin.*.tmp", "train_*.bin.*.tmp", "meta.json.tmp", "progress.json.tmp")


def count(text: str) -> int:
    """A positive number, as 100000000 or 1e8."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up, as 100000000 or 1e8")
    return int(number)


# What documents.py reads.
INPUTS = (
    'files or folders: .parquet and .jsonl with a document per row or line, under "text"; else a text '
    "file is one document, or several with a line <|endoftext|> after each; all but .parquet also as "
    ".gz or .zst"
)


def options(description: str, encoding: str, val_tokens: int) -> argparse.ArgumentParser:
    """The options that every script has which cuts documents into shards."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--encoding", default=encoding, help="%(default)s; vocabulary: bytes, gpt2, smollm, …")
    add(
        "--val_tokens",
        type=count,
        default=val_tokens,
        help="%(default)s; so many of the first documents' tokens are for validation",
    )
    add("--max_tokens", type=count, help="training tokens to stop at; none: all there are")
    add(
        "--shard_tokens", type=count, default=100_000_000, help="%(default)s; training tokens to a shard"
    )
    add("--workers", type=count, default=os.cpu_count(), help="%(default)s; processes that tokenize")
    return parser


@contextmanager
def command() -> Iterator[None]:
    """What goes wrong inside ends the program in one sentence."""
    with lasting_output():
        try:
            yield
        except BrokenProcessPool:
            sys.exit(
                "error: a process that tokenizes was killed, perhaps for memory; try fewer --workers."
            )
        except ValueError as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            sys.exit(f"error: the dataset cannot be made ({error}); mend that and repeat the command.")
        except KeyboardInterrupt:
            sys.exit(130)


def prepare(folder: Path, parts: Parts, source: dict, text_bytes: int, args: argparse.Namespace) -> None:
    """Writes or completes the dataset in `folder`, with the `options` in `args`.

    `source` says in JSON where the documents come from: what was begun with another is refused
    (ValueError), as is a damaged shard or a disk too small for `text_bytes` of text.
    """
    began, encoding = time.time(), get_encoding(args.encoding)
    names = ("encoding", "val_tokens", "shard_tokens", "max_tokens")
    plan = {**source, **{name: getattr(args, name) for name in names}}
    plan["vocabulary"] = zlib.crc32(sizes_of(args.encoding))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "--out", PATIENCE):
        shards, complete = finished_shards(folder, plan)
        if not complete:
            for left_behind in (path for name in TEMPORARY for path in folder.glob(name)):
                left_behind.unlink()
            total = text_bytes // (1 if args.encoding == "bytes" else BYTES_PER_TOKEN)
            if args.max_tokens:
                total = min(total, args.val_tokens + args.max_tokens)
            check_disk(folder, total, sum(s["tokens"] for s in shards), itemsize(encoding))
            write_json(folder / "progress.json", {"plan": plan, "shards": shards})
            (folder / "meta.json").unlink(missing_ok=True)
            write_shards(folder, parts, plan, shards, total, args)
            write_json(
                folder / "meta.json", {"encoding": args.encoding, **summary(shards), "plan": plan}
            )
        (folder / "progress.json").unlink(missing_ok=True)
    splits = summary(shards)["splits"].items()
    made = ", ".join(f"{split} {sums['tokens']:,} tokens" for split, sums in splits)
    print(f"{folder}: {made}, encoding {args.encoding}; complete after {time.time() - began:.1f} s")


def write_json(path: Path, content: dict) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def recorded(folder: Path) -> dict | None:
    """The plan and the shards that meta.json or progress.json tells of; None if neither is there.

    ValueError if it is none of ours, or holds shards without either.
    """
    for path in (folder / "meta.json", folder / "progress.json"):
        try:
            record = json.loads(path.read_text())
            for known in record["shards"]:
                known["file"], known["checksum"], known["tokens"], known["next"]
            return {"plan": dict(record["plan"]), "shards": record["shards"]}
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} belongs to some other dataset; give another --out.") from error
    if any(folder.glob("*.bin")):
        raise ValueError(f"{folder} holds shards of some other dataset; give another --out.")
    return None


def finished_shards(folder: Path, plan: dict) -> tuple[list[dict], bool]:
    """The shards that stand, checked: those before the first that is missing; and if they are all.

    A file that is there but damaged is refused, for a person to look at, as is another plan's folder.
    """
    record = recorded(folder)
    if not record:
        return [], False
    before, shards = record["plan"], record["shards"]
    for name in {**before, **plan}:
        old, new = before.get(name), plan.get(name)
        if old != new:
            raise ValueError(
                f"{folder} was begun with {name} = {old}, not {new}; repeat that command, with its "
                "inputs as they were, or give another --out."
            )
    for i, known in enumerate(tqdm(shards, "checking", unit="shard", disable=None, leave=False)):
        path = folder / known["file"]
        if not path.exists():
            return shards[:i], False
        try:
            shard = open_shard(path)
            shard.verify()
            if shard.checksum != known["checksum"]:
                raise ValueError(f"{path} is not the file that was written;")
        except ValueError as error:
            problem = str(error).rpartition(";")[0]
            raise ValueError(f"{problem}; remove that file, and this command makes it anew.") from None
    return shards, (folder / "meta.json").exists()


def check_disk(folder: Path, total: int, done: int, width: int) -> None:
    """Says what the dataset needs; ValueError if the disk has not as much."""
    needed, free = width * max(total - done, 0), shutil.disk_usage(folder).free
    print(
        f"{folder}: {done:,} of about {total:,} tokens are there; the rest needs about "
        f"{needed / 1e9:,.2f} GB of disk, {free / 1e9:,.2f} GB are free"
    )
    if needed > free:
        raise ValueError(
            f"{folder} has {free / 1e9:,.2f} GB free of about {needed / 1e9:,.2f} needed; make room, "
            "give an --out on a larger disk, or fewer --max_tokens."
        )


def write_shards(
    folder: Path, parts: Parts, plan: dict, shards: list[dict], total: int, args: argparse.Namespace
) -> None:
    """Appends to `shards` and to the folder until the documents or the tokens asked for are there."""

    def wanted() -> int:
        if not shards:
            return args.val_tokens
        if not args.max_tokens:
            return args.shard_tokens
        return min(args.shard_tokens, args.max_tokens - sum(s["tokens"] for s in shards[1:]))

    def close(place: tuple[int, int]) -> None:
        name = f"train_{len(shards) - 1:04}.bin" if shards else "val_0000.bin"
        tokens = np.concatenate([document for document, _ in waiting])
        shards.append(
            {
                "file": name,
                "checksum": write_shard(folder / name, tokens, args.encoding),
                "tokens": tokens.size,
                "bytes": sum(n_bytes for _, n_bytes in waiting),
                "documents": len(waiting),
                "next": place,
            }
        )
        write_json(folder / "progress.json", {"plan": plan, "shards": shards})
        waiting.clear()

    waiting, size, goal = [], 0, wanted()
    start = tuple(shards[-1]["next"]) if shards else (0, 0)
    done = sum(s["tokens"] for s in shards)
    texts = placed(parts, start) if goal > 0 else iter(())
    bar = tqdm(total=total, initial=done, unit="token", unit_scale=True, disable=None, leave=False)
    with bar, tokenized_in_order(texts, args) as stream:
        for document, n_bytes, place in stream:
            waiting.append((document, n_bytes))
            size += document.size
            bar.update(document.size)
            if size >= goal:
                close(place)
                size, goal = 0, wanted()
                if goal <= 0:
                    break
        if waiting:
            close(place)
    if len(shards) < 2:
        for name in ("val_0000.bin", "progress.json"):
            (folder / name).unlink(missing_ok=True)
        raise ValueError(
            f"all {sum(s['tokens'] for s in shards):,} tokens would be for validation, none for "
            "training; give more text, or fewer --val_tokens."
        )


def summary(shards: list[dict]) -> dict:
    """What readers of the dataset want to know of each split, and how its shards came about."""
    splits = {}
    for split, own in (("train", shards[1:]), ("val", shards[:1])):
        sums = {name: sum(shard[name] for shard in own) for name in ("tokens", "bytes", "documents")}
        splits[split] = {**sums, "shards": {shard["file"]: shard["checksum"] for shard in own}}
    return {"splits": splits, "shards": shards}


def placed(parts: Parts, start: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each document from the place `start` (part, document) on, with the place after it."""
    for number in range(start[0], len(parts)):
        first = start[1] if number == start[0] else 0
        for i, text in enumerate(parts[number](first), first + 1):
            yield text, (number, i)


@contextmanager
def tokenized_in_order(texts: Iterator, args: argparse.Namespace) -> Iterator[Iterator]:
    """Each document's tokens, its bytes of text and the place after it, in order, from processes."""
    pool, running = ProcessPoolExecutor(args.workers, initializer=begin_worker), deque()
    pool.submit(int)  # so the processes are there before reading starts threads

    def batches():
        batch, size = [], 0
        for text, place in texts:
            batch.append((text, place))
            size += len(text)
            if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def first_result():
        batch, result = running.popleft()
        tokens, lengths, n_bytes = result.result()
        for (_, place), end, length, size in zip(batch, accumulate(lengths), lengths, n_bytes):
            yield tokens[end - length : end], size, place

    def results():
        for batch in batches():
            running.append(
                (batch, pool.submit(encode_batch, args.encoding, [text for text, _ in batch]))
            )
            if len(running) >= 3 * args.workers:
                yield from first_result()
        while running:
            yield from first_result()

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker() -> None:
    """A worker leaves Ctrl-C to the program that began it, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forked = multiprocessing.get_start_method() == "fork"
    parent = multiprocessing.parent_process().pid if forked else os.getppid()  # or the server that forks

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def itemsize(encoding) -> int:
    return 2 if encoding.n_vocab <= 2**16 else 4


@functools.cache
def sizes_of(name: str) -> np.ndarray:
    return token_bytes(get_encoding(name))


def encode_batch(name: str, texts: list[str]) -> tuple[np.ndarray, list[int], list[int]]:
    """The documents' tokens back to back, <|endoftext|> after each; their lengths; their bytes."""
    encoding = get_encoding(name)
    rows = [[*encoding.encode_ordinary(text), encoding.eot_token] for text in texts]
    lengths = [len(row) for row in rows]
    tokens = np.array([t for row in rows for t in row], dtype=f"u{itemsize(encoding)}")
    n_bytes = np.add.reduceat(sizes_of(name)[tokens], [0, *accumulate(lengths[:-1])])
    return tokens, lengths, n_bytes.tolist()

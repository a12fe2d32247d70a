"""FineWeb-Edu, deduplicated: the paper's dataset, 190 million pages and 220 billion tokens.

Streams them from the hub (HuggingFaceTB/smollm-corpus), or reads the .parquet, .jsonl or text files
given, and writes shards of tokens here: the first documents as val_0000.bin, then train_0000.bin, …
Stopped or killed, the same command goes on where it was. --max_tokens=1e9 takes less of it.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from documents import find_files  # noqa: E402
from prepare import INPUTS, command, options, prepare, recorded  # noqa: E402

REPOSITORY, CONFIG = "HuggingFaceTB/smollm-corpus", "fineweb-edu-dedup"
TEXT_BYTES = 957 * 10**9


def hub_documents(stream, number: int, skip: int) -> Iterator[str]:
    """The documents of one of the stream's files."""
    try:
        for row in stream.shard(stream.num_shards, number).skip(skip):
            yield row["text"]
    except Exception as error:
        raise ValueError(
            f"{REPOSITORY} broke off ({type(error).__name__}); the same command goes on from there."
        ) from error


def open_hub(revision: str | None) -> tuple[list, dict, int]:
    """The dataset's files as parts for `prepare`; a revision once begun with is kept."""
    instead = "or give .parquet, .jsonl or text files on the command line"
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(
            f"streaming {REPOSITORY} needs the package {error.name}; run pip install datasets, "
            f"{instead}."
        ) from error
    try:
        revision = revision or HfApi().dataset_info(REPOSITORY).sha
        stream = load_dataset(REPOSITORY, CONFIG, split="train", streaming=True, revision=revision)
        stream = stream.select_columns(["text"])
    except Exception as error:
        raise ValueError(
            f"{REPOSITORY} cannot be reached ({type(error).__name__}); try again with internet access, "
            f"{instead}."
        ) from error
    parts = [functools.partial(hub_documents, stream, i) for i in range(stream.num_shards)]
    return parts, {"inputs": REPOSITORY, "revision": revision}, TEXT_BYTES


def main() -> None:
    parser = options(__doc__.splitlines()[0], encoding="smollm", val_tokens=10_000_000)
    parser.add_argument("inputs", nargs="*", type=Path, help=f"read instead of the hub: {INPUTS}")
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="where to write; none: this folder")
    args = parser.parse_args()
    if args.inputs:
        source = find_files(args.inputs, args.out)
    else:
        begun = recorded(args.out)
        source = open_hub(begun and begun["plan"].get("revision"))
    prepare(args.out, *source, args)


if __name__ == "__main__":
    with command():
        main()

"""The Python standard library as a dataset: 11 MB of real code that needs no download.

The sources of the Python that runs this, without tests, one document per file, in the "bytes"
encoding. About 5% of the files are the validation split, chosen by a hash of their name, so a file
stays on its side whatever else the library holds. Writes train_0000.bin, val_0000.bin, meta.json.
"""

import argparse
import hashlib
import json
import platform
import sys
import sysconfig
import time
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dataset import write_dataset  # noqa: E402
from prepare import command  # noqa: E402
from tokenizer import get_encoding  # noqa: E402

# pydoc_data is the manual as one generated string, which would be most of the validation split.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
LEFT_OUT |= {"pydoc_data"}


def sources(library: Path) -> list[str]:
    """The library's own files, as sorted relative paths."""
    kept = []
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        # Files that describe this very machine would make the dataset differ from the next one's.
        of_machine = relative.parts[0].startswith(("config-", "_sysconfigdata"))
        if not of_machine and not LEFT_OUT & set(relative.parts):
            kept.append(relative.as_posix())
    return sorted(kept)


def is_validation(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 13  # 13 of 256 are 5%


def check_folder(folder: Path) -> None:
    """Refuses a folder with another dataset in it, finished or not."""
    found = [path for path in (folder / "progress.json", folder / "meta.json") if path.exists()]
    try:
        if not found or "python" in json.loads(found[0].read_text()):
            return
    except (ValueError, TypeError):  # no JSON, or another kind of it
        pass
    raise ValueError(f"{found[0]} is of some other dataset; move it away, or give another --out_dir.")


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out_dir", type=Path, default=here, help="where to write; none: this folder")
    out_dir, began = parser.parse_args().out_dir, time.time()

    check_folder(out_dir)
    library = Path(sysconfig.get_path("stdlib"))
    names = sources(library)
    splits = {
        "train": [name for name in names if not is_validation(name)],
        "val": [name for name in names if is_validation(name)],
    }
    if not all(splits.values()):
        sys.exit(
            f"{library} holds {len(names)} Python sources, too few for a dataset; run this with a "
            "Python that ships its standard library as .py files, such as python.org's."
        )
    with tqdm(total=len(names), unit="file", disable=None, leave=False) as bar:

        def documents(split):
            for name in splits[split]:
                yield (library / name).read_text(encoding="utf-8", errors="replace")
                bar.update()

        meta = write_dataset(
            out_dir,
            get_encoding("bytes"),
            {split: documents(split) for split in splits},
            python=platform.python_version(),
        )
    made = ", ".join(
        f"{split} {total['tokens']:,} tokens of {len(splits[split])} files"
        for split, total in meta["splits"].items()
    )
    print(f"{out_dir}: {made}, from Python {meta['python']} in {time.time() - began:.1f} s")


if __name__ == "__main__":
    with command():
        main()

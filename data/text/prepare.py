"""A dataset of your own text: files or folders of .parquet, .jsonl, .txt, or any other text.

`python data/text/prepare.py ~/notes --out=notes` writes data/notes; train with --dataset=notes. The
first documents are for validation. Stopped or killed, the same command goes on where it was.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from documents import find_files  # noqa: E402
from prepare import INPUTS, command, options, prepare  # noqa: E402


def main() -> None:
    parser = options(__doc__.splitlines()[0], encoding="bytes", val_tokens=100_000)
    parser.add_argument("inputs", nargs="+", type=Path, help=INPUTS)
    parser.add_argument("--out", required=True, help="name of the dataset: a folder in data/")
    args = parser.parse_args()
    folder = ROOT / "data" / args.out
    if folder.resolve() == ROOT / "data":
        raise ValueError(f"--out={args.out} names no folder in data/; give the dataset a name.")
    prepare(folder, *find_files(args.inputs, folder), args)


if __name__ == "__main__":
    with command():
        main()

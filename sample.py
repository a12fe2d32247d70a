"""Text from a checkpoint, and how deep the model thought about each token.

`python sample.py --prompt="def " --show_depth` colours every token by its recursion steps; --max_depth
caps them, the paper's test-time scaling (both in its section 5). --interactive asks for one prompt after
another, --compare shows two checkpoints side by side. The depth of a token is known once it has been
read, so the last token of a sample has none: nothing reads it.
"""

import argparse
import collections
import html
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken

import checkpoint
from command import exit_status
from dataset import whole_file
from engine import Engine, Event, pick_device
from model import MoR
from modelconfig import MOST
from sampling import SamplingParams
from text import pieces

# ---- depths in the terminal and on a page --------------------------------------------------------

# From shallow to deep, for xterm and CSS; black text is legible on each, whatever the surroundings.
XTERM = (230, 222, 215, 209, 204, 170, 141)
CSS = ("#ffffd7", "#ffd787", "#ffaf5f", "#ff875f", "#ff5f87", "#d75fd7", "#af87ff")
# A control character out of a model could recolour the terminal or move its cursor: show its picture.
VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | {127: 0x2421}
ESCAPES = re.compile(r"\x1b\[[\d;]*m")  # the colours of `paint`
VISIBLE |= dict.fromkeys(range(128, 160), 0xFFFD)


def shade(depth: int, n_recursion: int) -> int:
    """Index of a depth's colour; a token of depth 0, which no step took, looks like one of depth 1."""
    return round(max(0, depth - 1) * (len(CSS) - 1) / max(1, n_recursion - 1))


def depth_counts(samples: list[list[tuple[str, int | None]]], n_recursion: int) -> dict[int, int]:
    """Tokens of each depth over all samples; depth 0 only where it occurs."""
    counts = collections.Counter(depth for sample in samples for _, depth in sample)
    return {depth: counts[depth] for depth in range(n_recursion + 1) if depth or counts[0]}


def paint(text: str, depth: int | None, n_recursion: int) -> str:
    """For the terminal: text on its depth's colour, or with the depth as exponent under NO_COLOR."""
    before = after = ""
    if depth is not None and os.environ.get("NO_COLOR"):
        after = "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(depth))
    elif depth is not None:
        before, after = f"\x1b[38;5;16;48;5;{XTERM[shade(depth, n_recursion)]}m", "\x1b[0m"
    lines = text.translate(VISIBLE).replace("\n", "↵\n").split("\n")
    return "\n".join(before + line + after if line else "" for line in lines)  # never colour a margin


PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Recursion depth of each token</title>
<style>
:root {{ color-scheme: light dark; font-family: sans-serif; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; }}
.newline::before {{ content: "↵"; }}
{colours}
</style>
<h1>Recursion depth of each token</h1>
<p>{legend}</p>
{samples}
</html>
"""


def page(samples: list[list[tuple[str, int | None]]], n_recursion: int) -> str:
    """All samples as one HTML page; each token tells its depth when pointed at."""

    def token(text: str, depth: int | None) -> str:
        newline = " newline" if text.startswith("\n") else ""
        title = "not read" if depth is None else f"depth {depth}"
        text = html.escape(text.translate(VISIBLE))
        return f'<span class="d{depth}{newline}" title="{title}">{text}</span>'

    style, legend, body = [], [], []
    for depth, count in depth_counts(samples, n_recursion).items():
        style.append(f".d{depth} {{ color: #000; background: {CSS[shade(depth, n_recursion)]}; }}")
        legend.append(f'<span class="d{depth}">&nbsp;depth {depth}: {count} tokens&nbsp;</span>')
    for number, sample in enumerate(samples, 1):
        spans = "".join(token(text, depth) for text, depth in sample if text)
        body.append(f"<h2>sample {number}</h2>\n<pre>{spans}</pre>")
    return PAGE.format(colours="\n".join(style), legend="\n".join(legend), samples="\n".join(body))


# ---- command line --------------------------------------------------------------------------------


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as that goes without the checkpoint."""

    def refuse(message: str):
        raise ValueError(f"{message}; --help lists what there is.")

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("out/checkpoint.pt"), help="out/checkpoint.pt")
    add("--prompt", help="text to continue; none: what is piped in, or else a new document")
    add("--prompt_file", help="file with the text to continue; - is standard input")
    add("--num_samples", type=int, default=1, help="1; samples, generated in one batch")
    add("--max_new_tokens", type=int, default=256, help="256; 0: just read the prompt")
    add("--temperature", type=float, default=0.8, help="0.8; 0: always the likeliest token")
    add("--top_k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all")
    add("--top_p", type=float, default=1.0, help="draw from the likeliest tokens of this total weight")
    add("--seed", type=int, default=1337, help="1337; a sample depends on it and on its number")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--max_depth", type=int, default=0, help="most recursion steps of a token; 0: all")
    add("--device", default="auto", help="cpu, cuda, cuda:1, …; auto: the GPU if there is one")
    add("--show_depth", action="store_true", help="colour tokens by depth (NO_COLOR=1: write it as d³)")
    add("--html", type=Path, metavar="FILE", help="write the samples, coloured by depth, as a page")
    add("--interactive", action="store_true", help="continue one line after another, coloured by depth")
    add("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two checkpoints, side by side")
    a = parser.parse_args(argv)
    text = "".join([a.prompt or "", *a.stop])  # lone surrogates stand for bytes that are not UTF-8
    prompted = a.prompt is not None or a.prompt_file is not None
    alone = sum(map(bool, (a.interactive, a.compare, a.html or a.num_samples > 1)))
    for fine, message in (
        (1 <= a.num_samples <= MOST, f"num_samples={a.num_samples} must lie from 1 to {MOST}."),
        (None in (a.prompt, a.prompt_file), "prompt and prompt_file are both given; give one of them."),
        (not (a.interactive and prompted), "interactive asks for prompts itself; leave out the prompt."),
        (alone <= 1, "interactive, compare, and num_samples or html exclude each other; give one."),
        (text.encode(errors="ignore").decode() == text, "prompt or stop is not UTF-8; convert it."),
    ):
        if not fine:
            raise ValueError(message)
    a.params = [
        SamplingParams(a.max_new_tokens, a.temperature, a.top_k, a.top_p, seed, (), tuple(a.stop))
        for seed in seeds(a.seed, a.num_samples)
    ]
    return a


def seeds(seed: int, n: int) -> list[int]:
    """A seed for each of n samples, so that none is another one's under a seed nearby."""
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative.")
    return np.random.SeedSequence(seed).generate_state(n, np.uint64).tolist()


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text: given, from a file, or piped in; else empty."""
    if args.prompt is not None or (args.prompt_file is None and (not sys.stdin or sys.stdin.isatty())):
        return args.prompt or ""
    piped = args.prompt_file in (None, "-")
    source = "standard input" if piped else args.prompt_file
    try:
        return (sys.stdin.buffer.read() if piped else Path(source).read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt in {source} is not UTF-8 (its byte {error.start}).") from None
    except OSError as error:
        raise ValueError(f"the prompt in {source} cannot be read: {error.strerror}.") from None


def require_writable(path: Path, inputs: list[Path]) -> None:
    """Refuses a path that cannot become a file, before minutes of work go into what it is to hold."""
    problem = ""
    try:
        if path.exists() and not path.is_file():
            problem = "there is something else of that name"
        if path.exists() and any(other.exists() and path.samefile(other) for other in inputs):
            problem = "it is the checkpoint or the prompt's file"
        tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        problem = error.strerror
    if problem:
        raise ValueError(f"html={path} cannot be written: {problem}.")


# ---- generation ----------------------------------------------------------------------------------


class Run:
    """Samples of one prompt as they come, and what they took."""

    def __init__(self, args: argparse.Namespace, model: MoR, encoding: tiktoken.Encoding, text: str):
        prompt = encoding.encode_ordinary(text) or [encoding.eot_token]
        self.config, self.encoding, self.stop = model.config, encoding, args.stop
        self.n_prompt, self.n_asked = len(prompt), len(prompt) + args.max_new_tokens
        self.engine = Engine(
            model, max_batch=args.num_samples, max_len=min(self.config.block_size, self.n_asked),
            encoding=encoding, max_depth=args.max_depth or None,
        )  # fmt: skip
        for params in args.params:
            self.engine.submit(prompt, params)
        self.events: list[list[Event]] = [[] for _ in args.params]
        self.seconds = 0.0

    def arriving(self) -> Iterator[Event]:
        start = time.perf_counter()
        for event in self.engine.stream():
            self.events[event.request].append(event)
            self.seconds = time.perf_counter() - start
            yield event

    def pieces(self, events) -> Iterator[tuple[str, int | None]]:
        return pieces(((e.token, e.depth) for e in events), self.encoding, self.n_prompt, self.stop)

    def summary(self) -> str:
        """Speed, memory and depths in a line; one before it if the context's end cut a sample short."""
        size, n_recursion = self.config.block_size, self.config.n_recursion
        full = self.n_asked > max(map(len, self.events)) > size
        note = f"note: a sample ends where the context of {size} tokens is full.\n" if full else ""
        n_new = sum(max(0, len(events) - self.n_prompt) for events in self.events)
        depths = [e.depth for events in self.events for e in events if e.depth is not None]
        kv = self.engine.kv
        return (
            f"{note}{n_new} tokens, {n_new / self.seconds:.1f} tokens/s, cache "
            f"{kv.most_bytes():,} bytes, mean depth {sum(depths) / len(depths):.2f} of {n_recursion}"
        )


def print_samples(args: argparse.Namespace, model: MoR, encoding: tiktoken.Encoding, text: str) -> int:
    """Generates and prints: one sample as it comes, several when all are done; the exit status."""
    n_recursion, several = model.config.n_recursion, args.num_samples > 1
    table = VISIBLE if sys.stdout.isatty() else {}
    run, samples, status = Run(args, model, encoding, text), [[] for _ in args.params], 0

    def print_sample(number: int, events) -> None:
        for piece, depth in run.pieces(events):
            samples[number].append((piece, depth))
            shown = paint(piece, depth, n_recursion) if args.show_depth else piece.translate(table)
            print(shown, end="", flush=True)

    try:
        if several:
            collections.deque(run.arriving(), maxlen=0)
        else:
            print_sample(0, run.arriving())
    except KeyboardInterrupt:
        status = 130  # and on with what there is
    for number in range(args.num_samples * several):
        print(f"--- sample {number + 1} ---")
        print_sample(number, run.events[number])
        print()
    if not several:
        print()
    if args.show_depth:
        counts = depth_counts(samples, n_recursion).items()
        print(*(paint(f" depth {d}: {n} tokens ", d, n_recursion) for d, n in counts))
    sys.stdout.flush()
    if args.html:
        with whole_file(args.html.resolve()) as file:  # a link stays, what it points to is replaced
            file.write(page(samples, n_recursion).encode())
    if any(run.events):
        print(run.summary(), file=sys.stderr)
    return status


def converse(args: argparse.Namespace, model: MoR, encoding: tiktoken.Encoding) -> int:
    """One prompt after another, until the input ends; Ctrl-C ends a sample."""
    args.show_depth = True
    print("A line is continued; an empty one starts a document. Ctrl-C ends a sample, Ctrl-D the loop.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        try:
            print_samples(args, model, encoding, text)
        except ValueError as error:  # as a line too long for the context
            print(f"error: {error}", file=sys.stderr)


# ---- two checkpoints -----------------------------------------------------------------------------


def lines_of(sample: list[tuple[str, int | None]], width: int) -> list[list[tuple[str, int | None]]]:
    """A sample cut into lines of up to `width` columns; a line end shows as one more, as in `paint`."""
    lines, used = [[]], 0
    for text, depth in sample:
        for character in text.translate(VISIBLE).replace("\t", "    "):
            shown = "↵" if character == "\n" else character
            columns = columns_of(shown)
            if used + columns > width:
                lines.append([])
                used = 0
            lines[-1].append((shown, depth))
            used += columns
            if character == "\n":
                lines.append([])
                used = 0
    return lines


def columns_of(text: str) -> int:
    """Columns that text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def compare(args: argparse.Namespace, text: str) -> int:
    """The same prompt through two checkpoints, in columns, with depths, speed and bytes below."""
    width = max(20, (shutil.get_terminal_size((100, 24)).columns - 3) // 2)
    columns, device = [], pick_device(args.device)
    runs = [Run(args, *checkpoint.load_trained(path, device)[1:], text) for path in args.compare]
    for path, run in zip(args.compare, runs):
        collections.deque(run.arriving(), maxlen=0)
        sample, n_recursion = list(run.pieces(run.events[0])), run.config.n_recursion
        cells = [(str(path)[-width:], columns_of(str(path)[-width:])), ("", 0)]
        for line in lines_of(sample, width):
            alike = itertools.groupby(line, lambda item: item[1])
            painted = "".join(paint("".join(c for c, _ in g), d, n_recursion) for d, g in alike)
            cells.append((painted, columns_of(ESCAPES.sub("", painted))))
        cells.append(("", 0))
        counts = ", ".join(f"{d}: {n}" for d, n in depth_counts([sample], n_recursion).items())
        for fact in (*run.summary().replace("\n", ", ").split(", "), f"tokens by depth {counts}"):
            cells += [
                (fact[i : i + width], len(fact[i : i + width])) for i in range(0, len(fact), width)
            ]
        columns.append(cells)
    width = max(used for _, used in columns[0])  # exponents under NO_COLOR may have made it wider
    for (left, used), (right, _) in itertools.zip_longest(*columns, fillvalue=("", 0)):
        print(f"{left}{' ' * (width - used)} │ {right}".rstrip())
    return 0


def sample(args: argparse.Namespace) -> int:
    """What the arguments ask for; the exit status."""
    if args.html:
        inputs = [args.checkpoint, Path(args.prompt_file or args.checkpoint)]
        require_writable(args.html, inputs)
    if args.compare:
        return compare(args, read_prompt(args))
    _, model, encoding = checkpoint.load_trained(args.checkpoint, pick_device(args.device))
    if args.interactive:
        return converse(args, model, encoding)
    return print_samples(args, model, encoding, read_prompt(args))


def main(argv: list[str] | None = None) -> int:
    return exit_status(lambda: sample(read_arguments(argv)), instead="a smaller --num_samples")


if __name__ == "__main__":
    sys.exit(main())

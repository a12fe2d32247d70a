"""Text from a checkpoint, and how deep the model thought about each token.

`python sample.py --prompt="def " --show_depth` colours every token by its recursion steps; --max_depth
caps them, the paper's test-time scaling (both in its section 5). The depth of a token is that of the
pass that reads it, so the last token of a sample has none: nothing reads it.
"""

import argparse
import collections
import html
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import tiktoken

import checkpoint
from dataset import whole_file
from engine import Step, generate, out_of_memory, pick_device, pieces, room, tokens_with_depths
from model import MoR
from modelconfig import MOST
from settings import open_streams, silence
from tokenizer import get_encoding

# ---- depths in the terminal and on a page --------------------------------------------------------

# From shallow to deep, for xterm and CSS; black text is legible on each, whatever the surroundings.
XTERM = (230, 222, 215, 209, 204, 170, 141)
CSS = ("#ffffd7", "#ffd787", "#ffaf5f", "#ff875f", "#ff5f87", "#d75fd7", "#af87ff")
# A control character out of a model could recolour the terminal or move its cursor: show its picture.
VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"} | {127: 0x2421}
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
    add("--prompt", help="text to continue; none: from the start of a document")
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
    add("--show_depth", action="store_true", help="colour tokens by depth (NO_COLOR=1: mark them)")
    add("--html", type=Path, metavar="FILE", help="write the samples, coloured by depth, as a page")
    a = parser.parse_args(argv)
    text = "".join([a.prompt or "", *a.stop])  # lone surrogates stand for bytes that are not UTF-8
    for fine, message in (
        (1 <= a.num_samples <= MOST, f"num_samples={a.num_samples} must lie from 1 to {MOST}."),
        (a.max_new_tokens >= 0, f"max_new_tokens={a.max_new_tokens} must not be negative."),
        (a.top_k >= 0, f"top_k={a.top_k} must be the number of tokens to draw from, or 0 for all."),
        (a.seed >= 0, f"seed={a.seed} must not be negative."),
        (0 <= a.temperature < math.inf, f"temperature={a.temperature} must be 0 (greedy) or more."),
        (0 < a.top_p <= 1, f"top_p={a.top_p} must lie above 0 and up to 1 (off)."),
        ("" not in a.stop, "stop is an empty text, which stands everywhere; leave it out."),
        (None in (a.prompt, a.prompt_file), "prompt and prompt_file are both given; give one of them."),
        (text.encode(errors="ignore").decode() == text, "prompt or stop is not UTF-8; convert it."),
    ):
        if not fine:
            raise ValueError(message)
    return a


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


def prepare(args: argparse.Namespace) -> tuple[MoR, tiktoken.Encoding, list[int]]:
    """Model, encoding and prompt tokens."""
    if args.html:
        inputs = [args.checkpoint, Path(args.prompt_file or args.checkpoint)]
        require_writable(args.html, inputs)
    device, state = pick_device(args.device), checkpoint.load(args.checkpoint)
    model, encoding = checkpoint.load_model(state, device), get_encoding(state["encoding"])
    path, n_vocab, known = args.checkpoint, encoding.n_vocab, model.config.vocab_size
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError(f"{path} holds weights that are not finite: its training diverged.")
    if known < n_vocab:
        raise ValueError(f"{path} knows {known} of the {n_vocab} tokens in its encoding.")
    prompt = encoding.encode_ordinary(read_prompt(args)) or [encoding.eot_token]
    return model, encoding, prompt


def print_samples(args: argparse.Namespace, model: MoR, encoding: tiktoken.Encoding, prompt) -> int:
    """Generates and prints: one sample as it comes, several when all are done; the exit status."""
    n_recursion, several = model.config.n_recursion, args.num_samples > 1
    table = VISIBLE if sys.stdout.isatty() else {}
    history, samples = [], [[] for _ in range(args.num_samples)]
    steps = generate(
        model, [prompt] * args.num_samples, encoding, max_new_tokens=args.max_new_tokens,
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed,
        stop=args.stop, max_depth=args.max_depth or None,
    )  # fmt: skip
    recorded = (history.append(step) or step for step in steps)

    def print_sample(sample: int, steps: Iterable[Step]) -> None:
        tokens = tokens_with_depths(steps, sample)
        for text, depth in pieces(tokens, encoding, len(prompt), args.stop):
            samples[sample].append((text, depth))
            text = paint(text, depth, n_recursion) if args.show_depth else text.translate(table)
            print(text, end="", flush=True)

    status, start = 0, time.perf_counter()
    try:
        if several:
            collections.deque(recorded, maxlen=0)
        else:
            print_sample(0, recorded)
    except KeyboardInterrupt:
        status = 130  # and on with what there is
    seconds = time.perf_counter() - start
    for sample in range(args.num_samples * several):
        print(f"--- sample {sample + 1} ---")
        print_sample(sample, history)
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
    if history:
        print(summary(history, room(model, prompt) < args.max_new_tokens, seconds), file=sys.stderr)
    return status


def summary(history: list[Step], limited: bool, seconds: float) -> str:
    """Speed, memory and depths in a line; one before it if the context's end cut a sample short."""
    cache = history[-1].cache
    size = cache.config.block_size
    note = f"note: a sample ends where the context of {size} tokens is full.\n"
    depths = [depth for step in history for read in step.read.values() for _, depth in read]
    n_new = sum(len(step.chosen) for step in history)
    return (
        f"{note if limited and cache.seen.max() == size else ''}"
        f"{n_new} tokens, {n_new / seconds:.1f} tokens/s, cache {cache.bytes_in_use():,} bytes, "
        f"mean depth {sum(depths) / len(depths):.2f} of {cache.config.n_recursion}"
    )


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 2 for bad input, 130 after Ctrl-C, 141 where nobody reads the output."""
    open_streams()
    try:
        args = read_arguments(argv)
        model, encoding, prompt = prepare(args)
        return print_samples(args, model, encoding, prompt)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        silence(sys.stdout)  # or Python complains at exit
        return 141
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print("error: there is too little memory; give a smaller --num_samples.", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Text from a checkpoint, and how deep the model thought about each token.

`python sample.py --prompt="def " --show_depth` colours every token by its recursion steps; --max_depth
caps them, the paper's test-time scaling (both in its section 5). `generate` is the loop: one pass over
the prompts of all samples at once, then one token per sample and pass. The depth of a token is that of
the pass that reads it, so the last token of a sample has none: nothing reads it.
"""

import argparse
import codecs
import collections
import html
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
from dataset import whole_file
from kernels import ragged_batch
from kvcache import KVCache
from model import MoR
from tokenizer import get_encoding, token_bytes

# ---- generation ----------------------------------------------------------------------------------


class Step(NamedTuple):
    """One forward pass; samples that have ended are in it no more."""

    read: dict[int, list[tuple[int, int]]]  # sample: (token, depth) of each token that the pass read
    chosen: dict[int, int]  # sample: the token that follows them
    cache: KVCache


@torch.no_grad()
def generate(
    model: MoR, prompts: list[list[int]], encoding: tiktoken.Encoding, *, max_new_tokens: int,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 1337,
    stop: Iterable[str] = (), max_depth: int | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Continues prompts (token ids, any lengths) with a model in eval mode, one `Step` per pass.

    A sample ends with <|endoftext|>, with the token that completes a `stop` text (both are chosen
    before they are seen; `pieces` leaves them out), after max_new_tokens, or where the context is full.
    """
    eot, stop = encoding.eot_token, [text.encode() for text in stop]
    longest_stop = max(map(len, stop), default=0)
    new = {s: prompt or [eot] for s, prompt in enumerate(prompts)}  # what the next pass reads
    if max(map(len, new.values())) > model.config.block_size:
        raise ValueError(f"a prompt is longer than the context of {model.config.block_size} tokens.")
    left = {s: min(max_new_tokens, room(model, prompt)) for s, prompt in new.items()}
    device, dtype = model.cos.device, model.model.norm.weight.dtype
    longest = max(len(new[s]) + max(0, left[s] - 1) for s in new)
    cache = KVCache(model.config, len(prompts), longest, device, dtype)
    usable = torch.from_numpy(token_bytes(encoding) > 0).to(device)
    usable[eot] = True
    text = {s: b"" for s in new}  # generated so far
    for index in itertools.count():
        lengths = [len(new.get(s, ())) for s in range(len(prompts))]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
        ids = torch.tensor(list(itertools.chain(*new.values())), device=device)
        rows = ragged_batch(cu_seqlens, start=cache.seen)
        x, routed = model.hidden(ids, rows, cache, "causal", max_depth)
        depths = iter(routed.depth.tolist())
        read = {s: list(zip(tokens, itertools.islice(depths, len(tokens)))) for s, tokens in new.items()}
        going = [s for s in new if left[s] > 0]
        last = cu_seqlens[1:][going] - 1
        # Ids beyond the encoding, and those of no text in it, are rows that training never met.
        logits = model.logits(x[last])[:, : len(usable)].masked_fill(~usable, -math.inf)
        if temperature == 0:
            tokens = logits.argmax(1)
        else:
            u = torch.tensor([noise(seed, s, index) for s in going], device=device, dtype=torch.double)
            tokens = draw(probabilities(logits, temperature, top_k, top_p), u)
        chosen = dict(zip(going, tokens.tolist()))
        yield Step(read, chosen, cache)
        new = {}
        for s, token in chosen.items():
            left[s] -= 1
            added = text_of(encoding, token)
            text[s] += added
            end = text[s][-longest_stop - len(added) :]
            if left[s] > 0 and token != eot and not any(x in end for x in stop):
                new[s] = [token]
        if not new:
            return


def room(model: MoR, prompt: list[int]) -> int:
    """Tokens that fit behind a prompt; the last may stand past the context, since nothing reads it."""
    return model.config.block_size - len(prompt) + 1


def noise(seed: int, sample: int, index: int) -> float:
    """Uniform in [0, 1), from these three alone: a sample does not depend on its companions."""
    return np.random.default_rng((seed, sample, index)).random()


def probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits (B, V) to float64 weights (B, V); tokens cut off by top_k, then by top_p, weigh 0."""
    logits = logits.double()
    p = ((logits - logits.amax(1, keepdim=True)) / temperature).softmax(1)
    if not top_k and top_p == 1:
        return p
    best, order = p.sort(dim=1, descending=True, stable=True)
    best[:, top_k or best.shape[1] :] = 0
    above = F.pad(best.cumsum(1)[:, :-1], (1, 0))  # weight of all better tokens
    best[above >= top_p * best.sum(1, keepdim=True)] = 0
    return torch.zeros_like(p).scatter(1, order, best)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Weights (B, V) and u (B,) in [0, 1) to tokens (B,): where the running sum first exceeds u."""
    running = weights.cumsum(1)
    return (running > u[:, None] * running[:, -1:]).int().argmax(1)


# ---- tokens as text ------------------------------------------------------------------------------


def text_of(encoding: tiktoken.Encoding, token: int) -> bytes:
    return b"" if token == encoding.eot_token else encoding.decode_single_token_bytes(token)


def tokens_with_depths(steps: Iterable[Step], sample: int) -> Iterator[tuple[int, int | None]]:
    """The (token, depth) of one sample, prompt and all, as steps arrive; of the last, depth None."""
    last = None
    for step in steps:
        if sample in step.read:
            yield from step.read[sample]
            last = step.chosen.get(sample)
    if last is not None:
        yield last, None


def pieces(
    tokens: Iterable[tuple[int, int | None]], encoding: tiktoken.Encoding,
    n_prompt: int = 0, stop: Iterable[str] = (),
) -> Iterator[tuple[str, int | None]]:  # fmt: skip
    """(token, depth) to (text, depth), one per token, up to a `stop` text behind n_prompt tokens.

    A character that several tokens spell comes with the last of them, the others have no text; one
    that is never completed is left out. Tokens that may begin a stop text wait until that is clear.
    """
    stop = [text.encode() for text in stop]
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    waiting, text = collections.deque(), b""
    for index, (token, depth) in enumerate(tokens):
        waiting.append((text_of(encoding, token), depth))
        text += waiting[-1][0]
        watched = stop if index >= n_prompt else []
        found = [text.find(x) for x in watched if x in text]
        clear = min(found) if found else len(text) - begun(text, watched)
        while waiting and len(waiting[0][0]) <= clear:
            part, depth = waiting.popleft()
            clear, text = clear - len(part), text[len(part) :]
            yield decode(part), depth
        if found:
            if clear:
                yield decode(text[:clear]), waiting[0][1]
            return
    for part, depth in waiting:
        yield decode(part), depth


def begun(text: bytes, stop: list[bytes]) -> int:
    """How many bytes at the end of `text` may be the beginning of a stop text."""
    return max((n for x in stop for n in range(1, len(x)) if text.endswith(x[:n])), default=0)


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
        (a.num_samples >= 1, f"num_samples={a.num_samples} must be at least 1."),
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


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0][:100]
        raise ValueError(f"device={name} cannot be used ({reason}); try --device=cpu.") from None
    return name


def prepare(args: argparse.Namespace) -> tuple[MoR, tiktoken.Encoding, list[int]]:
    """Model, encoding and prompt tokens; what cannot be done is refused here, before any work."""
    try:
        if args.html and args.html.exists() and not args.html.is_file():
            raise OSError(0, "there is something else of that name")
        if args.html:
            tempfile.TemporaryFile(dir=args.html.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"html={args.html} cannot be written: {error.strerror}.") from None
    device, state = pick_device(args.device), checkpoint.load(args.checkpoint)
    model, encoding = checkpoint.load_model(state, device), get_encoding(state["encoding"])
    path, c, n_vocab, deepest = args.checkpoint, model.config, encoding.n_vocab, args.max_depth
    prompt = encoding.encode_ordinary(read_prompt(args)) or [encoding.eot_token]
    n, finite = len(prompt), all(p.isfinite().all() for p in model.parameters())
    for fine, message in (
        (finite, f"{path} holds weights that are not finite: its training diverged."),
        (c.vocab_size >= n_vocab, f"{path} knows {c.vocab_size} of {n_vocab} tokens in its encoding."),
        (0 <= deepest <= c.n_recursion, f"max_depth={deepest} must be 1 to {c.n_recursion}, or 0: all."),
        (n <= c.block_size, f"the prompt has {n} tokens, the context {c.block_size}; shorten it."),
    ):
        if not fine:
            raise ValueError(message)
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
    try:
        try:
            args = read_arguments(argv)
            model, encoding, prompt = prepare(args)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters that a model writes
        return print_samples(args, model, encoding, prompt)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        return 141
    except OSError as error:
        print(f"the output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""Generation: one pass over the prompts of all samples at once, then one token per sample and pass.

`generate` runs the causal rule over a cache of keys and values (paper section 2.2.2); samples leave the
batch as they end. Noise is a function of seed, sample and token alone, so a sample is the same whatever
runs beside it. `pieces` makes text of what comes out, each token with its recursion depth.
"""

import codecs
import collections
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache import KVCache
from model import MoR
from ragged import ragged_batch
from tokenizer import token_bytes


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"device={name} is not known; there are cpu, mps, cuda, cuda:1 and so on.")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0][:100]
        raise ValueError(f"device={name} cannot be used ({reason}); try --device=cpu.") from None
    return name


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory; PyTorch has a type for it on GPUs alone."""
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return no_memory or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


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
    if (n := max(map(len, new.values()))) > (context := model.config.block_size):
        raise ValueError(f"a prompt of {n} tokens exceeds the context of {context}; shorten it.")
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
    beyond = above >= top_p * best.sum(1, keepdim=True)
    beyond[:, 0] = False  # whatever top_p rounds to, the best token stays
    best[beyond] = 0
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

"""Tokens as text, as they arrive, each with its recursion depth.

A token may be a part of a character, and several tokens a stop text: `pieces` gives out text as soon as
it is clear that it is some, and no sooner.
"""

import codecs
import collections
from collections.abc import Iterable, Iterator

import tiktoken


def text_of(encoding: tiktoken.Encoding, token: int) -> bytes:
    return b"" if token == encoding.eot_token else encoding.decode_single_token_bytes(token)


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

"""Text out of tokens: stop texts, and characters that several tokens spell."""

import itertools

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from text import pieces
from tokenizer import get_encoding

BYTES = get_encoding("bytes")

MERGED = tiktoken.Encoding(
    "merged", pat_str=r"(?s).", special_tokens={"<|endoftext|>": 9},
    mergeable_ranks={b"a": 0, b"b": 1, b"ab": 2, b"aa": 3, b"bab": 4, b"\xc3": 5, b"\xa9": 6},
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 3),
)
def test_text_ends_before_the_first_stop(tokens, stop, n_prompt):
    n_prompt = min(n_prompt, len(tokens))
    part = [MERGED.decode_single_token_bytes(t).decode() for t in tokens]
    prompt, text = "".join(part[:n_prompt]), ""
    for n in range(n_prompt, len(tokens)):
        text += part[n]
        found = [text.index(x) for x in stop if x in text]
        if found:
            text = text[: min(found)]
            break
    got = list(pieces(list(zip(tokens, range(20))), MERGED, n_prompt, stop))
    assert "".join(t for t, _ in got) == prompt + text
    assert [d for _, d in got] == list(range(len(got)))
    assert all(part[d].startswith(t) for t, d in got)


@pytest.mark.parametrize("n_prompt", [0, 2])
def test_nothing_of_a_stop_text_shows_while_it_arrives(n_prompt):
    arrived = []

    def arriving():
        for token in b"\n\nx\ndef y\n\ndef":
            arrived.append(token)
            yield token, 1

    shown = ""
    for text, _ in pieces(arriving(), BYTES, n_prompt, ["\n\ndef"]):
        shown += text
        if n_prompt and len(shown) <= 2:  # a prompt shows at once
            assert len(arrived) == len(shown)
        if bytes(arrived) == b"\n\nx":  # what is no stop text shows as soon as that is clear
            late = shown
    assert shown == "\n\nx\ndef y" and late == "\n\nx" and len(arrived) == 14


def test_characters_come_with_their_last_byte():
    text = "é€𝄞x"
    tokens = list(zip(text.encode(), itertools.count(1)))
    got = list(pieces(tokens, BYTES))
    assert [(t, d) for t, d in got if t] == [("é", 2), ("€", 5), ("𝄞", 9), ("x", 10)]
    assert [d for _, d in got] == list(range(1, 11))
    for n in range(len(tokens)):  # cut anywhere: whole characters, no replacement for the torn one
        cut = "".join(t for t, _ in pieces(tokens[:n], BYTES))
        assert text.startswith(cut) and "\ufffd" not in cut
    broken = "".join(t for t, _ in pieces([(0xE2, 1), (ord("y"), 1)], BYTES))
    assert broken == "\ufffdy"

"""Text to tokens and back: plain bytes, a Hugging Face tokenizer.json, or a tiktoken vocabulary.

"bytes" needs no file: token i is byte i, and 256 is <|endoftext|>. Any other NAME is read from
data/NAME/tokenizer.json where there is one ("smollm" is the paper's vocabulary of 49,152), else it is
tiktoken's own ("gpt2", "cl100k_base", …). Special tokens in a text are text like any other: none can
end a document. `token_bytes` makes losses of different vocabularies comparable, as bits per byte.
"""

import functools
import json
import math
from pathlib import Path

import numpy as np
import regex
import tiktoken

from modelconfig import nearest

FOLDER = Path(__file__).resolve().parent / "data"
END = "<|endoftext|>"
# Where the tokenizer.json of these encodings comes from.
HUB = {"smollm": "HuggingFaceTB/cosmo2-tokenizer", "gpt2": "openai-community/gpt2"}
MALFORMED = (KeyError, TypeError, AttributeError)
# GPT-2's words, as tiktoken spells them.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@functools.cache
def get_encoding(name: str) -> tiktoken.Encoding:
    """The vocabulary of that name: `encode_ordinary` for text, `eot_token` to end a document.

    ValueError if it is unknown, cannot be had, or has rules that are not kept exactly here.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            name,
            # Without merges any cut will do; short pieces keep the cost linear in the text.
            pat_str=r"(?s).{1,64}",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END: 256},
        )
    own = {path.parent.name: path for path in FOLDER.glob("*/tokenizer.json")}
    if name in own:
        return read_tokenizer_json(own[name], name)
    if name == "smollm":
        raise ValueError(
            f"encoding 'smollm' needs the tokenizer.json of huggingface.co/{HUB[name]}; "
            f"put it at {FOLDER / name / 'tokenizer.json'}."
        )
    known = ["bytes", "smollm", *tiktoken.list_encoding_names(), *own]
    if name not in known:
        raise ValueError(
            f"encoding {name!r} is not known; the nearest is {nearest(name, known)!r} "
            f"of {', '.join(known)}."
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        file = f"put the tokenizer.json of huggingface.co/{HUB[name]} at " if name in HUB else ""
        file += f"{FOLDER / name / 'tokenizer.json'}, or " if name in HUB else ""
        raise ValueError(
            f"the vocabulary of encoding {name!r} could not be downloaded or stored "
            f"({type(error).__name__}); run this once with internet access, or {file}set "
            "TIKTOKEN_CACHE_DIR to a tiktoken cache folder copied from a machine that has it, "
            "or use the encoding 'bytes', which needs no download."
        ) from error


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of UTF-8 text each token stands for, int64 (n_vocab,); 0 if special or unused."""
    sizes = np.zeros(encoding.n_vocab, dtype=np.int64)
    for piece in encoding.token_byte_values():
        sizes[encoding.encode_single_token(piece)] = len(piece)
    return sizes


def usable_ids(encoding: tiktoken.Encoding) -> np.ndarray:
    """What generation may choose, (n_vocab,) bool: ids that stand for text, and <|endoftext|>."""
    usable = token_bytes(encoding) > 0
    usable[encoding.eot_token] = True
    return usable


# ---- tokenizer.json --------------------------------------------------------------------------------


def byte_characters() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def merged(token: str, rules: dict[tuple[str, str], int]) -> tuple[int, float]:
    """What the rules make of a token's own characters: number of parts left, rank of the last rule."""
    parts, rank = list(token), -1
    while len(parts) > 1:
        ranks = [rules.get(pair, math.inf) for pair in zip(parts, parts[1:])]
        if (best := min(ranks)) == math.inf:
            break
        i, rank = ranks.index(best), best
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return len(parts), rank


def cuts(rule: dict) -> list[str]:
    """The patterns by which a text is cut in turn; ValueError names the rule that is not known here."""
    kind = rule["type"]
    if kind == "Sequence":
        if any(inner["type"] == "ByteLevel" for inner in rule["pretokenizers"][:-1]):
            raise ValueError("ByteLevel before the last place")
        return [pattern for inner in rule["pretokenizers"] for pattern in cuts(inner)]
    if kind == "Digits":
        return [r"\p{N}" if rule["individual_digits"] else r"\p{N}+"]
    if kind == "Split" and rule["behavior"] == "Isolated" and not rule["invert"]:
        if "String" in rule["pattern"]:
            return [regex.escape(rule["pattern"]["String"])]
        regex.compile(rule["pattern"]["Regex"])
        return [rule["pattern"]["Regex"]]
    if kind == "ByteLevel" and not rule["add_prefix_space"]:
        return [WORDS] if rule.get("use_regex", True) else []
    details = {k: v for k, v in rule.items() if k not in ("type", "pattern", "trim_offsets")}
    raise ValueError(" ".join([kind, *(f"{k}={v}" for k, v in details.items())]))


def ends_in_byte_level(rule: dict) -> bool:
    inner = rule.get("pretokenizers")
    return ends_in_byte_level(inner[-1]) if inner else rule["type"] == "ByteLevel"


class ByteLevelBPE(tiktoken.Encoding):
    """A vocabulary whose texts are cut by several patterns in turn; `encode_ordinary` is its encoder."""

    def __init__(self, name, patterns, added, missing, unknown, **vocabulary):
        # The last pattern is tiktoken's to apply, unless there are bytes to leave out after it.
        patterns = patterns if patterns[-1:] == [WORDS] else [*patterns, r"(?s:.+)"]
        super().__init__(name, pat_str=patterns[-1], **vocabulary)
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        longest_first = sorted(map(regex.escape, added), key=len, reverse=True)
        self.added = regex.compile(f"({'|'.join(longest_first)})") if added else None
        self.missing, self.unknown = missing, unknown

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids that the file's own rules give, no special token among them."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokens = []
        for i, part in enumerate(self.added.split(text) if self.added else [text]):
            tokens += [self._special_tokens[part]] if i % 2 else self._encode_part(part)
        return tokens

    def _encode_part(self, text: str) -> list[int]:
        data, pieces, tokens = text.encode(), [text], []
        lossless = len(data.translate(None, self.missing)) == len(data)
        for pattern in self.patterns[:-1] if lossless else self.patterns:
            pieces = [part for piece in pieces for part in isolated(pattern, piece)]
        for piece in pieces:
            if lossless:
                tokens += super().encode_ordinary(piece)
                continue
            if self.unknown is None:  # the bytes before and after a missing one become neighbours
                known = [piece.encode().translate(None, self.missing)]
            else:
                known = regex.split(b"[%b]" % regex.escape(self.missing), piece.encode())
            for i, part in enumerate(known):
                tokens += [self.unknown] if i else []
                tokens += self._encode_single_piece(part) if part else []
        return tokens


def isolated(pattern: regex.Pattern, text: str) -> list[str]:
    """The text cut before and after each match; nothing is lost."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in (*pieces, text[end:]) if piece]


def read_tokenizer_json(path: Path, name: str) -> tiktoken.Encoding:
    """A byte-level BPE vocabulary as Hugging Face's tokenizers library writes it, to the same ids.

    There a pair merges if a rule names it, here if both together are a token. These agree when each
    token ranks by the rule that completes it alone, and tokens that no rules complete are left out.
    """

    def require(condition, problem):
        if not condition:
            raise ValueError(
                f"{path} {problem}; encodings are read from tokenizer.json files of byte-level BPE, "
                "such as GPT-2's or SmolLM's."
            )

    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        model, rule, added = file["model"], file["pre_tokenizer"], file["added_tokens"]
        require(model.get("type", "BPE") == "BPE", f"has a model of type {model.get('type')}")
        pairs = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        rules, vocab = {pair: rank for rank, pair in enumerate(pairs)}, model["vocab"]
        require(
            all(len(pair) == 2 and "".join(pair) in vocab for pair in pairs), "has a merge to no token"
        )
        special = {token["content"]: token["id"] for token in added}
        plain = [token for token in added if not token["special"]]
        require(ends_in_byte_level(rule), f"cuts text by {rule['type']}, not into bytes")
        try:
            patterns = cuts(rule)
        except (ValueError, regex.error) as error:
            require(False, f"cuts text by a rule that is not known here ({error})")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, *MALFORMED) as error:
        require(False, f"is not a whole tokenizer.json ({type(error).__name__}: {error})")
    require(not file.get("normalizer"), "changes text before it is cut (normalizer)")
    for option in (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "fuse_unk",
    ):
        require(not model.get(option), f"sets {option}")
    strict = [t for t in plain if t.get("lstrip") or t.get("rstrip") or t.get("single_word")]
    require(not strict, f"has an added token with conditions ({strict and strict[0]['content']!r})")
    twice = [token for token, number in special.items() if vocab.get(token, number) != number]
    require(not twice, f"numbers a token twice ({twice and twice[0]!r})")
    require(END in special, f"has no special token {END}")

    characters = byte_characters()
    ranks, unused, last = {}, {}, -1
    for token, number in vocab.items():
        parts, rank = merged(token, rules) if set(token) <= vocab.keys() & characters.keys() else (0, -1)
        if parts == 1:
            ranks[bytes(characters[c] for c in token)] = rank, number
        elif token not in special:
            unused[token] = number
    require(not (unused and model.get("ignore_merges")), "has tokens that no merges complete")
    for rank, number in sorted(ranks.values()):
        require(rank < 0 or number > last, "numbers its tokens in another order than its merges")
        last = number if rank >= 0 else last
    missing = bytes(byte for c, byte in characters.items() if c not in vocab)
    return ByteLevelBPE(
        name,
        patterns,
        [token["content"] for token in plain],
        missing,
        vocab.get(model.get("unk_token")),
        mergeable_ranks={token: number for token, (_, number) in ranks.items()},
        special_tokens=unused | special,
    )

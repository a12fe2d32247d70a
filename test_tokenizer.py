"""Vocabularies: text comes back, and a tokenizer.json gives the ids that its own library gives.

Where that library (tokenizers, optional) is missing, a plain reading of the format stands in: cut the
text, then apply to each piece the first rule of the list that fits, until none does.
"""

import json
import random
import re
import unicodedata
from pathlib import Path

import pytest
import regex
import requests
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer
from tokenizer import byte_characters, get_encoding, read_tokenizer_json, token_bytes

ROOT = Path(__file__).resolve().parent
BYTES = get_encoding("bytes")
END = BYTES.eot_token
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
UNCUT = BYTE_LEVEL | {"use_regex": False}


def sequence(*rules) -> dict:
    return {"type": "Sequence", "pretokenizers": list(rules)}


def split(pattern: dict, behavior: str = "Isolated", invert: bool = False) -> dict:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


RULES = {
    "gpt2": BYTE_LEVEL,
    "smollm": sequence({"type": "Digits", "individual_digits": True}, BYTE_LEVEL),
    "llama": sequence(split({"Regex": GPT4}), UNCUT),
    "nested": sequence(split({"Regex": r"\p{N}{1,3}"}), sequence(split({"String": "e."}), BYTE_LEVEL)),
    "runs of digits": sequence({"type": "Digits", "individual_digits": False}, BYTE_LEVEL),
    "uncut": UNCUT,
}

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
text_with_marks = st.lists(st.sampled_from(["<|endoftext|>", "<|", "\n", " ", "é", "\r\n", "𝄞\0"]))
SOURCE = (
    Path(tokenizer.__file__).read_text(encoding="utf-8")
    + "Größe, naïve café; 1 234 567 m²\r\n\tЖук\n" * 9
)
code = st.integers(0, len(SOURCE)).flatmap(
    lambda a: st.integers(0, 200).map(lambda n: SOURCE[a : a + n])
)
# Characters of old standing: what letters and digits are grows with every edition of Unicode.
old = st.characters(exclude_categories=["Cs", "Cn", "Co"], max_codepoint=0x1F5FF)
PIECES = [
    " ", "  ", "\n", "\t ", "\r\n", "\xa0", "\u3000", "\0", "7", "12", "٣", "½", "'ll", "the", "e.", "é",
    "_", "中文", "𝄞", "<|endoftext|>", "<tool>",
]  # fmt: skip
pieces = st.sampled_from(PIECES)
mixed = st.lists(pieces | st.text(old, max_size=5) | code, max_size=30).map("".join)


def one_sentence(refused) -> str:
    """The message of a refusal, which must be a single sentence."""
    message = str(refused.value)
    assert message.endswith(".") and "\n" not in message and not re.search(r"\.\s+[A-Z]", message)
    return message


# --- by name --------------------------------------------------------------------------------------


@settings(derandomize=True)
@given(any_text | text_with_marks.map("".join))
def test_bytes_round_trip_any_text(text):
    tokens = BYTES.encode_ordinary(text)
    assert tokens == list(text.encode())
    assert BYTES.decode(tokens) == text
    assert token_bytes(BYTES)[tokens].sum() == len(text.encode())


def test_bytes_vocabulary():
    assert (BYTES.n_vocab, END) == (257, 256)
    assert BYTES.decode([72, 105, END]) == "Hi<|endoftext|>"
    assert END not in BYTES.encode_ordinary("<|endoftext|>")
    assert token_bytes(BYTES).tolist() == [1] * 256 + [0]


def test_half_a_surrogate_becomes_the_replacement_character():
    assert BYTES.decode(BYTES.encode_ordinary("a\ud800b")) == "a\ufffdb"
    assert BYTES.decode(BYTES.encode_ordinary("\ud834\udd1e")) == "𝄞"


def test_token_bytes_with_merges_and_gaps():
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257, "é".encode(): 300}
    encoding = tiktoken.Encoding(
        "merged", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 302}
    )
    sizes = token_bytes(encoding)
    assert len(sizes) == 303 and sizes[[256, 257, 300, 301, 302]].tolist() == [2, 3, 2, 0, 0]
    text = "abc abd ééab\n<|endoftext|>"
    assert sizes[encoding.encode_ordinary(text)].sum() == len(text.encode())


def test_unknown_encoding_names_the_nearest():
    with pytest.raises(ValueError) as refused:
        get_encoding("gtp2")
    assert "nearest is 'gpt2'" in one_sentence(refused)


@pytest.mark.parametrize("error", [requests.ConnectTimeout("slow"), PermissionError("cache")])
def test_failed_download_says_what_to_do(monkeypatch, tmp_path, error):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))

    def no_network(url, **options):
        raise error

    monkeypatch.setattr(requests, "get", no_network)
    with pytest.raises(ValueError) as refused:
        get_encoding("p50k_edit")
    message = one_sentence(refused)
    assert "'p50k_edit'" in message and "TIKTOKEN_CACHE_DIR" in message and "'bytes'" in message


@pytest.mark.parametrize("name", ["smollm", "gpt2"])
def test_missing_vocabulary_says_which_file_goes_where(monkeypatch, tmp_path, name):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer, "FOLDER", tmp_path / "data")
    monkeypatch.setattr(
        requests, "get", lambda url, **options: (_ for _ in ()).throw(OSError("offline"))
    )
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(ValueError) as refused:
        get_encoding.__wrapped__(name)
    message = one_sentence(refused)
    assert str(tmp_path / "data" / name / "tokenizer.json") in message and "huggingface.co/" in message

    # Put there, it is that encoding.
    (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / name / "tokenizer.json").write_text(json.dumps(trained(name)))
    encoding = get_encoding.__wrapped__(name)
    assert encoding.name == name and encoding.decode(encoding.encode_ordinary("in the café 12")) == (
        "in the café 12"
    )


# --- tokenizer.json -------------------------------------------------------------------------------


def tokenizer_json(rule: dict, n_merges: int = 300, alphabet=None, **model) -> dict:
    """A vocabulary of merges in an order of training: the commonest pairs of SOURCE, one at a time."""
    characters = byte_characters()
    written = {byte: character for character, byte in characters.items()}
    words = [[written[b] for b in word.encode()] for word in regex.findall(GPT2, SOURCE)]
    alphabet = sorted(characters) if alphabet is None else alphabet
    vocab = {"<|endoftext|>": 0, "<|im_start|>": 1}
    vocab |= {character: i for i, character in enumerate(alphabet, 2)}
    merges = []
    while len(merges) < n_merges:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + (set(pair) <= vocab.keys())
        a, b = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(f"{a} {b}")
        vocab[a + b] = len(vocab)
        words = [fuse(word, a, b) for word in words if len(word) > 1]
    added = [{"id": vocab[t], "content": t, "special": True} | NO_CONDITIONS for t in list(vocab)[:2]]
    absent = ("unk_token", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    off = ("fuse_unk", "byte_fallback", "ignore_merges")
    bpe = {"type": "BPE", **dict.fromkeys(absent), **dict.fromkeys(off, False)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": rule, "post_processor": None,
        "decoder": BYTE_LEVEL | {"add_prefix_space": True},
        "model": bpe | {"vocab": vocab, "merges": merges} | model,
    }  # fmt: skip


NO_CONDITIONS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TRAINED = {}


def trained(rule: str) -> dict:
    """A copy of the vocabulary that all cuts share, with that cut."""
    if not TRAINED:
        TRAINED["json"] = json.dumps(tokenizer_json(None))
    return json.loads(TRAINED["json"]) | {"pre_tokenizer": RULES[rule]}


def fuse(word: list[str], a: str, b: str) -> list[str]:
    out = []
    for part in word:
        if out and (out[-1], part) == (a, b) and not (a == b and len(out[-1]) != len(a)):
            out[-1] = a + b
        else:
            out.append(part)
    return out


def plainly(content: dict, cut, text: str) -> list[int]:
    """The ids by the letter of the format, for a text that `cut` cuts."""
    vocab, unknown = content["model"]["vocab"], content["model"]["unk_token"]
    written = {byte: character for character, byte in byte_characters().items()}
    rules = [tuple(merge.split(" ")) for merge in content["model"]["merges"]]
    ids = []
    for piece in cut(text):
        word = [written[byte] for byte in piece.encode()]
        word = [c if c in vocab else unknown for c in word if c in vocab or unknown]
        while True:
            pairs = list(zip(word, word[1:]))
            fitting = [rule for rule in rules if rule in pairs]
            if not fitting:
                break
            i = pairs.index(fitting[0])
            word[i : i + 2] = ["".join(fitting[0])]
        ids += [vocab[part] for part in word]
    return ids


def saved(folder: Path, content: dict) -> tiktoken.Encoding:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_tokenizer_json(path, "saved")


PLAIN_CUTS = {
    "gpt2": lambda text: regex.findall(GPT2, text),
    "smollm": lambda text: [
        word for part in regex.findall(r"\p{N}|\P{N}+", text) for word in regex.findall(GPT2, part)
    ],
    "llama": lambda text: regex.findall(GPT4, text),
    "uncut": lambda text: [text],
}


@pytest.mark.parametrize("rule", PLAIN_CUTS)
def test_ids_are_those_of_the_format(tmp_path, rule):
    content = trained(rule)
    encoding = saved(tmp_path, content)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(mixed)
    def same(text):
        text = text[: 100 if rule == "uncut" else None]
        ids = encoding.encode_ordinary(text)
        assert ids == plainly(content, PLAIN_CUTS[rule], text)
        assert encoding.decode(ids) == text
        assert token_bytes(encoding)[ids].sum() == len(text.encode())

    same()
    assert (encoding.n_vocab, encoding.eot_token) == (len(content["model"]["vocab"]), 0)
    assert token_bytes(encoding)[[0, 1]].tolist() == [0, 0]
    assert encoding.encode_ordinary_batch(["in the", ""]) == [encoding.encode_ordinary("in the"), []]


def test_digits_are_alone_and_spaces_before_them_stay_together(tmp_path):
    encoding = saved(tmp_path, trained("smollm"))
    parts = [encoding.decode([t]) for t in encoding.encode_ordinary("a  12 ½٣ 7")]
    assert "12" not in parts and {"1", "2", "7"} <= set(parts) and "  1" not in parts


@pytest.mark.parametrize("unknown", [None, "<|im_start|>"])
def test_bytes_that_the_vocabulary_lacks(tmp_path, unknown):
    lacking = {
        character for character, byte in byte_characters().items() if byte in b"q\0\xc3\xe4\xf0\xff"
    }
    alphabet = sorted(byte_characters().keys() - lacking)
    content = tokenizer_json(RULES["smollm"], 120, alphabet, unk_token=unknown)
    encoding = saved(tmp_path, content)

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(mixed | st.text("aq\0éä中 7", max_size=20))
    def same(text):
        assert encoding.encode_ordinary(text) == plainly(content, PLAIN_CUTS["smollm"], text)

    same()
    kept = [encoding.decode([t]) for t in encoding.encode_ordinary("iqn")]
    assert kept == (["in"] if unknown is None else ["i", "<|im_start|>", "n"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_list_of_merges_is_kept_exactly_or_refused(tmp_path_factory, data):
    parts, merges = ["a", "b", "c"], []
    for _ in range(data.draw(st.integers(1, 9))):
        pair = data.draw(st.tuples(st.sampled_from(parts), st.sampled_from(parts)))
        if " ".join(pair) not in merges:
            merges.append(" ".join(pair))
            parts += ["".join(pair)] * ("".join(pair) not in parts)
    shuffled = data.draw(st.permutations(merges))
    content = trained("uncut")
    model = content["model"]
    vocab = model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 258}
    made = list(dict.fromkeys("".join(m.split(" ")) for m in shuffled))
    vocab |= {part: 400 + 7 * i for i, part in enumerate(made)}
    model["merges"] = shuffled
    try:
        encoding = saved(tmp_path_factory.mktemp("merges"), content)
    except ValueError as error:
        assert "in another order than its merges" in str(error)
        return
    for _ in range(20):
        text = "".join(data.draw(st.lists(st.sampled_from("abc"), max_size=9)))
        assert encoding.encode_ordinary(text) == plainly(content, lambda text: [text], text)


def test_ids_with_gaps_and_tokens_without_merges(tmp_path):
    content = trained("gpt2")
    model = content["model"]
    model["vocab"] = {token: 3 * i + 5 for token, i in model["vocab"].items()} | {
        "Ġnever": 4000,
        "zz": 2,
    }
    for token in content["added_tokens"]:
        token["id"] = model["vocab"][token["content"]]
    model["merges"] = [merge.split(" ") for merge in model["merges"]]  # as newer files have it
    encoding, dense = saved(tmp_path, content), saved(tmp_path, trained("gpt2"))
    text = SOURCE[:3000] + " never zz"
    assert encoding.encode_ordinary(text) == [3 * i + 5 for i in dense.encode_ordinary(text)]
    assert (encoding.eot_token, encoding.n_vocab) == (5, 4001)
    assert token_bytes(encoding)[[2, 4000, 5, 6]].tolist() == [0, 0, 0, 0]


def test_added_tokens_are_found_and_special_ones_are_text(tmp_path):
    content = trained("gpt2")
    n = len(content["model"]["vocab"])
    for i, token in enumerate(["<tool>", "@@", "@@@"]):
        content["added_tokens"].append({"id": n + i, "content": token, "special": False} | NO_CONDITIONS)
    encoding = saved(tmp_path, content)
    ids = encoding.encode_ordinary("a<tool>b@@@@@c<|endoftext|>")
    assert [i for i in ids if i >= n] == [n, n + 2, n + 1] and 0 not in ids
    assert encoding.decode(ids) == "a<tool>b@@@@@c<|endoftext|>" and encoding.n_vocab == n + 3
    assert encoding.encode_ordinary("\ud834\udd1e \ud800") == encoding.encode_ordinary("𝄞 \ufffd")


def test_order_of_ids_other_than_of_merges_is_refused(tmp_path):
    content = trained("gpt2")
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[300:302]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    with pytest.raises(ValueError, match="another order than its merges") as refused:
        saved(tmp_path, content)
    assert str(tmp_path / "tokenizer.json") in one_sentence(refused)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
FOREIGN = {
    "not a file": (lambda c: None, "is not a whole tokenizer.json"),
    "a list": (lambda c: [], "is not a whole tokenizer.json"),
    "no model": (
        lambda c: {k: v for k, v in c.items() if k != "model"},
        "is not a whole tokenizer.json",
    ),
    "no cut": (lambda c: c | {"pre_tokenizer": None}, "is not a whole tokenizer.json"),
    "metaspace": (lambda c: c | {"pre_tokenizer": METASPACE}, "Metaspace, not into bytes"),
    "whitespace": (
        lambda c: c | {"pre_tokenizer": sequence({"type": "Whitespace"}, BYTE_LEVEL)},
        "not known here .Whitespace",
    ),
    "space put before": (
        lambda c: c | {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
        "add_prefix_space=True",
    ),
    "text dropped": (
        lambda c: c | {"pre_tokenizer": sequence(split({"String": " "}, "Removed"), UNCUT)},
        "behavior=Removed",
    ),
    "bytes too early": (lambda c: c | {"pre_tokenizer": sequence(BYTE_LEVEL, UNCUT)}, "last place"),
    "broken pattern": (
        lambda c: c | {"pre_tokenizer": sequence(split({"Regex": "(a"}), UNCUT)},
        "not known here .missing",
    ),
    "normalizer": (lambda c: c | {"normalizer": {"type": "NFC"}}, "changes text before it is cut"),
    "wordpiece": (
        lambda c: c | {"model": c["model"] | {"type": "WordPiece"}},
        "model of type WordPiece",
    ),
    "dropout": (lambda c: c | {"model": c["model"] | {"dropout": 0.1}}, "sets dropout"),
    "suffix": (lambda c: c | {"model": c["model"] | {"end_of_word_suffix": "</w>"}}, "sets end_of_word"),
    "merge to nothing": (lambda c: c | {"model": c["model"] | {"merges": ["q q"]}}, "merge to no token"),
    "no end": (lambda c: c | {"added_tokens": []}, "no special token"),
    "numbered twice": (
        lambda c: c | {"added_tokens": [{"id": 1, "content": "<|endoftext|>", "special": True}]},
        "numbers a token twice",
    ),
    "conditions": (
        lambda c: c | {"added_tokens": [{"id": 9, "content": "x", "special": False, "lstrip": True}]},
        "with conditions",
    ),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_files_of_another_kind_are_refused(tmp_path, change):
    edit, problem = FOREIGN[change]
    path, content = tmp_path / "tokenizer.json", edit(trained("smollm"))
    path.write_text(json.dumps(trained("smollm"))[:-9] if content is None else json.dumps(content))
    with pytest.raises(ValueError, match=problem) as refused:
        read_tokenizer_json(path, "foreign")
    assert str(path) in one_sentence(refused)


# --- against the library itself -------------------------------------------------------------------


def library_trained(path: Path, rule: str, whole_alphabet: bool):
    """A vocabulary that the library trains on SOURCE and saves, and the library's own reading of it."""
    library = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    path.parent.mkdir()
    start = library.Tokenizer(models.BPE())
    start.decoder = decoders.ByteLevel()
    start.save(str(path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": RULES[rule]}))
    trainee = library.Tokenizer.from_file(str(path))
    trainee.train_from_iterator(
        [SOURCE],
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=["<|endoftext|>", "<|im_start|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if whole_alphabet else [],
            show_progress=False,
        ),
    )
    trainee.add_tokens(["<tool>"])
    trainee.save(str(path))
    theirs = library.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True  # special tokens in a text are text
    return theirs


@pytest.mark.parametrize("whole_alphabet", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_ids_are_the_library_s(tmp_path, rule, whole_alphabet):
    path = tmp_path / "saved" / "tokenizer.json"
    theirs = library_trained(path, rule, whole_alphabet)
    ours = read_tokenizer_json(path, "saved")

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(mixed | any_text.filter(lambda text: all(map(is_old, text))))
    def same(text):
        assert ours.encode_ordinary(text) == theirs.encode(text).ids

    same()
    assert ours.encode_ordinary(SOURCE) == theirs.encode(SOURCE).ids
    assert ours.n_vocab == theirs.get_vocab_size()
    for token, number in theirs.get_vocab().items():
        assert ours.decode([number]) == theirs.decode([number], skip_special_tokens=False), token


def is_old(character: str) -> bool:
    return unicodedata.category(character) != "Cn"


def test_words_and_digits_are_the_library_s_for_every_character(tmp_path):
    path = tmp_path / "saved" / "tokenizer.json"
    theirs = library_trained(path, "smollm", True)
    ours = read_tokenizer_json(path, "saved")
    characters = [c for c in map(chr, [*range(0xD800), *range(0xE000, 0x20000)]) if is_old(c)]
    random.Random(0).shuffle(characters)
    for start in range(0, len(characters), 500):
        # in front of a letter, a digit, a space and itself a character shows what kind it is
        text = "".join(f"{c}a {c}7 {c}{c} '{c}" for c in characters[start : start + 500])
        assert ours.encode_ordinary(text) == theirs.encode(text).ids

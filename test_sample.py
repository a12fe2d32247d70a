"""Generation against the naive full pass, its distributions, and what is printed of it.

`Scripted` is a model that says what a test tells it to, for stop texts and characters out of several
tokens; everything else runs real models, their routers drawn wide so that all depths occur.
"""

import collections
import html.parser
import itertools
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
import engine
import sample
from engine import generate, noise, pieces, probabilities, tokens_with_depths
from model import MoR
from modelconfig import ModelConfig
from ragged import ragged_batch
from sample import main, page, paint
from tokenizer import get_encoding

ROOT = Path(__file__).resolve().parent
BYTES = get_encoding("bytes")
END = BYTES.eot_token
SIZES = dict(vocab_size=300, block_size=64, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, init_std=0.2)
KINDS = {
    "vanilla": dict(sharing="none", n_recursion=1, routing="none"),
    "expert": dict(routing="expert"),
    "expert_partial": dict(routing="expert", capacity=(0.8, 0.5, 0.3)),
    "expert_shared": dict(routing="expert", kv_mode="shared", sampling="aux_router"),
    "token": dict(routing="token"),
    "token_update": dict(routing="token", kv_mode="shared_update"),
}
PROMPTS = [list(b"def f(x):"), [], list(b"a"), list("é = 'naïve'\n".encode())]


def random_model(kind: str, seed: int = 0, cls=MoR) -> MoR:
    torch.manual_seed(seed)
    model = cls(ModelConfig(**SIZES | KINDS[kind])).eval()
    for name, p in model.named_parameters():
        if "router" in name:
            torch.nn.init.normal_(p, std=1.0)
    return model


class Scripted(MoR):
    """Continues a single prompt with `script`, then with <|endoftext|>."""

    script = b""

    def logits(self, x):
        y = torch.zeros(len(x), self.config.vocab_size)
        for row in y:
            token, self.script = (self.script[0], self.script[1:]) if self.script else (END, b"")
            row[token] = 100
        return y


def run(model, prompts, n=20, **kwargs):
    """Per sample, its generated tokens, all its tokens, and the depths of those but the last."""
    steps = list(generate(model, prompts, BYTES, max_new_tokens=n, **kwargs))
    tokens, depths = [], []
    for s in range(len(prompts)):
        pairs = list(tokens_with_depths(steps, s))
        assert pairs[-1][1] is None and None not in [d for _, d in pairs[:-1]]
        tokens.append([t for t, _ in pairs])
        depths.append([d for _, d in pairs[:-1]])
    new = [[step.chosen[s] for step in steps if s in step.chosen] for s in range(len(prompts))]
    return new, tokens, depths


@torch.no_grad()
def full_pass(model, tokens, max_depth=None):
    x, routed = model.hidden(
        torch.tensor(tokens), ragged_batch(torch.tensor([0, len(tokens)])), max_depth=max_depth
    )
    return model.logits(x)[:, : BYTES.n_vocab], routed.depth.tolist()


def naive_greedy(model, prompt, n, max_depth=None):
    tokens = prompt or [END]
    for _ in range(n):
        tokens = [*tokens, int(full_pass(model, tokens, max_depth)[0][-1].argmax())]
        if tokens[-1] == END:
            break
    return tokens


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_the_full_pass_token_by_token(kind):
    model, all_depths = random_model(kind), set()
    _, tokens, depths = run(model, PROMPTS, temperature=0)
    for prompt, got, depth in zip(PROMPTS, tokens, depths):
        assert got == naive_greedy(model, prompt, 20)
        assert depth == full_pass(model, got[:-1])[1]
        all_depths |= set(depth)
    if model.config.routing != "none":
        assert all_depths >= {1, 2, 3}
    assert (kind == "expert_partial") == (0 in all_depths)


def test_max_depth_caps_every_token():
    model = random_model("token")
    _, tokens, depths = run(model, PROMPTS, temperature=0, max_depth=2)
    assert set().union(*depths) == {1, 2}
    for prompt, got, depth in zip(PROMPTS, tokens, depths):
        assert got == naive_greedy(model, prompt, 20, max_depth=2)
        assert depth == full_pass(model, got[:-1], 2)[1]
    assert tokens != run(model, PROMPTS, temperature=0)[1]


@pytest.mark.parametrize("kind", ["expert", "token_update"])
def test_a_sample_does_not_depend_on_its_companions(kind):
    model = random_model(kind)
    together, *_ = run(model, PROMPTS, temperature=0.9, top_p=0.95, seed=3)
    first, *_ = run(model, PROMPTS[:1], temperature=0.9, top_p=0.95, seed=3)
    assert first == together[:1]
    others = [list(b"something else"), PROMPTS[1], list(b"short"), PROMPTS[3], list(b"one more")]
    among, *_ = run(model, others, temperature=0.9, top_p=0.95, seed=3)
    assert (among[1], among[3]) == (together[1], together[3])


@pytest.mark.parametrize("kind", ["expert_shared", "token"])
def test_sampling_equals_the_full_pass_and_the_noise_of_sample_and_token(kind):
    model, stop, wanted = random_model(kind), [chr(c) for c in range(96, 128)], []
    for s, prompt in enumerate(PROMPTS):
        tokens = prompt or [END]
        for index in range(12):
            p = expected(full_pass(model, tokens)[0][-1].tolist(), 1.2, 50, 0.9)
            tokens = [*tokens, int(np.argmax(np.cumsum(p) > noise(8, s, index)))]
            if tokens[-1] == END or chr(tokens[-1]) in stop:
                break
        wanted.append(tokens)
    _, got, _ = run(model, PROMPTS, n=12, temperature=1.2, top_k=50, top_p=0.9, seed=8, stop=stop)
    assert got == wanted
    assert len({len(g) - len(p or [END]) for g, p in zip(got, PROMPTS)}) > 1  # some end before others


def test_noise_differs_between_samples_tokens_and_seeds():
    same, *_ = run(random_model("expert"), [PROMPTS[0]] * 3, temperature=1.0, seed=1)
    other, *_ = run(random_model("expert"), [PROMPTS[0]], temperature=1.0, seed=2)
    assert len({tuple(x) for x in [*same, *other]}) == 4
    assert len({noise(*x) for x in itertools.product(range(10), repeat=3)}) == 1000
    u = np.array([noise(5, s, i) for s in range(40) for i in range(100)])
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02


def test_top_k_of_one_equals_greedy():
    model = random_model("expert")
    assert run(model, PROMPTS, top_k=1, temperature=3.0) == run(model, PROMPTS, temperature=0)
    tied = torch.zeros(1, 5)
    assert (probabilities(tied, 1.0, 1, 1.0) > 0).tolist() == [[True] + [False] * 4]


def expected(logits, temperature, top_k, top_p):
    """By the book: soften, keep the k best, then the fewest that together weigh top_p, and rescale."""
    p = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    best = sorted(p, key=p.get, reverse=True)[: top_k or None]
    total, kept = sum(p[i] for i in best), []
    for i in best:
        kept.append(i)
        if sum(p[j] for j in kept) >= top_p * total:
            break
    return np.array([p[i] / sum(p[j] for j in kept) if i in kept else 0 for i in range(len(logits))])


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (1, 0, 1),
        (0.5, 0, 1),
        (2, 3, 1),
        (1, 0, 0.6),
        (1.5, 4, 0.7),
        (1, 99, 0.01),
        (1, 0, 0.999999),
        (1, 2, 0.5),
    ],
)
def test_frequencies_match_the_distribution(temperature, top_k, top_p):
    logits = [0.3, 2.0, -1.0, 1.1, 1.9, -0.2]
    p = expected(logits, temperature, top_k, top_p)
    weights = probabilities(torch.tensor([logits, logits[::-1]]), temperature, top_k, top_p)
    got = (weights / weights.sum(1, keepdim=True)).numpy()
    np.testing.assert_allclose(got, [p, p[::-1]], atol=1e-7)
    n = 10000
    u = torch.tensor([noise(11, i % 100, i // 100) for i in range(n)], dtype=torch.double)
    tokens = engine.draw(weights[:1].expand(n, -1), u)
    counts = np.bincount(tokens, minlength=6)
    assert (counts[p == 0] == 0).all()
    chi_square = ((counts - n * p)[p > 0] ** 2 / (n * p[p > 0])).sum()
    assert chi_square < 25  # five degrees of freedom exceed it once in 7,000 times


def test_generated_frequencies_match_the_model():
    model = random_model("token")
    logits, _ = full_pass(model, PROMPTS[0])
    p = expected(logits[-1].tolist(), 0.7, 6, 0.9)
    new, *_ = run(model, [PROMPTS[0]] * 2000, n=1, temperature=0.7, top_k=6, top_p=0.9)
    counts = np.bincount([x[0] for x in new], minlength=BYTES.n_vocab)
    assert (p > 0).sum() > 2 and (counts[p == 0] == 0).all()
    assert ((counts - 2000 * p)[p > 0] ** 2 / (2000 * p[p > 0])).sum() < 25


def test_top_p_keeps_no_token_beyond_an_exact_sum():
    tied = torch.zeros(1, 4)  # a quarter each, exactly
    assert [(probabilities(tied, 1.0, 0, p) > 0).sum() for p in (0.25, 0.5, 0.51)] == [1, 2, 3]


def test_the_best_token_stays_under_any_top_p():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    for top_k in (0, 2):
        assert (probabilities(logits, 100.0, top_k, 5e-324) > 0).tolist() == [[False, True, False]]


def test_noise_just_below_one_draws_the_last_token(monkeypatch):
    model = random_model("vanilla")
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all tokens are alike
    monkeypatch.setattr(engine, "noise", lambda *numbers: 1 - 2**-53)
    assert run(model, [[1]], n=1, temperature=1.0)[0] == [[BYTES.n_vocab - 1]]


def test_any_noise_draws_a_token_that_has_weight():
    weights = torch.tensor([[0, 0.25, 0, 0.75, 0]], dtype=torch.double)
    for u, token in ((0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert engine.draw(weights, torch.tensor([u], dtype=torch.double)).tolist() == [token]
    tiny = probabilities(torch.tensor([[1.0, 3.0, 2.0]]), 1e-320, 0, 1.0)
    assert tiny.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("temperature", [0, 5.0])
def test_ids_that_stand_for_nothing_are_never_chosen(temperature):
    model = random_model("expert")
    with torch.no_grad():
        model.model.embed_tokens.weight[BYTES.n_vocab :] *= 20  # padding, but likely
        x, _ = model.hidden(torch.tensor(PROMPTS[0]), ragged_batch(torch.tensor([0, len(PROMPTS[0])])))
        assert model.logits(x)[-1].argmax() >= BYTES.n_vocab
    new, *_ = run(model, [PROMPTS[0]] * 8, temperature=temperature)
    assert max(map(max, new)) < BYTES.n_vocab
    # An encoding may have gaps, and special tokens that no text ever becomes.
    gaps = tiktoken.Encoding(
        "gaps", pat_str=".", mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={"<|other|>": 257, "<|endoftext|>": 259},
    )  # fmt: skip
    steps = list(generate(model, [[1]] * 50, gaps, max_new_tokens=20, temperature=temperature))
    chosen = {token for step in steps for token in step.chosen.values()}
    assert chosen <= {*range(256), 259}


def test_ended_samples_leave_the_passes_and_change_nothing():
    model = random_model("expert")
    alone, _, _ = run(model, PROMPTS, temperature=0)
    letter = next(t for t in alone[0][3:] if 32 < t < 127)
    end = alone[0].index(letter) + 1
    steps = list(
        generate(model, PROMPTS, BYTES, max_new_tokens=20, temperature=0, stop=["never", chr(letter)])
    )
    for s, whole in enumerate(alone):
        new = [step.chosen[s] for step in steps if s in step.chosen]
        assert new == (whole[: whole.index(letter) + 1] if letter in whole else whole)
        assert sum(s in step.read for step in steps) == len(new)
        assert steps[-1].cache.seen[s] == max(1, len(PROMPTS[s])) + len(new) - 1
    assert len([step for step in steps if 0 in step.read]) == end < len(steps)


def test_endoftext_ends_a_sample_and_is_no_text():
    model = random_model("vanilla", cls=Scripted)
    model.script = b"xyz"
    new, tokens, _ = run(model, [list(b"ab")], n=10)
    assert new == [[*b"xyz", END]]
    assert "".join(text for text, _ in pieces([(t, 1) for t in tokens[0]], BYTES)) == "abxyz"


def test_the_context_bounds_what_is_generated():
    model = random_model("token")
    prompts = [[1] * 64, [2] * 60, [3]]
    new, _, depths = run(model, prompts, n=200, temperature=0)
    assert [len(x) for x in new] == [1, 5, 64] and [len(d) for d in depths] == [64] * 3
    with pytest.raises(ValueError, match="prompt of 65 tokens exceeds the context of 64"):
        next(generate(model, [[1], [1] * 65], BYTES, max_new_tokens=1))


def test_no_new_tokens_reads_the_prompts_alone():
    model = random_model("token")
    (step,) = generate(model, PROMPTS, BYTES, max_new_tokens=0)
    assert step.chosen == {}
    for s, prompt in enumerate(PROMPTS):
        depths = full_pass(model, prompt or [END])[1]
        assert step.read[s] == list(zip(prompt or [END], depths))


# ---- tokens as text ------------------------------------------------------------------------------

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


# ---- depths in the terminal and on a page --------------------------------------------------------


def test_painting_changes_no_character_but_shows_line_ends(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    painted = paint("  a\n\nb", 2, 3)
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == "  a↵\n↵\nb"
    assert all(line.endswith("\x1b[0m") for line in painted.split("\n"))
    assert len({paint("x", depth, 4) for depth in (None, 1, 2, 3, 4)}) == 5
    assert paint("\x1b[2J", None, 3) == "␛[2J"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("a\n", 12, 12) == "a↵¹²\n" and paint("a", None, 3) == "a"


class PageText(html.parser.HTMLParser):
    """What a browser shows of each sample, and every (text, title) in it."""

    def __init__(self, text):
        super().__init__()
        self.samples, self.titles, self.tags, self.inside = [], [], collections.Counter(), False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        if tag == "pre":
            self.inside = True
            self.samples.append([])
        elif self.inside:
            self.titles.append(dict(attributes)["title"])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data):
        if self.inside:
            self.samples[-1].append(data)


def test_page_escapes_keeps_spaces_and_counts():
    first = [("\n  <script>alert(1)</script>", 1), ("&amp; {x}", 3), ("", 3), ('"', 2), ("é", None)]
    second = [("<!--", 1), ("\t\n", 0)]
    text = page([first, second], 3)
    assert "<script" not in text and "<!--" not in text
    shown = PageText(text)
    assert ["".join(s) for s in shown.samples] == ["".join(t for t, _ in s) for s in (first, second)]
    assert shown.titles == ["depth 1", "depth 3", "depth 2", "not read", "depth 1", "depth 0"]
    for depth, count in ((0, 1), (1, 2), (2, 1), (3, 2)):
        assert f"depth {depth}: {count} tokens" in text
    assert not {"script", "link", "img"} & set(shown.tags) and "http" not in text


# ---- command line --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt"
    checkpoint.save(path, random_model("expert"), encoding="bytes", step=0)
    return path


@pytest.fixture
def scripted(monkeypatch, saved):
    """A function of what the model is to say and of arguments: runs `main` on that."""

    def run(script: bytes, *arguments):
        model = random_model("expert", cls=Scripted)
        model.script = script
        monkeypatch.setattr(checkpoint, "load_model", lambda state, device: model)
        return main([f"--checkpoint={saved}", "--device=cpu", *arguments])

    return run


@pytest.mark.parametrize(
    "arguments, script, shown, n_new",
    [
        (["--prompt=ab"], b"cd", "abcd", 3),
        (["--prompt", "x STOP"], b" y STO ST STOP z", "x STOP y STO ST ", 14),
        (["--prompt=", "--stop", "\n\n", "--stop=é"], "a\nbéc\n\n".encode(), "a\nb", 5),
        (["--prompt=€", "--max_new_tokens=4"], "€€".encode(), "€€", 4),
        (["--prompt=x", "--max_new_tokens", "0"], b"y", "x", 0),
    ],
)
def test_prints_prompt_and_continuation(capsys, scripted, arguments, script, shown, n_new):
    assert scripted(script, *arguments, "--stop=STOP") == 0
    out, err = capsys.readouterr()
    assert out == shown + "\n"
    assert re.fullmatch(rf"{n_new} tokens, .* tokens/s, cache [\d,]+ bytes, mean depth .* of 3\n", err)


def test_depths_on_screen_and_page_are_those_of_the_full_pass(capsys, monkeypatch, tmp_path, saved):
    monkeypatch.setenv("NO_COLOR", "1")
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"if x:\r\n")
    target = tmp_path / "depths.html"
    flags = ["--num_samples=2", "--temperature=0", "--max_new_tokens=9", "--show_depth"]
    assert main([f"--checkpoint={saved}", f"--prompt_file={file}", f"--html={target}", *flags]) == 0
    out, err = capsys.readouterr()
    assert "--- sample 1 ---\ni" in out and "--- sample 2 ---\ni" in out
    model = checkpoint.load_model(checkpoint.load(saved))
    tokens = naive_greedy(model, list(b"if x:\r\n"), 9)
    depths = full_pass(model, tokens[:-1])[1]
    counts = collections.Counter(depths)
    for depth in (1, 2, 3):
        assert f"depth {depth}: {2 * counts[depth]} tokens" in out
        assert f"depth {depth}: {2 * counts[depth]} tokens" in target.read_text()
    assert "18 tokens, " in err and f"mean depth {sum(depths) / len(depths):.2f} of 3" in err
    second = out.split("sample 2 ---\n")[1].split(" depth")[0]
    exponents = ["⁰¹²³".index(c) for c in second if c in "⁰¹²³"]
    with_text = [d for t, d in pieces(list(zip(tokens, [*depths, None])), BYTES) if t and d is not None]
    assert exponents == with_text
    assert PageText(target.read_text()).titles[: len(with_text)] == [f"depth {d}" for d in with_text]
    assert sorted(tmp_path.iterdir()) == [target, file]


def test_passes_every_setting_on(monkeypatch, saved):
    given_on = {}
    monkeypatch.setattr(sample, "generate", lambda *a, **settings: given_on.update(settings) or iter(()))
    wanted = dict(max_new_tokens=7, temperature=0.3, top_k=5, top_p=0.6, seed=9, stop=["q"], max_depth=2)
    flags = [f"--{name}={value[0] if name == 'stop' else value}" for name, value in wanted.items()]
    assert main([f"--checkpoint={saved}", "--prompt=x", *flags]) == 0 and given_on == wanted
    assert main([f"--checkpoint={saved}", "--prompt=x"]) == 0
    assert given_on == dict(
        max_new_tokens=256, temperature=0.8, top_k=0, top_p=1.0, seed=1337, stop=[], max_depth=None
    )


def test_goes_to_the_end_of_the_context_and_says_so(capsys, saved):
    assert main([f"--checkpoint={saved}", "--prompt=abcd", "--temperature=0"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("note: a sample ends where the context of 64 tokens is full.\n61 tokens, ")


@pytest.mark.parametrize(
    "argument, says",
    [
        ("--checkpoint=nowhere.pt", "nowhere.pt"),
        ("--checkpoint={damaged}", "damaged"),
        ("--checkpoint={diverged}", "not finite"),
        ("--checkpoint={small}", "tokens in its encoding"),
        ("--prompt=" + "x" * 65, "65 tokens"),
        ("--prompt=\udcff", "UTF-8"),
        ("--prompt_file=nowhere.txt", "both given"),
        ("--temperature=-0.1", "temperature=-0.1"),
        ("--temperature=nan", "temperature=nan"),
        ("--top_p=0", "top_p=0.0"),
        ("--top_p=1.01", "top_p=1.01"),
        ("--top_k=-1", "top_k=-1"),
        ("--top_k=many", "invalid int value"),
        ("--seed=-1", "seed=-1"),
        ("--max_depth=4", "max_depth=4"),
        ("--max_depth=-1", "max_depth=-1"),
        ("--max_new_tokens=-1", "max_new_tokens=-1"),
        ("--num_samples=0", "num_samples=0"),
        ("--num_samples=1000000000", "num_samples=1000000000"),
        ("--device=meta", "device=meta"),
        ("--stop=", "stop"),
        ("--device=toaster", "device=toaster"),
        ("--html=nowhere/page.html", "nowhere/page.html"),
        ("--html=.", "html=."),
        ("--html=/dev/null", "html=/dev/null"),
        ("--colour", "--colour"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(capsys, monkeypatch, tmp_path, saved, argument, says):
    monkeypatch.chdir(tmp_path)
    if "{" in argument:
        Path("damaged").write_bytes(saved.read_bytes()[:5000])
        model = random_model("vanilla")
        model.model.norm.weight.data[3] = math.nan
        checkpoint.save(Path("diverged"), model, encoding="bytes", step=0)
        small = MoR(ModelConfig(**SIZES | KINDS["vanilla"] | {"vocab_size": 256}))
        checkpoint.save(Path("small"), small, encoding="bytes", step=0)
    argument = argument.format(damaged="damaged", diverged="diverged", small="small")
    given_prompt = [] if argument.startswith("--prompt=") else ["--prompt=x"]
    assert main([f"--checkpoint={saved}", *given_prompt, argument]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and says in err
    assert err.endswith(".\n") and err.count("\n") == 1 and "Traceback" not in err


def test_a_page_replaces_neither_checkpoint_nor_prompt(capsys, tmp_path, saved):
    prompt, link = tmp_path / "prompt.txt", tmp_path / "link"
    prompt.write_text("x")
    link.symlink_to(saved)
    before = saved.read_bytes()
    for target in (saved, link, prompt):
        assert main([f"--checkpoint={saved}", f"--prompt_file={prompt}", f"--html={target}"]) == 2
        assert "it is the checkpoint or the prompt's file" in capsys.readouterr().err
    assert saved.read_bytes() == before and prompt.read_text() == "x"


def test_closed_streams_are_no_error(tmp_path, saved):
    command = f"{sys.executable} sample.py --checkpoint={saved} --html={tmp_path}/x.html"
    command += " --max_new_tokens=3 --device=cpu <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT).returncode == 0
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize("content, says", [(b"ok \xff", "byte 3"), (None, "No such file")])
def test_a_bad_prompt_file_is_refused(capsys, tmp_path, saved, content, says):
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    assert main([f"--checkpoint={saved}", f"--prompt_file={file}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1 and str(file) in err


def start(saved, *arguments) -> subprocess.Popen:
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command = [sys.executable, "sample.py", f"--checkpoint={saved}", "--device=cpu", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """A context too long to be filled while a test runs; it never ends a text."""
    config = ModelConfig(**SIZES | KINDS["token"] | {"vocab_size": 257, "block_size": 100_000})
    model = MoR(config)
    path = tmp_path_factory.mktemp("endless") / "checkpoint.pt"
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are 0: the likeliest token is the first, a NUL
    checkpoint.save(path, model, encoding="bytes", step=0)
    return path


def test_piped_in_text_is_the_prompt(saved):
    for arguments in ([], ["--prompt_file=-"]):
        process = start(saved, "--max_new_tokens", "3", *arguments)
        out, err = process.communicate("naïve\n".encode())
        assert process.returncode == 0 and out.startswith("naïve\n".encode())
        assert err.startswith(b"3 tokens, ")


def test_interrupt_keeps_what_there_is(endless, tmp_path):
    target = tmp_path / "page.html"
    process = start(
        endless, "--prompt=ab", "--temperature=0", "--max_new_tokens=90000", f"--html={target}"
    )
    assert process.stdout.read(20) == b"ab" + bytes(18)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and re.fullmatch(rb"\0*\n", out)
    assert err.count(b"\n") == 1 and b"tokens/s" in err
    assert PageText(target.read_text()).samples[0][:20] == ["a", "b", *"␀" * 18]


def test_a_closed_pipe_is_no_error(endless):
    process = start(endless, "--prompt=ab", "--temperature=0", "--max_new_tokens=90000")
    assert process.stdout.read(2) == b"ab"
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b"" and process.wait(timeout=30) == 141


def test_unwritable_output_is_told(saved):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "sample.py", f"--checkpoint={saved}", "--prompt=x"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"cannot be written" in done.stderr

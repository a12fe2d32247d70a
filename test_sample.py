"""What is printed of generated text: samples, depths on screen and page, and what is refused.

`Scripted` is a model that says what a test tells it to, for stop texts and characters out of several
tokens; everything else runs real models, their routers drawn wide so that all depths occur.
"""

import collections
import html.parser
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import sample
from model import MoR
from modelconfig import ModelConfig
from sample import main, page, paint
from test_engine import full_pass
from text import pieces
from tokenizer import get_encoding

ROOT = Path(__file__).resolve().parent
BYTES = get_encoding("bytes")
END = BYTES.eot_token
SIZES = dict(vocab_size=300, block_size=64, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, init_std=0.2)
KINDS = {
    "vanilla": dict(sharing="none", n_recursion=1, routing="none"),
    "expert": dict(routing="expert"),
    "token": dict(routing="token"),
}


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


def naive_greedy(model, prompt, n):
    tokens = prompt
    for _ in range(n):
        tokens = [*tokens, int(full_pass(model, tokens)[0][-1, : BYTES.n_vocab].argmax())]
        if tokens[-1] == END:
            break
    return tokens


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
    asked, engines = [], []

    class Recorder(sample.Engine):
        def __init__(self, *args, **given):
            engines.append(given)
            super().__init__(*args, **given)

        def submit(self, tokens, params):
            asked.append(params)
            return super().submit(tokens, params)

    monkeypatch.setattr(sample, "Engine", Recorder)
    wanted = dict(max_new_tokens=7, temperature=0.3, top_k=5, top_p=0.6, stop=("q",))
    flags = [f"--{name}={value[0] if name == 'stop' else value}" for name, value in wanted.items()]
    assert main([f"--checkpoint={saved}", "--prompt=x", "--max_depth=2", "--seed=9", *flags]) == 0
    assert main([f"--checkpoint={saved}", "--prompt=x", "--num_samples=2"]) == 0
    assert engines[0]["max_depth"] == 2 and engines[1]["max_depth"] is None
    assert asked[0] == sample.SamplingParams(**wanted, seed=asked[0].seed)
    assert asked[1] == sample.SamplingParams(256, 0.8, seed=asked[1].seed)
    assert len({params.seed for params in asked}) == 3


def test_every_sample_has_a_seed_of_its_own_however_many_there_are():
    assert sample.seeds(3, 1) == sample.seeds(3, 4)[:1] != sample.seeds(4, 1)
    assert len({seed for n in range(50) for seed in sample.seeds(n, 50)}) == 2500


def test_goes_to_the_end_of_the_context_and_says_so(capsys, saved):
    assert main([f"--checkpoint={saved}", "--prompt=abcd", "--temperature=0"]) == 0
    note = "note: a sample ends where the context of 64 tokens is full.\n"
    assert capsys.readouterr().err.startswith(f"{note}61 tokens, ")
    for n, noted in ((60, False), (61, False), (62, True)):
        command = [f"--checkpoint={saved}", "--prompt=abcd", "--temperature=0", f"--max_new_tokens={n}"]
        assert main(command) == 0
        assert (note in capsys.readouterr().err) == noted


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
        ("--html=x --interactive", "leave out the prompt"),
        ("--compare {damaged} {damaged} --num_samples=2", "exclude each other"),
        ("--compare {damaged} {damaged}", "damaged"),
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
    assert main([f"--checkpoint={saved}", *given_prompt, *argument.split(" ")]) == 2
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def listen():  # also where the tests run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=listen, **pipes)


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


def test_lines_are_continued_until_the_input_ends(saved):
    process = start(saved, "--interactive", "--temperature=0", "--max_new_tokens=5", "--seed=3")
    out, err = process.communicate(("ab\n" + "x" * 70 + "\n\nab\n").encode())
    assert process.returncode == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", out.decode()).split("> ")
    assert len(shown) == 6 and shown[1].startswith("ab") and shown[1] == shown[4]
    assert "depth 1: " in shown[1] and shown[2] == "" and shown[5] == "\n"
    errors = err.decode().splitlines()
    assert [line.split(",")[0] for line in errors if "tokens/s" in line] == ["5 tokens"] * 3
    assert "error: a prompt of 70 tokens exceeds the context of 64; shorten it." in errors


def test_two_checkpoints_stand_side_by_side(capsys, monkeypatch, tmp_path, saved):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "83")
    other = tmp_path / "other.pt"
    checkpoint.save(other, random_model("vanilla"), encoding="bytes", step=0)
    flags = ["--prompt=if x:\n  y", "--temperature=0", "--max_new_tokens=30"]
    assert main(["--compare", str(saved), str(other), *flags]) == 0
    out = capsys.readouterr().out
    bars = {line.index("│") for line in out.splitlines()}
    assert len(bars) == 1
    columns = list(zip(*(line.ljust(min(bars) + 2).split("│ ") for line in out.splitlines())))
    for column, path, depths in zip(columns, (saved, other), ("123", "1")):
        text = "".join(column)
        assert str(path)[-30:] in text
        model = checkpoint.load_model(checkpoint.load(path))
        tokens = naive_greedy(model, list(b"if x:\n  y"), 30)
        got = full_pass(model, tokens[:-1])[1]
        joined = re.sub(r"\s+", " ", " ".join(part.strip() for part in column))
        assert "tokens by depth" in joined and f"{len(tokens) - 9} tokens" in joined
        assert all(f"{d}: {got.count(int(d))}" in joined for d in depths)


def test_nothing_is_generated_before_both_checkpoints_are_checked(capsys, monkeypatch, tmp_path, saved):
    other = tmp_path / "short.pt"
    checkpoint.save(other, MoR(ModelConfig(**SIZES | {"block_size": 8})), encoding="bytes", step=0)
    monkeypatch.setattr(sample.Engine, "step", lambda engine: pytest.fail("it generates"))
    for second, says in ((tmp_path / "none.pt", "no such"), (other, "exceeds the context of 8")):
        assert main(["--compare", str(saved), str(second), "--prompt=a long prompt"]) == 2
        assert says in capsys.readouterr().err


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
        buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert done.returncode == 1 and done.stderr.startswith(b"error: the output cannot be used")

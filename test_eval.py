"""Figures against naive ones: texts fed prefix by prefix, validation against training's own.

lm-eval itself is needed for one test alone; the others hand `Scorer` requests as it would, and what
`run_tasks` asks of the package is asked of a stand-in.
"""

import codecs
import itertools
import json
import math
import random
import sys
import types
from pathlib import Path

import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
import train
from dataset import Tokens, Windows, write_dataset
from engine import Engine
from eval import PAPER, Scorer, encode_pair, main, paper_figures, windows
from model import MoR
from modelconfig import ModelConfig
from ragged import ragged_batch
from sampling import SamplingParams
from text import text_of
from tokenizer import get_encoding
from validation import batches_of, validate

BYTES = get_encoding("bytes")
END = BYTES.eot_token
SIZES = dict(vocab_size=300, block_size=12, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, init_std=0.2)
KINDS = {
    "vanilla": dict(sharing="none", n_recursion=1, routing="none"),
    "recursive": dict(routing="none"),
    "expert": dict(routing="expert"),
    "expert_partial": dict(routing="expert", capacity=(0.8, 0.5, 0.3)),
    "expert_shared": dict(routing="expert", kv_mode="shared", sampling="aux_router"),
    "token": dict(routing="token"),
    "token_update": dict(routing="token", kv_mode="shared_update"),
}
# Contexts and continuations, empty, short, and longer than the block of 12 tokens; two alike. In a run
# of one letter all tokens have one state, and rounding alone would say which of them top-k takes.
LONG = "the quick brown fox jumps over a dog"
PAIRS = [
    ("def f(", "x):"), ("", "import"), ("a = ", "1"), ("naïve é", " = ß"), (LONG[:21], "zz"),
    (LONG[:11], "r"), ("", ""), ("some", ""), ("ab", LONG[:12]), ("ab", LONG[5:18]), ("", LONG[:30]),
    ("def f(", "x):"),
]  # fmt: skip


def random_model(kind: str, **more) -> MoR:
    torch.manual_seed(0)
    model = MoR(ModelConfig(**SIZES | KINDS[kind] | more)).eval()
    for name, p in model.named_parameters():
        if "router" in name:
            torch.nn.init.normal_(p, std=1.0)
    return model


def requests(arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


def scorer(kind="expert", batch_size=7, rule="causal", depth=None) -> Scorer:
    model = kind if isinstance(kind, MoR) else random_model(kind)
    return Scorer(model, BYTES, batch_size, rule, depth)


@torch.no_grad()
def last_logits(model, tokens, rule="causal", depth=None):
    """What follows a text, from a pass over it alone: float64, (V,)."""
    rows = ragged_batch(torch.tensor([0, len(tokens)]))
    return model.logits(model.hidden(torch.tensor(tokens), rows, rule, depth)[0])[-1].double()


def naive(model, context: list[int], continuation: list[int], depth=None):
    """Token by token; before each stands what its window has: the rule of `windows`, written anew."""
    size, total, greedy = model.config.block_size, 0.0, True
    tokens = [*(context or [END]), *continuation]
    start = len(tokens) - len(continuation)
    for i in range(start, len(tokens)):
        end = min(len(tokens), start + ((i - start) // size + 1) * size)  # of the window with token i
        logits = last_logits(model, tokens[max(0, end - 1 - size) : i], depth=depth)
        total += logits.log_softmax(0)[tokens[i]].item()
        greedy = greedy and logits[:257].argmax().item() == tokens[i]
    return total, greedy


# ---- likelihoods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_likelihoods_equal_the_naive_ones(kind):
    model = random_model(kind)
    got = scorer(model).loglikelihood(requests(PAIRS))
    for (context, continuation), (log_p, greedy) in zip(PAIRS, got):
        wanted = naive(model, list(context.encode()), list(continuation.encode()))
        assert log_p == pytest.approx(wanted[0], abs=2e-4) and greedy is wanted[1]


def test_likelihoods_under_fewer_steps_are_of_fewer_steps():
    model = random_model("expert")
    got = scorer(model, depth=1).loglikelihood(requests(PAIRS[:4]))
    for (a, b), (log_p, _) in zip(PAIRS, got):
        wanted = naive(model, list(a.encode()), list(b.encode()), depth=1)[0]
        assert log_p == pytest.approx(wanted, abs=2e-4)
        assert abs(log_p - naive(model, list(a.encode()), list(b.encode()))[0]) > 1e-3


@pytest.mark.parametrize("kind", ["expert_partial", "token"])
def test_rolling_scores_each_token_once(kind):
    model, texts = random_model(kind), ["", "a", LONG[:11], LONG[:12], LONG[:13], LONG, "é"]
    got = scorer(model).loglikelihood_rolling(requests([(text,) for text in texts]))
    assert got[0] == 0
    for text, log_p in zip(texts, got):
        assert log_p == pytest.approx(naive(model, [], list(text.encode()))[0], abs=2e-4)


def test_windows_are_those_of_the_harness():
    """The example in lm-eval's documentation of loglikelihood_rolling, with -1 to begin."""
    found = list(windows([-1, *range(10)], 1, 4))
    assert found == [([-1, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]


@given(st.integers(0, 40), st.integers(1, 20), st.integers(1, 12))
@settings(deadline=None)
def test_windows_cover_the_continuation_in_order(n, n_context, block_size):
    tokens, scored = list(range(n_context + n)), []
    for piece, count in windows(tokens, n_context, block_size):
        assert 1 <= count < len(piece) <= block_size + 1
        assert len(piece) in (block_size + 1, piece[-1] + 1)  # all that fits
        scored += piece[-count:]
    assert scored == tokens[n_context:]


@pytest.mark.parametrize("kind", ["expert_partial", "token_update"])
@pytest.mark.parametrize("rule", ["causal", "top-k"])
def test_batches_and_order_are_invisible(kind, rule):
    model, shuffled = random_model(kind), random.Random(3).sample(PAIRS * 2, 2 * len(PAIRS))
    alone = scorer(model, 1, rule).loglikelihood(requests(shuffled))
    together = scorer(model, 7, rule).loglikelihood(requests(shuffled))
    by_pair = dict(zip(PAIRS, scorer(model, 7, rule).loglikelihood(requests(PAIRS))))
    for pair, one, other in zip(shuffled, alone, together):
        for answer in (other, by_pair[pair]):
            assert answer == (pytest.approx(one[0], abs=2e-4), one[1])


def test_top_k_scores_look_ahead_within_their_own_text():
    model = random_model("expert")
    texts = requests([("abcdefgh", "ij"), ("abcdefgh", "xy"), ("qqqqqqqq", "ij"), ("a", "longer")])
    got = scorer(model, 7, "top-k").loglikelihood(texts)
    for text, (log_p, _) in zip(texts, got):
        tokens = list("".join(text.args).encode())
        rows = ragged_batch(torch.tensor([0, len(tokens) - 1]))
        with torch.no_grad():
            x, _ = model.hidden(torch.tensor(tokens[:-1]), rows, "top-k")
            table = model.logits(x).double().log_softmax(1)
        n = len(text.args[1])
        wanted = sum(table[i - 1, tokens[i]].item() for i in range(len(tokens) - n, len(tokens)))
        assert log_p == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("kind", ["vanilla", "expert", "token"])
def test_greedy_continuations_are_known_as_such(kind):
    model = random_model(kind)
    (greedy,) = Engine(model, encoding=BYTES).generate([list(b"def ")], SamplingParams(8, 0))
    right = ([*b"def ", *greedy], 4)
    wrong = ([*b"def ", *greedy[:-1], (greedy[-1] + 1) % 256], 4)
    early = ([*b"def ", (greedy[0] + 1) % 256, *greedy[1:]], 4)
    assert [flag for _, flag in scorer(model).score([right, wrong, early])] == [True, False, False]


def test_a_text_is_greedy_in_all_its_windows_or_not_at_all():
    model, tokens = random_model("vanilla"), [END, *LONG[:12].encode()]
    tokens.append(int(last_logits(model, tokens[-12:])[:257].argmax()))
    flags = [scorer(model).score([(tokens, n)])[0][1] for n in (1, 13)]
    assert flags == [False, True]


def test_ids_without_text_are_never_the_greedy_choice():
    model, bytes_alone = random_model("vanilla"), {bytes([b]): b for b in range(256)}
    gaps = tiktoken.Encoding(
        "gaps", pat_str="(?s).", mergeable_ranks=bytes_alone, special_tokens={"<|endoftext|>": 280}
    )
    x, _ = model.hidden(torch.tensor(list(b"ab")), ragged_batch(torch.tensor([0, 2])))
    for strange in (270, 290):  # unused, and beyond the encoding
        with torch.no_grad():
            model.model.embed_tokens.weight[strange] = 100 * x[-1]  # likelier than any other
    usable = last_logits(model, list(b"ab"))
    usable[256:280] = usable[281:] = -math.inf
    score = Scorer(model, gaps, 1, "causal", None).score
    ((log_p, greedy),) = score([([*b"ab", int(usable.argmax())], 2)])
    assert greedy and log_p < math.log(0.01)


def test_a_token_across_the_border_belongs_to_the_continuation():
    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 256, b" c": 257}
    encoding = tiktoken.Encoding(
        "test", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258}
    )
    a, b, c, x, space = b"abcx "
    assert encode_pair(encoding, "xa", "bx") == ([x, 256, x], 1)
    assert encode_pair(encoding, "a", "bx") == ([258, 256, x], 1)
    assert encode_pair(encoding, "x ", "c") == ([x, 257], 1)
    assert encode_pair(encoding, "x", " c") == ([x, 257], 1)
    assert encode_pair(encoding, "", "x") == ([258, x], 1)
    assert encode_pair(encoding, "x", "") == ([x], 1)


# ---- generation ------------------------------------------------------------------------------------


def alone(model, prompt: list[int], n: int, stop=(), depth=None) -> str:
    """What the engine makes of one prompt alone, up to a stop text."""
    engine = Engine(model, max_batch=1, max_depth=depth, encoding=BYTES)
    (tokens,) = engine.generate([prompt], SamplingParams(n, 0))
    text = b"".join(text_of(BYTES, token) for token in tokens)
    text = text[: min((text.index(x.encode()) for x in stop if x.encode() in text), default=len(text))]
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text)  # only whole characters


@pytest.mark.parametrize("kind, depth", [("expert_partial", None), ("expert", 2), ("token", None)])
def test_generation_equals_that_of_each_prompt_alone(kind, depth):
    model = random_model(kind)
    prompts = ["ab", "", "def f(", LONG, "ab"]
    asked = requests([(p, {"until": [], "max_gen_toks": 5}) for p in prompts])
    kept = [list(p.encode())[-8:] for p in prompts]  # a block of 12: the last new token is not read
    wanted = [alone(model, p, 5, depth=depth) for p in kept]
    assert len(set(wanted)) > 2
    for batch_size in (1, 7):
        assert scorer(model, batch_size, depth=depth).generate_until(asked) == wanted
    stops = [wanted[0][2:4], wanted[2][1:2], "", "never"]
    for until in (stops, stops[0], None):
        stop = [x for x in ([until] if isinstance(until, str) else until or []) if x]
        asked = requests([(p, {"until": until, "max_gen_toks": 5}) for p in prompts])
        assert scorer(model, depth=depth).generate_until(asked) == [
            alone(model, p, 5, stop, depth) for p in kept
        ]


def test_prompts_keep_half_a_block_where_all_new_tokens_will_not_fit():
    model = random_model("vanilla")
    asked = requests([("a" * 8 + "b" * 6, {}), ("b" * 6, {"temperature": 0})])
    got = scorer(model).generate_until(asked)
    assert got[0] == got[1] == alone(model, list(b"b" * 6), 256)


def test_sampled_texts_are_refused():
    for wish in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(ValueError, match="greedy; leave it out"):
            scorer().generate_until(requests([("a", wish)]))


# ---- validation ------------------------------------------------------------------------------------


TRAINED = {
    "expert": {},
    "token": {"routing": "token"},
    "documents": {"within_documents": True},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder of short runs, and of datasets of many documents, whose last tokens fill no window."""
    folder, words = tmp_path_factory.mktemp("run"), random.Random(1)
    for name in ("data", "other"):
        text = [" ".join(f"w{words.randrange(50)}" for _ in range(2)) for _ in range(150)]
        write_dataset(folder / name, BYTES, {"train": text, "val": text})
    for out, more in TRAINED.items():
        sizes = {**SIZES, "vocab_size": 257, "n_layer": 5, "warmup_iters": 2, "out_dir": folder / out}
        argv = {**sizes, "dataset": folder / "data", "batch_size": 3, "eval_iters": 4, "max_iters": 12}
        assert train.main([f"--{k}={v}" for k, v in {**argv, **more}.items()]) == 0
    return folder


def rows(out: str) -> list[list[str]]:
    """The table's cells, without its heads."""
    return [line.split() for line in out.splitlines()[2:]]


@pytest.mark.parametrize("kind", TRAINED)
def test_figures_are_those_of_training(capsys, trained, kind):
    log = [json.loads(line) for line in (trained / kind / "metrics.jsonl").read_text().splitlines()]
    val = next(line["val"] for line in reversed(log) if "val" in line)
    assert main([f"--checkpoint={trained / kind / 'checkpoint.pt'}", "--device=cpu"]) == 0
    out, err = capsys.readouterr()
    assert "step 12, on 144 tokens" in out and err == ""
    assert len(rows(out)) == len(val)
    for cells, (rule, wanted) in zip(rows(out), val.items()):
        active = wanted["active"]
        assert cells[0] == (rule if kind != "token" else "–") and cells[1] == "3"
        assert cells[2:5] == [
            f"{wanted['loss']:.4f}", f"{wanted['bits_per_byte']:.4f}", f"{sum(active):.2f}"
        ]  # fmt: skip
        shares = [a - b for a, b in zip(active, [*active[1:], 0])]
        assert [float(cell[:-1]) for cell in cells[5:]] == pytest.approx(
            [100 * x for x in shares], abs=0.051
        )


@pytest.mark.parametrize("kind", ["recursive", "expert_partial", "token"])
def test_depths_are_those_of_the_pass(kind):
    model, ids = random_model(kind), torch.randint(256, (3, 13))
    batches = [(ids[:2, :-1], ids[:2, 1:]), (ids[2:, :-1], ids[2:, 1:])]
    got = validate(model, batches, BYTES, "causal")
    rows = ragged_batch(torch.arange(4) * 12)
    with torch.no_grad():
        depths = model.hidden(ids[:, :-1].flatten(), rows)[1].depth.tolist()
    assert got["active"] == pytest.approx([sum(d > r for d in depths) / 36 for r in range(3)])


def test_the_whole_split_is_every_token_once(capsys, trained):
    tokens = Tokens(trained / "data", "val")
    stream = torch.from_numpy(tokens.read(0, len(tokens)))
    val = Windows(tokens, 12, 1)
    assert val.left_over
    batches = batches_of(val, 5, None)
    assert torch.equal(torch.cat([x.flatten() for x, _ in batches]), stream[:-1])
    assert torch.equal(torch.cat([y.flatten() for _, y in batches]), stream[1:])
    path = trained / "expert" / "checkpoint.pt"
    assert main([f"--checkpoint={path}", "--all", "--rule=causal", "--batch_size=100"]) == 0
    out = capsys.readouterr().out
    assert f"on {len(tokens) - 1:,} tokens" in out
    model, nats = checkpoint.load_model(checkpoint.load(path)), 0.0
    for start in range(0, len(stream) - 1, 12):
        piece = stream[start : start + 13]
        with torch.no_grad():
            x, _ = model.hidden(piece[:-1], ragged_batch(torch.tensor([0, len(piece) - 1])))
        nats -= model.logits(x).log_softmax(1).gather(1, piece[1:, None]).sum().item()
    assert rows(out)[0][2] == f"{nats / (len(stream) - 1):.4f}"


def test_depths_are_capped_one_by_one(capsys, trained):
    path = trained / "expert" / "checkpoint.pt"
    assert main([f"--checkpoint={path}", "--max_depth=all", "--eval_iters=2"]) == 0
    table = rows(capsys.readouterr().out)
    assert [row[:2] for row in table] == [
        [rule, str(depth)] for rule, depth in itertools.product(("top-k", "causal"), (1, 2, 3))
    ]
    assert [row[5:] for row in table[:2]] == [["100.0%", "0.0%", "0.0%"], ["33.3%", "66.7%", "0.0%"]]
    assert main([f"--checkpoint={path}", "--max_depth=2", "--eval_iters=2", "--rule=causal"]) == 0
    assert rows(capsys.readouterr().out) == [table[4]]


def test_another_dataset_and_a_changed_one(capsys, monkeypatch, trained):
    path = f"--checkpoint={trained / 'expert' / 'checkpoint.pt'}"
    assert main([path, f"--dataset={trained / 'other'}"]) == 0
    out, err = capsys.readouterr()
    assert f"tokens of {trained / 'other'}" in out and err == ""
    state = checkpoint.load(trained / "expert" / "checkpoint.pt", tuple(checkpoint.TYPES))
    monkeypatch.setattr(checkpoint, "load", lambda *_: state | {"data": {"val": [1]}})
    assert main([path]) == 0
    assert "changed since the training" in capsys.readouterr().err


# ---- benchmarks ------------------------------------------------------------------------------------


@pytest.fixture
def harness(monkeypatch):
    """A stand-in for lm-eval: tells what it was asked, and finds what a test puts in `results`."""
    asked = types.SimpleNamespace(results={}, error=None)

    class TaskManager:
        def __init__(self, include_path=None):
            asked.include_path = include_path

        def load(self, tasks):
            if asked.error:
                raise asked.error

    def simple_evaluate(model, task_manager, **given):
        task_manager.load(given["tasks"])
        asked.model, asked.given = model, given
        return {"results": asked.results, "groups": {}, "versions": {}, "n-shot": {}, "n-samples": {}}

    for name, parts in {
        "lm_eval": dict(simple_evaluate=simple_evaluate, __version__="0"),
        "lm_eval.api": {},
        "lm_eval.api.model": dict(LM=object),
        "lm_eval.tasks": dict(TaskManager=TaskManager),
        "lm_eval.utils": dict(make_table=lambda found, column="results": "a table"),
    }.items():
        module = types.ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_asks_the_harness_and_writes_what_it_finds(capsys, tmp_path, trained, harness):
    target, path = tmp_path / "found.json", trained / "expert" / "checkpoint.pt"
    harness.results = {
        task: {f"{metric},none": (n + 1) / 10, "sample_len": 1}
        for n, (task, metric) in enumerate(PAPER.items())
    }
    flags = ["--num_fewshot=2", "--limit=5", f"--include_path={tmp_path}", "--max_depth=2"]
    assert main([f"--checkpoint={path}", "--tasks=paper,extra", f"--output={target}", *flags]) == 0
    out = capsys.readouterr().out
    assert harness.given == dict(
        tasks=[*PAPER, "extra"], num_fewshot=2, limit=5, log_samples=False
    ) and harness.include_path == str(tmp_path)
    adapter = harness.model
    assert (adapter.rule, adapter.max_depth, adapter.batch_size) == ("causal", 2, 3)
    assert len(adapter.loglikelihood(requests([("a", "b")]))) == 1
    assert "a table" in out and "rule causal, max depth 2" in out and "lambada_openai 10.0" in out
    found = json.loads(target.read_text())
    assert found["results"] == harness.results and found["step"] == 12 and found["limit"] == 5
    assert found["paper"]["mean"] == pytest.approx((10 + 20 + 30 + 40 + 55 + 70) / 6)
    assert sorted(tmp_path.iterdir()) == [target]


def test_the_published_mean_is_of_six():
    """The first row of the published main table."""
    row = dict(zip(PAPER, (32.0, 37.8, 65.6, 50.5, 39.6, 39.6, 28.0)))
    results = {task: {f"{PAPER[task]},none": value / 100} for task, value in row.items()}
    assert paper_figures(results)["mean"] == pytest.approx(42.3, abs=0.051)
    del results["piqa"]
    assert "mean" not in paper_figures(results) and len(paper_figures(results)) == 6


def test_a_task_of_the_harness_end_to_end(capsys, monkeypatch, tmp_path, trained):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval")
    docs = [{"text": f"w{n} w", "choices": ["1", "#~~~#"], "answer": n % 2} for n in range(6)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = "dataset_path: json\ntest_split: test\nfewshot_split: test\nmetadata: {version: 1}\n"
    common += (
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/docs.jsonl}}}}\ndoc_to_text: '{{{{text}}}}'\n"
    )
    (tmp_path / "choice.yaml").write_text(
        common + "task: choice\noutput_type: multiple_choice\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "said.yaml").write_text(
        common + "task: said\noutput_type: generate_until\ndoc_to_target: '{{text}}'\n"
        "generation_kwargs: {until: [' '], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n"
    )
    (tmp_path / "rolling.yaml").write_text(
        common + "task: rolling\noutput_type: loglikelihood_rolling\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    path = trained / "expert" / "checkpoint.pt"
    flags = [f"--include_path={tmp_path}", f"--output={tmp_path}/out.json", "--device=cpu"]
    assert main([f"--checkpoint={path}", "--tasks=choice,said,rolling", *flags]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    model = checkpoint.load_model(checkpoint.load(path))
    right, nats = 0, 0.0
    for doc in docs:
        text = list(doc["text"].encode())
        likely = [naive(model, text, list(choice.encode()))[0] for choice in doc["choices"]]
        right += likely.index(max(likely)) == doc["answer"]
        nats -= naive(model, [], text)[0]
    n_bytes = sum(len(doc["text"]) for doc in docs)
    assert found["choice"]["acc,none"] == pytest.approx(right / len(docs))
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(
        nats / n_bytes / math.log(2), rel=1e-4
    )
    assert "exact_match,none" in found["said"] and "choice" in capsys.readouterr().out


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--checkpoint=nowhere.pt", "nowhere.pt"),
        ("--checkpoint={damaged}", "damaged"),
        ("--checkpoint={bare}", "settings"),
        ("--checkpoint={diverged}", "not finite"),
        ("--checkpoint={small}", "tokens in its encoding"),
        ("--dataset=nowhere", "nowhere"),
        ("--rule=best", "invalid choice"),
        ("--max_depth=4", "n_recursion=3"),
        ("--max_depth=deep", "max_depth=deep"),
        ("--max_depth=all --tasks=x", "must be a number."),
        ("--batch_size=-1", "batch_size=-1"),
        ("--batch_size=99999999999999999999", "must be at most 65536"),
        ("--eval_iters=0", "eval_iters=0"),
        ("--eval_iters=1 --all", "not allowed with"),
        ("--limit=0 --tasks=x", "limit=0"),
        ("--num_fewshot=-1 --tasks=x", "num_fewshot=-1"),
        ("--limit=3 --output=x", "limit and output needs --tasks"),
        ("--tasks=x --all", "all is not for --tasks"),
        ("--tasks=x --include_path=nowhere", "include_path=nowhere"),
        ("--tasks=x --output=damaged", "damaged exists"),
        ("--tasks=x --output=no/where", "no/where"),
        ("--tasks=x", "pip install lm-eval"),
        ("--device=toaster", "device=toaster"),
        ("--colour", "--colour"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(capsys, monkeypatch, tmp_path, trained, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    path = trained / "expert" / "checkpoint.pt"
    Path("damaged").write_bytes(path.read_bytes()[:5000])
    if "{" in arguments:
        state = checkpoint.load(path, tuple(checkpoint.TYPES))
        model = checkpoint.load_model(state)
        more = {k: state[k] for k in ("encoding", "step", "settings", "data")}
        checkpoint.save(Path("bare"), model, encoding="bytes", step=0)
        small = random_model("vanilla", vocab_size=256)
        checkpoint.save(Path("small"), small, **more)
        model.model.norm.weight.data[3] = math.nan
        checkpoint.save(Path("diverged"), model, **more)
    arguments = arguments.replace("{", "").replace("}", "").split()
    assert main([f"--checkpoint={path}", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and says in err
    assert err.endswith(".\n") and err.count("\n") == 1 and "Traceback" not in err


def test_a_dataset_in_another_encoding_is_refused(capsys, monkeypatch, trained):
    foreign = types.SimpleNamespace(encoding="gpt2")
    monkeypatch.setattr("eval.open_dataset", lambda name: (foreign, foreign))
    assert main([f"--checkpoint={trained / 'expert' / 'checkpoint.pt'}", "--dataset=web"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "dataset 'web' is in encoding 'gpt2'" in err and "reads 'bytes'" in err


def test_tasks_that_cannot_be_loaded_are_told(capsys, tmp_path, trained, harness):
    harness.error = KeyError("no such\ntask")
    path = trained / "expert" / "checkpoint.pt"
    assert main([f"--checkpoint={path}", "--tasks=nope", f"--output={tmp_path / 'x.json'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --tasks=nope cannot be loaded (KeyError")
    assert err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_too_many_examples_and_closed_folders_are_told(capsys, monkeypatch, tmp_path, trained, harness):
    flags = [f"--checkpoint={trained / 'expert' / 'checkpoint.pt'}", f"--output={tmp_path / 'x.json'}"]
    monkeypatch.setattr(
        sys.modules["lm_eval"],
        "simple_evaluate",
        lambda *_, num_fewshot, **given: random.sample(range(3), num_fewshot),
    )
    assert main([*flags, "--tasks=t", "--num_fewshot=5"]) == 2
    assert "num_fewshot=5 is more than a task has examples" in capsys.readouterr().err
    monkeypatch.setattr("eval.os.access", lambda path, mode: False)
    assert main([*flags, "--tasks=t"]) == 2
    assert f"{tmp_path} cannot be written to; give another --output" in capsys.readouterr().err

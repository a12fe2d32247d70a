"""Whatever shares the batch, a request gets what the model, alone and without a cache, gives it."""

import collections
import contextlib
import itertools

import numpy as np
import pytest
import tiktoken
import torch
from torch.utils._pytree import tree_leaves

import passes
from engine import Engine, Event, halvings
from model import MoR
from modelconfig import ModelConfig
from ragged import ragged_batch
from sampling import SamplingParams, draw, probabilities, uniform
from test_kvcache import CASES, SMALL, random_model
from tokenizer import get_encoding

BYTES = get_encoding("bytes")
END = BYTES.eot_token


@torch.no_grad()
def full_pass(model, tokens, max_depth=None):
    """Logits and depths of whole sequences at once, without a cache."""
    rows = ragged_batch(torch.tensor([0, len(tokens)]))
    x, routed = model.hidden(torch.tensor(tokens), rows, max_depth=max_depth)
    return model.logits(x), routed.depth.tolist()


def run(engine: Engine, requests, generator=None) -> dict[int, list[Event]]:
    """The events of each request; with a generator, they arrive, and are put back, at random moments."""
    events, waiting, numbers = collections.defaultdict(list), list(requests), []
    while waiting or engine.busy():
        while waiting and (generator is None or not engine.busy() or generator.random() < 0.4):
            numbers.append(engine.submit(*waiting.pop(0)))
        if generator is not None and any(engine.running) and generator.random() < 0.05:
            engine.put_back()
        for event in engine.step():
            events[event.request].append(event)
    assert sorted(events) == sorted(numbers)
    check_drained(engine)
    return [events[n] for n in numbers]


def check_drained(engine: Engine) -> None:
    kv = engine.kv
    assert kv.n_free == kv.n_page and sorted(kv.free) == list(range(1, kv.n_page + 1))
    assert not kv.table.any() and not kv.rows[:-1].any()
    assert len(engine.flight) == 0 and not any(engine.running)


def check_greedy(model, events, request, max_depth=None) -> set[int]:
    """Every token is the likeliest, every depth right, by the full pass; the depths that occurred."""
    prompt, params = request
    tokens = [e.token for e in events]
    assert tokens[: len(prompt)] == prompt and len(tokens) == len(prompt) + params.max_new_tokens
    logits, depths = full_pass(model, tokens, max_depth)
    assert logits.argmax(1).tolist()[len(prompt) - 1 : -1] == tokens[len(prompt) :]
    assert [e.depth for e in events[:-1]] == depths[:-1] and events[-1].depth is None
    assert [e.ends for e in events] == [False] * (len(events) - 1) + [True]
    return set(depths)


def pool_bytes(model, max_len=None) -> int:
    """The pool that one request of max_len tokens can need."""
    kv = Engine(model, max_batch=1, max_len=max_len).kv
    return kv.n_page * kv.page_bytes


def random_requests(generator, n, longest=30):
    return [
        (
            generator.integers(0, 61, generator.integers(1, longest)).tolist(),
            SamplingParams(int(generator.integers(1, longest)), temperature=0),
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize("kind, kv_mode", CASES)
def test_greedy_equals_the_full_pass_whatever_shares_the_batch(kind, kv_mode):
    model, g = random_model(kind, kv_mode, 0), np.random.default_rng(len(kind) + len(kv_mode))
    requests, depths, n_put_back = random_requests(g, 7, 24), set(), 0
    longest = max(len(t) + p.max_new_tokens for t, p in requests)
    for given in (
        dict(max_batch=3, chunk=5, gather=0),
        dict(continuous=False),
        dict(max_batch=6, chunk=7, kv_bytes=pool_bytes(model, longest)),
    ):
        engine = Engine(model, **given)
        for events, request in zip(run(engine, requests, g), requests):
            depths |= check_greedy(model, events, request)
        n_put_back += engine.n_put_back
    assert n_put_back > 0
    if model.config.routing != "none":
        assert depths >= set(range(1, model.config.n_recursion + 1))
    assert (kind == "expert_first_step_partial") == (0 in depths)


@pytest.mark.parametrize(
    "kind, kv_mode", [("expert_aux_loss", "recursion"), ("token_softmax", "shared")]
)
def test_the_kernels_generate_the_same(kind, kv_mode):
    model = random_model(kind, kv_mode, 0, n_head=2, n_kv_head=1, n_layer=5)
    requests = random_requests(np.random.default_rng(0), 3, 8)
    engine = Engine(model, max_batch=2, chunk=5, attention="triton")
    for events, request in zip(run(engine, requests), requests):
        check_greedy(model, events, request)


@pytest.mark.parametrize(
    "kind, kv_mode", [("expert_aux_router", "shared"), ("token_softmax", "recursion")]
)
def test_layers_in_bfloat16_and_routers_in_float32(kind, kv_mode):
    model = random_model(kind, kv_mode, 0)
    model.model.to(torch.bfloat16)
    requests = random_requests(np.random.default_rng(0), 4, 12)
    engine = Engine(model, max_batch=3)
    assert engine.kv.k.dtype == torch.bfloat16
    for events, (prompt, params) in zip(run(engine, requests), requests):
        assert len(events) == len(prompt) + params.max_new_tokens


@pytest.mark.parametrize("kind", ["middle_sequence", "cycle", "expert_aux_loss", "token_softmax"])
def test_max_depth_caps_every_token(kind):
    model, requests = random_model(kind, "recursion", 3), random_requests(np.random.default_rng(1), 5)
    for max_depth in range(1, model.config.n_recursion + 1):
        got = run(Engine(model, max_batch=3, max_depth=max_depth), requests)
        depths = [check_greedy(model, e, r, max_depth) for e, r in zip(got, requests)]
        assert max(set().union(*depths)) == max_depth


@pytest.mark.parametrize("kind", ["expert_aux_loss", "token_softmax"])
def test_a_sample_depends_on_its_seed_alone(kind):
    model, g = random_model(kind, "recursion", 0), np.random.default_rng(0)
    requests = [
        (prompt, SamplingParams(params.max_new_tokens, *settings, seed=seed))
        for seed, ((prompt, params), settings) in enumerate(
            zip(random_requests(g, 6), [(0.9, 0, 1.0), (1.5, 5, 0.9), (0, 0, 1.0)] * 2)
        )
    ]
    alone = [run(Engine(model), [request])[0] for request in requests]
    for given in (dict(max_batch=6), dict(max_batch=2, chunk=3, gather=0.9)):
        order = g.permutation(6)
        together = run(Engine(model, **given), [requests[i] for i in order], g)
        for i, events in zip(order, together):
            assert [e[1:] for e in events] == [e[1:] for e in alone[i]]
    for events, (prompt, p) in zip(alone, requests):  # by the full pass and the noise of seed and count
        tokens = [e.token for e in events]
        logits, _ = full_pass(model, tokens)
        index = np.arange(p.max_new_tokens, dtype=np.uint64)
        u = uniform(np.full(len(index), p.seed, np.uint64), index)
        settings = (torch.full((len(index),), x) for x in (float(p.temperature), p.top_k, p.top_p))
        weights = probabilities(logits[len(prompt) - 1 : -1], *settings)
        assert draw(weights, torch.from_numpy(u)).tolist() == tokens[len(prompt) :]


@pytest.mark.parametrize(
    "kind, kv_mode", [("expert_first_step_partial", "recursion"), ("token_softmax", "shared_update")]
)
def test_a_request_that_overflows_harms_no_other(kind, kv_mode):
    model, sick, well = random_model(kind, kv_mode, 0), [60] * 20, list(range(20))
    params = SamplingParams(4, 0)
    alone = Engine(model).generate([well], params)[0]

    def overflow(module, given, x):
        return x.masked_fill((given[0] == 60)[:, None], torch.inf)

    model.model.embed_tokens.register_forward_hook(overflow)
    engine = Engine(model, max_batch=2)
    assert engine.generate([well, sick], params)[0] == alone
    engine.generate([sick, sick], params)  # and now in pages that it has left
    assert engine.generate([well, well], params) == [alone, alone]


def test_a_long_load_is_answered_right_in_flat_memory():
    """2,000 requests through a pool that holds the longest about twice."""
    torch.manual_seed(0)
    model = MoR(
        ModelConfig(**SMALL | dict(n_layer=5, n_embd=16, n_head=1, n_kv_head=1, n_ffn=16))
    ).eval()
    torch.nn.init.normal_(model.router[1].weight, std=1.0)
    g = np.random.default_rng(0)
    requests = [
        (g.integers(0, 61, g.integers(1, 12)).tolist(), SamplingParams(int(g.integers(1, 14)), 0))
        for _ in range(2000)
    ]
    engine = Engine(model, max_batch=32, max_len=24, kv_bytes=5 * pool_bytes(model, 24))
    pool = engine.kv.k.data_ptr(), engine.tokens.shape, engine.kv.table.shape
    got = run(engine, requests)
    assert engine.n_put_back > 20
    assert pool == (engine.kv.k.data_ptr(), engine.tokens.shape, engine.kv.table.shape)
    tokens = [[e.token for e in events] for events in got]
    lengths = [len(t) for t in tokens]
    ids = torch.tensor(list(itertools.chain(*tokens)))
    with torch.no_grad():  # all of them, whole, in one pass
        x, routed = model.hidden(ids, ragged_batch(torch.tensor([0, *itertools.accumulate(lengths)])))
        best = model.logits(x).argmax(1).split(lengths)
    for (prompt, params), t, b, d, events in zip(
        requests, tokens, best, routed.depth.split(lengths), got
    ):
        assert len(t) == len(prompt) + params.max_new_tokens and t[: len(prompt)] == prompt
        assert b.tolist()[len(prompt) - 1 : -1] == t[len(prompt) :]
        assert [e.depth for e in events[:-1]] == d.tolist()[:-1]


# ---- passes of fixed sizes -----------------------------------------------------------------------

FIXED = [("expert_first_step_partial", "recursion"), ("token_softmax", "shared_update")]


def check_fixed(kind, kv_mode, sizes):
    model, g = random_model(kind, kv_mode, 0), np.random.default_rng(0)
    requests = random_requests(g, 8, 20)
    engine = Engine(model, max_batch=6, chunk=8, compile=True)
    engine.outer_sizes, engine.block_sizes = sizes, sizes[-1:]
    for events, request in zip(run(engine, requests, g), requests):
        check_greedy(model, events, request)


@pytest.mark.parametrize("kind, kv_mode", FIXED)
def test_passes_of_fixed_sizes_are_filled_up_with_nobody(monkeypatch, kind, kv_mode):
    sizes = set()

    def counted(function):
        return lambda *given: (sizes.add(len(given[-1].mask.n_key)), function(*given))[1]

    monkeypatch.setattr(passes, "compiled", counted)
    check_fixed(kind, kv_mode, [1, 4, 6])
    assert sizes == {1, 4, 6}


def test_halvings():
    given = (51, 16), (4, 16), (6, 1)
    assert [halvings(*x) for x in given] == [[26, 51], [4], [1, 2, 3, 6]]


@pytest.mark.slow
@pytest.mark.parametrize("kind, kv_mode", FIXED)
def test_compiled_passes_generate_the_same(kind, kv_mode):
    check_fixed(kind, kv_mode, [3, 6])


class PretendedGraph:
    """A CUDA graph on a CPU: a replay computes once more, from and into the memory of the capture."""

    capturing = None

    @staticmethod
    @contextlib.contextmanager
    def capture(graph, pool, stream):
        PretendedGraph.capturing = graph
        yield
        PretendedGraph.capturing = None

    def replay(self):
        function, given, made = self.call
        for old, new in zip(tree_leaves(made), tree_leaves(function(*given))):
            if isinstance(old, torch.Tensor):
                old.copy_(new)


@pytest.mark.parametrize("kind, kv_mode", FIXED)
def test_graphs_read_and_write_the_memory_of_their_capture(monkeypatch, kind, kv_mode):
    captures = []

    def recorded(function):
        def run(*given):
            made = function(*given)
            if graph := PretendedGraph.capturing:
                graph.call = function, given, made
                captures.append(graph)
            return made

        return run

    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "graph", PretendedGraph.capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(passes, "compiled", lambda function: passes.captured(recorded(function), None))
    check_fixed(kind, kv_mode, [1, 2, 4, 6])
    assert 9 <= len(captures) <= 24  # three passes of up to four sizes, page tables of two widths


def test_without_a_compiler_the_engine_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(passes.shutil, "which", lambda name: None)
    model = random_model("expert_aux_loss", "recursion", 0)
    new = [Engine(model, compile=c).generate([[1, 2]], SamplingParams(5, 0)) for c in (True, False)]
    assert new[0] == new[1]
    assert capsys.readouterr().err == "note: there is no compiler for cpu here; going on without.\n"


# ---- how requests end ----------------------------------------------------------------------------


def text_model(kind="expert_aux_loss") -> MoR:
    return random_model(kind, "recursion", 0, vocab_size=300)


def test_stop_tokens_and_texts_end_a_request_with_what_completes_them():
    model, prompts = text_model(), [list(b"def f(x):"), [], list(b"a"), list("é = 'x'\n".encode())]
    whole = Engine(model, encoding=BYTES).generate(prompts, SamplingParams(20, 0))
    letters = [t for t in whole[0][3:] if 32 < t < 127]
    pair = next(p for p in zip(whole[0][4:], whole[0][5:]) if max(p) < 128)
    for asked, ends in (
        (dict(stop=("never", chr(letters[0]))), lambda t, n: t[n] == letters[0]),
        (dict(stop_tokens=(letters[0], 299)), lambda t, n: t[n] == letters[0]),
        (dict(stop=(bytes(pair).decode(),)), lambda t, n: n > 0 and (t[n - 1], t[n]) == pair),
    ):
        engine = Engine(model, max_batch=2, encoding=BYTES)
        got = engine.generate(prompts, SamplingParams(20, 0, **asked))
        check_drained(engine)
        for tokens, all_tokens in zip(got, whole):
            n = next((n for n in range(len(all_tokens)) if ends(all_tokens, n)), len(all_tokens) - 1)
            assert tokens == all_tokens[: n + 1]


def test_a_stop_text_is_found_across_a_put_back():
    model = text_model()
    plain = Engine(model, encoding=BYTES).generate([list(b"ab")], SamplingParams(40, 0))[0]
    at = next(n for n in range(20, 39) if max(plain[n : n + 2]) < 128)
    stop = bytes(plain[at : at + 2]).decode()
    first = next(n for n in range(40) if bytes(plain[: n + 1]).endswith(stop.encode()))
    for n_step in range(1, 100, 3):
        engine = Engine(model, max_batch=1, encoding=BYTES)
        engine.submit(list(b"ab"), SamplingParams(40, 0, stop=(stop,)))
        events = []
        for n in itertools.count():
            if n == n_step and any(engine.running):
                engine.put_back()
            if not engine.busy():
                break
            events += engine.step()
        assert [e.token for e in events][2:] == plain[: first + 1]
        assert [e.ends for e in events] == [False] * (len(events) - 1) + [True]


def test_endoftext_ends_a_request_that_knows_the_encoding():
    model = text_model("vanilla")
    with torch.no_grad():  # all states alike, and <|endoftext|> the likeliest
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 0.0
    x = model.hidden(torch.tensor([7]), ragged_batch(torch.tensor([0, 1])))[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[END, 0] = x[0, 0].sign()
    assert Engine(model, encoding=BYTES).generate([[7]], SamplingParams(5, 0)) == [[END]]
    assert Engine(model).generate([[7]], SamplingParams(5, 0)) == [[END] * 5]


def test_the_context_bounds_what_is_generated():
    model = text_model("token_softmax")
    prompts = [[1] * 64, [2] * 60, [3]]
    for given in (dict(), dict(max_batch=2, chunk=9)):
        new = Engine(model, **given).generate(prompts, SamplingParams(200, 0))
        assert [len(x) for x in new] == [1, 5, 64]
    assert [
        len(x) for x in Engine(model, max_len=10).generate([[3], [1] * 10], SamplingParams(200, 0))
    ] == [10, 1]


def test_a_stream_left_early_goes_on_where_it_was():
    engine = Engine(random_model("expert_aux_loss", "recursion", 0))
    requests = [([t, t], SamplingParams(3, 0)) for t in range(4)]
    for request in requests:
        engine.submit(*request)
    events = collections.defaultdict(list)
    while event := next(engine.stream(), None):
        events[event.request].append(event)
    for number, request in enumerate(requests):
        check_greedy(engine.model, events[number], request)


def test_no_new_tokens_reads_the_prompts_alone():
    model = text_model("token_softmax")
    prompts = [[5, 6, 7], [8]]
    got = run(Engine(model, chunk=2), [(p, SamplingParams(0)) for p in prompts])
    for events, prompt in zip(got, prompts):
        assert [e.token for e in events] == prompt
        assert [e.depth for e in events] == full_pass(model, prompt)[1]
        assert [e.ends for e in events] == [False] * (len(prompt) - 1) + [True]


@pytest.mark.parametrize("temperature", [0, 5.0])
def test_ids_that_stand_for_nothing_are_never_chosen(temperature):
    model, prompt = text_model(), list(b"def f(x):")
    with torch.no_grad():
        model.model.embed_tokens.weight[BYTES.n_vocab :] *= 20  # padding, but likely
    assert full_pass(model, prompt)[0][-1].argmax() >= BYTES.n_vocab
    params = [SamplingParams(8, temperature, seed=seed) for seed in range(8)]
    got = run(Engine(model, encoding=BYTES), [(prompt, p) for p in params])
    assert max(e.token for events in got for e in events) < BYTES.n_vocab
    # An encoding may have gaps, and special tokens that no text ever becomes.
    gaps = tiktoken.Encoding(
        "gaps", pat_str=".", mergeable_ranks={bytes([b]): b for b in range(256)},
        special_tokens={"<|other|>": 257, "<|endoftext|>": 259},
    )  # fmt: skip
    params = [SamplingParams(20, temperature, seed=seed) for seed in range(30)]
    got = run(Engine(model, encoding=gaps), [([1], p) for p in params])
    assert {e.token for events in got for e in events} <= {*range(256), 259}


def test_generated_frequencies_match_the_model():
    model, prompt = text_model("token_softmax"), list(b"def f(x):")
    settings = (torch.tensor([x]) for x in (0.7, 6, 0.9))
    p = probabilities(full_pass(model, prompt)[0][-1:, : BYTES.n_vocab], *settings)[0]
    p = (p / p.sum()).numpy()
    engine = Engine(model, max_batch=500, max_len=16, encoding=BYTES)
    got = run(engine, [(prompt, SamplingParams(1, 0.7, 6, 0.9, seed)) for seed in range(2000)])
    counts = np.bincount([events[-1].token for events in got], minlength=BYTES.n_vocab)
    assert (p > 0).sum() > 2 and (counts[p == 0] == 0).all()
    assert ((counts - 2000 * p)[p > 0] ** 2 / (2000 * p[p > 0])).sum() < 25


# ---- scheduling ----------------------------------------------------------------------------------


def test_continuous_batching_needs_fewer_passes_and_static_waits():
    model = random_model("expert_random", "recursion", 0)
    g = np.random.default_rng(0)
    requests = [([int(t)], SamplingParams(int(n), 0)) for t, n in g.integers(1, 30, (24, 2))]
    passes = {}
    for continuous in (True, False):
        engine = Engine(model, max_batch=6, gather=0, continuous=continuous)
        run(engine, requests)
        passes[continuous] = engine.ran["block"]
        n_row = engine.n_row
    n_new = sum(p.max_new_tokens for _, p in requests)
    assert n_new < n_row < 3 * n_new  # tokens take from 1 to 3 steps
    assert passes[True] < 0.7 * passes[False]


def test_tokens_that_are_done_wait_for_others():
    model = random_model("expert_random", "recursion", 0)
    requests = [([t] * (t + 1), SamplingParams(12, 0)) for t in range(8)]
    leaving = {}
    for gather in (0, 0.75):
        engine = Engine(model, max_batch=8, gather=gather)
        for request in requests:
            engine.submit(*request)
        counts = []
        while engine.busy():
            counts.append(len({e.request for e in engine.step()}))
        leaving[gather] = [n for n in counts if n]
    assert sum(n >= 6 for n in leaving[0.75]) > 0.8 * len(leaving[0.75])
    assert len(leaving[0.75]) < len(leaving[0])


def test_the_youngest_is_put_back_and_the_first_come_are_first_served():
    model = random_model("vanilla", "recursion", 0)
    engine = Engine(model, max_batch=4, kv_bytes=pool_bytes(model))
    for t in range(6):
        engine.submit([t], SamplingParams(60, 0))
    ended = [event.request for event in engine.stream() if event.ends]
    assert ended == sorted(ended) and engine.n_put_back > 3


def test_a_step_may_put_back_many():
    """All want their second page at once, and half of them have to go."""
    sizes = dict(n_layer=1, n_head=1, n_kv_head=1, n_embd=8, n_ffn=8)
    model = random_model("vanilla", "recursion", 0, **sizes)
    page_bytes = Engine(model, max_batch=1).kv.page_bytes
    engine = Engine(model, max_batch=2400, max_len=20, kv_bytes=2400 * page_bytes, chunk=2400 * 16)
    for _ in range(2400):
        engine.submit([1] * 16, SamplingParams(2, 0))
    assert sum(event.ends for event in engine.stream()) == 2400 and engine.n_put_back >= 1200
    check_drained(engine)


@pytest.mark.parametrize(
    "given, says",
    [
        (dict(max_batch=0), "max_batch=0 must lie from 1"),
        (dict(max_len=65), "max_len=65 must lie from 1 to 64"),
        (dict(chunk=0), "chunk=0"),
        (dict(gather=1.5), "gather=1.5 must lie from 0 to 1"),
        (dict(max_depth=4), "max_depth=4 must lie from 1 to 3"),
        (dict(encoding=BYTES), "knows 61 of the encoding's 257 tokens"),
    ],
)
def test_impossible_engines_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        Engine(random_model("expert_aux_loss", "recursion", 0), **given)


@pytest.mark.parametrize(
    "tokens, params, says",
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([1] * 65, SamplingParams(), "prompt of 65 tokens exceeds the context of 64"),
        ([1, 61], SamplingParams(), "outside the model's vocabulary of 61"),
        ([-1], SamplingParams(), "outside the model's vocabulary of 61"),
        ([1], SamplingParams(stop=("x",)), "knows the encoding"),
        (
            [1] * 40,
            SamplingParams(),
            "can need .* bytes of keys and values, but there are .*; raise kv_bytes or",
        ),
    ],
)
def test_impossible_requests_are_refused_and_harm_no_other(tokens, params, says):
    model = random_model("expert_aux_loss", "recursion", 0)
    engine = Engine(model, kv_bytes=pool_bytes(model, 48))
    greedy = SamplingParams(3, 0)
    engine.submit([3], greedy)
    with pytest.raises(ValueError, match=says):
        engine.submit(tokens, params)
    assert engine.generate([[2]], greedy) == Engine(model).generate([[2]], greedy)

"""Config files, command lines, presets: what is read, what wins, what is refused in which words."""

import ast
import functools
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flops import budget_steps, run_steps
from modelconfig import CHOICES, KINDS, PRESETS, SIZES, ModelConfig, fitting_depths, preset
from settings import (
    BUDGETS,
    FIELDS,
    SPLIT,
    TrainConfig,
    build,
    help_text,
    merge,
    parse,
    read_config,
    split_batch,
)

HERE = Path(__file__).parent
INFINITY = float("inf")


def write(folder: Path, text: str, name="run.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(function, *args, **kwargs) -> str:
    """The sentence of a refusal: one, with a full stop, no line breaks, no Python objects."""
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message, message
    assert not re.search(r"[.!?] [A-Z]", message), f"more than one sentence: {message}"
    assert " object at 0x" not in message, message
    return message


# ---- config files --------------------------------------------------------------------------------


def test_a_config_file_is_assignments_of_literals(tmp_path):
    path = write(tmp_path, '''"""A run."""
# a comment
max_iters = 1e6
learning_rate = 1
resume = True
capacity = [1, 0.5, 2e-1]
out_dir = "out-x"
seed = -3
batch_size = 1_024
''')  # fmt: skip
    given_settings = read_config(path)
    assert given_settings == dict(
        max_iters=1_000_000, learning_rate=1.0, resume=True, capacity=(1.0, 0.5, 0.2), out_dir="out-x",
        seed=-3, batch_size=1024,
    )  # fmt: skip
    assert type(given_settings["max_iters"]) is int and type(given_settings["learning_rate"]) is float
    assert read_config(write(tmp_path, "")) == {}


STATEMENTS = [
    "import os",
    "from os import system",
    "open({path!r}, 'w')",
    "f\"{{open({path!r}, 'w')}}\"",
    "def seed(): pass",
    "class seed: pass",
    "if True: seed = 1",
    "for seed in (1, 2): pass",
    "seed += 1",
    "seed: int = 5",
    "seed, max_iters = 1, 2",
    "seed.x = 1",
    "seed[0] = 1",
    "del seed",
    "(seed := 5)",
    "lambda: 1",
    "learning_rate = {{[]: 1}}",
]
EXPRESSIONS = [
    "seed = open({path!r}, 'w')",
    "seed = __import__('os').system('touch {path}')",
    "out_dir = f\"{{open({path!r}, 'w')}}\"",
    "out_dir = f'x'",
    "seed = [open({path!r}, 'w') for _ in 'x']",
    "seed = (lambda: open({path!r}, 'w'))()",
    "capacity = [1, open({path!r}, 'w')]",
    "seed = max_iters",
    "seed = 10**3",
    "seed = 1 if True else 2",
    "seed = max_iters = 5",
]


@pytest.mark.parametrize("line", [*STATEMENTS, *EXPRESSIONS])
def test_anything_else_in_a_config_file_is_refused_where_it_stands_and_not_run(tmp_path, line):
    trap = tmp_path / "trap"
    path = write(tmp_path, "max_iters = 5\n" + line.format(path=str(trap)) + "\n")
    message = refusal(read_config, path)
    assert path in message and "line 2" in message
    assert not trap.exists()


@pytest.mark.parametrize("text", ["seed = (", "seed 5", "seed = 5\n  max_iters = 3", "\0"])
def test_what_is_not_python_is_refused(tmp_path, text):
    path = write(tmp_path, text)
    message = refusal(read_config, path)
    assert path in message and "max_iters = 100" in message


def test_a_file_in_another_encoding_or_none_at_all_is_refused(tmp_path):
    path = tmp_path / "run.py"
    path.write_bytes(b"out_dir = '\xff\xfe'")
    assert str(path) in refusal(read_config, str(path))
    missing = str(tmp_path / "missing.py")
    for where in (missing, str(tmp_path)):
        message = refusal(read_config, where)
        assert where in message and "config/" in message


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FIELDS)), st.integers(0, 30), st.sampled_from("abcdefgilnorst_"))
def test_a_misspelt_key_is_told_a_known_one(key, at, letter):
    typo = key[:at] + letter + key[at:]
    if typo in FIELDS:
        return
    message = refusal(parse, [f"--{typo}=1"])
    near = re.search(r"nearest is '(\w+)'", message)[1]
    assert near in FIELDS and repr(typo) in message
    if len(key) > 4:  # one letter too many: nothing that differs more may be named instead
        letters = [k for k in FIELDS if any(typo[:i] + typo[i + 1 :] == k for i in range(len(typo)))]
        assert near in letters or len(near) >= len(key)


@pytest.mark.parametrize("typo, near", [
    ("max_iter", "max_iters"), ("learningrate", "learning_rate"), ("nlayer", "n_layer"),
    ("kvmode", "kv_mode"), ("n_recursions", "n_recursion"),
    ("capacities", "capacity"), ("batchsize", "batch_size"), ("lr", "learning_rate"),
])  # fmt: skip
def test_the_nearest_key_is_named(tmp_path, typo, near):
    for message in (
        refusal(parse, [f"--{typo}=1"]),
        refusal(read_config, write(tmp_path, f"{typo} = 1")),
    ):
        assert repr(typo) in message and f"nearest is {near!r}" in message
    assert str(tmp_path) in message  # a file is named, so that one knows where to look


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, text, value", [
    ("max_iters", "100", 100), ("max_iters", "1e6", 1_000_000), ("max_iters", "3.0", 3),
    ("max_tokens", "20e9", 20_000_000_000), ("max_flops", "16.5e18", 16.5e18), ("seed", "-1", -1),
    ("max_flops", "10", 10.0), ("learning_rate", "3e-3", 0.003), ("learning_rate", "1", 1.0),
    ("resume", "True", True), ("resume", "False", False), ("capacity", "1,0.5,0.25", (1.0, 0.5, 0.25)),
    ("capacity", "1", (1.0,)), ("capacity", "[1, 0.5]", (1.0, 0.5)), ("capacity", "(1,)", (1.0,)),
    ("capacity", "()", ()), ("out_dir", "5", "5"), ("out_dir", "a=b", "a=b"), ("out_dir", "", ""),
    ("sharing", "cycle", "cycle"),
])  # fmt: skip
def test_the_command_line_converts_to_the_type_of_the_setting(key, text, value):
    (actual,) = parse([f"--{key}={text}"]).values()
    assert actual == value and type(actual) is type(value)
    assert parse([f"--{key.replace('_', '-')}={text}"]) == {key: value}


def test_an_option_given_twice_is_refused():
    for argv in (["--seed=1", "--seed=1"], ["--batch_size=1", "--batch-size=2"]):
        assert "is given twice" in refusal(parse, argv)


def test_a_byte_order_mark_is_no_setting(tmp_path):
    assert read_config(write(tmp_path, "\ufeffseed = 5")) == {"seed": 5}


def test_nesting_too_deep_is_refused(tmp_path):
    for n in (3000, 60000):
        assert "max_iters = 100" in refusal(read_config, write(tmp_path, f"seed = {'-' * n}1"))


def test_a_flag_alone_is_true():
    assert parse(["--resume", "--seed=4"]) == {"resume": True, "seed": 4}
    for key in ("out_dir", "seed", "capacity"):
        assert f"write --{key}=VALUE" in refusal(parse, [f"--{key}"])


@pytest.mark.parametrize("key, text", [
    ("max_iters", "many"), ("max_iters", "1.5"), ("max_iters", "True"), ("max_iters", "[1]"),
    ("max_iters", ""), ("max_iters", "nan"), ("max_iters", "'x'"), ("seed", "__import__('os')"),
    ("learning_rate", "fast"), ("learning_rate", "False"), ("learning_rate", "nan"),
    ("learning_rate", "1j"), ("resume", "1"), ("resume", "yes"), ("resume", "None"), ("capacity", "a,b"),
    ("capacity", "1,'x'"), ("capacity", "{1: 2}"), ("capacity", ""), ("capacity", "[[1]]"),
    ("capacity", "1,True,True"), ("max_iters", "1e999"), ("learning_rate", "9" * 400),
    ("max_tokens", "1" + "0" * 400), ("capacity", "1" + "0" * 400), ("seed", "9" * 5000),
    ("max_iters", str(2**63)), ("learning_rate", "-" * 60000 + "1"), ("learning_rate", "-" * 3000 + "1"),
])  # fmt: skip
def test_wrong_types_are_refused(tmp_path, key, text):
    message = refusal(parse, [f"--{key}={text}"])
    assert message.startswith("command line:") and key in message
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        text = repr(text)
    path = write(tmp_path, f"{key} = {text}")
    message = refusal(read_config, path)
    assert message.startswith(path) and key in message


def test_numbers_are_no_strings(tmp_path):
    for text in ("5", "None", "True", "['a']"):
        assert "out_dir takes one str" in refusal(read_config, write(tmp_path, f"out_dir = {text}"))


def test_every_default_is_read_back_as_itself(tmp_path):
    """The default that --help prints is a value one may type, and a file may hold."""
    for key, field in FIELDS.items():
        if field.default != "":
            assert parse([f"--{key}={field.default}"]) == {key: field.default}
        assert read_config(write(tmp_path, f"{key} = {field.default!r}")) == {key: field.default}


# ---- what wins -----------------------------------------------------------------------------------


def test_later_sources_win(tmp_path):
    path = write(tmp_path, 'preset = "mor-360m"\nn_recursion = 2\nseed = 7\nkv_mode = "shared"\n')
    model, train = build(parse([path, "--kv_mode=recursion", "--seed=9"]))
    assert (model.n_embd, model.vocab_size, model.block_size) == (960, 49152, 2048)  # preset
    assert model.n_recursion == 2  # file over preset
    assert model.kv_mode == "recursion" and train.seed == 9  # command line over file
    assert (train.batch_size, model.router_type) == (0, "linear")  # defaults
    assert parse(["--kv_mode=recursion", path])["kv_mode"] == "recursion"  # wherever it stands
    model, _ = build(parse([path, "--preset=vanilla-135m", "--n_recursion=1", "--kv_mode=recursion"]))
    assert (model.n_embd, model.n_layer, model.sharing) == (576, 30, "none")
    model, _ = build(parse(["--preset=mor-135m", "--n_layer=11", "--n_embd=18", "--block_size=64"]))
    assert (model.n_layer, model.n_embd, model.block_size) == (11, 18, 64)


@pytest.mark.parametrize("first", BUDGETS)
@pytest.mark.parametrize("then", BUDGETS)
def test_a_budget_replaces_the_budget_before_it(tmp_path, first, then):
    path = write(tmp_path, f"{first} = 1000\nseed = 3")
    _, train = build(parse([path, f"--{then}=2000"]))
    assert train.seed == 3
    assert {b: getattr(train, b) for b in BUDGETS} == {b: 2000 if b == then else 0 for b in BUDGETS}
    _, train = build(parse([path]))
    assert {b: getattr(train, b) for b in BUDGETS} == {b: 1000 if b == first else 0 for b in BUDGETS}
    assert merge({first: 5, "seed": 1}, {"seed": 2}) == {first: 5, "seed": 2}


def test_two_budgets_at_once_are_refused(tmp_path):
    for a, b in (("max_iters", "max_tokens"), ("max_flops", "max_iters"), ("max_tokens", "max_flops")):
        for argv in ([f"--{a}=10", f"--{b}=10"], [write(tmp_path, f"{a} = 10\n{b} = 10")]):
            message = refusal(build, parse(argv))
            assert a in message and b in message


def test_without_a_budget_there_is_the_default():
    _, train = build({})
    assert (train.max_iters, train.max_tokens, train.max_flops) == (700, 0, 0)


@pytest.mark.parametrize("first", ["seed = 1", ""])
def test_a_second_config_file_is_refused(tmp_path, first):
    a, b = write(tmp_path, first, "a.py"), write(tmp_path, "seed = 2", "b.py")
    assert b in refusal(parse, [a, b])


@pytest.mark.parametrize("key, bad, good", [
    ("schedule", "cos", "cosine"), ("schedule", "trapeze", "trapezoid"),
    ("attention", "tritn", "triton"), ("dtype", "float16", "bfloat16"), ("dtype", "bf16", "bfloat16"),
    ("compile", "y", "yes"), ("compile", "n", "no"),
])  # fmt: skip
def test_unknown_choices_of_training_name_the_nearest(key, bad, good):
    message = refusal(TrainConfig, **{key: bad})
    assert f"{key}={bad!r}" in message
    assert f"nearest choice is {good!r}" in message
    assert getattr(TrainConfig(**{key: good}), key) == good


@pytest.mark.parametrize("key, bad, good", [
    *((k, 0, 1) for k in ("eval_interval", "eval_iters", "log_interval")),
    *((k, -1, 0) for k in (*SPLIT, "warmup_iters", "weight_decay", "grad_clip", "peak_flops")),
    *((k, -1, 1) for k in BUDGETS),
    *((k, INFINITY, 1) for k in ("max_flops", "weight_decay", "grad_clip", "peak_flops")),
    ("seed", -1, 0), ("seed", 2**32, 2**32 - 1), ("learning_rate", INFINITY, 1),
    ("learning_rate", 0, 1e-9), ("learning_rate", -1e-3, 1e-3), ("learning_rate", float("nan"), 1e-3),
    *((k, 2**16 + 1, 2**16) for k in SPLIT),
    ("beta1", 1, 0.99), ("beta2", -0.1, 0), ("cooldown", 1, 0.99), ("cooldown", -0.1, 0),
])  # fmt: skip
def test_absurd_training_settings_are_refused(key, bad, good):
    assert f"{key}={bad}" in refusal(TrainConfig, **{key: bad})
    TrainConfig(**{key: good})


# ---- a step's sequences --------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(0, 48), st.integers(0, 5), st.integers(1, 5), st.integers(1, 9))
def test_a_step_splits_evenly_or_is_refused(size, whole, passes, n_process, most):
    t = TrainConfig(
        batch_size=size, global_batch_size=whole, gradient_accumulation_steps=passes, max_iters=1
    )
    try:
        split = split_batch(t, most, n_process)
    except ValueError:
        message = refusal(split_batch, t, most, n_process)
        if named := re.search(r"(\w+)=\d+ does.*nearest that does is (\d+)", message):
            split_batch(
                TrainConfig(**{"global_batch_size": whole, named[1]: int(named[2])}), most, n_process
            )
        assert whole and (size or passes or whole % n_process)
        return
    n, per_pass = split.gradient_accumulation_steps, split.batch_size
    assert split.global_batch_size == n * per_pass * n_process
    asked = (whole or split.global_batch_size, size or per_pass, passes or n)
    assert (split.global_batch_size, per_pass, n) == asked
    assert size or passes or per_pass <= most
    assert split_batch(split, most, n_process) == split


def test_a_batch_size_typed_replaces_the_global_batch_of_a_file(tmp_path, capsys):
    path = write(tmp_path, "global_batch_size = 1024")
    assert parse([path, "--batch_size=2"]) == {"batch_size": 2}
    assert "add --global_batch_size=1024" in capsys.readouterr().out
    for more in (["--batch_size=auto"], ["--batch_size=2", "--global_batch_size=1024"], []):
        assert parse([path, *more])["global_batch_size"] == 1024
    assert parse([path, "--batch_size=2", "--global_batch_size=6"])["global_batch_size"] == 6
    assert capsys.readouterr().out == "" and parse(["--batch_size=auto"]) == {"batch_size": 0}


# ---- the published runs --------------------------------------------------------------------------

RUNS = {
    "vanilla": ("none", 1, "recursion"), "recursive_r2": ("none", 2, "recursion"),
    "recursive_r3": ("none", 3, "recursion"), "recursive_r4": ("none", 4, "recursion"),
    "mor_expert_r2": ("expert", 2, "recursion"), "mor_expert_r3": ("expert", 3, "recursion"),
    "mor_expert_r4": ("expert", 4, "recursion"), "mor_token_r3": ("token", 3, "recursion"),
    "mor_expert_r3_shared": ("expert", 3, "shared"),
}  # fmt: skip
LENGTHS = {  # steps published for 360M
    "vanilla": 9438, "recursive_r2": 9438, "recursive_r3": 9438, "recursive_r4": 8883,
    "mor_expert_r2": 12619, "mor_expert_r3": 14161, "mor_expert_r4": 14216, "mor_token_r3": 14161,
    "mor_expert_r3_shared": 14672,
}  # fmt: skip


@pytest.mark.parametrize("size", ["135m", "360m"])
@pytest.mark.parametrize("run", RUNS)
def test_config_files_are_the_published_runs(run, size):
    kind, _, rest = run.partition("_")
    given_settings = read_config(str(HERE / "config" / f"{kind}_{size}{rest and '_' + rest}.py"))
    model, train = build(given_settings)
    assert (model.routing, model.n_recursion, model.kv_mode) == RUNS[run]
    assert (model.n_embd, model.vocab_size) == ({"135m": 576, "360m": 960}[size], 49152)
    assert model.z_coeff == (1e-5 if model.routing == "token" else 0)
    recipe = dict(
        dataset="fineweb_edu", global_batch_size=1024, max_flops=16.5e18, learning_rate=3e-3,
        schedule="trapezoid", cooldown=0.2, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
    )  # fmt: skip
    assert {k: getattr(train, k) for k in recipe} == recipe
    assert model.block_size == 2048 and train.out_dir.startswith("out-" + kind)
    assert train.warmup_iters == round(0.05 * budget_steps(model, 2e18, 1024 * 2048))
    if size == "360m":
        assert abs(run_steps(model, train) - LENGTHS[run]) <= 1
        assert train.warmup_iters == {"vanilla": 57, "mor_expert_r3": 86}.get(run, train.warmup_iters)


def test_no_steps_at_all_are_refused():
    assert "max_iters=0" in refusal(build, {"max_iters": 0})


def test_help_names_every_setting():
    text = help_text("train.py")
    for name, field in FIELDS.items():
        assert f"--{name}=" in text and field.metadata["help"] in text
    assert len(FIELDS) == len(fields(ModelConfig)) + len(fields(TrainConfig)), "one name, one meaning"


def test_settings_are_read_without_torch():
    """`--help` and a refusal of a typo take no seconds."""
    code = "import sys, settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE).returncode == 0


# ---- presets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, overrides, n_layer", [
    ("vanilla-135m", {}, 30), ("recursive-135m", {}, 32), ("mor-135m", {}, 32),
    ("mor-135m", {"n_recursion": 2}, 30), ("mor-135m", {"n_recursion": 4}, 30),
    ("vanilla-360m", {}, 32), ("recursive-360m", {}, 32), ("mor-360m", {}, 32),
    ("mor-360m", {"n_recursion": 2}, 32), ("mor-360m", {"n_recursion": 4}, 34),
    ("recursive-360m", {"n_recursion": 4}, 34), ("vanilla-730m", {}, 26), ("mor-730m", {}, 26),
    ("mor-730m", {"n_recursion": 2}, 26), ("mor-730m", {"n_recursion": 4}, 26), ("vanilla-1.7b", {}, 24),
    ("recursive-1.7b", {}, 26), ("mor-1.7b", {"n_recursion": 2}, 24), ("mor-1.7b", {}, 26),
    ("mor-1.7b", {"n_recursion": 4}, 26), ("mor-360m", {"sharing": "cycle"}, 33),
    ("recursive-360m", {"sharing": "sequence", "n_recursion": 2}, 32), ("mor-360m", {"n_layer": 14}, 14),
])  # fmt: skip
def test_depths_of_presets(name, overrides, n_layer):
    config = ModelConfig(**preset(name, **overrides))
    assert config.n_layer == n_layer == len(config.plan)


@functools.cache
def accepted(**given_settings) -> bool:
    try:
        ModelConfig(**given_settings)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_preset_is_the_published_base_raised_to_the_next_valid_depth(size, kind):
    *widths, base = {
        "135m": (576, 1536, 9, 3, 30), "360m": (960, 2560, 15, 5, 32), "730m": (1536, 4096, 24, 8, 26),
        "1.7b": (2048, 8192, 32, 32, 24),
    }[size]  # fmt: skip
    assert f"{kind}-{size}" in PRESETS
    for n_recursion in (1,) if kind == "vanilla" else (1, 2, 3, 4, 5, 7):
        given_settings = preset(f"{kind}-{size}", n_recursion=n_recursion)
        config = ModelConfig(**given_settings)
        assert [config.n_embd, config.n_ffn, config.n_head, config.n_kv_head] == widths
        assert (config.vocab_size, config.block_size, config.rope_theta) == (49152, 2048, 10000)
        assert config.init_std == (1 / 24 if size == "135m" else 0.02)
        assert config.routing == ("expert" if kind == "mor" else "none")
        nearest = next(n for n in range(base, 99) if accepted(**given_settings | {"n_layer": n}))
        assert config.n_layer == nearest
    assert len(PRESETS) == len(SIZES) * len(KINDS)


def test_an_unknown_preset_is_told_the_nearest():
    for typo, near in (
        ("mor-360", "mor-360m"), ("mor_135m", "mor-135m"), ("vanila-730m", "vanilla-730m"),
        ("recursive-1.7B", "recursive-1.7b"),
    ):  # fmt: skip
        message = refusal(preset, typo)
        assert f"nearest is {near!r}" in message
        assert refusal(build, {"preset": typo}) == message


@pytest.mark.parametrize("n_recursion", [-1, 0])
def test_a_preset_refuses_impossible_recursions(n_recursion):
    message = refusal(build, {"preset": "mor-135m", "n_recursion": n_recursion})
    assert f"n_recursion={n_recursion} must be at least 1" in message


# ---- layer plans ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing, n_layer, n_recursion, plan", [
    ("none", 4, 1, [0, 1, 2, 3]),
    ("middle_cycle", 8, 3, [0, 1, 2, 1, 2, 1, 2, 3]),
    ("middle_sequence", 8, 3, [0, 1, 1, 1, 2, 2, 2, 3]),
    ("cycle", 6, 2, [0, 1, 2, 0, 1, 2]), ("cycle", 6, 3, [0, 1, 0, 1, 0, 1]),
    ("sequence", 6, 2, [0, 0, 1, 1, 2, 2]), ("sequence", 6, 3, [0, 0, 0, 1, 1, 1]),
    ("cycle", 1, 1, [0]), ("middle_cycle", 3, 1, [0, 1, 2]), ("middle_cycle", 4, 2, [0, 1, 1, 2]),
])  # fmt: skip
def test_layer_plans(sharing, n_layer, n_recursion, plan):
    config = ModelConfig(sharing=sharing, n_layer=n_layer, n_recursion=n_recursion, routing="none")
    assert config.plan == plan
    assert config.first_use == [plan.index(p) for p in plan]
    for layer, (p, step) in enumerate(zip(plan, config.steps)):
        own = sharing.startswith("middle") and layer in (0, n_layer - 1)
        # The step of a layer is how often its weights were used before.
        assert step == (None if own else plan[:layer].count(p))


# ---- refusals of the model -----------------------------------------------------------------------

# What is wrong, what the refusal says, and the choice it names, which must then be accepted.
REFUSED = [
    *((dict([(k, 0)]), f"{k}=0 must be at least 1", None) for k in (
        "vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ffn", "n_recursion")),
    *((dict([(k, -1)]), f"{k}=-1 must be above 0", None) for k in (
        "rope_theta", "norm_eps", "init_std", "alpha", "router_temperature")),
    *((dict([(k, 10**9)]), f"{k}=1000000000 must be at least 1 and at most", None) for k in (
        "vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_ffn", "n_recursion")),
    (dict(n_embd=190), "nearest width is 192", dict(n_embd=192)),
    (dict(n_embd=18), "nearest width is 24", dict(n_embd=24)),
    (dict(n_embd=1), "nearest width is 12", dict(n_embd=12)),
    (dict(n_kv_head=4), "nearest is 3", dict(n_kv_head=3)),
    (dict(n_kv_head=7), "nearest is 6", dict(n_kv_head=6)),
    (dict(n_layer=1), "nearest valid n_layer is 5", dict(n_layer=5)),
    (dict(n_layer=2), "nearest valid n_layer is 5", dict(n_layer=5)),
    (dict(n_layer=9), "nearest valid n_layer is 8", dict(n_layer=8)),
    (dict(n_layer=10), "nearest valid n_layer is 11", dict(n_layer=11)),
    (dict(n_recursion=9), "nearest valid n_layer is 11", dict(n_layer=11)),
    (dict(sharing="none", routing="none"), "set sharing='middle_cycle'", dict(sharing="middle_cycle")),
    (dict(sharing="none", n_recursion=1), "'middle_cycle' or 'cycle'", dict(sharing="middle_cycle")),
    (dict(sharing="none", n_recursion=1), "'middle_cycle' or 'cycle'", dict(sharing="cycle")),
    (dict(sharing="none", n_recursion=1, routing="none", kv_mode="shared"), "set kv_mode='recursion'",
     dict(kv_mode="recursion")),
    (dict(sharing="none", n_recursion=1, routing="none", kv_mode="shared"),
     "sharing='middle_cycle' with n_recursion=2", dict(sharing="middle_cycle", n_recursion=2)),
    (dict(routing="none", kv_mode="shared_update"), "set kv_mode='recursion'",
     dict(kv_mode="recursion")),
    (dict(sharing="middle_sequence"), "nearest choice is 'middle_cycle'", dict(sharing="middle_cycle")),
    (dict(sharing="sequence", n_layer=9), "nearest choice is 'cycle'", dict(sharing="cycle")),
    (dict(sharing="sequence", n_layer=9, routing="token"), "nearest choice is 'cycle'",
     dict(sharing="cycle")),
    (dict(routing="token", router_func="tanh"), "set 'softmax' or 'sigmoid'",
     dict(router_func="softmax")),
    (dict(routing="token", router_func="tanh"), "set 'softmax' or 'sigmoid'",
     dict(router_func="sigmoid")),
    (dict(routing="token", router_type="random"), "set 'linear'", dict(router_type="linear")),
    (dict(router_func="softmax"), "set 'sigmoid'", dict(router_func="sigmoid")),
    (dict(router_type="random"), "set sampling='none'", dict(sampling="none")),
    (dict(router_type="random", sampling="aux_router"), "set sampling='none'", dict(sampling="none")),
    (dict(capacity=(1, 0.5)), "as 1,0.6667,0.3333", dict(capacity=(1, 0.6667, 0.3333))),
    (dict(capacity=(1,) * 4), "as 1,0.6667,0.3333", dict(capacity=(1, 0.6667, 0.3333))),
    (dict(capacity=(1, 0.5, 0.6)), "nearest falling list is (1, 0.5, 0.5)",
     dict(capacity=(1, 0.5, 0.5))),
    (dict(capacity=(0.4, 1, 0.6)), "list is (0.4, 0.4, 0.4)", dict(capacity=(0.4, 0.4, 0.4))),
    (dict(capacity=(1.2, 1, 0.5)), "above 0 and up to 1", dict(capacity=(1, 1, 0.5))),
    (dict(capacity=(1, 0.5, 0)), "above 0 and up to 1", dict(capacity=(1, 0.5, 0.1))),
    (dict(capacity=(1, float("nan"), 0.5)), "above 0 and up to 1", dict(capacity=(1, 0.5, 0.5))),
    (dict(capacity=(0.9, 0.5, 0.3), kv_mode="shared"), "capacity[0] to 1", dict(capacity=(1, 0.5, 0.3))),
    (dict(capacity=(0.9, 0.5, 0.3), kv_mode="shared_update"), "or kv_mode='recursion'",
     dict(kv_mode="recursion")),
    (dict(routing="token", capacity=(1, 0.5, 0.2)), "set routing='expert'", dict(routing="expert")),
    (dict(routing="none", capacity_warmup=5), "leave it out", dict(capacity_warmup=0)),
    *((dict([(k, float("nan"))]), f"{k}=nan", None) for k in ("alpha", "init_std", "norm_eps")),
    *((dict([(k, INFINITY)]), f"{k}=inf", None) for k in ("alpha", "router_temperature")),
    *((dict([(k, -1)]), f"{k}=-1", None) for k in (
        "capacity_warmup", "balance_rate", "aux_coeff", "balance_coeff", "z_coeff")),
]  # fmt: skip


@pytest.mark.parametrize("wrong, says, fix", REFUSED, ids=[str(w) for w, _, _ in REFUSED])
def test_refusals_name_a_choice_that_is_valid(wrong, says, fix):
    message = refusal(ModelConfig, **wrong)
    assert says in message
    assert any(key in message for key in wrong)  # the sentence is about what was given
    if fix is not None:
        ModelConfig(**wrong | fix)


@pytest.mark.parametrize("key", CHOICES)
def test_unknown_choices_of_the_model_name_the_nearest(key):
    for option in CHOICES[key]:
        typo = option + "x"
        message = refusal(ModelConfig, **{key: typo})
        assert f"{key}={typo!r}" in message and f"nearest choice is {option!r}" in message
        for other in CHOICES[key]:
            assert other in message


sizes = st.integers(1, 60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(CHOICES["sharing"][1:]), sizes, st.integers(1, 9))
def test_the_named_depth_is_the_nearest_of_all(sharing, n_layer, n_recursion):
    def config(n):
        return dict(sharing=sharing, n_layer=n, n_recursion=n_recursion, routing="none")

    valid = [n for n in range(1, 100) if accepted(**config(n))]
    outer = 2 * sharing.startswith("middle")
    assert valid == [n for n in range(1, 100) if n > outer and (n - outer) % n_recursion == 0]
    if n_layer not in valid:
        message = refusal(ModelConfig, **config(n_layer))
        named = int(re.search(r"nearest valid n_layer is (\d+)", message)[1])
        assert named in valid
        assert abs(named - n_layer) == min(abs(n - n_layer) for n in valid)
    low, high = fitting_depths(sharing, n_layer, n_recursion)
    assert low == max([n for n in valid if n <= n_layer], default=valid[0])
    assert high == min(n for n in valid if n >= n_layer)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes, st.integers(1, 12), st.integers(1, 30))
def test_the_named_width_and_key_heads_are_the_nearest_of_all(n_embd, n_head, n_kv_head):
    widths = [n for n in range(1, 100) if accepted(n_embd=n, n_head=n_head, n_kv_head=n_head)]
    assert widths == [n for n in range(1, 100) if n % n_head == 0 and n // n_head % 2 == 0]
    if n_embd not in widths:
        message = refusal(ModelConfig, n_embd=n_embd, n_head=n_head, n_kv_head=n_head)
        named = int(re.search(r"nearest width is (\d+)", message)[1])
        assert named in widths
        assert abs(named - n_embd) == min(abs(n - n_embd) for n in widths)
    if n_head % n_kv_head:
        message = refusal(ModelConfig, n_embd=widths[0], n_head=n_head, n_kv_head=n_kv_head)
        named = int(re.search(r"nearest is (\d+)", message)[1])
        divisors = [h for h in range(1, n_head + 1) if n_head % h == 0]
        assert abs(named - n_kv_head) == min(abs(h - n_kv_head) for h in divisors)
        assert accepted(n_embd=widths[0], n_head=n_head, n_kv_head=named)


share = st.floats(0.01, 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(share, min_size=1, max_size=6), st.integers(1, 6))
def test_capacity_lists_are_accepted_or_told_a_valid_one(capacity, n_recursion):
    base = dict(n_recursion=n_recursion, n_layer=2 * n_recursion + 2)
    if len(capacity) == n_recursion and capacity == sorted(capacity, reverse=True):
        assert ModelConfig(**base, capacity=tuple(capacity)).capacity == tuple(capacity)
        return
    message = refusal(ModelConfig, **base, capacity=tuple(capacity))
    named = re.search(r"(?:, as |list is )\(?([\d., e-]+?)\)?\.$", message)[1]
    given_settings = parse([f"--capacity={named}"])
    ModelConfig(**base, **given_settings)


def test_default_capacities_fall_evenly():
    for r in range(1, 7):
        config = ModelConfig(n_recursion=r, n_layer=r + 2)
        assert config.capacity == pytest.approx([(r - i) / r for i in range(r)])
        assert config.capacity[0] == 1

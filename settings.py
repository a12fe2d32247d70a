"""Settings of a run: `train.py [config/file.py] [--key=value …]`, read without running any code.

A setting is a field of ModelConfig (modelconfig.py) or of TrainConfig (below); its default, type and
line of help stand there. Later sources win: preset, config file, command line. A config file holds
plain assignments of literals. Unknown keys and wrong types are refused with the nearest known key.
"""

import ast
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from modelconfig import PRESETS, ModelConfig, nearest, preset, setting


@dataclass
class TrainConfig:
    preset: str = setting("", "published size, as mor-135m: " + ", ".join(PRESETS))
    out_dir: str = setting("out", "folder of checkpoint and metrics.jsonl")
    dataset: str = setting("pystdlib", "folder below data/ with the prepared shards")
    within_documents: bool = setting(False, "tokens attend within their own document alone")
    resume: bool = setting(False, "go on from the checkpoint in out_dir")
    seed: int = setting(1337, "seed of weights, batches and random routing")
    batch_size: int = setting(0, "sequences per process and pass; 0: 8, on a GPU 64; auto: all that fit")
    global_batch_size: int = setting(0, "sequences per optimizer step; 0: those of all passes")
    gradient_accumulation_steps: int = setting(0, "passes per step; 0: as many as that takes, else 1")
    max_iters: int = setting(700, "budget in optimizer steps")
    max_tokens: int = setting(0, "budget in tokens, instead of max_iters")
    max_flops: float = setting(0.0, "budget in FLOPs as the paper counts, instead of max_iters")
    budgets: tuple[float, ...] = setting((), "budgets in FLOPs: one plateau, a cool-down for each")
    learning_rate: float = setting(3e-3, "peak learning rate")
    schedule: str = setting("trapezoid", "trapezoid (linear up, plateau, linear down) or cosine")
    warmup_iters: int = setting(50, "steps of linear warm-up")
    cooldown: float = setting(0.2, "trapezoid: share of the steps that cool down to 0")
    weight_decay: float = setting(0.1, "AdamW decay, on matrices only")
    beta1: float = setting(0.9, "AdamW")
    beta2: float = setting(0.95, "AdamW")
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping")
    eval_interval: int = setting(250, "steps between evaluations and checkpoints")
    eval_iters: int = setting(16, "validation batches per evaluation")
    log_interval: int = setting(10, "steps between lines of metrics.jsonl")
    parallel: str = setting("ddp", "under torchrun: ddp, or fsdp, which splits the weights as well")
    device: str = setting("auto", "cpu, cuda, cuda:1, …; auto: the GPU if there is one")
    dtype: str = setting("auto", "float32 or bfloat16 (autocast); auto: bfloat16 on a GPU")
    attention: str = setting(
        "auto",
        "who computes attention: auto, plain (PyTorch), triton (a GPU; on a CPU with "
        "TRITON_INTERPRET=1, slowly)",
    )
    compile: str = setting("auto", "torch.compile: yes, no; auto: on a GPU, if one graph will do")
    activation_checkpointing: bool = setting(False, "keep less and compute layers again, to save memory")
    wandb: str = setting("", "project of Weights & Biases to report to as well")
    peak_flops: float = setting(0.0, "FLOP/s of one device, for MFU; 0: looked up for known GPUs")

    def __post_init__(self):
        for name, options in (
            ("schedule", ("trapezoid", "cosine")),
            ("dtype", ("auto", "float32", "bfloat16")),
            ("attention", ("auto", "plain", "triton")),
            ("compile", ("auto", "yes", "no")),
            ("parallel", ("ddp", "fsdp")),
        ):
            value = getattr(self, name)
            if value not in options:
                raise ValueError(
                    f"{name}={value!r} is not known; the nearest choice is {nearest(value, options)!r} "
                    f"of {', '.join(options)}."
                )
        for name in ("eval_interval", "eval_iters", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in SPLIT:
            if getattr(self, name) > MOST_PASSES:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {MOST_PASSES}.")
        for name in (*BUDGETS, *SPLIT, "warmup_iters", "weight_decay", "grad_clip", "peak_flops"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative.")
        if not all(0 < b < math.inf for b in self.budgets) or len({*self.budgets}) < len(self.budgets):
            raise ValueError(f"budgets={self.budgets} must be different numbers above 0 and finite.")
        if self.budgets and self.schedule != "trapezoid":
            raise ValueError(f"budgets need a plateau; set schedule='trapezoid', not {self.schedule!r}.")
        if not any(getattr(self, name) for name in ALL_BUDGETS):
            raise ValueError("max_iters=0 leaves no step to train; give a budget of 1 or more.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must lie from 0 up to below 2**32.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0 and finite.")
        for name in ("beta1", "beta2", "cooldown"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie from 0 up to below 1.")


BUDGETS = ("max_iters", "max_tokens", "max_flops")
ALL_BUDGETS = (*BUDGETS, "budgets")
SPLIT = ("batch_size", "global_batch_size", "gradient_accumulation_steps")
MOST_PASSES = 2**16
FIELDS = {f.name: f for cls in (TrainConfig, ModelConfig) for f in fields(cls)}
# What Python's parser raises: the last two for nesting thousands deep.
UNREADABLE = (ValueError, SyntaxError, MemoryError, RecursionError)


def convert(key: str, value, source: str):
    """The value in the type of its setting; `value` is a literal, or text from the command line."""
    if key not in FIELDS:
        raise ValueError(
            f"{source}: there is no setting {key!r}; the nearest is {nearest(key, FIELDS)!r}."
        )
    wanted = FIELDS[key].type
    if key == "batch_size" and value == "auto":
        return 0
    if wanted is str and isinstance(value, str):
        return value
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except UNREADABLE:
            value = None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is bool and isinstance(value, bool):
        return value
    try:
        # 1e6 is welcome where steps are meant
        if wanted is int and number and value == int(value) and abs(value) < 2**63:
            return int(value)
        if wanted is float and number:
            return float(value)
        if wanted == tuple[float, ...]:
            values = value if isinstance(value, (tuple, list)) else (value,)
            if all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in values):
                return tuple(float(x) for x in values)
    except (OverflowError, ValueError):  # no number of this machine
        pass
    kind = "list of numbers" if wanted == tuple[float, ...] else wanted.__name__
    raise ValueError(f"{source}: {key} takes one {kind}, as {key}={FIELDS[key].default!r}.")


def read_config(path: str) -> dict:
    """The assignments of a config file; anything but `name = literal` is refused."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; the ones at hand are in the folder config/."
        ) from None
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is not a list of plain assignments: {str(error) or 'nested too deep'}; "
            "write lines as `max_iters = 100`."
        ) from None
    given = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        targets = node.targets if isinstance(node, ast.Assign) else []
        try:
            (name,) = (target.id for target in targets)
            value = ast.literal_eval(node.value)
        except (*UNREADABLE, TypeError, AttributeError):
            raise ValueError(
                f"{path}, line {node.lineno} is not `name = literal`, which is all that is read; "
                "write out its value."
            ) from None
        given[name] = convert(name, value, path)
    return given


def parse(argv: list[str]) -> dict:
    """The settings that a command line gives, itself and through the config file it names."""
    typed, from_file = {}, None
    for arg in argv:
        if arg.startswith("--"):
            key, equals, value = arg[2:].partition("=")
            key = key.replace("-", "_")
            if not equals and key in FIELDS and FIELDS[key].type is not bool:
                raise ValueError(f"--{key} needs a value; write --{key}=VALUE.")
            if key in typed:
                raise ValueError(f"--{key} is given twice; leave one of them out.")
            typed[key] = convert(key, value if equals else "True", "command line")
        elif from_file is not None:
            raise ValueError(f"{arg}: one config file is read, and there is one before it already.")
        else:
            from_file = read_config(arg)
    recipe = (from_file or {}).get("global_batch_size")
    if recipe and typed.get("batch_size") and not set(SPLIT[1:]) & set(typed):
        # A try on a small machine is not to take a thousand passes a step.
        print(
            f"note: --batch_size={typed['batch_size']} replaces the global batch of {recipe} sequences; "
            f"to keep it and read it in smaller passes, add --global_batch_size={recipe}"
        )
        del from_file["global_batch_size"]
    return merge(from_file or {}, typed)


def merge(first: dict, then: dict) -> dict:
    """Both, the second winning; a budget given there replaces whatever budget stood before."""
    if any(b in then for b in ALL_BUDGETS):
        first = {k: v for k, v in first.items() if k not in ALL_BUDGETS}
    return {**first, **then}


def build(given: dict) -> tuple[ModelConfig, TrainConfig]:
    """The two configurations, each field given, preset or default."""
    given = dict(given)
    budgets = [b for b in ALL_BUDGETS if given.get(b)]
    if len(budgets) > 1:
        raise ValueError(f"{' and '.join(budgets)} are both budgets; give one of them.")
    if budgets:
        given = {b: 0 for b in BUDGETS} | given
    own = {f.name for f in fields(ModelConfig)}
    model = {k: v for k, v in given.items() if k in own}
    if given.get("preset"):
        model = preset(given["preset"], **model)
    train = {k: v for k, v in given.items() if k not in own}
    return ModelConfig(**model), TrainConfig(**train)


def split_batch(t: TrainConfig, most: int = 8, n_process: int = 1) -> TrainConfig:
    """A step's sequences split into processes and passes, of up to `most` where t names no number."""
    size, passes = t.batch_size, t.gradient_accumulation_steps
    if not t.global_batch_size:
        size, passes = size or most, passes or 1
        whole = size * passes * n_process
        return replace(t, batch_size=size, gradient_accumulation_steps=passes, global_batch_size=whole)
    share, rest = divmod(t.global_batch_size, n_process)
    if rest:
        raise ValueError(
            f"global_batch_size={t.global_batch_size} does not divide among {n_process} processes; "
            f"the nearest that does is {max(1, round(t.global_batch_size / n_process)) * n_process}."
        )
    fitting = [n for n in range(1, share + 1) if share % n == 0]
    size = size or (share // passes if passes else max(n for n in fitting if n <= max(1, most)))
    if size not in fitting:
        raise ValueError(
            f"batch_size={size} does not divide a process's {share} sequences of "
            f"global_batch_size={t.global_batch_size}; the nearest that does is "
            f"{min(fitting, key=lambda n: abs(n - size))}."
        )
    if passes not in (0, share // size):
        raise ValueError(
            f"gradient_accumulation_steps={passes} of batch_size={size} in {n_process} process(es) are "
            f"not global_batch_size={t.global_batch_size}; leave gradient_accumulation_steps out."
        )
    return replace(t, batch_size=size, gradient_accumulation_steps=share // size)


def help_text(program: str) -> str:
    """Every setting with its default and its line."""
    lines = [f"usage: {program} [config/file.py] [--key=value …]"]
    for title, cls in (("training", TrainConfig), ("model", ModelConfig)):
        lines.append(f"\n{title}:")
        for f in fields(cls):
            default = f.default if f.default not in ("", ()) else "–"
            lines.append(f"  --{f.name}={default}".ljust(40) + f.metadata["help"])
    return "\n".join(lines)

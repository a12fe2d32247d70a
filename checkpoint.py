"""Checkpoints: everything a run needs to go on, in one file that is whole or absent.

A file is written under a temporary name, flushed to the disk and renamed, so a kill at any moment
leaves the last good one. It is read with `weights_only=True`: tensors and plain values, never code;
and checked whole, down to the shapes, before anything is made of it. The run's log and the lock on its
folder are here too.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path

import tiktoken
import torch

import distributed
from dataset import locked, whole_file
from model import MoR
from modelconfig import ModelConfig
from settings import ALL_BUDGETS, build, convert, merge
from tokenizer import get_encoding

TYPES = {
    "model": dict, "model_config": dict, "encoding": str, "step": int,
    "settings": dict, "optimizer": dict, "data": dict,
}  # fmt: skip
KEYS = ("model", "model_config", "encoding", "step")  # the others are needed to go on, not to sample


def save(path: Path, model: MoR, **state) -> None:
    """Writes the model, its configuration and `state` (tensors and plain values) to `path`.

    All processes take part, since weights may be split among them; rank 0 writes.
    """
    state = {"model": model.state_dict(), "model_config": asdict(model.config), **state}
    state = distributed.whole(state)
    if distributed.RANK:
        return
    try:
        with whole_file(Path(os.path.realpath(path))) as file:  # a link stays, its target is replaced
            torch.save(state, file)
    except RuntimeError as error:  # torch's own, on top of what the system said
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load(path: Path, keys: tuple[str, ...] = KEYS) -> dict:
    """The dictionary that `save` wrote, on the CPU; ValueError in one sentence if it is not one."""
    try:
        with zipfile.ZipFile(path) as parts:
            if damaged := parts.testzip():
                raise ValueError(f"the checksum of {damaged} does not match")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: there is no such checkpoint; train one with `python train.py`."
        ) from None
    except Exception as error:  # many kinds for a damaged or foreign file
        reason = str(error).split("\n")[0][:100]
        raise ValueError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__}: {reason}); "
            "restore a copy of it or train again."
        ) from None
    found = state if isinstance(state, dict) else {}
    wrong = [k for k in keys if not isinstance(found.get(k), TYPES[k]) or found[k] is True]
    if wrong or state["step"] < 0:
        raise ValueError(
            f"{path} lacks {', '.join(wrong) or 'a step'} in the form that train.py writes: it is "
            "not a checkpoint of train.py; give one that is."
        )
    for name in {"model_config", "settings"} & set(keys):
        state[name] = {k: convert(k, v, f"{path}, {name}") for k, v in state[name].items()}
    return state


@contextmanager
def this_version() -> Iterator[None]:
    """Around what takes a checkpoint apart: what another version wrote fails in one sentence."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:150]
        raise ValueError(
            f"the checkpoint does not fit this version or its own configuration ({reason}); train again."
        ) from None


def load_model(state: dict, device: str = "cpu") -> MoR:
    """The model of a loaded checkpoint, ready to generate."""
    with this_version():
        model = MoR(ModelConfig(**state["model_config"]))
        model.load_state_dict(state["model"])
    return model.to(device).eval()


def load_trained(
    path: Path, device: str, keys: tuple[str, ...] = KEYS
) -> tuple[dict, MoR, tiktoken.Encoding]:
    """What `load` gives, the model and the encoding, to sample or evaluate; refused if it cannot."""
    state = load(path, keys)
    model, encoding = load_model(state, device), get_encoding(state["encoding"])
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError(f"{path} holds weights that are not finite: its training diverged.")
    if (known := model.config.vocab_size) < encoding.n_vocab:
        raise ValueError(f"{path} knows {known} of the {encoding.n_vocab} tokens in its encoding.")
    return state, model, encoding


def load_moments(state: dict, optimizer: torch.optim.AdamW) -> None:
    """The moments of a loaded checkpoint; the optimizer's settings stay as they are now."""
    with this_version():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts = {}
        for number, moments in state["optimizer"]["state"].items():
            shape = parameters[number].shape
            for name, wanted in (("step", ()), ("exp_avg", shape), ("exp_avg_sq", shape)):
                # The fused step trusts these: with others it writes where it must not.
                if moments[name].shape != wanted or moments[name].layout != torch.strided:
                    raise TypeError(f"{name} of parameter {number} has another shape")
            parts[number] = {n: distributed.part(x, parameters[number]) for n, x in moments.items()}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": parts, "param_groups": groups})


# ---- going on ---------------------------------------------------------------------------------------

# Settings that decide which tokens a step reads: a resumed run must have them as they were.
FIXED = ("dataset", "seed", "global_batch_size", "within_documents")


def resume(given: dict, folder: Path) -> tuple[dict, dict | None]:
    """The settings, and the checkpoint to go on from, whose settings hold unless given anew."""
    path, log = folder / "checkpoint.pt", folder / "metrics.jsonl"
    distributed.any_of(False)  # what is about to be read is written
    if not path.exists() and (folder / "plateau.pt").exists():
        path = folder / "plateau.pt"
    if not (target := Path(os.path.realpath(path)).parent).is_dir() and path.is_symlink():
        raise ValueError(f"{path} is a link into {target}, which does not exist; make that folder.")
    if not given.get("resume"):
        if path.exists():
            raise ValueError(
                f"{path} exists already; add --resume to go on from it, or give another --out_dir."
            )
        if log.exists() and log.stat().st_size:
            raise ValueError(f"{log} exists already; move it away, or give another --out_dir.")
    if not given.get("resume") or (given.get("budgets") and not path.exists()):
        return given, None
    if path.name == "plateau.pt" and not any(given.get(b) for b in ALL_BUDGETS):
        raise ValueError(
            f"{path} is where a budget leaves the plateau; resume {folder.parent}, "
            "or give that budget as --max_flops."
        )
    state = load(path, tuple(TYPES))
    if not given.get("batch_size"):  # 0 is "as the device likes", and that is settled
        given = {k: v for k, v in given.items() if k != "batch_size"}
    with this_version():
        before = ModelConfig(**state["model_config"]), build(state["settings"])[1]
        given = merge(state["settings"], given) | {"out_dir": str(folder)}
    for old, new, names in zip(before, build(given), ([f.name for f in fields(ModelConfig)], FIXED)):
        for name in names:
            if getattr(old, name) != getattr(new, name):
                raise ValueError(
                    f"{path} was trained with {name}={getattr(old, name)}, not {getattr(new, name)}; "
                    "resume without that setting, or start anew in another --out_dir."
                )
    return given, state


# ---- the folder of a run -----------------------------------------------------------------------------


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; one that stays empty is removed again."""
    if distributed.RANK:
        yield
        return
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "--out_dir"):
        try:
            yield
        finally:
            if made:
                with suppress(OSError):
                    folder.rmdir()


def kept_up_to(path: Path, step: int) -> bytes:
    """The lines of a log up to a step; the steps after it, if any, are about to be redone."""
    kept = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, TypeError, KeyError, RecursionError):  # cut short by a kill, or damaged
            continue
    return b"".join(kept)


class Log:
    """A file of JSON lines; those that a full disk does not take wait for the next try.

    Rank 0 keeps it, and reports to Weights & Biases as well if a project of it is given.
    """

    def __init__(self, path: Path, step: int, project: str = "", settings: dict | None = None):
        self.path, self.waiting, self.file, self.project = path, b"", None, None
        if distributed.RANK:
            return
        kept = kept_up_to(path, step)
        with whole_file(path) as file:
            file.write(kept)
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115
        if project:
            folder = str(path.parent)
            self.project = import_wandb().init(project=project, name=folder, dir=folder, config=settings)

    def add(self, line: dict) -> None:
        if self.file is None:
            return
        if self.project:
            self.project.log(line, step=line["step"])
        self.waiting += json.dumps(line).encode() + b"\n"
        with suppress(OSError):
            self.flush()

    def flush(self) -> None:
        while self.waiting:
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def close(self) -> None:
        if self.file:
            self.file.close()
        if self.project:
            self.project.finish()


def import_wandb():
    try:
        import wandb
    except ImportError:
        raise ValueError(
            "--wandb needs the package wandb, which is not installed; "
            "`pip install wandb`, or leave --wandb out."
        ) from None
    return wandb

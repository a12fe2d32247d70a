"""Checkpoints: everything a run needs to go on, in one file that is whole or absent.

A file is written under a temporary name, flushed to the disk and renamed, so a kill at any moment
leaves the last good one. It is read with `weights_only=True`: tensors and plain values, never code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from dataset import whole_file
from model import MoR
from modelconfig import ModelConfig

KEYS = ("model", "model_config", "encoding", "step")


def save(path: Path, model: MoR, **state) -> None:
    """Writes the model, its configuration and `state` (tensors and plain values) to `path`."""
    config = asdict(model.config)
    with whole_file(path) as file:
        torch.save({"model": model.state_dict(), "model_config": config, **state}, file)


def load(path: Path, keys: tuple[str, ...] = KEYS) -> dict:
    """The dictionary that `save` wrote, on the CPU; ValueError in one sentence if it lacks a key."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: there is no such checkpoint; train one with `python train.py`."
        ) from None
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        reason = str(error).split("\n")[0][:100]
        raise ValueError(
            f"{path} is damaged or not a checkpoint ({type(error).__name__}: {reason}); "
            "restore a copy of it or train again."
        ) from None
    missing = [k for k in keys if not isinstance(state, dict) or k not in state]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it is not a checkpoint of train.py; give one that is."
        )
    return state


@contextmanager
def this_version() -> Iterator[None]:
    """Around what takes a checkpoint apart: what another version wrote fails in one sentence."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
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

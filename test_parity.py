"""The model against the authors' training code: choices, logits, losses, gradients of reference files.

Each .npz holds a small model, an input and what the released code computes (reference/golden/README.md).
`PARITY_DIR=folder python -m pytest test_parity.py` checks other such files.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from model import MoR
from modelconfig import ModelConfig
from ragged import ragged_batch

FOLDER = Path(os.environ.get("PARITY_DIR", Path(__file__).parent / "reference" / "golden"))
FILES = sorted(FOLDER.glob("*.npz"))
RENAMED = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_ffn",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "num_kv_heads": "n_kv_head",
    "rope_theta": "rope_theta",
    "norm_eps": "norm_eps",
    "num_recursions": "n_recursion",
    "sharing": "sharing",
    "routing": "routing",
    "kv_mode": "kv_mode",
    "router_type": "router_type",
    "router_func": "router_func",
    "alpha": "alpha",
    "temperature": "router_temperature",
    "capacity": "capacity",
    "sampling": "sampling",
    "aux_coeff": "aux_coeff",
    "balancing": "balancing",
    "balance_coeff": "balance_coeff",
    "z_coeff": "z_coeff",
}
DEFAULT = {"kv_mode": "recursion", "n_recursion": 1}  # what null means; "none" for all others


def load(path: Path) -> tuple[dict, MoR, torch.Tensor]:
    data = dict(np.load(path))
    reference = json.loads(str(data["config"]))
    assert reference["tie_embeddings"], "the output head is tied to the embedding"
    named = {RENAMED[k]: v for k, v in reference.items() if k in RENAMED}
    named = {k: DEFAULT.get(k, "none") if v is None else v for k, v in named.items()}
    ids = torch.from_numpy(data["input_ids"])
    model = MoR(ModelConfig(block_size=ids.shape[1], **named))
    assert model.config.plan == reference["plan"]
    weights = {
        k.removeprefix("weight/"): torch.from_numpy(v)
        for k, v in data.items()
        if k.startswith("weight/")
    }
    model.load_state_dict(weights)
    return data, model, ids


def test_there_are_reference_files():
    assert FILES, f"no .npz in {FOLDER}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_same_choices_and_logits(path):
    data, model, ids = load(path)
    n_seq, length = ids.shape
    rows = ragged_batch(torch.arange(n_seq + 1) * length, length)
    with torch.no_grad():
        x, routed = model.hidden(ids.flatten(), rows, rule="top-k")
        logits = model.logits(x).view(n_seq, length, -1)
    for r in range(model.config.n_recursion if model.config.routing == "expert" else 0):
        assert ((routed.depth > r).nonzero().view(n_seq, -1) % length).tolist() == data[
            f"selected_{r}"
        ].tolist()
    if "depth" in data:
        assert (routed.depth.view(n_seq, length) - 1).tolist() == data["depth"].tolist()
    torch.testing.assert_close(logits, torch.from_numpy(data["logits"]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_same_losses_and_gradients(path):
    data, model, ids = load(path)
    targets = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    total, figures = model(ids, targets)
    assert total.item() == pytest.approx(float(data["total_loss"]), abs=5e-6)
    for name in ("lm_loss", "aux_loss", "balance_loss", "z_loss"):
        if name in data:
            assert figures[name].item() == pytest.approx(float(data[name]), abs=5e-6), name
    total.backward()
    for name, parameter in model.named_parameters():
        expected = torch.from_numpy(np.asarray(data[f"grad/{name}"]))
        actual = parameter.grad if expected.dim() else parameter.grad.norm()
        assert (actual - expected).norm() <= 1e-5 * expected.norm(), name

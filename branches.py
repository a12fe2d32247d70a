"""The learning rate; and one plateau for several budgets, `--budgets=2e18,5e18,16.5e18` (section 3).

Until its cool-down begins, a trapezoid does not depend on its budget. So one run goes along the plateau,
and keeps a checkpoint where each budget leaves it: budget-2e18/plateau.pt. The cool-downs follow, each
a run of its own in that folder, resumed from there; it ends as if it had been alone from the start.
"""

import math
from pathlib import Path
from typing import NamedTuple

from checkpoint import kept_up_to
from dataset import whole_file
from distributed import RANK
from flops import budget_steps
from modelconfig import ModelConfig
from settings import ALL_BUDGETS, TrainConfig

WARMUP = 0.05  # of the smallest budget's steps


def learning_rate(t: TrainConfig, step: int) -> float:
    """The rate of a step: linear warm-up, then a plateau with a linear end, or a cosine, down to 0."""
    warm = min(1.0, (step + 1) / max(1, t.warmup_iters))
    if t.schedule == "cosine":
        done = max(0, step - t.warmup_iters) / max(1, t.max_iters - t.warmup_iters)
        return t.learning_rate * min(warm, 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    left = (t.max_iters - step) / max(1.0, t.cooldown * t.max_iters)
    return t.learning_rate * min(warm, left, 1.0)


class Branch(NamedTuple):
    """A budget's cool-down."""

    folder: Path
    budget: float  # FLOPs
    start: int  # steps on the plateau
    steps: int  # all of them

    @property
    def plateau(self) -> Path:
        return self.folder / "plateau.pt"

    def ready(self) -> bool:
        return self.plateau.exists() or (self.folder / "checkpoint.pt").exists()

    def settings(self, given: dict) -> dict:
        """Those of a run of this budget alone, resumed from the plateau."""
        own = {"max_flops": self.budget, "out_dir": str(self.folder), "resume": True}
        return {k: v for k, v in given.items() if k not in ALL_BUDGETS} | own

    def begin(self) -> None:
        """Takes over the log of the plateau, unless the cool-down is under way."""
        if RANK == 0 and not (self.folder / "checkpoint.pt").exists():
            with whole_file(self.folder / "metrics.jsonl") as file:
                file.write(kept_up_to(self.folder.parent / "metrics.jsonl", self.start))


def plan(config: ModelConfig, t: TrainConfig) -> list[Branch]:
    """The branches of a run whose global batch is settled, the shortest first."""
    branches = []
    for budget in sorted(t.budgets):
        steps = budget_steps(config, budget, t.global_batch_size * config.block_size)
        start = int(steps - max(1.0, t.cooldown * steps))  # from here on the rate may be below its peak
        if not start:
            raise ValueError(f"budgets: {budget:g} FLOPs pay {steps} step; give 2 or more.")
        mantissa, exponent = f"{budget:.14e}".split("e")  # 8e10, not 80000000000
        name = f"budget-{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
        branches.append(Branch(Path(t.out_dir) / name, budget, start, steps))
    return branches


def warmup_iters(branches: list[Branch]) -> int:
    return max(1, round(WARMUP * branches[0].steps))


def check_resumed(branches: list[Branch], state: dict | None, out_dir: str) -> None:
    """Refuses to resume what has passed a branch, or is no plateau; and branches of another run."""
    if state is None:
        for b in branches:
            if (path := b.folder / "checkpoint.pt").exists():
                raise ValueError(
                    f"{path} is of a run whose own checkpoint is gone; move it away, "
                    "or give another --out_dir."
                )
        return
    if not state["settings"].get("budgets"):
        raise ValueError(
            f"{out_dir} was not begun with budgets; start anew with them in another --out_dir."
        )
    for b in branches:
        if b.start < state["step"] and not b.ready():
            raise ValueError(
                f"budgets: {b.budget:g} FLOPs cool down from step {b.start}, which {out_dir} has "
                "passed; start anew in another --out_dir."
            )

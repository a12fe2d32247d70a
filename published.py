"""The published figures beside the computed ones: `python flops.py` without arguments.

The published ones are read from reference/published; flops.py computes the others from the presets.
"""

import csv
from dataclasses import replace
from pathlib import Path

from flops import budget_steps, budget_tokens, describe, parameters, relative_batch, without_routing
from modelconfig import ModelConfig, preset

FOLDER = Path(__file__).parent / "reference" / "published"


def read(name: str) -> list[dict[str, str]]:
    with open(FOLDER / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def config_of(row: dict[str, str], base: str = "360M", **overrides) -> ModelConfig:
    """The model of a row of a published table; what the row does not say is the preset's."""
    columns = {"n_recursion": "recursions", "n_layer": "unrolled_layers", "routing": "routing",
               "kv_mode": "kv", "sharing": "sharing"}  # fmt: skip
    given = {key: row[column] for key, column in columns.items() if row.get(column)}
    given = {key: int(value) if key.startswith("n_") else value for key, value in given.items()}
    kind = row.get("model") or ("recursive" if given.get("sharing") else "vanilla")
    return ModelConfig(**preset(f"{kind}-{base.lower()}", **given | overrides))


# ---- comparisons: (what, computed, published, whether they agree) ------------------------------------


def run_lengths():
    for row in read("run_lengths.csv"):
        config, tokens = config_of(row), int(row["sequences"]) * int(row["sequence_length"])
        steps = budget_steps(config, float(row["flops_1e18"]) * 1e18, tokens)
        agree = abs(steps - int(row["steps"])) <= 1
        yield f"steps   360M {describe(config)}", str(steps), row["steps"], agree


def token_counts():
    for row in read("isoflop.csv"):
        config, budget = config_of(row, row["base"]), float(row["flops_1e18"]) * 1e18
        tokens = f"{budget_tokens(config, budget) / 1e9:.1f}"
        what = f"tokens  {row['base']} {describe(config)}, {row['flops_1e18']}e18 FLOPs"
        yield what, tokens + "B", row["tokens_B"] + "B", tokens == row["tokens_B"]


def batches():
    vanilla, *recursive = read("relative_batch.csv")
    for row in recursive:
        batch = str(relative_batch(int(row["recursions"]), int(vanilla["batch"])))
        yield f"batch   MoR R={row['recursions']}", batch, row["batch"], batch == row["batch"]


def unrolled_layers(row: dict[str, str]) -> int:
    """Of a row that lists physical layers: all are applied R times, but for the two outer ones."""
    outer = 2 if row["sharing"].startswith("middle") else 0
    return (int(row["physical_layers"]) - outer) * int(row["recursions"]) + outer


def models():
    """(base, model, millions of parameters, physical layers if listed) of every row that has them."""
    for row in read("isoflop.csv"):
        config, millions = config_of(row, row["base"]), int(row["nonembedding_M"])
        yield row["base"], config, millions, row["physical_layers"]
    depths = {}
    for row in read("sharing.csv"):
        depth = unrolled_layers(row)
        depths[row["base"], row["sharing"], row["recursions"]] = depth
        config = config_of(row, row["base"], n_layer=depth)
        yield row["base"], config, int(row["params_M"]), row["physical_layers"]
    for row in read("main.csv") + read("fixed_params.csv"):
        yield "360M", config_of(row), int(row["params_M"]), ""
    # This table lists no depths. They are those that fit the plan by which caches are shared; a row
    # that shares none stands right above the same model sharing them.
    rows = read("kv_sharing.csv")
    for row, below in zip(rows, rows[1:] + rows[:1]):
        plan = (row["kv_sharing"] or below["kv_sharing"]).removesuffix("_update")
        sharing, _, recursions = plan.rpartition("_")
        config = config_of(row, n_layer=depths["360M", sharing, recursions])
        yield "360M", config, int(row["params_M"]), ""
    for row in read("scale_1p7b.csv"):
        yield "1.7B", config_of(row, "1.7B"), round(float(row["params_B"]) * 1000), ""


def parameter_counts():
    """Each model once: tables repeat models, and caches and routing change no layer."""
    seen = set()
    for base, config, millions, physical in models():
        config = without_routing(config)
        what = f"params  {base} {describe(config)}, {config.n_layer} unrolled layers"
        count, layers = parameters(config).non_embedding / 1e6, str(max(config.plan) + 1)
        computed, published = f"{count:.1f}M", f"{millions}M"
        if physical:
            computed, published = f"{computed}, {layers} layers", f"{published}, {physical} layers"
        unit = 10 if base == "1.7B" else 1  # published as 1.61B
        agree = abs(count - millions) <= unit / 2 and physical in ("", layers)
        if what not in seen or not agree:
            yield what, computed, published, agree
        seen.add(what)


# ---- the table ---------------------------------------------------------------------------------------


def print_comparison() -> int:
    """Prints the published figures beside the computed ones; returns how many differ."""
    print(f"{'':68}{'computed':>20}{'published':>18}")
    agreed = []
    for compare in (run_lengths, token_counts, batches, parameter_counts):
        for what, computed, published, agree in compare():
            print(f"{what:68}{computed:>20}{published:>18}  {'ok' if agree else 'DIFFERS'}")
            agreed.append(agree)
    mor = ModelConfig(**preset("mor-360m"))
    floored = replace(
        mor, capacity=tuple(int(c * mor.block_size) / mor.block_size for c in mor.capacity)
    )
    exact, whole = (budget_steps(config, 16.5e18, 1024 * 2048) for config in (mor, floored))
    routers = max(parameters(config).router for _, config, _, _ in models())
    print(
        "\nSteps agree within one, tokens to the published decimal, parameters when they round to the\n"
        "published figure: 1.7B models to 0.01B, others to 1M. Parameters are those outside embedding\n"
        f"and routers; the routers of these models have {routers:,} weights at most.\n"
        f"Two run lengths are published as 14161: shares of exactly 2/3 and 1/3 give {exact}, shares\n"
        f"floored to whole tokens {whole}."
    )
    print(f"{len(agreed)} figures: {sum(agreed)} ok, {agreed.count(False)} differ")
    return agreed.count(False)

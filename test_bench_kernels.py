"""The kernels' work, counted by brute force, and their machine code for GPUs that are not here."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import bench_kernels
from bench_kernels import visited_blocks
from kernels import make_tiles
from ragged import Ragged


def test_a_block_is_visited_iff_it_holds_a_visible_pair():
    """No kernel can do with fewer, given the size of its blocks."""
    for seed in range(20):
        draw = random.Random(seed)
        keys = [sorted(draw.sample(range(300), draw.randint(0, 120))) for _ in range(3)] + [[1]]
        queries = [sorted(draw.sample(p, draw.randint(0, len(p)))) for p in keys]
        group, size, n_keys = draw.choice(((1, 16, 16), (3, 16, 32), (3, 64, 16)))
        expected = 0
        for q, k in zip(queries, keys):
            tiles = [q[i : i + size // group] for i in range(0, len(q), size // group)]
            blocks = [k[i : i + n_keys] for i in range(0, len(k), n_keys)]
            expected += sum(any(key <= query for key in b for query in t) for t in tiles for b in blocks)
        rows = [
            Ragged(
                torch.tensor(sum(p, [])),
                torch.tensor([0, *map(len, p)]).cumsum(0),
                None,
                None,
            )
            for p in (queries, keys)
        ]
        assert visited_blocks(make_tiles(*rows, group, size), group, n_keys) == expected


def test_work_follows_the_active_tokens(capsys):
    """Within 10 % of the square of their share, at the paper's length and head groups."""
    assert bench.main(["kernels"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    blocks = {
        (cells[0], cells[1]): int(cells[2]) for cells in lines if len(cells) == 7 and cells[2].isdigit()
    }
    for capacity, share in (("2/3", 2 / 3), ("1/3", 1 / 3)):
        for mode, law in (("recursion-wise", share**2), ("shared", share)):
            assert 0.9 <= blocks[capacity, mode] / blocks["1", mode] / law <= 1.1


@pytest.mark.parametrize(
    "arch, cores", [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")]
)
def test_every_kernel_compiles_ahead_of_time(arch, cores):
    code = (
        "import json, torch, bench_kernels as b\n"
        f"made = {{n: b.compile_ahead(n, 64, torch.bfloat16, {arch}) for n in b.COMPILED}}\n"
        "print(json.dumps(made))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment,
        cwd=Path(bench_kernels.__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert set(made) == set(bench_kernels.COMPILED)
    assert all(made[n]["spilled"] == 0 for n in made)
    assert all(made[n]["tensor_cores"] == cores for n in ("forward", "dq", "dkv"))
    assert made["paged"]["tensor_cores"] == "mma.sync"  # 16 rows are too few for the larger ones


def test_compiling_needs_the_compiler(capsys):
    assert bench.main(["kernels", "--aot"]) == 2  # kernels are interpreted here
    assert "unset TRITON_INTERPRET" in capsys.readouterr().err

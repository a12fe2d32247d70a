"""What can be proved of the Triton kernels without a GPU: `python bench.py kernels [--aot]`.

The work they do, counted: blocks of keys that tiles visit, over the least possible. And their machine
code, compiled ahead of time for the GPUs that this machine lacks: registers, bytes that spill out of
them to slow memory, shared memory, and which of the tensor cores' instructions they use.
"""

import argparse
import re
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from tqdm import tqdm

import kernels
from kernels import Tiles, make_tiles
from measure import print_table
from ragged import ragged_batch

CAPACITIES = {"1": 1.0, "2/3": 2 / 3, "1/3": 1 / 3}
ARCHITECTURES = {80: "A100", 90: "H100, H200", 100: "B200"}
TENSOR_CORES = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
ARGUMENTS = {
    **dict.fromkeys(("log2_scale", "scale"), "fp32"),
    **dict.fromkeys(("n_row", "table_width"), "i32"),
    **dict.fromkeys(("LSE", "DELTA", "PART"), "*fp32"),
    **dict.fromkeys(("N_KEY", "FIRST_QUERY", "CU_Q", "CU_K", "TILES", "PAGES"), "*i32"),
    "PLACE": "*i64",
    **dict.fromkeys(("Q", "K", "V", "OUT", "DY", "DQ", "DK", "DV", "K_PAGES", "V_PAGES"), None),  # as q
}
COMPILED = {  # kernel -> the sizes that it is compiled with, beside the tuned ones
    "forward": (kernels.forward_kernel, {}),
    "dq": (kernels.dq_kernel, {}),
    "dkv": (kernels.dkv_kernel, {}),
    "paged": (kernels.paged_kernel, {"ROWS": kernels.DECODE_ROWS, "PAGE": 16, "SPLIT": kernels.SPLIT}),
    "prefill": (kernels.paged_kernel, {"PAGE": 16, "SPLIT": 2048}),
    "combine": (kernels.combine_kernel, {"SPLIT": kernels.SPLIT}),
    "store": (kernels.store_kernel, {}),
}


def visited_blocks(tiles: Tiles, group: int, n_keys: int) -> int:
    """Blocks of n_keys keys that the forward kernel walks, over all tiles of one key head."""
    queries = tiles.size // group
    sequence, first = tiles.q_tiles.long().T
    last = torch.minimum(tiles.cu_q[sequence] + first + queries, tiles.cu_q[sequence + 1]) - 1
    return int(((tiles.n_key[last] + n_keys - 1) // n_keys).sum())


def count_blocks(args: argparse.Namespace) -> None:
    """Counts the key blocks that tiles visit, for steps that hold 1, 2/3 and 1/3 of the tokens."""
    if args.group > kernels.MAX_GROUP:
        raise ValueError(f"--group={args.group} is more than the {kernels.MAX_GROUP} that kernels take.")
    size = kernels.tile_rows(torch.bfloat16)
    n_keys = kernels.tuned("forward", 64, torch.bfloat16)["KEYS"]
    per_block = size // args.group * n_keys  # pairs of query and key in one block
    everyone, rows, all_blocks = ragged_batch(torch.tensor([0, args.seq]), args.seq), [], 0
    for name, share in CAPACITIES.items():
        torch.manual_seed(0)
        k = max(1, int(share * args.seq))
        active = everyone.take(torch.randperm(args.seq)[:k].sort().values)
        for mode, keys in (("recursion-wise", active), ("shared", everyone)):
            tiles = make_tiles(active, keys, args.group, size)
            visited, pairs = visited_blocks(tiles, args.group, n_keys), int(tiles.n_key.sum())
            all_blocks = all_blocks or visited
            law = share**2 if mode == "recursion-wise" else share
            cells = [name, mode, str(visited), f"{visited * per_block / pairs:.3f}"]
            cells += [f"{visited / all_blocks:.4f}", f"{law:.4f}", f"{visited / all_blocks / law:.3f}"]
            rows.append(cells)
    print(
        f"Blocks of {size // args.group} queries x {args.group} heads by {n_keys} keys, one sequence of "
        f"{args.seq} tokens"
    )
    heads = ["capacity", "keys", "blocks", "over least", "of capacity 1", "ideal", "over ideal"]
    print_table(heads, rows)
    print(
        "Over least: pairs in the blocks visited, over visible ones. Ideal: the square of the share\n"
        "of active tokens where keys are theirs alone, the share where they are everyone's."
    )


def source(name: str, head_dim: int, dtype: torch.dtype):
    """A kernel with its tuned sizes as triton.compile takes it, and its compiler options."""
    from triton.compiler import ASTSource

    kernel, sizes = COMPILED[name]
    tuned = kernels.tuned(name, head_dim, dtype)
    options = {key: tuned.pop(key) for key in ("num_warps", "num_stages")}
    constants = {"HEADS": 9, "GROUP": 3, "D": head_dim, "WIDTH": 3 * head_dim, "BLOCK": 4 * head_dim}
    constants |= dict.fromkeys(("ROWS", "KEYS"), kernels.tile_rows(dtype)) | tuned | sizes
    signature = {
        n: "constexpr" if n in constants else ARGUMENTS[n] or TYPES[dtype] for n in kernel.arg_names
    }
    pointers = [i for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*")]
    alignment = {(i,): [["tt.divisibility", 16]] for i in pointers}  # what torch allocates is aligned
    values = {(kernel.arg_names.index(n),): x for n, x in constants.items() if n in signature}
    return ASTSource(kernel, signature, values, alignment), options


def compile_ahead(name: str, head_dim: int, dtype: torch.dtype, arch: int) -> dict:
    """Machine code of one kernel for one architecture, as ptxas describes it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    code, options = source(name, head_dim, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = triton.compile(code, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(compiled.asm["ptx"])
        chip = f"sm_{arch}" + ("a" if arch >= 90 else "")
        command = [get_ptxas(arch).path, "-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={chip}"]
        done = subprocess.run(
            [*command, "kernel.ptx", "-o", "kernel.cubin"], cwd=folder, capture_output=True, text=True
        )
    if done.returncode:
        raise ValueError(f"ptxas refused {name} for sm_{arch}: {done.stderr.strip().splitlines()[0]}")
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr))),
        "shared": compiled.metadata.shared,
        "tensor_cores": next((x for x in TENSOR_CORES if x in compiled.asm["ptx"]), "–"),
    }


def compile_all(args: argparse.Namespace) -> None:
    """Compiles every kernel in its tuned shapes for sm_80, sm_90 and sm_100 and prints a table."""
    if kernels.triton is None or kernels.INTERPRETED:
        raise ValueError(
            "kernels --aot needs Triton's compiler; install triton, and unset TRITON_INTERPRET."
        )
    jobs = [
        (arch, name, dtype, head_dim)
        for arch in ARCHITECTURES
        for name in COMPILED
        for dtype in (torch.bfloat16, torch.float32)
        for head_dim in kernels.HEAD_DIMS
        if name not in ("combine", "store") or (dtype, head_dim) == (torch.bfloat16, 64)
    ]
    rows = []
    for arch, name, dtype, head_dim in tqdm(jobs, unit="kernel", disable=None):
        made = compile_ahead(name, head_dim, dtype, arch)
        cells = [f"sm_{arch}", name, str(dtype).removeprefix("torch."), str(head_dim)]
        cells += [str(made["registers"]), str(made["spilled"]), str(made["shared"])]
        rows.append([*cells, made["tensor_cores"]])
    chips = "; ".join(f"sm_{arch} is {chip}" for arch, chip in ARCHITECTURES.items())
    print(f"9 query heads, 3 key heads. {chips}")
    print_table(
        ["arch", "kernel", "type", "D", "registers", "spilled bytes", "shared bytes", "tensor cores"],
        rows,
    )


def bench_kernels(args: argparse.Namespace) -> None:
    """Counts what the Triton kernels do and, with --aot, compiles them for GPUs that are not here."""
    if args.aot:
        compile_all(args)
    else:
        count_blocks(args)

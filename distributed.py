"""Several processes, one run: `torchrun --nproc_per_node=8 train.py …`, on one node or more.

A pass reads and draws what its number says, and the passes of a step go round the processes: any number
of them trains the same run. With DDP each holds the whole model; with FSDP2 (--parallel=fsdp) weights,
gradients and moments are split among them. Checkpoints are whole in either case. Nodes share the
folders of data and checkpoints.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if WORLD > 1 else 0  # a RANK by itself is someone else's


@contextmanager
def processes() -> Iterator[None]:
    """Around a run: joins the others, if torchrun started several; rank 0 alone prints."""
    if WORLD == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # Small things go over gloo, so that no GPU waits for them.
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except ValueError as error:
        raise ValueError(
            f"WORLD_SIZE={WORLD} says that torchrun has started this, but it has not "
            f"({str(error).split(': ')[-1]}); start it by torchrun, or unset WORLD_SIZE."
        ) from None
    stdout = sys.stdout
    if RANK:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield
        any_of(False)  # nobody leaves while another still works
    finally:
        sys.stdout = stdout
    dist.destroy_process_group()  # not after an error: it would wait for the others


def failure() -> str:
    """How a failing process begins its sentence; what all of them meet, rank 0 tells alone."""
    if WORLD == 1:
        return "error"
    time.sleep(5 * bool(RANK))  # by then torchrun has ended this process, if rank 0 has failed as well
    return f"error in process {RANK} of {WORLD}"


def left_alone(error: Exception) -> bool:
    """Whether an error says that another process is gone."""
    return WORLD > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))


# ---- exchange ----------------------------------------------------------------------------------------


def total(x: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if WORLD > 1:
        dist.all_reduce(x := x.clone())
    return x


def any_of(flag: bool) -> bool:
    """Whether any process says yes; all of them get here, and go on from here, together."""
    return bool(total(torch.tensor(int(flag))))


def gather(items: list) -> list:
    """Everyone's items in order of rank."""
    if WORLD == 1:
        return items
    parts = [None] * WORLD
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


@contextmanager
def rank_0_first() -> Iterator[None]:
    """What rank 0 prepares inside, the others find ready."""
    if RANK:
        any_of(False)
    yield
    if not RANK:
        any_of(False)


# ---- model and optimizer -----------------------------------------------------------------------------


def shard(model: nn.Module) -> None:
    """Splits the weights; they are brought together for as long as they are needed.

    A layer's own where all tokens go through it, and else all at once: processes whose tokens stop at
    different steps would ask for different layers.
    """
    if WORLD > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model["layers"] if model.config.routing == "none" else ():
            fully_shard(layer)
        fully_shard(model)


def replicate(module: nn.Module) -> nn.Module:
    """The module with DDP around it: the last pass of a step averages gradients over the processes."""
    if WORLD == 1:
        return module
    return nn.parallel.DistributedDataParallel(
        module, forward_sync_buffers=False, gradient_as_bucket_view=True
    )


def average_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next pass exchanges gradients or keeps them; sharded ones are exchanged in each."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = now


def whole(x):
    """Nested dicts and lists with their sharded tensors put together; all processes take part."""
    if isinstance(x, dict):
        return {key: whole(value) for key, value in x.items()}
    if isinstance(x, list):
        return [whole(value) for value in x]
    return x.full_tensor().cpu() if hasattr(x, "full_tensor") else x


def part(x: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as the parameter is."""
    if x.shape != parameter.shape or not hasattr(parameter, "full_tensor"):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(x.to(parameter.device), mesh, placements, src_data_rank=None)

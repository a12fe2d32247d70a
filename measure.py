"""The device that is measured, its clock and its memory, what fits in there, and a table of it all."""

import ctypes
import math
import os
import time
from pathlib import Path

import torch

# Dense bfloat16 FLOP/s as the makers state them; for MFU.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "RTX 4090": 165e12}


class Machine:
    """The device that is measured, and how to compute, wait and weigh there."""

    def __init__(self, device: str):
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        here = ["cpu", *(["cuda"] if gpus else []), *gpus]
        self.device = ("cuda" if gpus else "cpu") if device == "auto" else device
        if self.device not in here:
            raise ValueError(f"--device={device} is not on this machine; there is {', '.join(here)}.")
        self.on_gpu = self.device != "cpu"
        self.dtype = "bfloat16" if self.on_gpu else "float32"

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {self.dtype}"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.on_gpu)

    def clock(self) -> float:
        """Seconds, after all work that was asked for is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def reset_peak(self) -> int | None:
        """Bytes held now, from which on `peak` counts anew; None where nobody counts."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        try:
            # What earlier models freed must go back first, or this one would fill it unseen.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, AttributeError):  # not Linux, another C library, or not allowed
            return None

    def peak(self) -> int:
        """The most bytes held since `reset_peak`."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def fitting_batch(model: torch.nn.Module, autocast: torch.autocast) -> int:
    """Sequences that a GPU can train on in one pass, as a power of two, from what 1 and 2 take at most.

    Three times the weights are set aside, for the optimizer's moments and for what exchanges gradients.
    """
    config, device, peaks = model.config, model.cos.device, []
    if config.capacity_warmup:
        model.warm_up_capacity(0)  # the first passes take most
    for n in (1, 2):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        ids = torch.randint(config.vocab_size, (n, config.block_size), device=device)
        try:
            with autocast:
                loss, _ = model(ids, ids)
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
        except torch.OutOfMemoryError:
            if n == 1:
                raise
            peaks.append(math.inf)
        model.zero_grad()
    torch.cuda.empty_cache()
    free = 0.9 * torch.cuda.mem_get_info(device)[0] - 3 * sum(p.nbytes for p in model.parameters())
    more = (free - peaks[0]) / max(1, peaks[1] - peaks[0])
    return 2 ** int(math.log2(max(1.0, 1 + more)))


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their widest entry; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for first, *others in [head, *rows]:
        cells = [first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(others, widths[1:]))]
        print("  ".join(cells))

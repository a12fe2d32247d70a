"""What every benchmark needs: the device that is measured, its clock and its memory, and a table."""

import ctypes
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


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their widest entry; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for first, *others in [head, *rows]:
        cells = [first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(others, widths[1:]))]
        print("  ".join(cells))

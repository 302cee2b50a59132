"""How much memory this rank really takes: of the process on a CPU, of torch's tensors on a GPU."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

from gnnpipe.heap import give_back

__all__ = ["count_peaks_anew", "held_bytes", "peak_bytes"]


def peak_bytes(device: torch.device) -> int:
    """The most since ``count_peaks_anew``, or since the beginning where no system tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_peaks_anew(device: torch.device) -> None:
    """Reading and cutting a graph can take more for a while than training on it does.

    What they freed goes back to the system first.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def held_bytes(device: torch.device) -> int:
    """Now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # Linux: the second number of statm is resident pages.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()

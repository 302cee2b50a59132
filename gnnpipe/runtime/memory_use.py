"""How much memory this rank really takes: of the process on a CPU, of torch's tensors on a GPU."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

from gnnpipe.heap import give_back, held_heap

__all__ = ["code_bytes", "count_peaks_anew", "held_bytes", "held_memory", "peak_bytes"]


def peak_bytes(device: torch.device) -> int:
    """The most since ``count_peaks_anew``, or since the beginning where no system tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, IndexError, ValueError):
        return _of_status("VmHWM")
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
    """Now, without ``code_bytes``."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _of_status("VmRSS") - _of_status("RssFile")


def held_memory(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Keep freed memory in the process inside the block; torch's GPU allocator always does."""
    return contextlib.nullcontext() if device.type == "cuda" else held_heap()


def code_bytes(device: torch.device) -> int:
    """Pages of files, torch's code above all, which come in when they are first used."""
    return 0 if device.type == "cuda" else _of_status("RssFile")


def _of_status(name: str) -> int:
    """What Linux tells of this process in KiB, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024

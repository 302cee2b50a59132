"""Memory of this rank: of the process on a CPU, of torch's tensors on a GPU."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

from gnnpipe.heap import give_back, held_heap


def peak_bytes(device: torch.device) -> int:
    """Return the peak in bytes since ``reset_peak``; without /proc, since the process started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, IndexError, ValueError):
        return _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak, after freed memory was returned to the system."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    give_back()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def free_holes(device: torch.device) -> None:
    """Return freed memory to the system; torch's GPU allocator reuses it for any size."""
    if device.type != "cuda":
        give_back()


def held_bytes(device: torch.device) -> int:
    """Return the bytes in use, without ``code_bytes``."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") - _status_bytes("RssFile")


def held_memory(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Keep freed memory in the process inside the block; torch's GPU allocator always does."""
    return contextlib.nullcontext() if device.type == "cuda" else held_heap()


def code_bytes(device: torch.device) -> int:
    """Return the bytes of mapped files (mostly torch's code), which are loaded on first use."""
    return 0 if device.type == "cuda" else _status_bytes("RssFile")


def _status_bytes(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024

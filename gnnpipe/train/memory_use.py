"""How much memory this rank really takes: of the process on a CPU, of torch's tensors on a GPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

__all__ = ["held_bytes", "peak_bytes"]


def peak_bytes(device: torch.device) -> int:
    """The most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held_bytes(device: torch.device) -> int:
    """Now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # Linux: the second number of statm is resident pages.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()

"""What only GPUs need: kernels in Triton, which comes with torch for CUDA, and CUDA graphs.

The kernels are modules of their own, to be imported where ``works_on`` says that they work.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["captured", "works_on"]

T = TypeVar("T")


def works_on(device: torch.device) -> bool:
    """Whether kernels in Triton run there."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def captured(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """What ``work`` starts on the GPU as one graph, and what it returned.

    It runs once, but the GPU does nothing yet: tensors that it returned have their numbers after
    each ``replay``. An exception, also one because it waited for the GPU, is passed on.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads (the one that watches NCCL, say) may do as they like meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    return graph, found

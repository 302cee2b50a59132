"""What only GPUs need: kernels in Triton, which comes with torch for CUDA, and CUDA graphs.

The kernels are modules of their own, to be imported where ``works_on`` says that they work. Triton
builds a kernel when it is first run, and a small launcher for it with the C compiler of the
machine: it may be installed and still be of no use, so one kernel is run before it is relied on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["captured", "fault_on", "works_on"]

T = TypeVar("T")


def works_on(device: torch.device) -> bool:
    """Whether kernels in Triton run there."""
    return fault_on(device) is None


@functools.cache
def fault_on(device: torch.device) -> str | None:
    """Why kernels in Triton do not run there, on a line; None: they do.

    A ``UserWarning`` says so, once, of a GPU that has to do without a Triton that is there.
    """
    if device.type != "cuda":
        return "it is for GPUs"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        importlib.import_module("gnnpipe.ops.triton.spmm").try_out(device)
    except Exception as error:  # whatever its compiler, the C compiler or the driver comes up with
        why = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        warnings.warn(
            f"Triton is installed, but a kernel of it does not run on {device} ({why}): torch's "
            "own are used, which take longer. It needs a C compiler (gcc or clang), Python's "
            "headers and a GPU of compute capability 7.0 or more",
            UserWarning,
            stacklevel=2,
        )
        return why
    return None


def captured(work: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """What ``work`` starts on the GPU ``device`` as one graph, and what it returned.

    It runs once, but the GPU does nothing yet: tensors that it returned have their numbers after
    each ``replay``. An exception, also one because it waited for the GPU, is passed on.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        # A stream of this GPU, and not the one that torch keeps of the first that it recorded on.
        # Other threads (the one that watches NCCL, say) may do as they like meanwhile.
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            found = work()
    return graph, found

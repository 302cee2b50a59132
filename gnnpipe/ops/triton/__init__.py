"""Code for GPUs only: kernels in Triton, and recording of CUDA graphs.

Import the kernel modules only if ``works_on``. Triton compiles a kernel at its first run, with the
machine's C compiler, so an installed Triton may still fail; one kernel is run as a trial.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import TypeVar

import torch

from gnnpipe.output import warn

__all__ = ["captured", "fault_on", "works_on"]

T = TypeVar("T")


def works_on(device: torch.device) -> bool:
    """Return whether Triton kernels run on ``device``."""
    return fault_on(device) is None


@functools.cache
def fault_on(device: torch.device) -> str | None:
    """Return in one line why Triton kernels do not run on ``device``; ``None`` if they do.

    Warns once if Triton is installed but does not run on this GPU.
    """
    if device.type != "cuda":
        return "Triton kernels run on GPUs only"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        importlib.import_module("gnnpipe.ops.triton.spmm").try_out(device)
    except Exception as error:  # of Triton's compiler, the C compiler or the driver
        why = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        warn(
            f"Triton is installed, but its kernels do not run on {device} ({why}): torch's own, "
            "slower ones are used. Triton needs a C compiler (gcc or clang), Python's headers and "
            "a GPU of compute capability 7.0 or more"
        )
        return why
    return None


def captured(work: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record the kernels that ``work`` launches on ``device`` as a CUDA graph.

    Returns:
        The graph, and the result of ``work``: its tensors hold their values after a ``replay``.

    Raises:
        Exception: ``work`` raised one, or waited for the GPU.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        # torch's default capture stream belongs to the GPU that captured first.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # "thread_local": other threads, such as NCCL's watchdog, may use the GPU meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = work()
    return graph, found

"""The kernels that multiply rows of a sparse matrix with dense rows, by name.

Which is fastest depends on the device: on CPUs ``embedding-bag`` is, by 3 to 4 times
(docs/adr/0007-embedding-bag-is-the-product.md), and is taken without asking, so that a run gives
the same bits each time; on a GPU they are timed on the run's own matrix when it starts. R rows, T
columns, E entries, F features.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gnnpipe.errors import InputError
from gnnpipe.registry import Registry

__all__ = [
    "KERNELS", "Kernel", "embedding_bag", "index_type", "kernel_named", "time_kernels"
]  # fmt: skip

Kernel = Callable[[Tensor, Tensor, Tensor, int, Tensor], Tensor]
"""offsets [R + 1], indices [E], values [E], T and dense rows [T, F] to [R, F]; no autograd. Offsets
and indices are of one integer type, values of the type of the dense rows."""

KERNELS: Registry[Kernel] = Registry("kernel")


def embedding_bag(
    offsets: Tensor, indices: Tensor, values: Tensor, columns: int, dense: Tensor
) -> Tensor:
    """Weighted bags of embeddings; sums of bf16 rows are made in float32."""
    del columns
    return torch.embedding_bag(
        dense,
        indices,
        offsets,
        False,  # scale_grad_by_freq
        0,  # mode: sum
        False,  # sparse gradients
        values,
        True,  # include_last_offset
    )[0]


def _torch_csr(
    offsets: Tensor, indices: Tensor, values: Tensor, columns: int, dense: Tensor
) -> Tensor:
    """torch's own CSR product: MKL on CPUs, cuSPARSE on GPUs."""
    shape = (len(offsets) - 1, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that CSR is new, each time it is first used
        matrix = torch.sparse_csr_tensor(offsets, indices, values, shape, check_invariants=False)
    return matrix @ dense


def _torch_sparse(
    offsets: Tensor, indices: Tensor, values: Tensor, columns: int, dense: Tensor
) -> Tensor:
    """pyg's torch_sparse, a package of its own that must match torch's version; int64 only."""
    del columns
    found: Tensor = torch.ops.torch_sparse.spmm_sum(
        None, offsets, indices, values, None, None, dense
    )
    return found


KERNELS.add("embedding-bag", embedding_bag)
KERNELS.add("csr", _torch_csr)
KERNELS.add("torch-sparse", _torch_sparse)


def index_type(kernel: Kernel) -> torch.dtype | None:
    """The only type of offsets and indices that it takes; None: 32 or 64 bits."""
    return torch.int64 if kernel is _torch_sparse else None


def kernel_named(name: str, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel, if it works here: ``InputError`` otherwise. It multiplies 1 by 1 to be sure."""
    kernel = KERNELS[name]
    try:
        if name == "torch-sparse":
            importlib.import_module("torch_sparse")  # registers the operator
        one = torch.ones(1, 1, dtype=dtype, device=device)
        index = torch.arange(2, device=device, dtype=index_type(kernel) or torch.int32)
        kernel(index, index[:1], one[0], 1, one)
    except Exception as error:  # whatever a package that was built for another torch comes up with
        missing = isinstance(error, ModuleNotFoundError)
        why = (
            "the package torch_sparse is not installed"
            if missing
            else (
                f"does not work on {device.type} with {str(dtype).removeprefix('torch.')} rows "
                f"({str(error).splitlines()[0][:80] if str(error) else type(error).__name__})"
            )
        )
        raise InputError(f"--kernel {name}: {why}; try --kernel auto") from None
    return kernel


def time_kernels(
    offsets: Tensor, indices: Tensor, values: Tensor, columns: int, width: int, rounds: int = 3
) -> dict[str, float]:
    """Seconds of one product with random rows [T, ``width``] by name, best of ``rounds``.

    A kernel that is not installed, or does not take these types, is left out.
    """
    dense = torch.rand(columns, width, device=values.device).to(values.dtype)
    found = {}
    for name in KERNELS:
        try:
            kernel = kernel_named(name, values.dtype, values.device)
        except InputError:
            continue
        kind = index_type(kernel) or indices.dtype
        which = offsets.to(kind), indices.to(kind)
        times = []
        for _ in range(rounds + 1):
            start = _now(values.device)
            kernel(*which, values, columns, dense)
            times.append(_now(values.device) - start)
        found[name] = min(times[1:])
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""The kernels that multiply rows of a sparse matrix with dense rows, by name.

Which is fastest depends on the device: on CPUs ``embedding-bag`` is, by 3 to 4 times
(docs/adr/0007-embedding-bag-is-the-product.md), and is taken without asking, so that a run gives
the same bits each time; on a GPU they are timed on the run's own matrix when it starts. R rows, T
columns, E entries, F features.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gnnpipe.errors import InputError
from gnnpipe.registry import Registry

__all__ = ["KERNELS", "Kernel", "embedding_bag", "kernel_named", "time_kernels"]

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
    """pyg's torch_sparse, a package of its own that must match torch's version."""
    del columns
    import torch_sparse  # noqa: F401  # registers the operator

    found: Tensor = torch.ops.torch_sparse.spmm_sum(
        None, offsets.long(), indices.long(), values, None, None, dense
    )
    return found


KERNELS.add("embedding-bag", embedding_bag)
KERNELS.add("csr", _torch_csr)
KERNELS.add("torch-sparse", _torch_sparse)


def kernel_named(name: str) -> Kernel:
    """The kernel, if it can be had here: ``InputError`` otherwise."""
    kernel = KERNELS[name]
    if name == "torch-sparse" and importlib.util.find_spec("torch_sparse") is None:
        raise InputError(
            "--kernel torch-sparse: the package torch_sparse is not installed; "
            "try --kernel embedding-bag, or pip install torch_sparse"
        )
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
            kernel = kernel_named(name)
            times = []
            for _ in range(rounds + 1):
                start = _now(values.device)
                kernel(offsets, indices, values, columns, dense)
                times.append(_now(values.device) - start)
        except (InputError, ImportError, RuntimeError, NotImplementedError):
            continue
        found[name] = min(times[1:])
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""The kernels that multiply rows of a sparse matrix with dense rows, by name.

Which is fastest depends on the device: on CPUs ``embedding-bag`` is, by 3 to 4 times
(docs/adr/0007-embedding-bag-is-the-product.md), and on GPUs ``triton`` (0031). They are taken
without asking, so that a run gives the same bits each time; on the run's own matrix they are timed
only if that is asked for. A kernel is given the matrix once, and makes what it needs of it. R rows,
T columns, E entries, F features.
"""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from gnnpipe.errors import InputError
from gnnpipe.ops import triton
from gnnpipe.registry import Registry

__all__ = [
    "KERNELS",
    "Kernel",
    "Product",
    "bag_sums",
    "default_kernel",
    "embedding_bag",
    "index_type",
    "kernel_named",
    "time_kernels",
]

Product = Callable[[Tensor], Tensor]
"""Dense rows [T, F] to [R, F]; no autograd."""
Kernel = Callable[[Tensor, Tensor, Tensor, int], Product]
"""offsets [R + 1], indices [E], values [E] and T to the product with that matrix. Offsets and
indices are of one integer type, values of the type of the dense rows; R is not 0."""

KERNELS: Registry[Kernel] = Registry("kernel")

_IN_A_ROW = 5
"""Products that are timed together on a GPU."""


def bag_sums(offsets: Tensor, indices: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    """Weighted bags of embeddings; sums of bf16 rows are made in float32."""
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


def embedding_bag(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """``bag_sums``, which needs nothing but the three."""
    del columns
    return functools.partial(bag_sums, offsets, indices, values)


def _torch_csr(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """torch's own CSR product: MKL on CPUs, cuSPARSE on GPUs."""
    shape = (len(offsets) - 1, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that CSR is new, each time it is first used
        matrix = torch.sparse_csr_tensor(offsets, indices, values, shape, check_invariants=False)
    return matrix.matmul


def _torch_sparse(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """pyg's torch_sparse, a package of its own that must match torch's version; int64 only."""
    del columns

    def times(dense: Tensor) -> Tensor:
        found: Tensor = torch.ops.torch_sparse.spmm_sum(
            None, offsets, indices, values, None, None, dense
        )
        return found

    return times


def _triton(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """Ours for GPUs."""
    del columns
    # Triton is not there for every torch.
    products = importlib.import_module("gnnpipe.ops.triton.spmm")
    made: Product = products.product(offsets, indices, values)
    return made


KERNELS.add("embedding-bag", embedding_bag)
KERNELS.add("csr", _torch_csr)
KERNELS.add("torch-sparse", _torch_sparse)
KERNELS.add("triton", _triton)


def default_kernel(device: torch.device) -> Kernel:
    """Of ``--kernel auto``: mostly the fastest where it was measured (docs/adr/0007, 0031)."""
    if device.type != "cuda":
        return embedding_bag
    return _triton if triton.works_on(device) else _torch_csr


def index_type(kernel: Kernel) -> torch.dtype | None:
    """The only type of offsets and indices that it takes; None: 32 or 64 bits."""
    return torch.int64 if kernel is _torch_sparse else None


def kernel_named(name: str, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel, if it works here: ``InputError`` otherwise. It multiplies 1 by 1 to be sure."""
    kernel = KERNELS[name]
    try:
        if name == "torch-sparse":
            importlib.import_module("torch_sparse")  # registers the operator
        if name == "triton" and not triton.works_on(device):
            raise RuntimeError(triton.fault_on(device))
        one = torch.ones(1, 1, dtype=dtype, device=device)
        index = torch.arange(2, device=device, dtype=index_type(kernel) or torch.int32)
        kernel(index, index[:1], one[0], 1)(one)
    except Exception as error:  # whatever a package that was built for another torch comes up with
        missing = isinstance(error, ModuleNotFoundError)
        why = (
            f"the package {name.replace('-', '_')} is not installed"
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
        times = kernel(offsets.to(kind), indices.to(kind), values, columns)
        found[name] = min(_seconds(times, dense) for _ in range(rounds + 1))
    return found


def _seconds(times: Product, dense: Tensor) -> float:
    """Of one product; on a GPU without the time to start it, for epochs are replayed there."""
    if dense.device.type != "cuda":
        start = time.perf_counter()
        times(dense)
        return time.perf_counter() - start
    times(dense)
    run: Callable[[], object]
    try:
        run = triton.captured(lambda: [times(dense) for _ in range(_IN_A_ROW)], dense.device)[
            0
        ].replay
    except RuntimeError:  # it looks at numbers

        def run() -> object:
            return [times(dense) for _ in range(_IN_A_ROW)]

    torch.cuda.synchronize(dense.device)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize(dense.device)
    return (time.perf_counter() - start) / _IN_A_ROW

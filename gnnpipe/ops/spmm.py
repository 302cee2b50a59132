"""Registry of kernels for sparse matrix times dense matrix (SpMM), chosen by ``--kernel``.

By default the device decides, so that every run gives the same bits: ``embedding-bag`` on CPUs
(docs/adr/0007-embedding-bag-is-the-product.md) and ``triton`` on GPUs (docs/adr/0031). ``--kernel
measured`` times all kernels on the run's own matrix. A kernel prepares the matrix once.
R rows, T columns, E entries, F features.
"""

from __future__ import annotations

import contextlib
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

Product = Callable[[Tensor], Tensor]
"""Maps dense rows [T, F] to [R, F], without autograd."""
Kernel = Callable[[Tensor, Tensor, Tensor, int], Product]
"""Takes a matrix (offsets [R + 1], indices [E], values [E], T) and returns the product with it.
Offsets and indices have the same integer type, values the type of the dense rows; R > 0."""

KERNELS: Registry[Kernel] = Registry("kernel")

_TIMED_TOGETHER = 5
"""Products in one measurement on a GPU."""


def bag_sums(offsets: Tensor, indices: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    """Return the weighted sums [R, F] of rows of ``dense``; bf16 rows are summed in float32."""
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
    """Return the product by ``bag_sums``."""
    del columns
    return functools.partial(bag_sums, offsets, indices, values)


def _torch_csr(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """Return torch's CSR product: MKL on CPUs, cuSPARSE on GPUs."""
    shape = (len(offsets) - 1, columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "CSR support is in beta state"
        matrix = torch.sparse_csr_tensor(offsets, indices, values, shape, check_invariants=False)
    return matrix.matmul


def _torch_sparse(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """Return the product of PyG's torch_sparse, which must match torch's version; int64 only."""
    del columns
    spmm = torch.ops.torch_sparse.spmm_sum
    return lambda dense: spmm(None, offsets, indices, values, None, None, dense)


def _triton(offsets: Tensor, indices: Tensor, values: Tensor, columns: int) -> Product:
    """Return the product of ``gnnpipe.ops.triton.spmm``."""
    del columns
    # Not every torch comes with Triton.
    kernels = importlib.import_module("gnnpipe.ops.triton.spmm")
    product: Product = kernels.product(offsets, indices, values)
    return product


KERNELS.add("embedding-bag", embedding_bag)
KERNELS.add("csr", _torch_csr)
KERNELS.add("torch-sparse", _torch_sparse)
KERNELS.add("triton", _triton)


def default_kernel(device: torch.device) -> Kernel:
    """Return the kernel of ``--kernel auto``."""
    if device.type != "cuda":
        return embedding_bag
    return _triton if triton.works_on(device) else _torch_csr


def index_type(kernel: Kernel) -> torch.dtype | None:
    """Return the only type of offsets and indices that a kernel takes; ``None``: int32 or int64."""
    return torch.int64 if kernel is _torch_sparse else None


def kernel_named(name: str, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return a kernel after a trial product; ``InputError`` if it does not work here."""
    kernel = KERNELS[name]
    try:
        if name == "torch-sparse":
            importlib.import_module("torch_sparse")  # registers the operator
        if name == "triton" and not triton.works_on(device):
            raise RuntimeError(triton.fault_on(device))
        one = torch.ones(1, 1, dtype=dtype, device=device)
        index = torch.arange(2, device=device, dtype=index_type(kernel) or torch.int32)
        kernel(index, index[:1], one[0], 1)(one)
    except Exception as error:  # a package built for another torch raises anything
        if isinstance(error, ModuleNotFoundError):
            why = f"the package {name.replace('-', '_')} is not installed"
        else:
            reason = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
            rows = str(dtype).removeprefix("torch.")
            why = f"does not work on {device.type} with {rows} rows ({reason})"
        raise InputError(f"--kernel {name}: {why}; try --kernel auto") from None
    return kernel


def time_kernels(
    offsets: Tensor, indices: Tensor, values: Tensor, columns: int, width: int
) -> dict[str, float]:
    """Return by name the seconds of one product with random rows [T, ``width``], best of four.

    Kernels that are not installed or do not take these types are left out.
    """
    dense = torch.rand(columns, width, device=values.device).to(values.dtype)
    found = {}
    for name in KERNELS:
        try:
            kernel = kernel_named(name, values.dtype, values.device)
        except InputError:
            continue
        kind = index_type(kernel) or indices.dtype
        product = kernel(offsets.to(kind), indices.to(kind), values, columns)
        found[name] = min(_time_s(product, dense) for _ in range(4))
    return found


def _time_s(product: Product, dense: Tensor) -> float:
    """Return the seconds of one product.

    On a GPU without the time of launches if possible, because epochs run as a CUDA graph there.
    """
    if dense.device.type != "cuda":
        start_s = time.perf_counter()
        product(dense)
        return time.perf_counter() - start_s

    def run() -> list[Tensor]:
        return [product(dense) for _ in range(_TIMED_TOGETHER)]

    product(dense)
    replay: Callable[[], object] = run
    with contextlib.suppress(RuntimeError):  # the kernel waits for the GPU: no graph of it
        replay = triton.captured(run, dense.device)[0].replay
    torch.cuda.synchronize(dense.device)
    start_s = time.perf_counter()
    replay()
    torch.cuda.synchronize(dense.device)
    return (time.perf_counter() - start_s) / _TIMED_TOGETHER

"""Products of a sparse matrix with dense rows, which carry every linear aggregation.

A chunk is a contiguous range of rows, so the product takes a range of one CSR and copies nothing.
The kernels (``ops.spmm``) have no autograd here: the adjoint is a product with the transposed CSR.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.ops.spmm import Kernel, Product, embedding_bag, index_type


@dataclass(frozen=True, eq=False)
class RowCSR:
    """A sparse matrix [R, T] by rows. E entries."""

    indptr: Tensor
    """[R + 1], int32 or int64 like ``indices``."""
    indices: Tensor
    """[E], column of each entry."""
    values: Tensor
    """[E], floating."""
    num_columns: int
    kernel: Kernel = embedding_bag
    _ranges: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    """Indices, offsets and values of the row ranges used so far: with many small chunks, slicing
    them again would cost as much as the product."""
    _products: dict[tuple[int, int], Product] = field(default_factory=dict, init=False, repr=False)
    """The kernel's product for each of these ranges."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.indptr.numel() - 1

    @classmethod
    def from_scipy(
        cls,
        matrix: sp.csr_array,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel = embedding_bag,
    ) -> RowCSR:
        """Convert a scipy matrix, to 32-bit indices if they are wide enough."""
        wide = max(matrix.nnz, matrix.shape[1]) >= 2**31 or index_type(kernel) == torch.int64
        kind = np.int64 if wide else np.int32
        return cls(
            torch.from_numpy(np.ascontiguousarray(matrix.indptr, dtype=kind)).to(device),
            torch.from_numpy(np.ascontiguousarray(matrix.indices, dtype=kind)).to(device),
            torch.from_numpy(np.ascontiguousarray(matrix.data)).to(device=device, dtype=dtype),
            int(matrix.shape[1]),
            kernel,
        )

    def select(self, rows: Tensor) -> RowCSR:
        """A copy of some rows [P] int64 of the matrix, in the order given."""
        counts = (self.indptr[1:] - self.indptr[:-1]).long()[rows]
        indptr = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        start = torch.repeat_interleave(self.indptr.long()[rows] - indptr[:-1], counts)
        entries = start.add_(torch.arange(len(start), device=rows.device))
        pointer, indices = indptr.to(self.indptr.dtype), self.indices[entries]
        return RowCSR(pointer, indices, self.values[entries], self.num_columns, self.kernel)

    def keep_columns(self, start: int, stop: int, kind: Tensor, is_kept: Tensor) -> RowCSR:
        """A copy of rows start:stop with only the columns of some kinds.

        ``kind`` [T] int32 of each column; ``is_kept`` bool, by kind.
        """
        indices, offsets, values = self._range(start, stop)
        kept = is_kept.index_select(0, kind.index_select(0, indices))
        before = torch.zeros(len(kept) + 1, dtype=offsets.dtype, device=offsets.device)
        torch.cumsum(kept, 0, out=before[1:])
        if kept.device.type == "cpu":  # numpy finds them four times as fast
            entries = torch.from_numpy(np.flatnonzero(kept.numpy()))
        else:
            entries = kept.nonzero().squeeze(1)
        part = RowCSR(
            before.index_select(0, offsets),
            indices.index_select(0, entries),
            values.index_select(0, entries),
            self.num_columns,
            self.kernel,
        )
        # Set here because ``_range`` would read ``indptr``, and so wait for the GPU.
        part._ranges[0, stop - start] = part.indices, part.indptr, part.values
        return part

    def block(self, rows: tuple[int, int], columns: tuple[int, int]) -> RowCSR:
        """A copy of a range of rows and of columns, both (start, stop) and numbered from 0."""
        indices, offsets, values = self._range(*rows)
        first, last = columns
        kept = (indices >= first) & (indices < last)
        before = torch.zeros(len(kept) + 1, dtype=offsets.dtype, device=offsets.device)
        torch.cumsum(kept, 0, out=before[1:])
        pointer = before.index_select(0, offsets)
        return RowCSR(pointer, indices[kept] - first, values[kept], last - first, self.kernel)

    def transpose(self) -> RowCSR:
        """The transpose [T, R], with ascending columns in each of its rows."""
        indices, indptr = self.indices.cpu().numpy(), self.indptr.cpu().numpy()
        numbers = np.arange(len(indices), dtype=indices.dtype)
        shape = self.num_rows, self.num_columns
        place = sp.csr_array((numbers, indices, indptr), shape=shape).T.tocsr()
        place.sort_indices()
        kind = self.indices.dtype
        found = [torch.from_numpy(a) for a in (place.indptr, place.indices, place.data)]
        pointer, columns, entries = (t.to(self.indices.device) for t in found)
        values = self.values.index_select(0, entries)
        return RowCSR(pointer.to(kind), columns.to(kind), values, self.num_rows, self.kernel)

    def matmul(self, dense: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start:stop times ``dense`` [T, F], as [stop - start, F]; no autograd."""
        stop = self.num_rows if stop is None else stop
        if stop == start or not self.num_columns:  # Some kernels do not support empty matrices.
            return dense.new_zeros(stop - start, dense.shape[1])
        with torch.no_grad():
            if (start, stop) not in self._products:
                indices, offsets, values = self._range(start, stop)
                times = self.kernel(offsets, indices, values, self.num_columns)
                self._products[start, stop] = times
            return self._products[start, stop](dense.detach())

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start:stop as [stop - start, T]."""
        indices, offsets, values = self._range(start, self.num_rows if stop is None else stop)
        number = torch.repeat_interleave(
            torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff().long()
        )
        found = values.new_zeros(len(offsets) - 1, self.num_columns)
        found[number, indices.long()] = values
        return found

    def _range(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the entries of rows start:stop, and where each row starts among them."""
        if (start, stop) not in self._ranges:
            pointer = self.indptr[start : stop + 1]
            first, last = int(pointer[0]), int(pointer[-1])
            self._ranges[start, stop] = (
                self.indices[first:last],
                pointer - first if first else pointer,
                self.values[first:last],
            )
        return self._ranges[start, stop]

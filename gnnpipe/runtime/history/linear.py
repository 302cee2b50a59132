"""History of an aggregation with fixed weights: A[c] @ table, backward At[c] @ gradients.

With a shared table (``plan.shared_tables``), the aggregated rows of a chunk and their gradients use
the same memory: when a chunk records its gradient, its aggregated rows are no longer needed. Until
then its part of the table holds no gradient. The backward product therefore uses only the edges of
chunks that have recorded.

Shapes: m target rows, F columns, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gnnpipe.graph.operators import LinearOperator
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.history.base import History, HistorySpec, zeroed


class LinearHistory(History):
    """Aggregation by a ``LinearOperator``."""

    def __init__(
        self, spec: HistorySpec, width: int, operator: LinearOperator, is_shared: bool = False
    ) -> None:
        """``is_shared``: use a shared table; only for several chunks and unrounded tables."""
        super().__init__(spec, width)
        self.operator, self._is_shared = operator, is_shared
        self._recorded = 0
        """Bit set of the chunks that have recorded in this epoch."""
        self._shared_rows: list[Tensor] = []
        """Rows of the shared table by chunk."""

    def take(self, structure: Any) -> None:
        """Aggregate by another operator from now on."""
        self.operator = structure

    def into(self, chunk: int) -> tuple[int, int]:
        """Return the target rows of a chunk as (start, stop); their vertex type may differ."""
        return self.operator.into_ptr[chunk], self.operator.into_ptr[chunk + 1]

    def read(self, chunk: int) -> Tensor:
        """Return the aggregated rows [C, F]."""
        self.settle()
        found = self.operator.forward.matmul(self.table, *self.into(chunk)).to(self._dtype)
        self._free_after_read()
        return self._shared_rows[chunk].copy_(found) if self._is_shared else found

    def record(self, chunk: int, grad: Tensor) -> None:
        """Record the gradient [C, F] of the aggregated rows."""
        if self.layout.num_chunks == 1:
            self._grads = grad.to(self.table.dtype).contiguous()
            return
        if self.stays_in_chunk:
            self._of_chunk[chunk] = grad.to(self.table.dtype).contiguous()
            return
        start, stop = self.into(chunk)
        here = self._grads[start:stop]
        if grad.data_ptr() != here.data_ptr():  # not made in place
            here.copy_(grad)
        self._recorded |= 1 << chunk

    def pull(self, chunk: int) -> Tensor:
        """Return the gradient [C, F] of the chunk's rows from everything recorded so far."""
        start, stop = self.rows(chunk)
        self.begin_pull(chunk)  # sent while the larger product runs
        own = self._backward_product(chunk, start, stop).to(self._dtype)
        self._add_returned(chunk, own)
        self._of_chunk.pop(chunk, None)
        if self.layout.num_chunks == 1:
            self._grads = self._grads.new_empty(0, own.shape[1])
        elif self.scale != 1.0 and not self.stays_in_chunk:
            # Only other chunks read this chunk's gradients from now on.
            first, last = self.into(chunk)
            self._grads[first:last] *= self.scale
        return own

    def _halo_gradients(self, chunk: int) -> Tensor:
        return self._backward_product(chunk, *self.exchange.halo_range(chunk))

    def _backward_product(self, chunk: int, start: int, stop: int) -> Tensor:
        """Return the gradients of table rows start:stop, which belong to a chunk."""
        if self.stays_in_chunk and self.layout.num_chunks > 1:
            return self.operator.back_from(chunk, self._of_chunk[chunk], start, stop)
        if self._is_shared:
            return self.operator.back(self._grads, start, stop, self._recorded)
        return self.operator.transposed.matmul(self._grads, start, stop)

    def _clear_gradients(self) -> None:
        if self.layout.num_chunks == 1:
            return  # the single chunk overwrites all gradients
        count = self.operator.forward.num_rows
        if not self._is_shared:
            self._grads = zeroed(self._grads, count)
            return
        # Not zeroed: only rows that have been recorded are read.
        self._recorded = 0
        self.operator.forget()
        if len(self._grads) != count:
            self._grads = self._grads.new_empty(count, self._grads.shape[1])
            chunks = range(self.layout.num_chunks)
            self._shared_rows = [OutputBuffer.of(self._grads, *self.into(c)).rows for c in chunks]

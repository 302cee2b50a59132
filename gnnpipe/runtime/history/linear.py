"""The history of an aggregation with fixed weights: a product forward, and one with the transpose.

Where one table is to do for both, it holds what was aggregated for a chunk's rows, or what the step
makes there of it, until their gradient is there, and that from then on. All that is made of the one
is done with by then: later steps of the chunk have gone back already, and so have those of other
stages that were sent it, for their gradients were waited for. So a gradient is brought back over
the edges of those chunks alone that have recorded theirs; in the rows of the others stands
something else. m rows that read, F columns.
"""

from __future__ import annotations

from torch import Tensor

from gnnpipe.graph.operators import LinearOperator
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.history.base import History, HistorySpec, zeroed

__all__ = ["LinearHistory"]


class LinearHistory(History):
    """Aggregation with fixed weights: A[c] @ table, and At[c] @ gradients."""

    def __init__(
        self, spec: HistorySpec, width: int, operator: LinearOperator, is_shared: bool = False
    ) -> None:
        """``is_shared``: of several chunks, with a table of the type of the rows."""
        super().__init__(spec, width)
        self.operator, self._is_shared = operator, is_shared
        self._recorded = 0
        """A bit for each chunk that has recorded in this epoch."""
        self._lent: list[Tensor] = []
        """By chunk, its rows of the shared table."""

    def into(self, chunk: int) -> tuple[int, int]:
        """Own rows of a chunk that read, as (start, stop): of another type, maybe."""
        return self.operator.into_ptr[chunk], self.operator.into_ptr[chunk + 1]

    def read(self, chunk: int) -> Tensor:
        """Aggregated rows [C, F]."""
        self.settle()
        found = self.operator.forward.matmul(self.table, *self.into(chunk)).to(self._dtype)
        self._read_once()
        return self._lent[chunk].copy_(found) if self._is_shared else found

    def record(self, chunk: int, grad: Tensor) -> None:
        """Gradient [C, F] of the aggregated rows."""
        if self.layout.num_chunks == 1:
            self._grads = grad.to(self.table.dtype).contiguous()
            return
        start, stop = self.into(chunk)
        here = self._grads[start:stop]
        if grad.data_ptr() != here.data_ptr():  # made elsewhere
            here.copy_(grad)
        self._recorded |= 1 << chunk

    def pull(self, chunk: int) -> Tensor:
        """Everything recorded so far, brought back over the edges to the chunk's rows."""
        start, stop = self.rows(chunk)
        self.begin_pull(chunk)  # first, so that it travels under the larger product
        own = self._brought_back(start, stop).to(self._dtype)
        self._add_returned(chunk, own)
        if self.layout.num_chunks == 1:
            self._grads = self._grads.new_empty(0, own.shape[1])
        elif self.scale != 1.0:
            # From here on this chunk's gradients are only read by other chunks.
            first, last = self.into(chunk)
            self._grads[first:last] *= self.scale
        return own

    def _halo_gradients(self, low: int, high: int) -> Tensor:
        return self._brought_back(low, high)

    def _brought_back(self, start: int, stop: int) -> Tensor:
        if self._is_shared:
            return self.operator.back(self._grads, start, stop, self._recorded)
        return self.operator.transposed.matmul(self._grads, start, stop)

    def _clear_gradients(self) -> None:
        if self.layout.num_chunks == 1:
            return  # It records everything at once and overwrites what is here.
        count = self.operator.forward.num_rows
        if not self._is_shared:
            self._grads = zeroed(self._grads, count)
            return
        # What has not been recorded is not read.
        self._recorded = 0
        self.operator.forget()
        if len(self._grads) != count:
            self._grads = self._grads.new_empty(count, self._grads.shape[1])
            chunks = range(self.layout.num_chunks)
            self._lent = [OutputBuffer.of(self._grads, *self.into(c)).rows for c in chunks]

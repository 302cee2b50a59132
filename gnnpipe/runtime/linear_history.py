"""The history of an aggregation with fixed weights: a product forward, and one with the transpose.

One table holds what was aggregated for a chunk's rows until their gradient is there, and that from
then on. All that is made of the one is done with by then: later steps of the chunk have gone back
already, and so have those of other stages that were sent it, for their gradients were waited for.
So a gradient is brought back over the edges of those chunks alone that have recorded theirs; in the
rows of the others stands something else. m rows that read, F columns.
"""

from __future__ import annotations

from torch import Tensor

from gnnpipe.graph.operators import LinearOperator
from gnnpipe.models.place import Place
from gnnpipe.runtime.history import History, HistorySpec

__all__ = ["LinearHistory"]


class LinearHistory(History):
    """Aggregation with fixed weights: A[c] @ table, and At[c] @ gradients."""

    def __init__(self, spec: HistorySpec, width: int, operator: LinearOperator) -> None:
        super().__init__(spec, width)
        self.operator = operator
        self._recorded = 0
        """A bit for each chunk that has recorded in this epoch."""
        self._lent: list[Tensor] = []
        """By chunk, its rows of the table of gradients."""

    def into(self, chunk: int) -> tuple[int, int]:
        """Own rows of a chunk that read, as (start, stop): of another type, maybe."""
        return self.operator.into_ptr[chunk], self.operator.into_ptr[chunk + 1]

    def read(self, chunk: int) -> Tensor:
        """Aggregated rows [C, F]."""
        self.settle()
        found = self.operator.forward.matmul(self.table, *self.into(chunk)).to(self._dtype)
        self._read_once()
        if not self._lent or self._grads.dtype != self._dtype:
            return found  # Evaluation has no gradients; and rounded, they have less room.
        return self._lent[chunk].copy_(found)

    def record(self, chunk: int, grad: Tensor) -> None:
        """Gradient [C, F] of the aggregated rows."""
        if self.layout.num_chunks == 1:
            self._grads = grad.to(self.table.dtype).contiguous()
            self._recorded = 1
            return
        start, stop = self.into(chunk)
        self._grads[start:stop] = grad
        self._recorded |= 1 << chunk

    def pull(self, chunk: int) -> Tensor:
        """Everything recorded so far, brought back over the edges to the chunk's rows."""
        start, stop = self.rows(chunk)
        self.begin_pull(chunk)  # first, so that it travels under the larger product
        own = self.operator.back(self._grads, start, stop, self._recorded).to(self._dtype)
        self._add_returned(chunk, own)
        if self.layout.num_chunks == 1:
            self._grads = self._grads.new_empty(0, own.shape[1])
        elif self.scale != 1.0:
            # From here on this chunk's gradients are only read by other chunks.
            first, last = self.into(chunk)
            self._grads[first:last] *= self.scale
        return own

    def _halo_gradients(self, low: int, high: int) -> Tensor:
        return self.operator.back(self._grads, low, high, self._recorded)

    def _clear_gradients(self) -> None:
        # What has not been recorded is not read. A single chunk's come as they are.
        self._recorded = 0
        self.operator.forget()
        count = self.operator.forward.num_rows if self.layout.num_chunks > 1 else 0
        if len(self._grads) != count:
            self._grads = self._grads.new_empty(count, self._grads.shape[1])
            chunks = range(self.layout.num_chunks)
            self._lent = [Place.of(self._grads, *self.into(c)).rows for c in chunks if count]

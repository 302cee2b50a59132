"""History of a mean or a sum over all vertices or edges.

The mean is an aggregation in which every chunk reads every chunk; only the sum of each chunk's rows
is kept. With one chunk, or layer by layer, the mean is that of the whole graph. Otherwise the parts
of later chunks are those of the last epoch, or their forecast. A sum is added up by the chunks
themselves, which push their parts.

Shapes: K chunks, F columns, C rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpipe.graph.operators import Everyone
from gnnpipe.ops.norm_relu_blocks import blocks_of
from gnnpipe.runtime.comm.halo_exchange import sum_over_shards
from gnnpipe.runtime.history.base import History, HistorySpec
from gnnpipe.runtime.staleness.affine_map import AffineMap


class MeanHistory(History):
    """Table [K, F] float64: each chunk's part of the mean, over all shards."""

    def __init__(self, spec: HistorySpec, width: int, everyone: Everyone) -> None:
        super().__init__(spec, width, num_rows=spec.layout.num_chunks)
        self.count = everyone.count
        """Number of vertices or edges; may be 0."""
        self._divisor = max(self.count, 1)
        self._weights, self._is_sum = everyone.weights, everyone.is_sum
        self._shares = everyone.shares.to(self.table.device)[:, None]

    @property
    def mean(self) -> Tensor:
        """The mean of all rows, [F] float64."""
        return self.table.sum(0)

    def settle_at(self, parts: Tensor) -> None:
        """Load saved parts [K', F]; if the chunks were others, divide the sum among the chunks."""
        is_same = parts.shape == self.table.shape
        self.lasting.copy_(parts if is_same else self._shares * parts.sum(0))

    def output_buffer(self, chunk: int) -> None:
        """Return ``None``: the table holds no rows."""
        del chunk

    def push(self, chunk: int, rows: Tensor) -> None:
        """Write the chunk's part of the mean, from its rows [C, F] on all shards.

        For a sum, the part [1, F] is that of the chunk on this shard.
        """
        if self.drift is not None:
            self.drift.before(self.table)
        if self._weights is None:
            part = _sum(rows.detach())
        else:
            part = self._weights[slice(*self.rows(chunk))] @ rows.detach().double()
        self.table[chunk] = self._summed(part / self._divisor)

    def read(self, chunk: int) -> Tensor:
        """Return the mean [1, F]."""
        del chunk
        return self.mean.to(self._dtype)[None]

    def record(self, chunk: int, grad: Tensor) -> None:
        """Record the gradient [1, F] of the mean."""
        summed = self._summed(grad[0].double())
        if self.stays_in_chunk:
            self._of_chunk[chunk] = summed
        else:
            self._grads[chunk] = summed

    def begin_pull(self, chunk: int) -> None:
        """Do nothing: ``record`` has added the gradients of all shards."""

    def _halo_gradients(self, chunk: int) -> Tensor:
        raise AssertionError("a mean has no halo")

    def pull(self, chunk: int) -> Tensor:
        """Return the gradient [C, F] of the rows, or [1, F] of the part, that the chunk pushed."""
        start, stop = self.rows(chunk)
        own = self._of_chunk.pop(chunk) if self.stays_in_chunk else self._grads.sum(0)
        found = own / self._divisor
        if self._weights is not None:
            found = self._weights[start:stop, None] * found
        if not self.stays_in_chunk:
            # Only other chunks read this chunk's gradients from now on.
            self._grads[chunk] *= self.scale
        return found.to(self._dtype).expand(1 if self._is_sum else stop - start, -1)

    def move(self, found: AffineMap, rows: Tensor | None = None) -> None:
        """Apply a shift to every row, and so to every part of the mean."""
        self.table += self._shares * found.shift.double()

    def _summed(self, part: Tensor) -> Tensor:
        self.exchange.sent_bytes += sum_over_shards(part, self.exchange.mesh)
        return part

    def _clear_gradients(self) -> None:
        self._grads = torch.zeros_like(self.table)


def _sum(rows: Tensor) -> Tensor:
    """Return the sum [F] float64 of rows [C, F], in blocks: torch copies its input to float64."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for block in blocks_of(rows, rows.shape[1]):
        total += rows[block].sum(0, dtype=torch.float64)
    return total

"""The history of a mean over all vertices, or edges: what a normalisation over them reads.

It is an aggregation in which every chunk reads every chunk, and it is live and stale in the same
way; but all that is kept of a chunk is the sum of its rows. With one chunk, or walked layer by
layer, the mean is that of the whole graph; otherwise chunks that come later in the walk count with
their rows of the last epoch, or with their forecast. K chunks, F columns, C rows of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpipe.graph.blocks import Blocks
from gnnpipe.graph.operators import Everyone, LinearOperator
from gnnpipe.ops.norm_relu_blocks import blocks_of
from gnnpipe.runtime.comm.halo_exchange import sum_over_shards
from gnnpipe.runtime.history.base import History, HistorySpec
from gnnpipe.runtime.history.block import BlockHistory
from gnnpipe.runtime.history.linear import LinearHistory

__all__ = ["MeanHistory", "open_history"]


class MeanHistory(History):
    """Table [K, F] float64: every chunk's part of the mean, over all shards."""

    def __init__(self, spec: HistorySpec, width: int, everyone: Everyone) -> None:
        super().__init__(spec, width, num_rows=spec.layout.num_chunks)
        self.count = everyone.count
        """Vertices, or edges: there may be none."""
        self._divisor = max(self.count, 1)
        self._weights = everyone.weights
        self._shares = everyone.shares.to(self.table.device)[:, None]

    @property
    def mean(self) -> Tensor:
        """[F] float64."""
        return self.table.sum(0)

    def settle_at(self, parts: Tensor) -> None:
        """Start from these parts [K', F]; of other chunks only their sum is of use."""
        is_same = parts.shape == self.table.shape
        self.lasting.copy_(parts if is_same else self._shares * parts.sum(0))

    def output_buffer(self, chunk: int) -> None:
        """None: the table holds no rows."""
        del chunk

    def push(self, chunk: int, rows: Tensor) -> None:
        """The chunk's rows [C, F] of this shard; those of the other shards are added."""
        if self.drift is not None:
            self.drift.before(self.table)
        if self._weights is None:
            part = _sum(rows.detach())
        else:
            part = self._weights[slice(*self.rows(chunk))] @ rows.detach().double()
        self.table[chunk] = self._summed(part / self._divisor)

    def read(self, chunk: int) -> Tensor:
        """The mean [1, F], which is the same for all rows of the chunk."""
        del chunk
        return self.mean.to(self._dtype)[None]

    def record(self, chunk: int, grad: Tensor) -> None:
        """Gradient [1, F] of what ``read`` gave."""
        self._grads[chunk] = self._summed(grad[0].double())

    def begin_pull(self, chunk: int) -> None:
        """Nothing is on its way: the sums are made when they are recorded."""

    def _halo_gradients(self, low: int, high: int) -> Tensor:
        raise AssertionError("a mean has no halo")

    def pull(self, chunk: int) -> Tensor:
        """Gradient [C, F] of the rows that the chunk pushed."""
        start, stop = self.rows(chunk)
        found = self._grads.sum(0) / self._divisor
        if self._weights is not None:
            found = self._weights[start:stop, None] * found
        # From here on this chunk's gradients are only read by other chunks.
        self._grads[chunk] *= self.scale
        return found.to(self._dtype).expand(stop - start, -1)

    def move(self, factor: Tensor, shift: Tensor, rows: Tensor | None = None) -> None:
        """Every row becomes ``row @ factor + shift``, and every part of the mean with them."""
        moved = self.table @ factor.double() + self._shares * shift.double()
        self.table.copy_(moved)

    def _summed(self, part: Tensor) -> Tensor:
        self.exchange.sent_bytes += sum_over_shards(part, self.exchange.mesh)
        return part

    def _clear_gradients(self) -> None:
        self._grads = torch.zeros_like(self.table)


def _sum(rows: Tensor) -> Tensor:
    """[F] float64 of rows [C, F], in blocks: torch makes a copy in that type of all it is given."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for block in blocks_of(rows, rows.shape[1]):
        total += rows[block].sum(0, dtype=torch.float64)
    return total


def open_history(
    spec: HistorySpec,
    width: int,
    structure: LinearOperator | Blocks | Everyone,
    is_shared: bool = False,
) -> History:
    """A history for rows of ``width`` over what the layer aggregates with.

    ``is_shared``: what is aggregated lies where its gradient will be (``plan.shared_tables``).
    """
    if isinstance(structure, Everyone):
        return MeanHistory(spec, width, structure)
    if isinstance(structure, Blocks):
        return BlockHistory(spec, width, structure)
    return LinearHistory(spec, width, structure, is_shared)

"""History of an aggregation with fixed weights whose rows travel by columns (``RowWay.COLUMNS``).

Each shard has some columns of all rows and multiplies these with the matrix of the whole graph, so
that no row of a neighbour is sent for each of its readers. As NeutronTP (arXiv 2412.20379).

In an exact program all chunks push before the first one reads, and all record before the first one
pulls. Columns of a chunk may therefore be on their way while other chunks are computed.

Shapes: C rows of a chunk on all shards, C_g of them on this shard; F columns, f of them on this
shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gnnpipe.collectives import CollectiveWork
from gnnpipe.graph.operators import LinearOperator
from gnnpipe.runtime.comm.column_exchange import ArrivingRows, ColumnExchange
from gnnpipe.runtime.history.base import History, HistorySpec


@dataclass(frozen=True)
class CellRows:
    """Rows of every chunk by shard, [K][G]."""

    pushed: Sequence[Sequence[int]]
    read: Sequence[Sequence[int]]
    """Target rows: all of the target's vertex type, or the loss rows."""


class ColumnHistory(History):
    """Table [N, f] of one layer on one rank, and its gradients [m, f] for m target rows."""

    def __init__(
        self,
        spec: HistorySpec,
        width: int,
        operator: LinearOperator,
        cells: CellRows,
        exchange: ColumnExchange,
    ) -> None:
        """``spec.layout`` and ``operator`` are of the whole graph; ``width``: F."""
        super().__init__(spec, exchange.own_width(width))
        self.operator = operator
        self._width, self._cells, self._exchange = width, cells, exchange
        self._recording: list[CollectiveWork] = []
        self._pulled: dict[int, ArrivingRows] = {}

    def take(self, structure: Any) -> None:
        """Aggregate by another operator from now on."""
        self.operator = structure

    def output_buffer(self, chunk: int) -> None:
        """Return ``None``: the table has other columns than the pushed rows."""
        del chunk

    def push(self, chunk: int, rows: Tensor) -> None:
        """Send the columns of the chunk's rows [C_g, F] to their shards."""
        here = self.table[slice(*self.rows(chunk))]
        cells = self._cells.pushed[chunk]
        self._arriving.append(self._exchange.to_columns(rows.detach(), cells, here))

    def read(self, chunk: int) -> Tensor:
        """Return the aggregated rows [C_g, F]."""
        self.settle()
        found = self.operator.forward.matmul(self.table, *self._into(chunk))
        arriving = self._exchange.to_rows(found, self._cells.read[chunk], self._width)
        return arriving.wait().to(self._dtype)

    def record(self, chunk: int, grad: Tensor) -> None:
        """Send the columns of the gradient [C_g, F] of the aggregated rows to their shards."""
        if len(self._grads) != self.operator.forward.num_rows:
            shape = self.operator.forward.num_rows, self.table.shape[1]
            self._grads = self.table.new_empty(shape)
        here = self._grads[slice(*self._into(chunk))]
        cells = self._cells.read[chunk]
        self._recording.append(self._exchange.to_columns(grad, cells, here))

    def begin_pull(self, chunk: int) -> None:
        """Compute the columns of the gradient that ``pull`` needs, and send them back."""
        if chunk in self._pulled:
            return
        for work in self._recording:
            work.wait()
        self._recording.clear()
        found = self.operator.transposed.matmul(self._grads, *self.rows(chunk))
        cells = self._cells.pushed[chunk]
        self._pulled[chunk] = self._exchange.to_rows(found, cells, self._width)

    def pull(self, chunk: int) -> Tensor:
        """Return the gradient [C_g, F] of the chunk's rows."""
        self.begin_pull(chunk)
        own = self._pulled.pop(chunk).wait().to(self._dtype)
        if self.layout.num_chunks == 1:
            self._grads = self._grads.new_empty(0, self.table.shape[1])
        return own

    def _into(self, chunk: int) -> tuple[int, int]:
        """Return the target rows of a chunk as (start, stop)."""
        return self.operator.into_ptr[chunk], self.operator.into_ptr[chunk + 1]

    def _halo_gradients(self, low: int, high: int) -> Tensor:
        raise AssertionError("columns of all rows have no halo")

    def _clear_gradients(self) -> None:
        self._recording.clear()  # left by a pass that failed
        self._pulled.clear()

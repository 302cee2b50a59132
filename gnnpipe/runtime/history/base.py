"""History table of one layer: push, read, record, pull.

Forward: chunk c pushes its rows, then aggregates over the whole table. Rows of chunks that were
pushed in this epoch are live; all others are stale, left from an earlier epoch or a snapshot.
Backward: c records the gradient of its aggregated rows, then pulls the gradient of its pushed rows,
from exactly those chunks that read the rows of c live (the program checker proves the order).

Shapes: n own rows, h halo rows, F columns, C rows of a chunk.

Gradients from other chunks can be scaled (GNNPipe's third technique): a neighbour is live with
probability 1/2, so a factor of 2 makes the sum unbiased.

If gradients stay in their chunk (``GradientScope.OWN_CHUNK``), rows of other chunks are constants:
pull then returns the gradient that the chunk itself has recorded, on all shards, and no table of
gradients is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnpipe.collectives import CollectiveWork
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.comm.halo_exchange import HaloExchange
from gnnpipe.runtime.staleness.affine_map import AffineMap


class Drift:
    """Relative change of one table in an epoch, measured on sampled rows."""

    def __init__(self, rows: Tensor) -> None:
        """``rows`` [s]: numbers of the sampled own rows of this shard."""
        self.rows = rows
        self._before: Tensor | None = None
        self.sums = torch.zeros(2, dtype=torch.float64, device=rows.device)
        """Sums of squares of the change and of the rows, from the last complete epoch."""

    def before(self, table: Tensor) -> None:
        """Keep the sampled rows as they are before the first push; called before every push."""
        if self._before is None:
            self._before = table[self.rows]

    def after(self, table: Tensor) -> None:
        """Measure the change at the end of the epoch."""
        if self._before is None:
            return
        now = table[self.rows].to(torch.promote_types(table.dtype, torch.float32))
        self.sums = torch.stack([x.square().sum().double() for x in (now - self._before, now)])
        self._before = None


_MOVE_ROWS = {"cpu": 1024, "cuda": 1 << 16}
"""Rows per operation of ``move``: few enough for the cache of a CPU, enough for kernels on a GPU to
take longer than their launch."""


@dataclass(frozen=True)
class HistorySpec:
    """Common properties of the history tables of one rank."""

    layout: ShardLayout
    exchange: HaloExchange
    dtype: torch.dtype
    """Number type of rows that are read; tables have the number type of ``exchange``."""
    snapshot_every: int = 1
    """Stale rows come from a snapshot taken every so many epochs; 1: from the last epoch."""
    scale: float = 1.0
    """Factor on gradients from other chunks."""
    sample: Tensor | None = None
    """[s], own rows whose drift is measured; ``None`` if nothing can be stale."""


class History(ABC):
    """Table [n + h, F] of one layer on one rank, and its gradients."""

    def __init__(self, spec: HistorySpec, width: int, num_rows: int | None = None) -> None:
        """``width``: F; ``num_rows``: size of a float64 table that does not hold vertices' rows."""
        self.layout, self.exchange = spec.layout, spec.exchange
        self.snapshot_every, self.scale = spec.snapshot_every, 1.0
        self._scale, self._dtype = spec.scale, spec.dtype
        self._ptr: list[int] = spec.layout.own_ptr.tolist()
        mesh = spec.exchange.mesh
        # The pushed rows of a single chunk on a single shard are the table: no copy is needed.
        self._has_peers = mesh.shards > 1
        self._whole = num_rows is None and spec.layout.num_chunks == 1 and not self._has_peers
        if num_rows is None:
            size, table_dtype = 0 if self._whole else spec.layout.num_rows, spec.exchange.dtype
        else:
            size, table_dtype = num_rows, torch.float64
        self.table = torch.zeros(size, width, dtype=table_dtype, device=mesh.device)
        self._snapshot = torch.zeros_like(self.table) if spec.snapshot_every > 1 else None
        self._grads = self.table.new_empty(0, width)
        self.stays_in_chunk = False
        """Whether gradients stay in their chunk; each pull then forgets what it has returned,
        because several epochs may follow before ``begin_epoch``."""
        self._of_chunk: dict[int, Tensor] = {}
        """Gradients recorded by chunks that have not pulled yet, if gradients stay in them."""
        self._arriving: list[CollectiveWork] = []
        self._returning: dict[int, CollectiveWork] = {}
        sample = spec.sample
        if sample is not None and num_rows is not None:
            sample = torch.arange(num_rows, device=mesh.device)
        self.drift = None if sample is None else Drift(sample)

    @property
    def can_repeat(self) -> bool:
        """Whether push and read may run again in backward, for the same result.

        True for a single chunk on a single shard, which has no table between push and read.
        """
        return self._whole

    @property
    def lasting(self) -> Tensor:
        """The rows that outlast the epoch: stale reads of the next epoch, and a checkpoint."""
        return self.table if self._snapshot is None else self._snapshot

    def forget_faults(self) -> None:
        """Replace NaN and infinity by zero, which stale reads would spread through later epochs."""
        for table in (self.table, self.lasting):
            table.nan_to_num_(0.0, 0.0, 0.0)

    def rows(self, chunk: int) -> tuple[int, int]:
        """Return the own rows of a chunk as (start, stop)."""
        return self._ptr[chunk], self._ptr[chunk + 1]

    def take(self, structure: Any) -> None:
        """Aggregate over another structure of the same kind from now on."""
        raise NotImplementedError

    def begin_epoch(self, is_exact: bool, stays_in_chunk: bool = False) -> None:
        """Restore the snapshot, if there is one, and clear the gradients.

        Args:
            is_exact: No read is stale, so gradients from other chunks are complete and not scaled.
            stays_in_chunk: Gradients stay in their chunk.
        """
        self.stays_in_chunk = stays_in_chunk
        self._of_chunk.clear()
        self.scale = 1.0 if is_exact else self._scale
        self._arriving.clear()  # left by a pass that failed
        self._returning.clear()
        if self._snapshot is not None:
            self.table.copy_(self._snapshot)
        if self.stays_in_chunk:
            self._grads = self._grads.new_empty(0, self._grads.shape[1])
        else:
            self._clear_gradients()

    def end_epoch(self, epoch: int, is_exact: bool) -> None:
        """Refresh the snapshot after every ``snapshot_every``-th epoch (from 0).

        Also after an exact epoch, because later epochs must not read older rows.
        """
        self.settle()
        if self.drift is not None:
            self.drift.after(self.table)
        is_due = (epoch + 1) % self.snapshot_every == 0 or is_exact
        if self._snapshot is not None and is_due:
            self._snapshot.copy_(self.table)

    def output_buffer(self, chunk: int) -> OutputBuffer | None:
        """Return memory in the table for the rows that the chunk pushes next, if possible."""
        if self._whole or self.table.dtype != self._dtype:
            return None
        if self.drift is not None:
            self.drift.before(self.table)
        return OutputBuffer.of(self.table, *self.rows(chunk))

    def push(self, chunk: int, rows: Tensor) -> None:
        """Write the chunk's rows [C, F], and exchange halo rows with the other shards."""
        if self._whole:
            self.table = rows.detach().to(self.table.dtype)
            return
        if self.drift is not None:
            self.drift.before(self.table)
        here = self.table[slice(*self.rows(chunk))]
        if rows.data_ptr() != here.data_ptr():  # not made in the output buffer
            here.copy_(rows.detach())
        if self._has_peers:
            self._arriving.append(self.exchange.push(chunk, self.table))

    def settle(self) -> None:
        """Wait for all halo rows; call this before the table is read."""
        for arrival in self._arriving:
            arrival.wait()
        self._arriving.clear()

    def _free_after_read(self) -> None:
        """Free the table of a single chunk, which only the chunk itself reads."""
        if self._whole:
            self.table = self.table.new_empty(0, self.table.shape[1])

    def move(self, found: AffineMap, rows: Tensor | None = None) -> None:
        """Apply a map to ``rows`` [t] (default: all) of the table."""
        if rows is None:
            rows = torch.arange(len(self.table), device=self.table.device)
        # In pieces, because the temporary would be a second table.
        for piece in torch.split(rows, _MOVE_ROWS[self.table.device.type]):
            old = self.table.index_select(0, piece).to(found.shift.dtype)
            self.table.index_copy_(0, piece, found.apply(old).to(self.table.dtype))

    @abstractmethod
    def read(self, chunk: int) -> Tensor:
        """Return the layer's input for the chunk: aggregated rows, or the rows of its block."""

    @abstractmethod
    def record(self, chunk: int, grad: Tensor) -> None:
        """Record the gradient of the result of ``read``."""

    def begin_pull(self, chunk: int) -> None:
        """Start to send the halo gradients that ``pull`` needs; all must have been recorded."""
        if self._has_peers and chunk not in self._returning:
            halo = self._halo_gradients(chunk)
            self._returning[chunk] = self.exchange.send_back(chunk, halo)

    @abstractmethod
    def pull(self, chunk: int) -> Tensor:
        """Return the gradient [C, F] of the rows that the chunk pushed."""

    def _add_returned(self, chunk: int, own: Tensor) -> Tensor:
        """Add the gradients from other shards to ``own`` [C, F]."""
        if chunk in self._returning:
            self.exchange.add(chunk, self._returning.pop(chunk), own, self.rows(chunk)[0])
        return own

    @abstractmethod
    def _halo_gradients(self, chunk: int) -> Tensor:
        """Return the gradients [halo rows of the chunk, F] of the chunk's halo rows."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Clear the gradients of the last epoch."""


def zeroed(grads: Tensor, rows: int) -> Tensor:
    """Return ``grads`` filled with zeros, allocated on first use: evaluation needs none."""
    if len(grads) == rows:
        return grads.zero_()
    return grads.new_zeros(rows, grads.shape[1])

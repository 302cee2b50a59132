"""The history table of one layer: push, read, record, pull.

Forward, chunk c pushes its rows and then aggregates over the whole table: rows of chunks that were
pushed in this epoch are live, the others are what an earlier epoch (or a snapshot) left there; one
table holds both. Backward, c records the gradient of what it aggregated, and pulls the gradient of
the rows it pushed: what has been recorded by then comes from exactly those chunks that read c live
(the program checker proved it). n own rows, h halo rows, F columns.

Gradients from other chunks can be scaled (GNNPipe's third technique): a neighbour is live with
probability one half, so a factor of 2 makes the sum unbiased.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpipe.collectives import Transfer
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.comm.halo_exchange import HaloExchange

__all__ = ["Drift", "History", "HistorySpec", "zeroed"]


class Drift:
    """The drift of one layer's table on one rank."""

    def __init__(self, rows: Tensor) -> None:
        """``rows`` [s]: local numbers of this shard's sampled own rows."""
        self.rows = rows
        self._before: Tensor | None = None
        self.sums = torch.zeros(2, dtype=torch.float64, device=rows.device)
        """Squares of the change and of the rows, of the last whole epoch, over the sample."""

    def before(self, table: Tensor) -> None:
        """Called ahead of every push; keeps the rows [N, F] as they are at the first."""
        if self._before is None:
            self._before = table[self.rows]

    def after(self, table: Tensor) -> None:
        """Called at the end of the epoch."""
        if self._before is None:
            return
        now = table[self.rows].to(torch.promote_types(table.dtype, torch.float32))
        self.sums = torch.stack([x.square().sum().double() for x in (now - self._before, now)])
        self._before = None


_MOVED_AT_ONCE = {"cpu": 1024, "cuda": 1 << 16}
"""Rows, by device: on a CPU few enough that they stay near the core meanwhile; on a GPU enough that
the three kernels of a piece take longer than to launch them. The temporary stays small."""


@dataclass(frozen=True)
class HistorySpec:
    """What the tables of one rank have in common."""

    layout: ShardLayout
    exchange: HaloExchange
    dtype: torch.dtype
    """Of what is read; the table's own is that of ``exchange``."""
    snapshot_every: int = 1
    """Stale reads come from a snapshot this many epochs apart; 1: from the last epoch."""
    scale: float = 1.0
    """Factor on gradients from other chunks."""
    sample: Tensor | None = None
    """[s], own rows whose drift is measured; none where nothing can be stale."""


class History(ABC):
    """One layer's table on one rank, and the gradients that belong to it. F = ``width``."""

    def __init__(self, spec: HistorySpec, width: int, num_rows: int | None = None) -> None:
        """``num_rows`` of a table that is kept in float64 and has none of the layout's rows."""
        self.layout, self.exchange = spec.layout, spec.exchange
        self.snapshot_every, self.scale = spec.snapshot_every, 1.0
        self._scale = spec.scale
        self._ptr: list[int] = spec.layout.own_ptr.tolist()
        mesh = spec.exchange.mesh
        # A single chunk on a single shard IS the table; it then needs no copy and no memory.
        self._whole = num_rows is None and spec.layout.num_chunks == 1 and mesh.shards == 1
        self._dtype, row_dtype = spec.dtype, spec.exchange.dtype
        if num_rows is None:
            size = (0 if self._whole else spec.layout.num_rows, width)
            self.table = torch.zeros(size, dtype=row_dtype, device=mesh.device)
        else:
            size = (num_rows, width)
            self.table = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        self._snapshot = torch.zeros_like(self.table) if spec.snapshot_every > 1 else None
        self._grads = self.table.new_empty(0, width)
        self._arriving: list[Transfer] = []
        self._returning: dict[int, Transfer] = {}
        sample = spec.sample
        if sample is not None and num_rows is not None:
            sample = torch.arange(num_rows, device=mesh.device)
        self.drift = None if sample is None else Drift(sample)

    @property
    def lasting(self) -> Tensor:
        """What the next epoch's stale reads start from: all that a later run needs of the table."""
        return self.table if self._snapshot is None else self._snapshot

    def forget_faults(self) -> None:
        """What is no number becomes zero: stale readers would hand it on for ever."""
        for table in (self.table, self.lasting):
            table.nan_to_num_(0.0, 0.0, 0.0)

    def rows(self, chunk: int) -> tuple[int, int]:
        """Own rows of a chunk as (start, stop)."""
        return self._ptr[chunk], self._ptr[chunk + 1]

    def begin_epoch(self, is_exact: bool) -> None:
        """Stale reads start from the snapshot, if there is one; no gradient is left over.

        Where nothing is stale, there is no gradient to make up for.
        """
        self.scale = 1.0 if is_exact else self._scale
        self._arriving.clear()  # of a pass that was ended by an error
        self._returning.clear()
        if self._snapshot is not None:
            self.table.copy_(self._snapshot)
        self._clear_gradients()

    def end_epoch(self, epoch: int, is_exact: bool) -> None:
        """Refresh the snapshot at the end of every ``snapshot_every``-th epoch (from 0).

        Also at the end of an exact one: what comes next must not read what is older.
        """
        self.settle()
        if self.drift is not None:
            self.drift.after(self.table)
        due = (epoch + 1) % self.snapshot_every == 0 or is_exact
        if self._snapshot is not None and due:
            self._snapshot.copy_(self.table)

    def output_buffer(self, chunk: int) -> OutputBuffer | None:
        """Where the rows of the chunk can be made that it pushes next; in the table, if at all."""
        if self._whole or self.table.dtype != self._dtype:
            return None
        if self.drift is not None:
            self.drift.before(self.table)
        return OutputBuffer.of(self.table, *self.rows(chunk))

    def push(self, chunk: int, rows: Tensor) -> None:
        """Write the chunk's rows [C, F], and its halo rows from the other shards."""
        if self._whole:
            self.table = rows.detach().to(self.table.dtype)
            return
        if self.drift is not None:
            self.drift.before(self.table)
        start, stop = self.rows(chunk)
        here = self.table.data_ptr() + start * self.table.stride(0) * self.table.element_size()
        if rows.data_ptr() != here:  # made elsewhere
            self.table[start:stop] = rows.detach()
        if self.exchange.mesh.shards > 1:
            self._arriving.append(self.exchange.push(chunk, self.table))

    def settle(self) -> None:
        """Wait for all halo rows that are on their way: the table is about to be read."""
        for arrival in self._arriving:
            arrival.wait()
        self._arriving.clear()

    def _read_once(self) -> None:
        """What a single chunk pushed is read by itself, and by nobody else."""
        if self._whole:
            self.table = self.table.new_empty(0, self.table.shape[1])

    def move(self, factor: Tensor, shift: Tensor, rows: Tensor | None = None) -> None:
        """These ``rows`` [t], or all, become ``row @ factor + shift``: [F, F] and [F]."""
        if rows is None:
            rows = torch.arange(len(self.table), device=self.table.device)
        # Some at a time: no second table.
        for some in torch.split(rows, _MOVED_AT_ONCE[self.table.device.type]):
            found = self.table.index_select(0, some).to(factor.dtype)
            moved = torch.addmm(shift, found, factor)
            self.table.index_copy_(0, some, moved.to(self.table.dtype))

    @abstractmethod
    def read(self, chunk: int) -> Tensor:
        """What the layer gets for the chunk: aggregated rows, or the rows of its block."""

    @abstractmethod
    def record(self, chunk: int, grad: Tensor) -> None:
        """Note the gradient of what ``read`` gave."""

    def begin_pull(self, chunk: int) -> None:
        """All that the chunk's ``pull`` needs has been recorded: halo gradients can leave."""
        if self.exchange.mesh.shards > 1 and chunk not in self._returning:
            halo = self._halo_gradients(*self.exchange.halo_range(chunk))
            self._returning[chunk] = self.exchange.send_back(chunk, halo)

    @abstractmethod
    def pull(self, chunk: int) -> Tensor:
        """Gradient [C, F] of the rows that the chunk pushed."""

    def _add_returned(self, chunk: int, own: Tensor) -> Tensor:
        """``own`` [C, F] with what the other shards found for these rows."""
        if chunk in self._returning:
            self.exchange.add(chunk, self._returning.pop(chunk), own, self.rows(chunk)[0])
        return own

    @abstractmethod
    def _halo_gradients(self, low: int, high: int) -> Tensor:
        """Gradients [high - low, F] of rows of other shards, by table row."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Forget the gradients of the last epoch."""


def zeroed(grads: Tensor, rows: int) -> Tensor:
    """``grads`` set to zero, allocated on first use: evaluation never needs it."""
    if len(grads) == rows:
        return grads.zero_()
    return grads.new_zeros(rows, grads.shape[1])

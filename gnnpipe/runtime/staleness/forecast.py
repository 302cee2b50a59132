"""Forecast: what the stale rows would be, had they been computed with today's weights.

Between two epochs the rows of a table move because the weights moved, and they move together: an
affine map, fitted on a few rows, tells most of where all the others went (on real graphs 80 to 97 %
of the movement of what a layer aggregates, docs/benchmarks/staleness.md). So before the chunks are
walked, a small fixed set of PILOT rows passes through all layers with the weights of this epoch, as
it has passed in the last one, when all tables were written, with the weights of that. At each layer
the map from old to new pilot rows is fitted and applied to the whole table. Stale rows stay
constants: the forecast changes what is read, not where gradients go.

P pilot rows (of all shards), F columns. With frozen weights old and new are the same numbers, the
map is the identity to the bit, and nothing changes (law 8).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.graph.blocks import Block, Blocks
from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.operators import Everyone, LinearOperator
from gnnpipe.graph.stale_rows import StaleRows
from gnnpipe.models import Aggregation, Received, Rows, StageModule, Values
from gnnpipe.runtime.comm.halo_exchange import sum_over_shards
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.base import History
from gnnpipe.runtime.staleness.affine_map import (
    AffineMap,
    fit_affine,
    fit_shift,
    gram,
    mean_moments,
    moments,
)

__all__ = ["Forecaster", "ProbeRows"]


class ProbeRows:
    """The pilot rows of one rank's stage on their way in and out. P rows."""

    def __init__(self, forecaster: Forecaster, leaving: Collection[str], is_rounded: bool) -> None:
        """``leaving``: what goes on to other stages, by name."""
        self._forecaster, self._names, self._is_rounded = forecaster, leaving, is_rounded
        self._entered: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        """Of the last recall."""

    def recall(self, values: Values) -> Values:
        """What leaves of the rows that came in, [P, width] by name, with the last weights."""
        out = self._forecaster.recall(values)
        if self._is_rounded:
            self._entered, self._left = values, {name: out[name] for name in self._names}
        return out

    def run(self, values: Values) -> Values:
        """The same with the current weights; maps are fitted on the way."""
        if not self._is_rounded:
            return self._forecaster.run(values)
        now = {name: self._entered[name] + moved for name, moved in values.items()}
        out = self._forecaster.run(now)
        moved = {name: out[name] - was for name, was in self._left.items()}
        self._entered, self._left = {}, {}
        return moved


@dataclass(frozen=True)
class _Recalled:
    """What a forecast has to know of the last epoch, of one aggregation."""

    rows: Tensor | None
    """[p, F], what the pilots pushed; none where that does not move."""
    read: Tensor | None
    """What they read of the table as it is; none where it is read again, or not at all."""
    gram: Tensor | None


class Forecaster:
    """The pilot rows of one rank's stage, and the weights of the last epoch."""

    def __init__(
        self,
        stage_module: StageModule,
        histories: Mapping[str, History],
        structures: Callable[[Aggregation], LinearOperator | Blocks | Everyone],
        probes: Mapping[str, Tensor],
        rows: Rows,
        totals: Mapping[str, tuple[int, bool]],
        mesh: Mesh,
        dtype: torch.dtype,
        hands_on: bool = True,
    ) -> None:
        """By the type of the vertices, ``probes`` [p]: this shard's own rows among the pilot rows;
        ``totals``: those of all shards, and whether these are all vertices. Where the stage
        ``hands_on`` nothing to another one, what its last tables would give is not made.
        """
        self.stage_module, self.histories, self.mesh = stage_module, histories, mesh
        self.rows, self._totals = rows, totals
        self.num_rows = {name: len(mine) for name, mine in probes.items()}
        self.sent_bytes = 0
        self._num_steps = stage_module.num_steps if hands_on else stage_module.num_steps - 1
        self.maps: dict[str, AffineMap] = {}
        """By aggregation, of the last pass."""
        self.before = copy.deepcopy(stage_module)
        """With the weights of the last epoch."""
        self.is_ready = False
        """Whether the pilot rows have passed with these weights, and the tables are still those."""
        self._recalled: dict[str, _Recalled] = {}
        self._places: dict[tuple[str, str], Tensor] = {}
        """By aggregation, where what is recalled lies: the same in every epoch."""
        self._neighbours: dict[Hashable, _Neighbours] = {}
        self._stale: dict[Hashable, StaleRows] = {}
        self._over = {a.name: a.structure_key for a in stage_module.aggregations}
        for a in stage_module.aggregations:
            if a.structure_key in self._neighbours:
                continue
            structure, history = structures(a), histories[a.name]
            self._neighbours[a.structure_key] = _Neighbours(structure, probes[a.vertex_type], dtype)
            if not isinstance(structure, Everyone):
                # The measured rows, too: drift is what a forecast leaves.
                measured = None if history.drift is None else history.drift.rows
                self._stale[a.structure_key] = StaleRows(structure, history.layout, measured)

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the weights as those of the last epoch; called before they change."""
        for kept, now in zip(self.before.parameters(), self.stage_module.parameters(), strict=True):
            kept.copy_(now)

    def forget(self) -> None:
        """The tables are others now, or the weights of the last epoch."""
        self.is_ready = False
        self._recalled = {}

    @torch.no_grad()
    def recall(self, values: Values) -> Values:
        """Pass the pilot rows through this stage with the weights of ``before``; [p, width].

        Dropout is off: its noise, different in each epoch, is not movement. No table changes until
        the next ``run``.
        """
        received: dict[str, Received] = {}
        self._recalled = {}
        for step in range(self._num_steps):
            pushed, values = self.before.step(step, values, received, self.rows)
            received = {}
            for a in self._pushed(step):
                rows, read, history = pushed[a.name], None, self.histories[a.name]
                history.settle()
                neighbours = self._neighbours[a.structure_key]
                if step < self._num_steps - 1:
                    read = neighbours.read(history.table, rows)
                    received[a.name] = neighbours.received(history.table, read, rows)
                self._recalled[a.name] = _Recalled(
                    self._keep(a.name, "rows", rows) if a.moves else None,
                    None if read is None else self._keep(a.name, "read", read),
                    gram(rows) if a.moves and not a.is_mean else None,
                )
        self.is_ready = True
        return values

    def _keep(self, name: str, what: str, found: Tensor) -> Tensor:
        """A copy of ``found`` in its place.

        It is made amid the drain and read in front of the next fill: taken anew each time, it would
        lie where the fill's rows are to be, and those elsewhere, and the heap would grow by both.
        """
        place = self._places.get((name, what))
        if place is None or place.shape != found.shape or place.dtype != found.dtype:
            place = self._places[name, what] = torch.empty_like(found)
        return place.copy_(found)

    @torch.no_grad()
    def run(self, values: Values) -> Values:
        """Fit the maps of this stage on the way of the pilot rows, values [p, width], through it.

        The tables stay as they are until ``carry``, so that the next stage need not wait for that.
        """
        assert self.is_ready
        received: dict[str, Received] = {}
        self.maps = {}
        for step in range(self._num_steps):
            pushed, values = self.stage_module.step(step, values, received, self.rows)
            received, is_read = {}, step < self._num_steps - 1
            for a in self._pushed(step):
                rows, was = pushed[a.name], self._recalled.pop(a.name)
                neighbours, table = self._neighbours[a.structure_key], self.histories[a.name].table
                if was.rows is not None:
                    self.maps[a.name] = found = self._fit(was.rows, was.gram, rows, a)
                    if is_read:
                        received[a.name] = neighbours.foresee(table, was.read, rows, found)
                elif is_read:
                    received[a.name] = neighbours.received(table, was.read, rows)
        self.forget()
        return values

    def _pushed(self, step: int) -> tuple[Aggregation, ...]:
        """What the end of a step pushes."""
        return self.stage_module.rounds[step] if step < self.stage_module.num_steps - 1 else ()

    def _fit(self, old: Tensor, found: Tensor | None, new: Tensor, a: Aggregation) -> AffineMap:
        total, is_whole = self._totals[a.pushed_type]
        if a.is_mean:
            sums = mean_moments(old, new)
            self.sent_bytes += sum_over_shards(sums, self.mesh)
            return fit_shift(sums, total, old.dtype)
        sums = moments(old, new, found)
        self.sent_bytes += sum_over_shards(sums, self.mesh)
        return fit_affine(sums, total, old.shape[1], old.dtype, is_whole)

    def carry(self, order: Sequence[int], stale_pairs: npt.NDArray[np.bool_]) -> None:
        """Apply the maps to the rows that are read stale (see ``StaleRows.in_order``)."""
        for name, found in self.maps.items():
            stale = self._stale.get(self._over[name])
            rows = None if stale is None else stale.in_order(order, stale_pairs)
            self.histories[name].move(found.factor, found.shift, rows)


class _Neighbours:
    """What the pilot rows [p, F] read of a table, before and after a map, with one product."""

    def __init__(
        self, structure: LinearOperator | Blocks | Everyone, probes: Tensor, dtype: torch.dtype
    ) -> None:
        self.block: Block | None = None
        self._linear: RowCSR | None = None
        if isinstance(structure, Everyone):
            return
        if isinstance(structure, Blocks):
            self.block = structure.select(probes)
            self._is_square = structure.is_square
        else:
            self._linear = structure.forward.select(probes)
            ones = self._linear.values.new_ones(self._linear.num_columns, 1)
            self._weights = self._linear.matmul(ones).to(dtype)

    def read(self, table: Tensor, own: Tensor) -> Tensor | None:
        """What they read of a table; none where the block's own code must."""
        if self._linear is not None:
            return self._linear.matmul(table).to(own.dtype)
        return table.sum(0).to(own.dtype) if self.block is None else None

    def received(self, table: Tensor, read: Tensor | None, own: Tensor) -> Received:
        """What the next step gets of the table as it is."""
        if read is None:
            assert self.block is not None
            return self._of_block(table[self.block.halo_rows].to(own.dtype), own)
        return Received(read if self._linear is not None else read.expand(len(own), -1))

    def foresee(self, table: Tensor, was: Tensor | None, new: Tensor, found: AffineMap) -> Received:
        """What the next step gets of the table as it will be."""
        if was is None:
            assert self.block is not None
            halo = table[self.block.halo_rows].to(new.dtype)
            return self._of_block(torch.addmm(found.shift, halo, found.factor), new)
        if self._linear is not None:
            return Received(was @ found.factor + self._weights * found.shift)
        return Received((was + found.shift).expand(len(new), -1))

    def _of_block(self, halo: Tensor, own: Tensor) -> Received:
        return Received(torch.cat([own, halo]) if self._is_square else halo, self.block)

"""Forecast of stale rows: predicts their values under the current weights.

From one epoch to the next the rows of a history table change because the weights change, and all
rows change in a similar way: an affine map, fitted to a few rows, explains most of the change (80
to 97 % of what a layer aggregates on real graphs, docs/benchmarks/staleness.md). A small fixed set
of probe vertices is run through all layers before the first chunk of an epoch: with the weights
that wrote the tables, and with the current ones (``run``). At each layer a map from the old to the
new probe rows is fitted, and then applied to all stale rows of the table (``carry``). Stale rows
stay constants in backward.

Shapes: P probe vertices on all shards, p on this shard, F columns. With frozen weights, old and new
rows are equal, and the map is the identity bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
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
    mean_moments,
    moments,
)

_Structure = LinearOperator | Blocks | Everyone


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """Probe vertices of one rank."""

    rows: Rows
    own: Mapping[str, Tensor]
    """By vertex type [p], the own rows of the shard that are probe vertices."""
    totals: Mapping[str, tuple[int, bool]]
    """By vertex type, the probe vertices on all shards, and whether these are all vertices."""


class Forecaster:
    """Probe vertices of one rank's stage, and the stage's weights of the last epoch."""

    def __init__(
        self,
        stage_module: StageModule,
        histories: Mapping[str, History],
        structures: Mapping[str, _Structure],
        probes: ProbeRows,
        mesh: Mesh,
        is_rounded: bool,
        leaving: Collection[str],
        edges_are_random: bool = False,
    ) -> None:
        """Prepare the forecast of one stage.

        Args:
            stage_module: The ops of the stage.
            histories: Histories by name of the aggregation.
            structures: Matrix, blocks or mean by name of the aggregation; aggregations may share
                one.
            probes: The probe vertices.
            mesh: The ranks.
            is_rounded: Values are rounded in messages to other stages.
            leaving: Names of the values that go to other stages.
            edges_are_random: An epoch reads rows that ``structures`` do not read.
        """
        self.stage_module, self.histories, self.mesh = stage_module, histories, mesh
        self.num_rows = {name: len(own) for name, own in probes.own.items()}
        self.sent_bytes = 0
        self.maps: dict[str, AffineMap] = {}
        """By aggregation, from the last ``run``."""
        self.before = copy.deepcopy(stage_module)
        """The ops with the weights of the last epoch."""
        self._probes, self._leaving, self._is_rounded = probes, leaving, is_rounded
        # If no value leaves the stage, the last step is not needed.
        self._num_steps = stage_module.num_steps - (not leaving)
        self._over = structures
        self._neighbours: dict[_Structure, _Neighbours] = {}
        self._stale: dict[_Structure, StaleRows] = {}
        for a in stage_module.aggregations:
            structure, history = structures[a.name], histories[a.name]
            if structure in self._neighbours:
                continue
            self._neighbours[structure] = _Neighbours(structure, probes.own[a.vertex_type])
            if not isinstance(structure, Everyone) and not edges_are_random:
                # Rows whose drift is measured count as stale: drift is the error of the forecast.
                measured = None if history.drift is None else history.drift.rows
                self._stale[structure] = StaleRows(structure, history.layout, measured)

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the current weights to ``before``; call this before the optimizer's step."""
        for kept, now in zip(self.before.parameters(), self.stage_module.parameters(), strict=True):
            kept.copy_(now)

    @torch.no_grad()
    def run(self, values: Values) -> Values:
        """Run the probe vertices with the old and the new weights and fit ``maps``, layer by layer.

        Dropout is off: its noise differs between epochs and would be fitted as a change. The tables
        change later, in ``carry``, so that the next stage need not wait for the tables.

        Args:
            values: By name, [2 p, width] from earlier stages: rows with the old weights, then those
                with the new ones. If messages are rounded, then instead the changes of the rows:
                the error is relative to the change.

        Returns:
            The same for later stages.
        """
        halves = {name: rows.tensor_split(2) for name, rows in values.items()}
        old_values = {name: old for name, (old, _) in halves.items()}
        new_values = {name: new for name, (_, new) in halves.items()}
        if self._is_rounded:
            new_values = {name: old + change for name, (old, change) in halves.items()}
        old_received: dict[str, Received] = {}
        new_received: dict[str, Received] = {}
        self.maps = {}
        for step in range(self._num_steps):
            rows = self._probes.rows
            old_pushed, old_values = self.before.step(step, old_values, old_received, rows)
            new_pushed, new_values = self.stage_module.step(step, new_values, new_received, rows)
            old_received, new_received = {}, {}
            for a in self._pushed(step):
                old, new = old_pushed[a.name], new_pushed[a.name]
                if a.moves:
                    self.maps[a.name] = self._fit(old, new, a)
                if step < self._num_steps - 1:
                    old_received[a.name], new_received[a.name] = self._aggregate(a, old, new)
        if self._is_rounded:
            new_values = {name: new_values[name] - old_values[name] for name in self._leaving}
        return {name: torch.cat([old_values[name], new_values[name]]) for name in self._leaving}

    def _aggregate(self, a: Aggregation, old: Tensor, new: Tensor) -> tuple[Received, Received]:
        """Return the next step's inputs: from the table, and from the table after the map."""
        neighbours, table = self._neighbours[self._over[a.name]], self.histories[a.name].table
        read = neighbours.read(table, old)
        received = neighbours.received(table, read, old)
        if not a.moves:
            return received, neighbours.received(table, read, new)
        return received, neighbours.foresee(table, read, new, self.maps[a.name])

    def _pushed(self, step: int) -> tuple[Aggregation, ...]:
        """Return the aggregations that a step pushes rows for."""
        return self.stage_module.rounds[step] if step < self.stage_module.num_steps - 1 else ()

    def _fit(self, old: Tensor, new: Tensor, a: Aggregation) -> AffineMap:
        total, is_whole = self._probes.totals[a.pushed_type]
        sums = mean_moments(old, new) if a.is_mean else moments(old, new)
        self.sent_bytes += sum_over_shards(sums, self.mesh)
        if a.is_mean:
            return fit_shift(sums, total, old.dtype)
        return fit_affine(sums, total, old.shape[1], old.dtype, is_whole)

    def carry(self, order: Sequence[int], stale_pairs: npt.NDArray[np.bool_]) -> None:
        """Apply the maps to the rows that are read stale (arguments of ``StaleRows.in_order``)."""
        for name, found in self.maps.items():
            stale = self._stale.get(self._over[name])
            rows = None if stale is None else stale.in_order(order, stale_pairs)
            self.histories[name].move(found, rows)


class _Neighbours:
    """Aggregation of the probe vertices' neighbours, from a table or from the mapped table.

    The mapped rows are not computed: the map of ``A T`` with the weights ``A 1`` is the aggregation
    of the mapped table T.
    """

    def __init__(self, structure: _Structure, probes: Tensor) -> None:
        self.block: Block | None = None
        self._linear: RowCSR | None = None
        if isinstance(structure, Blocks):
            self.block = structure.select(probes)
            self._is_square = structure.is_square
        elif isinstance(structure, LinearOperator):
            self._linear = structure.forward.select(probes)
            ones = self._linear.values.new_ones(self._linear.num_columns, 1)
            self._weights = self._linear.matmul(ones)

    def read(self, table: Tensor, own: Tensor) -> Tensor | None:
        """Return the rows aggregated from a table; ``None`` if a convolution aggregates."""
        if self._linear is not None:
            return self._linear.matmul(table).to(own.dtype)
        return table.sum(0).to(own.dtype) if self.block is None else None

    def received(self, table: Tensor, read: Tensor | None, own: Tensor) -> Received:
        """Return the next step's input; ``read``: the result of ``self.read`` for this table."""
        if read is None:
            assert self.block is not None
            return self._block_input(table[self.block.halo_rows].to(own.dtype), own)
        return Received(read if self._linear is not None else read.expand(len(own), -1))

    def foresee(
        self, table: Tensor, read: Tensor | None, new: Tensor, found: AffineMap
    ) -> Received:
        """Return the next step's input after the map is applied to the table's rows."""
        if read is None:
            assert self.block is not None
            halo = table[self.block.halo_rows].to(new.dtype)
            return self._block_input(found.apply(halo), new)
        if self._linear is not None:
            return Received(found.apply(read, self._weights.to(read.dtype)))
        return Received((read + found.shift).expand(len(new), -1))

    def _block_input(self, halo: Tensor, own: Tensor) -> Received:
        return Received(torch.cat([own, halo]) if self._is_square else halo, self.block)

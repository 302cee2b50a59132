"""Which rows of a message go to which rank of another stage.

Stages may have different numbers of shards. A message between two stages then has a part for each
pair of shards that own rows in common; in every chunk these rows are consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray
from gnnpipe.graph.layout import common_rows
from gnnpipe.plan import Plan
from gnnpipe.schedule import SpecialPosition

Pieces = Sequence[tuple[int, slice]]
"""Rank of another stage and rows of a value, for each piece that the rank sends or gets."""


@dataclass(frozen=True, eq=False)
class RowLinks:
    """The rows that a rank has in common with the ranks of other stages, by vertex type."""

    plan: Plan
    rank: int
    chunkings: Sequence[Chunking]
    """By stage, the rows of its shards."""
    row_types: Mapping[str, BoolArray]
    """By vertex type [N], the rows of the type."""
    probes: npt.NDArray[np.int64]
    """Rows of the probe vertices."""
    _tables: dict[tuple[int, str, bool], list[tuple[int, npt.NDArray[np.int64]]]] = field(
        default_factory=dict, init=False
    )
    """Ranks of a stage with their first row and end in each chunk [K, 2], by stage, vertex type and
    whether only probe vertices count."""
    _row_counts: dict[tuple[str, bool], npt.NDArray[np.int64]] = field(
        default_factory=dict, init=False
    )
    """Own rows of each chunk [K], by vertex type and whether only probe vertices count."""

    def pieces(self, stage: int, chunk: int, vertex_type: str) -> Pieces:
        """Return the pieces of a value that is exchanged with ``stage``.

        ``chunk``: the chunk; ``SpecialPosition.PROBE``: the value has the rows of the probe
        vertices with the old weights and then their changes; ``SpecialPosition.NO_CHUNK``: the
        value has all own rows.
        """
        is_probe = chunk == SpecialPosition.PROBE
        table = self._table(stage, vertex_type, is_probe)
        if chunk >= 0:
            return [(rank, slice(*rows[chunk].tolist())) for rank, rows in table]
        bounds = self.plan.split.bounds
        if bounds[stage] == bounds[self.plan.placement.stage(self.rank)]:
            return [(table[0][0], slice(0, self.num_rows(chunk, vertex_type)))]
        first = np.concatenate([[0], np.cumsum(self._counts(vertex_type, is_probe))])
        found = []
        for rank, rows in table:
            runs = rows + first[:-1, None]
            found += [(rank, slice(*run)) for run in runs.tolist()]
            if is_probe:
                found += [(rank, slice(*run)) for run in (runs + first[-1]).tolist()]
        return found

    def num_rows(self, chunk: int, vertex_type: str) -> int:
        """Return the rows of a value on this rank; ``chunk`` as in ``pieces``."""
        if chunk >= 0:
            return int(self._counts(vertex_type, False)[chunk])
        is_probe = chunk == SpecialPosition.PROBE
        return int(self._counts(vertex_type, is_probe).sum()) * (1 + is_probe)

    def _table(
        self, stage: int, vertex_type: str, only_probes: bool
    ) -> list[tuple[int, npt.NDArray[np.int64]]]:
        key = stage, vertex_type, only_probes
        if key not in self._tables:
            placement, rows = self.plan.placement, self._rows(vertex_type, only_probes)
            mine, shard = placement.place(self.rank)
            own, other = self.chunkings[mine], self.chunkings[stage]
            self._tables[key] = [
                (placement.rank(stage, j), common_rows(own, shard, other, j, rows))
                for i, j in self.plan.split.overlaps(mine, stage)
                if i == shard
            ]
        return self._tables[key]

    def _counts(self, vertex_type: str, only_probes: bool) -> npt.NDArray[np.int64]:
        key = vertex_type, only_probes
        if key not in self._row_counts:
            stage, shard = self.plan.placement.place(self.rank)
            own = self.chunkings[stage]
            both = common_rows(own, shard, own, shard, self._rows(*key))
            self._row_counts[key] = both[:, 1] - both[:, 0]
        return self._row_counts[key]

    def _rows(self, vertex_type: str, only_probes: bool) -> BoolArray:
        """Rows [N] of a vertex type, or those of them that are probe vertices."""
        rows = self.row_types[vertex_type]
        if not only_probes:
            return rows
        is_probe = np.zeros(len(rows), dtype=bool)
        is_probe[self.probes] = True
        return rows & is_probe

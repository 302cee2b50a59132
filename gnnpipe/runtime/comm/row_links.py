"""Which rows of a message go to which rank of another stage.

Stages may have different numbers of shards. A message between two stages then has a part for each
pair of shards that own rows in common; in every chunk these rows are consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray
from gnnpipe.graph.layout import common_rows
from gnnpipe.plan import Plan
from gnnpipe.schedule import SpecialPosition

Pieces = Sequence[tuple[int, slice]]
"""Ranks of another stage, ascending, and the rows of a value that each of them sends or gets."""


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

    def pieces(self, stage: int, chunk: int, vertex_type: str) -> Pieces:
        """Return the pieces of a value that is exchanged with ``stage``.

        ``chunk``: the chunk; ``SpecialPosition.PROBE``: the value has the rows of the probe
        vertices with the old weights and then their changes; ``SpecialPosition.NO_CHUNK``: the
        value has all own rows.
        """
        if chunk >= 0:
            table = self._tables[stage, vertex_type, False]
            return [(rank, slice(*rows[chunk].tolist())) for rank, rows in table]
        is_probe = chunk == SpecialPosition.PROBE
        table = self._tables[stage, vertex_type, is_probe]
        counts = self._counts[vertex_type, is_probe]
        first = np.concatenate([[0], np.cumsum(counts)])
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
            return int(self._counts[vertex_type, False][chunk])
        is_probe = chunk == SpecialPosition.PROBE
        return int(self._counts[vertex_type, is_probe].sum()) * (1 + is_probe)

    @cached_property
    def _masks(self) -> dict[tuple[str, bool], BoolArray]:
        """Rows by vertex type; and those of them that are probe vertices."""
        is_probe = np.zeros(len(self.chunkings[0].perm), dtype=bool)
        is_probe[self.probes] = True
        return {
            (name, only_probes): rows & is_probe if only_probes else rows
            for name, rows in self.row_types.items()
            for only_probes in (False, True)
        }

    @cached_property
    def _counts(self) -> dict[tuple[str, bool], npt.NDArray[np.int64]]:
        """Own rows of each chunk, [K]."""
        stage, shard = self.plan.placement.place(self.rank)
        own = self.chunkings[stage]
        rows = {key: common_rows(own, shard, own, shard, mask) for key, mask in self._masks.items()}
        return {key: both[:, 1] - both[:, 0] for key, both in rows.items()}

    @cached_property
    def _tables(self) -> dict[tuple[int, str, bool], list[tuple[int, npt.NDArray[np.int64]]]]:
        """Ranks of each stage with their first row and end in each chunk, [K, 2]."""
        placement, own = self.plan.placement, self.chunkings
        mine, shard = placement.place(self.rank)
        return {
            (stage, *key): [
                (placement.rank(stage, j), common_rows(own[mine], shard, own[stage], j, mask))
                for i, j in self.plan.split.overlaps(mine, stage)
                if i == shard
            ]
            for stage in range(placement.num_stages)
            if stage != mine
            for key, mask in self._masks.items()
        }

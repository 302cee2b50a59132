"""Parts of ops in the steps of a stage, and the work of each part for a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gnnpipe.perf.fit import Work
from gnnpipe.perf.volume import ShardRows
from gnnpipe.plan import ModelGraph, Op, ShardSplit

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Side(StrEnum):
    """Side of an op's aggregation; the value ends the names of fields in ``OpTimes``."""

    BEFORE = "before"
    """Before the rows are pushed."""
    AFTER = "after"


class Part(NamedTuple):
    """A part of an op."""

    op: int
    side: Side


def step_parts(model: ModelGraph, ops: Sequence[int]) -> list[list[Part]]:
    """Return the parts of each step of a stage; an op without a push has the part AFTER only."""
    steps: list[list[Part]] = [[] for _ in range(model.num_steps(ops))]
    for i, depth in zip(ops, model.depths(ops), strict=True):
        op = model.ops[i]
        if op.aggregates:
            steps[depth - 1].append(Part(i, Side.BEFORE))
        steps[depth].append(Part(i, Side.AFTER))
    return steps


def _no_counts() -> Counts:
    return np.zeros((0, 0), dtype=np.int64)


INDEX_BYTES = 8
"""Bytes of an edge's column and weight, which are read for any number of columns (assumed)."""
SECTOR_BYTES = 32
"""Bytes of a row that are read at least (assumed)."""


def column_work(own: Floats, width: int, number_bytes: int) -> Floats:
    """Return the work of aggregating some columns, relative to all columns.

    It grows with the bytes that are read for an edge: its index, and the columns of a row.

    Args:
        own: [G] numbers of columns.
        width: F.
        number_bytes: Of a number in the rows.
    """
    read = np.maximum(own * number_bytes, min(SECTOR_BYTES, width * number_bytes)) + INDEX_BYTES
    found: Floats = (own > 0) * read / (width * number_bytes + INDEX_BYTES)
    return found


@dataclass(frozen=True)
class ChunkSizes:
    """Numbers of rows, edges and features of the chunks of every shard, [G, K] each.

    Keys are the types of history tables: '' if there is only one type of vertices; with link
    prediction also the type of the pairs.
    """

    rows: Mapping[str, Counts]
    edges: Mapping[str, Counts]
    """Edges into the rows of a type, from all types; for pairs their number."""
    entries: Mapping[str, Counts]
    """Stored numbers of the features."""
    boundary: Mapping[str, Counts]
    """Own rows that other shards read, counted once for each of these shards."""
    halo: Mapping[str, Counts]
    """Rows of other shards that are read."""
    stale: Mapping[str, Counts]
    """[G] own and halo rows that are read stale, the mean over all orders of the chunks."""
    probes: Mapping[str, Counts]
    """[G] probe rows among the own rows."""
    loss_rows: frozenset[str] = frozenset()
    """Ops that compute only the loss rows (``plan.choose_loss_rows``)."""
    loss_row_counts: Counts = field(default_factory=_no_counts)
    loss_row_edges: Counts = field(default_factory=_no_counts)
    """Edges into the loss rows."""
    loss_row_source_edges: Counts = field(default_factory=_no_counts)
    """The same edges by the chunk of their source, halo rows included."""
    stale_edges: Mapping[str, Counts] = field(default_factory=dict)
    """Edges over which no gradient returns. Those whose source is read stale, the mean over all
    orders: half of the edges between chunks; all of these if gradients stay in their chunk; empty
    if nothing is stale."""
    shared: frozenset[str] = frozenset()
    """Ops whose gradients return over live edges alone (``plan.shared_tables``), or over those
    inside their chunk."""

    @property
    def shard_rows(self) -> ShardRows:
        """Rows of the shards in all chunks."""
        own = {t: counts.sum(1).tolist() for t, counts in self.rows.items()}
        return ShardRows(own, self.loss_row_counts.sum(1).tolist(), self.loss_rows)

    @property
    def chunks(self) -> int:
        """K."""
        return int(next(iter(self.rows.values())).shape[1])

    @property
    def shards(self) -> int:
        """G."""
        return int(next(iter(self.rows.values())).shape[0])

    def work(self, op: Op, side: Side, shard: int, chunk: int) -> Work:
        """Return the work of a part for one chunk."""
        rows, edges, entries = (int(counts[shard, chunk]) for counts in self.columns(op, side))
        return Work(rows, edges, entries)

    def feature_work(self, op: Op, shard: int) -> Work:
        """Return the rows and stored features of all chunks, as work."""
        rows, entries = self.rows[op.vertex_type][shard], self.entries[op.vertex_type][shard]
        return Work(int(rows.sum()), entries=int(entries.sum()))

    def begin_work(self, ops: Iterable[Op], shard: int) -> Work:
        """Return the work at the start of an epoch: cleared numbers as rows, mask numbers as edges.

        With a single chunk no gradient tables are cleared, but masks are drawn.
        """
        pushing = [op for op in ops if op.aggregates]
        numbers = [op.push_width * int(self.rows[op.pushed_type][shard].sum()) for op in pushing]
        cleared = [n * op.clears for n, op in zip(numbers, pushing, strict=True)]
        return Work(sum(cleared) * (self.chunks > 1), sum(numbers), times=len(pushing))

    def columns(self, op: Op, side: Side) -> tuple[Counts, Counts, Counts]:
        """Return the rows, edges and entries that a part processes, [G, K] each."""
        zeros = np.zeros((self.shards, self.chunks), dtype=np.int64)
        entries = edges = zeros
        if op.reads_features and side is (Side.BEFORE if op.aggregates else Side.AFTER):
            entries = self.entries[op.vertex_type]
        if op.aggregates and not op.is_mean:
            edges = self.edges[op.pushed_type if op.over_pairs else op.vertex_type]
        if op.name in self.loss_rows and op.aggregates:
            edges = self.loss_row_source_edges if side is Side.BEFORE else self.loss_row_edges
        if side is Side.BEFORE:
            # Only the backward product of this part works on edges.
            if op.name in self.shared and self.stale_edges:
                every = np.maximum(self.edges[op.vertex_type], 1)
                share = self.stale_edges[op.vertex_type] / every
                edges = np.round(edges * (1 - share)).astype(np.int64)
            return self.rows[op.pushed_type], edges, entries
        if op.name in self.loss_rows:
            return self.loss_row_counts, edges, entries
        return edges if op.over_pairs else self.rows[op.vertex_type], edges, entries


@dataclass(frozen=True)
class PlanSizes:
    """Sizes of the chunks in every stage of a plan."""

    stages: tuple[ChunkSizes, ...]
    """By stage; stages of equal shards have equal sizes."""
    split: ShardSplit
    """The shards of the stages."""
    part_rows: Mapping[str, Counts]
    """[P, K] rows of the parts of the chunks, by vertex type."""
    part_probes: Mapping[str, Counts]
    """[P] probe rows of the parts."""

    @classmethod
    def equal(cls, sizes: ChunkSizes, split: ShardSplit) -> PlanSizes:
        """Return the sizes of a plan whose stages have the same shards."""
        return cls((sizes,) * len(split.bounds), split, sizes.rows, sizes.probes)

    def rows_between(
        self, stage: int, other: int, vertex_type: str
    ) -> dict[tuple[int, int], Counts]:
        """Return the rows [K] that a shard of ``stage`` and a shard of ``other`` own, by pair."""
        return self._between(stage, other, self.part_rows[vertex_type])

    def probes_between(
        self, stage: int, other: int, vertex_type: str
    ) -> dict[tuple[int, int], Counts]:
        """Return the probe rows that shards of both stages own, by pair."""
        return self._between(stage, other, self.part_probes[vertex_type])

    def _between(self, stage: int, other: int, parts: Counts) -> dict[tuple[int, int], Counts]:
        mine, theirs = self.split.bounds[stage], self.split.bounds[other]
        found = {}
        for i, j in self.split.overlaps(stage, other):
            first, last = max(mine[i], theirs[j]), min(mine[i + 1], theirs[j + 1])
            found[i, j] = parts[first:last].sum(0)
        return found

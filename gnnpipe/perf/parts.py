"""Which parts of which ops lie in a step of a stage, and what they have to do for a chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gnnpipe.perf.fit import Work
from gnnpipe.plan import ModelGraph, Op

__all__ = ["ChunkSizes", "Part", "step_parts"]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """What an op does before its push ('before') or after its aggregation ('after')."""

    op: int
    side: str


def step_parts(
    model: ModelGraph, first: int, last: int, precomputed: Collection[str] = ()
) -> list[list[Part]]:
    """By step of a stage of ops first..last-1; an op without a push is all 'after'.

    ``precomputed``: ops that push nothing, for what they aggregate is there; all they do is done
    behind.
    """
    steps: list[list[Part]] = [[] for _ in range(model.num_steps(first, last))]
    for i, depth in enumerate(model.depths(first, last), first):
        op = model.ops[i]
        if op.aggregates:
            steps[depth - (op.name not in precomputed)].append(Part(i, "before"))
        steps[depth].append(Part(i, "after"))
    return steps


def _no_counts() -> Counts:
    return np.zeros((0, 0), dtype=np.int64)


@dataclass(frozen=True)
class ChunkSizes:
    """What the chunks of a cut hold, shard by shard: [G, K] each.

    By the type that tables go by: '' if there is but one type of vertices, and for links also that
    of the pairs.
    """

    rows: Mapping[str, Counts]
    edges: Mapping[str, Counts]
    """Edges into the rows of a type, from all types; of pairs the pairs."""
    entries: Mapping[str, Counts]
    """Stored numbers of the features."""
    boundary: Mapping[str, Counts]
    """Own rows that other shards read, once for each of them."""
    halo: Mapping[str, Counts]
    """Rows of other shards that are read."""
    stale: Mapping[str, Counts]
    """[G] own and halo rows that are read stale, the mean over all orders of the chunks."""
    probes: Mapping[str, Counts]
    """[G] pilot rows among the own rows."""
    precomputed: frozenset[str] = frozenset()
    """Ops whose aggregation is made once for all epochs."""
    loss_rows: frozenset[str] = frozenset()
    """Ops whose values are made of the rows that the loss asks for alone
    (``plan.choose_loss_rows``)."""
    loss_row_counts: Counts = field(default_factory=_no_counts)
    """Those rows, and the edges into them."""
    asked_edges: Counts = field(default_factory=_no_counts)
    asked_pulled: Counts = field(default_factory=_no_counts)
    """The same edges by the chunk that they lead from, halo rows' chunks counted."""
    stale_edges: Mapping[str, Counts] = field(default_factory=dict)
    """Those of ``edges`` that stale rows are read over, the mean over all orders: half of what
    leads from one chunk to another; none where nothing is stale."""
    shared: frozenset[str] = frozenset()
    """Ops whose gradients are brought back over live edges alone (``plan.shared_tables``)."""

    @property
    def chunks(self) -> int:
        """K."""
        return int(next(iter(self.rows.values())).shape[1])

    @property
    def shards(self) -> int:
        """G."""
        return int(next(iter(self.rows.values())).shape[0])

    def work(self, op: Op, side: str, shard: int, chunk: int) -> Work:
        """What a part has to do for one chunk."""
        rows, edges, entries = (int(counts[shard, chunk]) for counts in self.columns(op, side))
        return Work(rows, edges, entries)

    def whole(self, op: Op, shard: int) -> Work:
        """Rows and entries of all chunks that an op reads features of."""
        rows, entries = self.rows[op.vertex_type][shard], self.entries[op.vertex_type][shard]
        return Work(int(rows.sum()), entries=int(entries.sum()))

    def begun(self, ops: Iterable[Op], shard: int) -> Work:
        """What an epoch begins with: numbers of cleared tables (rows), and of masks (edges).

        A single chunk's gradients are not kept. Masks are made for it, too.
        """
        pushing = [op for op in ops if op.aggregates]
        numbers = [op.push_width * int(self.rows[op.pushed_type][shard].sum()) for op in pushing]
        cleared = [n * op.clears for n, op in zip(numbers, pushing, strict=True)]
        return Work(sum(cleared) * (self.chunks > 1), sum(numbers), times=len(pushing))

    def columns(self, op: Op, side: str) -> tuple[Counts, Counts, Counts]:
        """Rows, edges and entries [G, K] that a part has to do with."""
        nothing = np.zeros((self.shards, self.chunks), dtype=np.int64)
        entries = edges = nothing
        if op.reads_features and side == ("before" if op.aggregates else "after"):
            entries = self.entries[op.vertex_type]
        if op.aggregates and not op.is_mean and op.name not in self.precomputed:
            edges = self.edges[op.pushed_type if op.over_pairs else op.vertex_type]
        if op.name in self.loss_rows and op.aggregates:
            edges = self.asked_pulled if side == "before" else self.asked_edges
        if side == "before":
            # What a product brings back; the way forward there has none.
            if op.name in self.shared and self.stale_edges:
                every = np.maximum(self.edges[op.vertex_type], 1)
                share = self.stale_edges[op.vertex_type] / every
                edges = np.round(edges * (1 - share)).astype(np.int64)
            return self.rows[op.pushed_type], edges, entries
        if op.name in self.loss_rows:
            return self.loss_row_counts, edges, entries
        return edges if op.over_pairs else self.rows[op.vertex_type], edges, entries

"""What the loss asks for: behind the last aggregation only the rows of training vertices matter.

Rows that no label is held against change neither the loss nor a gradient, so training makes none of
them: the last aggregation of the last stage is a product with the rows of its matrix that are asked
for, and whatever is made of it comes in as many rows. Evaluation makes them all. A table is pushed
whole, for who is asked for reads neighbours who are not.

Those rows of the matrix, and their transpose, are kept beside the whole one: that is done where
they take no more memory than a layer keeps of all rows anyway (docs/adr/0027).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gnnpipe.plan.model_graph import ModelGraph, Op

__all__ = ["ALL_ROWS", "Asked", "asked_of"]

_INDEX_BYTES = 4

MOST = 0.75
"""Share of the vertices that are trained on: with more, to copy what goes on to the rows asked for
costs what is won."""


@dataclass(frozen=True)
class Asked:
    """The rows asked for, of the whole graph or of a shard."""

    rows: int
    """Training vertices."""
    edges: int
    """Edges into them."""
    ops: frozenset[str] = frozenset()
    """Whose values are made of these rows alone; none where all are made."""

    def rows_of(self, op: str, every: int) -> int:
        """Rows that an op makes where others make ``every`` one."""
        return self.rows if op in self.ops else every

    def kept_numbers(self, op: Op, every: int, recompute: bool) -> int:
        """Numbers that an op keeps until backward where others make ``every`` row."""
        pushed, made, held = op.kept_by_rows(recompute)
        if op.name not in self.ops:
            return (pushed + made) * every
        # What goes on to it is a copy, of the rows asked for.
        return pushed * every + (made + held) * self.rows

    def structure_bytes(self, row_bytes: int) -> int:
        """Of the matrix and its transpose, a loop for each row counted."""
        return 2 * (self.edges + self.rows) * (_INDEX_BYTES + row_bytes)


ALL_ROWS = Asked(0, 0)
"""All of them are made."""


def asked_of(
    model: ModelGraph,
    last_stage: tuple[int, int],
    rows: int,
    num_vertices: int,
    edges: int,
    *,
    once: Collection[str],
    number_bytes: int,
    row_bytes: int,
) -> Asked:
    """What is asked for of N vertices where ``rows`` are trained on, ``edges`` lead into those.

    Of ops ``last_stage``; ``once``: aggregations whose result is there anyway (``plan.once``).
    Of a graph with several types of vertices, and of links, all rows are made. With ``--recompute``
    it is the same as without, to give the same bits.
    """
    first, last = last_stage
    depths = model.depths(first, last)
    end = max(depths, default=0)
    behind = [op for op, d in zip(model.ops[first:last], depths, strict=True) if d == end]
    can = end > 0 and not any(op.vertex_type for op in behind)
    for op in behind:
        if op.aggregates:
            is_product = op.is_linear and not op.is_mean and not op.over_pairs
            can = can and is_product and op.name not in once
        else:
            can = can and not op.reads_features
    found = Asked(rows, edges, frozenset(op.name for op in behind))
    kept_bytes = max(op.kept_per_row for op in model.ops) * num_vertices * number_bytes
    is_small = found.structure_bytes(row_bytes) <= kept_bytes
    return found if can and is_small and rows <= MOST * num_vertices else ALL_ROWS

"""What the loss asks for: behind the last aggregation only the rows of training vertices matter.

Rows that no label is held against change neither the loss nor a gradient, so training makes none of
them: the last aggregation of the last stage is a product with the rows of its matrix that are asked
for, and whatever is made of it comes in as many rows. Evaluation makes them all. A table is pushed
whole, for who is asked for reads neighbours who are not.

Those rows of the matrix, and their transpose, are kept beside the whole one, and what goes on to
them beside the aggregation is copied: it is done where that takes no more memory than a layer keeps
of all rows anyway, and less time than it saves (docs/adr/0027).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gnnpipe.plan.model_graph import EDGE_FLOPS, KEPT_FLOPS, ModelGraph, Op

__all__ = ["ALL_ROWS", "LossRows", "choose_loss_rows"]

_INDEX_BYTES, _ROW_BYTES = 4, 20
"""Of a column, and of a row its dropout key, its vertex and its place in the chunk."""

_MOST = 0.75
"""Share of the rows; where more are asked for, too little is won to keep rows of a matrix twice."""


@dataclass(frozen=True)
class LossRows:
    """The rows asked for, of the whole graph or of a shard."""

    rows: int
    edges: int
    """Those that lead into these rows."""
    ops: frozenset[str] = frozenset()
    """Whose values are made of these rows alone; none where all are made."""
    carried: int = 0
    """Numbers of a row that go on to row-wise ops among them from in front of the aggregation."""

    def rows_of(self, op: str, every: int) -> int:
        """Rows that an op makes where others make ``every`` one."""
        return self.rows if op in self.ops else every

    def kept_numbers(self, op: Op, every: int, recompute: bool) -> int:
        """Numbers that an op keeps until backward where others make ``every`` row."""
        pushed, made, held = op.kept_by_rows(recompute)
        if op.name not in self.ops:
            return (pushed + made) * every
        # What it holds is a copy, of the rows asked for.
        return pushed * every + (made + held) * self.rows

    def structure_bytes(self, row_bytes: int) -> int:
        """Of the matrix and its transpose, a loop for each row counted, and the rows' numbers."""
        return 2 * (self.edges + self.rows) * (_INDEX_BYTES + row_bytes) + _ROW_BYTES * self.rows


ALL_ROWS = LossRows(0, 0)
"""All of them are made."""


def choose_loss_rows(
    model: ModelGraph,
    last_stage: tuple[int, int],
    rows: int,
    num_vertices: int,
    edges: int,
    num_edges: int,
    *,
    precomputed: Collection[str],
    number_bytes: int,
    row_bytes: int,
) -> LossRows:
    """What is asked for of N vertices and E edges: ``rows``, and ``edges`` that lead into those.

    Of ops ``last_stage``; ``precomputed``: aggregations whose result is there anyway
    (``plan.precomputed``). Of a graph with several types of vertices, and of links, all rows are
    made. With ``--recompute`` it is the same as without, to give the same bits.
    """
    first, last = last_stage
    depths = model.depths(first, last)
    end = max(depths, default=0)
    behind = [op for op, d in zip(model.ops[first:last], depths, strict=True) if d == end]
    if (
        end == 0
        or rows > _MOST * num_vertices
        or not all(_can_make_few(op, precomputed) for op in behind)
    ):
        return ALL_ROWS
    found = LossRows(rows, edges, frozenset(op.name for op in behind), _carried(model, behind))
    kept_bytes = max(op.kept_per_row for op in model.ops) * num_vertices * number_bytes
    saved = sum(
        (num_vertices - rows)
        * (op.flops_per_row + KEPT_FLOPS * (op.written_per_row - op.kept_before))
        + (num_edges - edges) * EDGE_FLOPS * op.push_width
        for op in behind
    )
    # To copy a number forward, and in backward to clear and to add, takes about what a kept one
    # does.
    copied = found.carried + sum(sum(op.kept_widths.values()) for op in behind)
    copying = KEPT_FLOPS * copied * (num_vertices + rows)
    is_small = found.structure_bytes(row_bytes) <= kept_bytes
    return found if is_small and copying < saved else ALL_ROWS


def _can_make_few(op: Op, precomputed: Collection[str]) -> bool:
    """A row-wise op, or a product of its own in every epoch; features are there for all rows."""
    if op.vertex_type or op.reads_features:
        return False
    is_product = op.is_linear and not op.is_mean and not op.over_pairs
    return not op.aggregates or (is_product and op.name not in precomputed)


def _carried(model: ModelGraph, behind: list[Op]) -> int:
    """Of what row-wise ops read that none of them makes."""
    widths = {value: width for op in model.ops for value, width in op.outputs.items()}
    made = {value for op in behind for value in op.outputs}
    read = {value for op in behind if not op.aggregates for value in op.inputs}
    return sum(widths[value] for value in read - made)

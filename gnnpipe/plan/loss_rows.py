"""Loss rows: training computes the last aggregation only for rows that have a training label.

Rows without a training label change neither the loss nor a gradient. The last aggregation of the
last stage therefore multiplies with the loss rows of its matrix only, and the ops behind it work on
as many rows (docs/adr/0027). All rows are still pushed, because loss rows aggregate neighbours
without a label.
Evaluation computes all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gnnpipe.plan.model_graph import ModelGraph, Op

MAX_SHARE = 0.75
"""Largest share of loss rows among all rows; with more, a second matrix is not worth its memory."""


@dataclass(frozen=True)
class LossRows:
    """Number of loss rows (of the whole graph or of one shard), and the ops limited to them."""

    rows: int
    edges: int
    """Edges into the loss rows."""
    ops: frozenset[str] = frozenset()
    """Names of the ops whose values have loss rows only; empty: all ops compute all rows."""
    copied: frozenset[str] = frozenset()
    """Names of the earlier ops whose values only ``ops`` read in a later step, as copies of the
    loss rows."""

    def rows_of(self, op: str, num_rows: int) -> int:
        """Return the rows that ``op`` computes; an op without a limit computes ``num_rows``."""
        return self.rows if op in self.ops else num_rows

    def kept_numbers(self, op: Op, num_rows: int, recompute: bool) -> int:
        """Return the numbers that ``op`` keeps until backward.

        An op that is not limited to loss rows computes ``num_rows`` rows. Copies of loss rows are
        counted by ``copied_widths``.
        """
        if recompute and op.name in self.copied:
            return 0
        each = op.kept_per_row_recomputed if recompute else op.kept_per_row
        return each * self.rows_of(op.name, num_rows)

    def copied_widths(self, model: ModelGraph) -> int:
        """Return the numbers per loss row that row-wise ops read from before the aggregation."""
        widths = {value: width for op in model.ops for value, width in op.outputs.items()}
        limited = [op for op in model.ops if op.name in self.ops]
        made = {value for op in limited for value in op.outputs}
        read = {value for op in limited if not op.aggregates for value in op.inputs}
        return sum(widths[value] for value in read - made)


ALL_ROWS = LossRows(0, 0)
"""Every op computes all rows."""


def choose_loss_rows(
    model: ModelGraph, last_stage: Sequence[int], counts: LossRows, num_vertices: int
) -> LossRows:
    """Returns ``counts`` with the ops that are limited to loss rows, or ``ALL_ROWS``.

    ``last_stage``: its ops. The result does not depend on ``--recompute``, so that runs with and
    without this flag agree to the bit.
    """
    depths = model.depths(last_stage)
    last_depth = max(depths, default=0)
    stage_ops = model.select(last_stage)
    last_ops = [op for op, depth in zip(stage_ops, depths, strict=True) if depth == last_depth]
    if last_depth == 0 or counts.rows > MAX_SHARE * num_vertices:
        return ALL_ROWS
    if not all(map(_can_limit_rows, last_ops)):
        return ALL_ROWS
    ops = frozenset(op.name for op in last_ops)
    return replace(counts, ops=ops, copied=_copied(model, last_stage, depths, ops))


def _copied(
    model: ModelGraph, stage: Sequence[int], depths: Sequence[int], limited: Collection[str]
) -> frozenset[str]:
    """Return the names of the row-wise ops of a stage that only ``limited`` read in a later step.

    ``depths``: the step in which each op of the stage ends; an aggregation reads a step earlier.
    """
    depth = dict(zip(stage, depths, strict=True))
    found = set()
    for i in stage:
        later = [
            model.ops[j]
            for j in model.readers[i]
            if j in depth and depth[j] - model.ops[j].aggregates > depth[i]
        ]
        is_row_wise = not model.ops[i].aggregates and model.ops[i].name not in limited
        if is_row_wise and later and all(op.name in limited for op in later):
            found.add(model.ops[i].name)
    return frozenset(found)


def _can_limit_rows(op: Op) -> bool:
    """Whether ``op`` is row-wise, or a product with a fixed matrix.

    An op that reads features, or their aggregated rows, cannot be limited: these are given for all
    rows.
    """
    if op.vertex_type or op.reads_features or op.is_given:
        return False
    return not op.aggregates or (op.is_linear and not op.is_mean and not op.over_pairs)

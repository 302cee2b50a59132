"""The model as planners and cost formulas see it: a DAG of ops with widths and counts, no tensors.

A width is a count of numbers per row. Ops are listed in the order in which they run: each after the
ops that it reads, branch by branch. A stage is a set of ops; because an op may read values of
several earlier stages, the stages form a DAG as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from gnnpipe.plan.op_steps import op_steps
from gnnpipe.plan.plan import Plan
from gnnpipe.plan.row_ways import RowWay

EDGE_FLOPS = 10
"""Floating-point operations of a dense product that take as long as reading and adding one number
of a neighbour's row."""
KEPT_FLOPS = 80
"""Floating-point operations of a dense product that take as long as the row-wise work (norm,
activation, dropout, copies) on one number that is kept until backward."""


def shared_tables(
    model: ModelGraph, plan: Plan, loss_rows: Collection[str], rounds_rows: bool, is_exact: bool
) -> frozenset[str]:
    """Return the aggregations whose results and gradients share one table (docs/adr/0028).

    Args:
        model: The ops.
        plan: The plan.
        loss_rows: Ops that are limited to loss rows, with a matrix of their own (``LossRows.ops``).
        rounds_rows: Whether the tables hold rounded rows (``--comm-dtype bf16``).
        is_exact: Whether the program has no stale reads.
    """
    if plan.chunks == 1 or rounds_rows:
        return frozenset()
    found: set[str] = set()
    for stage in plan.stages:
        by_matrix = defaultdict(list)
        for i in stage.ops:
            op = model.ops[i]
            if plan.way(i) is RowWay.COLUMNS:
                continue  # its gradients have other columns than its aggregated rows
            if op.aggregates and op.is_linear and not op.is_mean:
                by_matrix[op.structure, op.name in loss_rows].append(op.name)
        for names in by_matrix.values():
            # With stale reads, backward needs a matrix without the stale entries. Making this
            # matrix costs as much as one aggregation saves, so at least two must use the matrix.
            if len(names) > 1 or is_exact:
                found.update(names)
    return frozenset(found)


@dataclass(frozen=True)
class Op:
    """Row-wise work; or an aggregation, with the row-wise work before and after it."""

    name: str
    inputs: tuple[str, ...]
    """Values that the op reads, each the output of an earlier op; not the input features."""
    outputs: Mapping[str, int]
    """Values that the op computes, and their widths; names are unique in the model."""
    num_parameters: int
    flops_per_row: int
    """Multiply-adds x 2 of its dense products for one row, forward, without input features."""
    flops_per_feature: int = 0
    """Multiply-adds x 2 for one stored number of the input features."""
    push_width: int = 0
    """Width of the rows that the op pushes into its history table and aggregates; 0: row-wise."""
    kept_per_row: int = 0
    """Numbers per row that are kept until backward."""
    kept_per_row_recomputed: int = 0
    """Numbers per row that are kept until backward with ``--recompute``."""
    push_maker: str = ""
    """The op, this or an earlier one, that writes the pushed rows straight into the history table;
    '' if the rows are copied into the table."""
    holds_pushed: bool = False
    """A later step reads the pushed rows, too; with ``--recompute`` these are kept."""
    passing_per_row: int = 0
    """Numbers per row of temporaries in backward."""
    kept_per_edge: int = 0
    """Numbers per edge that are kept until backward; 0 with ``--recompute``."""
    kept_per_read_row: int = 0
    """The part of ``kept_per_row`` that is kept for each row that the op reads."""
    structure_per_edge: int = 0
    """Bytes per edge of index arrays, beyond the edge itself."""
    structure: str = ""
    """Name of the matrix or edges that the op aggregates over (``models.Aggregation``); of a
    row-wise op the matrix whose product with the input features is its value (``is_given``)."""
    is_linear: bool = True
    """The aggregation, if any, is a product with a fixed matrix."""
    is_mean: bool = False
    """The aggregation is the mean over all vertices, or over all edges."""
    is_sum: bool = False
    """The mean is a sum instead: each chunk adds up its own rows and pushes its part, one row."""
    is_one_row: bool = False
    """All rows of the output are equal; inside a stage a single row stands for them."""
    moves: bool = True
    """The pushed rows, if any, depend on weights."""
    vertex_type: str = ""
    """Type of the vertices of the output rows; '' in a graph of one type."""
    pushed_type: str = ""
    """Type of the vertices of the pushed rows."""
    over_pairs: bool = False
    """The op scores the vertex pairs of a link prediction, on the stage of the op whose rows it
    reads."""
    kept_per_pair: int = 0
    """Numbers per pair that are kept until backward."""
    reads_features: bool = False
    """The op reads the input features themselves."""
    weights: tuple[str, ...] = ()
    """Names of the weights and buffers that the op uses."""
    kind: str = ""
    """Name of the op's times in a profile; '': derived from the other fields (``perf.profile``)."""

    @property
    def aggregates(self) -> bool:
        """The op pushes rows and aggregates them."""
        return self.push_width > 0

    @property
    def is_given(self) -> bool:
        """The op's value is the product of a matrix and the input features, computed at set-up."""
        return bool(self.structure) and not self.aggregates

    @property
    def clears(self) -> bool:
        """The op has a gradient table, which is cleared in every epoch of several chunks."""
        return self.aggregates and not (self.is_linear or self.is_mean)

    def reason_against(self, way: RowWay) -> str:
        """Return why the rows of the op cannot travel that way; '' if they can."""
        if way is RowWay.HALO:
            return ""
        if not self.aggregates or self.is_mean:
            return "aggregates no rows of neighbours"
        if self.over_pairs:
            return "scores pairs of rows, which travel by halo only"
        if way is RowWay.COLUMNS and not self.is_linear:
            return "computes messages of whole rows, and a rank would have only some columns"
        return ""

    @property
    def is_forecast(self) -> bool:
        """The probe vertices predict the stale rows of its table."""
        return self.aggregates and self.moves


@dataclass(frozen=True)
class ModelGraph:
    """The ops of a model; the last one computes the logits."""

    name: str
    num_features: int
    num_classes: int
    ops: tuple[Op, ...]

    @property
    def num_ops(self) -> int:
        """Length of ``ops``."""
        return len(self.ops)

    @property
    def output_width(self) -> int:
        """Numbers of a row that the last op returns."""
        return sum(self.ops[-1].outputs.values())

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all ops."""
        return sum(op.num_parameters for op in self.ops)

    @property
    def aggregations(self) -> tuple[Op, ...]:
        """The ops that aggregate, in order: each has a history table."""
        return tuple(op for op in self.ops if op.aggregates)

    @cached_property
    def vertex_types(self) -> frozenset[str]:
        """Types of the vertices for which ops compute rows."""
        return frozenset(op.vertex_type for op in self.ops)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the earlier ops whose values the op reads."""
        maker: dict[str, int] = {}
        found = []
        for i, op in enumerate(self.ops):
            found.append(tuple(dict.fromkeys(maker[value] for value in op.inputs)))
            maker |= dict.fromkeys(op.outputs, i)
        return tuple(found)

    @cached_property
    def ties(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an op and an earlier op that must be in one stage.

        The two ops use the same weight, or the op scores pairs of the earlier op's rows.
        """
        first_use: dict[str, int] = {}
        found = []
        for i, op in enumerate(self.ops):
            tied = [first_use.setdefault(name, i) for name in op.weights]
            tied += self.reads[i] if op.over_pairs else ()
            found += [(i, other) for other in dict.fromkeys(tied) if other != i]
        return tuple(found)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ops before which a stage of consecutive ops may begin: no tied ops are on both sides."""
        change = [0] * (self.num_ops + 1)
        for op, earlier in self.ties:
            change[earlier + 1] += 1
            change[op + 1] -= 1
        is_tied = accumulate(change)
        return tuple(i for i, count in enumerate(is_tied) if 0 < i < self.num_ops and not count)

    def crossing(self) -> list[int]:
        """Return for each op the total width of earlier values that this or a later op reads."""
        last = {value: i for i, op in enumerate(self.ops) for value in op.inputs}
        change = [0] * (self.num_ops + 1)
        for i, op in enumerate(self.ops):
            for value, width in op.outputs.items():
                if last.get(value, i) > i:
                    change[i + 1] += width
                    change[last[value] + 1] -= width
        return list(accumulate(change[:-1]))

    def select(self, ops: Sequence[int]) -> list[Op]:
        """Return the ops with these indices."""
        return [self.ops[i] for i in ops]

    def depths(self, ops: Sequence[int]) -> list[int]:
        """Return the step in which each of a stage's ``ops`` ends.

        The number of the step is the length of the longest chain of aggregations up to the op, or
        more for an op that is read later (``op_steps``). An aggregation pushes its rows in the
        step before.
        """
        found = op_steps(
            ops,
            self.reads.__getitem__,
            self.readers.__getitem__,
            lambda i: self.ops[i].aggregates,
            self._is_row_wise,
            lambda i: sum(self.ops[i].outputs.values()),
        )
        return list(found.values())

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the later ops that read its values."""
        found: list[list[int]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.reads):
            for source in sources:
                found[source].append(i)
        return tuple(map(tuple, found))

    def _is_row_wise(self, i: int) -> bool:
        op = self.ops[i]
        return not (op.aggregates or op.reads_features or op.is_one_row)

    def num_steps(self, ops: Sequence[int]) -> int:
        """Return the number of steps of a stage: its longest chain of aggregations plus 1."""
        return max(self.depths(ops), default=0) + 1

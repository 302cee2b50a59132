"""The model as planners and cost formulas see it: a DAG of ops with widths and counts, no tensors.

Widths are numbers per row, so multiplying by rows and the size of a number gives bytes. A hand-made
layer is one op. Ops stand in the order in which they run, and a stage is a run of consecutive ops:
where its ops read values of several earlier stages, or of none, the stages form a DAG as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gnnpipe.plan.plan import Plan, Transfer

__all__ = [
    "EDGE_FLOPS",
    "KEPT_FLOPS",
    "ModelGraph",
    "Op",
    "precomputed_aggregations",
    "shared_tables",
]


EDGE_FLOPS = 10
"""Operations of a dense product in the time that one number of a neighbour's row takes to be read
and added."""
KEPT_FLOPS = 80
"""The same for a number of a row that is written, and kept until backward as a rule: norm,
activation, dropout and copies pass over it."""


def shared_tables(
    model: ModelGraph,
    plan: Plan,
    precomputed: Collection[str],
    loss_rows: Collection[str],
    rounds_rows: bool,
    is_exact: bool,
) -> frozenset[str]:
    """Names of their ops.

    ``precomputed``: aggregations that are made once (``precomputed_aggregations``); ``loss_rows``:
    ops that make the rows that the loss asks for, with a matrix of their own (``LossRows.ops``);
    ``rounds_rows``: the tables have fewer bits, and hold nothing that is aggregated;
    ``is_exact``: the program has no stale reads.
    """
    if plan.chunks == 1 or rounds_rows:
        return frozenset()
    found: set[str] = set()
    for stage in plan.stages:
        alike = defaultdict(list)
        for op in model.select(stage.ops):
            if op.aggregates and op.is_linear and not op.is_mean and op.name not in precomputed:
                alike[op.structure, op.name in loss_rows].append(op.name)
        for names in alike.values():
            # Where nothing is stale, nothing is cut out.
            if len(names) > 1 or is_exact:
                found.update(names)
    return frozenset(found)


def precomputed_aggregations(
    model: ModelGraph, plan: Plan, rounds_rows: bool, is_exact: bool
) -> frozenset[str]:
    """The ops whose aggregation is made once for all epochs.

    ``rounds_rows``: the tables have fewer bits, which other shapes would show and this one not;
    ``is_exact``: the program has no stale reads.
    """
    if plan.shards > 1 or not is_exact or rounds_rows:
        return frozenset()
    return frozenset(op.name for op in model.ops if op.of_features)


@dataclass(frozen=True)
class Op:
    """Row-wise work; or an aggregation, with the row-wise work before and after it."""

    name: str
    inputs: tuple[str, ...]
    """Values it reads, each made by an earlier op. Features are not among them."""
    outputs: Mapping[str, int]
    """Values it makes and their widths; names are unique in the model."""
    num_parameters: int
    flops_per_row: int
    """Multiply-adds x 2 of its dense products for one row, forward, features left out."""
    flops_per_feature: int = 0
    """Multiply-adds x 2 for one stored number of the input features."""
    push_width: int = 0
    """Width of the rows it pushes into its history table and aggregates; 0: row-wise."""
    kept_widths: Mapping[str, int] = field(default_factory=dict)
    """Values it holds for a row while the row's neighbours are aggregated."""
    kept_per_row: int = 0
    """Numbers that are kept of a row until backward."""
    kept_per_row_recomputed: int = 0
    """The same with ``--recompute``."""
    kept_before: int = 0
    """Those of ``kept_per_row`` that are made in front of its push."""
    push_maker: str = ""
    """The op that makes the rows it pushes, itself or an earlier one, and keeps them until
    backward: in the table, where that holds rows as they are made. '' where they are copied."""
    holds_pushed: bool = False
    """What it holds of a row is the row that it pushes: with ``--recompute`` that is kept."""
    passing_per_row: int = 0
    """Numbers that exist of a row for a moment in backward."""
    kept_per_edge: int = 0
    """Numbers that are kept of an edge, without ``--recompute``."""
    kept_per_read_row: int = 0
    """Those of ``kept_per_row`` that are kept, beside the row itself, of a row that it reads."""
    structure_per_edge: int = 0
    """Bytes of structure for an edge, beyond the edge itself."""
    structure: str = ""
    """What it aggregates over (``models.Aggregation``)."""
    is_linear: bool = True
    """Its aggregation, if it is one, is a product with a fixed matrix."""
    is_mean: bool = False
    """It aggregates to the mean over all vertices, or all edges."""
    is_one_row: bool = False
    """All rows of what it makes are the same, and inside of a stage a single one is handed on."""
    moves: bool = True
    """The rows it pushes, if any, move with the weights: they are not made of features alone."""
    vertex_type: str = ""
    """The type of the vertices that its outputs are rows of, '' if there is but one."""
    pushed_type: str = ""
    """The type of the vertices whose rows it pushes."""
    over_pairs: bool = False
    """It reads over the pairs of a link prediction, each a row to it, and stays with the op before
    it, whose rows leave the model."""
    reads_features: bool = False
    of_features: bool = False
    """What it pushes is the features or a linear map of them, and not wider than that is worth."""
    features_kept: int = 0
    """Where its aggregation is precomputed: numbers of a row kept for it, beside the features."""
    rows_spared: int = 0
    """In that place: numbers that are not kept of a row until backward."""
    weights: tuple[str, ...] = ()
    """Names of the weights and buffers it uses."""

    @property
    def aggregates(self) -> bool:
        """It pushes rows."""
        return self.push_width > 0

    def kept_by_rows(self, recompute: bool) -> tuple[int, int, int]:
        """Numbers that are kept until backward of a row that it pushes and of one that it makes.

        And, where it makes fewer rows than it pushes, of what it holds of one that it makes.
        """
        held = sum(self.kept_widths.values())
        if not recompute:
            return self.kept_before, self.kept_per_row - self.kept_before, held
        # Kept is the aggregated row and what only this op holds; the rest that it holds is copied.
        kept = self.kept_per_row_recomputed
        return 0, kept, held - (kept - self.push_width)

    @property
    def clears(self) -> bool:
        """Gradients are added up in a table of its own, which an epoch of several chunks clears."""
        return self.aggregates and not (self.is_linear or self.is_mean)

    @property
    def is_forecast(self) -> bool:
        """Pilots tell where the rows go that it pushes."""
        return self.aggregates and self.moves


@dataclass(frozen=True)
class ModelGraph:
    """Ops over features of ``num_features``; the last one gives the logits."""

    name: str
    num_features: int
    num_classes: int
    ops: tuple[Op, ...]
    unit: str = "layer"
    """What a person calls one of the ops."""

    @property
    def num_ops(self) -> int:
        """Length of ``ops``."""
        return len(self.ops)

    @property
    def num_parameters(self) -> int:
        """Weights of all ops together."""
        return sum(op.num_parameters for op in self.ops)

    @property
    def aggregations(self) -> tuple[Op, ...]:
        """The ops that aggregate, in order: each has a history table."""
        return tuple(op for op in self.ops if op.aggregates)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ops in front of which a stage may begin: no weight is used on both sides."""
        last = {name: i for i, op in enumerate(self.ops) for name in op.weights}
        free, reach = [], 0
        for i, op in enumerate(self.ops):
            if i > reach and not op.over_pairs:
                free.append(i)
            reach = max([reach, *(last[name] for name in op.weights)])
        return tuple(free)

    def crossing(self) -> list[int]:
        """By op the width of all values that are made before it and read by it or later ones."""
        last = {value: i for i, op in enumerate(self.ops) for value in op.inputs}
        change = [0] * (self.num_ops + 1)
        for i, op in enumerate(self.ops):
            for value, width in op.outputs.items():
                if last.get(value, i) > i:
                    change[i + 1] += width
                    change[last[value] + 1] -= width
        return list(accumulate(change[:-1]))

    def select(self, ops: Sequence[int]) -> list[Op]:
        """The ops of these indices."""
        return [self.ops[i] for i in ops]

    def depths(self, ops: Sequence[int]) -> list[int]:
        """The step that ends each op of a stage of these ``ops``.

        That is the longest chain of aggregations up to it; an aggregation itself begins one step
        before.
        """
        reached: dict[str, int] = {}
        found = []
        for op in self.select(ops):
            depth = max((reached.get(v, 0) for v in op.inputs), default=0) + op.aggregates
            reached |= dict.fromkeys(op.outputs, depth)
            found.append(depth)
        return found

    def num_steps(self, ops: Sequence[int]) -> int:
        """Steps of a stage of these ops: its longest chain of aggregations, and one."""
        return max(self.depths(ops), default=0) + 1

    def transfers(self, stages: Sequence[Sequence[int]]) -> tuple[Transfer, ...]:
        """What the stages must send each other: every value once to every stage that reads it."""
        source: dict[str, tuple[int, int]] = {}
        types: dict[str, str] = {}
        sent: dict[tuple[int, int], dict[str, int]] = {}
        for stage, ops in enumerate(stages):
            for op in self.select(ops):
                for value in op.inputs:
                    maker, width = source[value]
                    if maker != stage:
                        sent.setdefault((maker, stage), {})[value] = width
                source |= {value: (stage, width) for value, width in op.outputs.items()}
                types |= dict.fromkeys(op.outputs, op.vertex_type)
        return tuple(
            Transfer(*ends, widths, {value: types[value] for value in widths if types[value]})
            for ends, widths in sorted(sent.items())
        )

"""Distributed programs as data: how values are sharded over a group of ranks, and by what work.

As in HAP (arXiv 2401.05965, section 4), a program is a list of instructions, each a Hoare triple
{needs} instruction {gives} over properties "value v is in state s". ``RULES`` has the ways to
compute each kind of op from its inputs, ``CONVERSIONS`` the collectives that change a state. The
loss is computed as a sum over ranks.

Backward runs the adjoint of every instruction in reverse order, with the gradient of a replicated
value as a sum over ranks: all-gather and reduce-scatter are each other's adjoint, that of a slice
sends nothing, and every other collective is its own adjoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from gnnpipe.errors import InputError
from gnnpipe.plan import RowWay


class State(Enum):
    """How a value [N, F] lies on a group of ranks."""

    ROWS = "rows"
    """Every rank has all columns of its own vertices; shares may differ."""
    HALO = "rows and halo"
    """As ``ROWS``, with the rows of other ranks that a rank's edges read."""
    COLUMNS = "columns"
    """Every rank has some columns of all vertices; shares may differ."""
    REPLICATED = "replicated"
    """Every rank has the whole value."""
    PARTIAL = "partial sums"
    """The value is the sum of one array [N, F] from every rank."""


class OpKind(Enum):
    """Kinds of primitive ops."""

    FEATURES = "features"
    """Input features, loaded once in any state."""
    AGGREGATION = "aggregation"
    """Product with a fixed sparse matrix [N, N]."""
    ATTENTION = "attention"
    """Aggregation whose weights depend on the rows of both ends of an edge."""
    DENSE = "dense"
    """Product of every row with a weight matrix."""
    ELEMENTWISE = "elementwise"
    """Activation or dropout."""
    ROW_WISE = "row-wise"
    """Work that needs a whole row, such as LayerNorm."""
    ADD = "add"
    CONCAT = "concat"
    """Side by side along the columns."""
    LOSS = "loss"


@dataclass(frozen=True)
class PrimitiveOp:
    """One kernel's work: a part of an op of a model."""

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    """Names of earlier ops whose values the op reads."""
    width: int
    """Columns of its value."""
    part_of: str = ""
    """The op of the model to which it belongs."""


class Property(NamedTuple):
    """Value ``value`` is in state ``state``; a value has the name of the op that computes it."""

    value: str
    state: State


class Split(Enum):
    """The part of the work of an op that each rank does."""

    BY_ROWS = "by rows"
    BY_COLUMNS = "by columns"
    """Of the output; or of the input, with partial sums as the result."""
    WHOLE = "whole"
    """All work on every rank."""
    NONE = "none"


@dataclass(frozen=True)
class Rule:
    """A way to compute ops of one kind; every input must be in state ``needs``."""

    needs: State | None
    """None: the op has no inputs."""
    gives: State
    split: Split
    sums_weights: bool = False
    """Every rank has the whole weight, so the weight's gradient is summed over the ranks."""


def _rules() -> dict[OpKind, tuple[Rule, ...]]:
    rows, halo, columns = State.ROWS, State.HALO, State.COLUMNS
    replicated, partial = State.REPLICATED, State.PARTIAL
    by_rows, by_columns, whole = Split.BY_ROWS, Split.BY_COLUMNS, Split.WHOLE
    on_rows, on_all = Rule(rows, rows, by_rows), Rule(replicated, replicated, whole)
    on_columns = Rule(columns, columns, by_columns)
    gathered = Rule(replicated, rows, by_rows)
    return {
        OpKind.FEATURES: tuple(Rule(None, s, Split.NONE) for s in (rows, columns, replicated)),
        OpKind.AGGREGATION: (Rule(halo, rows, by_rows), gathered, on_columns, on_all),
        OpKind.ATTENTION: (
            Rule(halo, rows, by_rows, sums_weights=True),
            Rule(replicated, rows, by_rows, sums_weights=True),
            Rule(replicated, replicated, whole, sums_weights=True),
        ),
        OpKind.DENSE: (
            Rule(rows, rows, by_rows, sums_weights=True),
            Rule(replicated, columns, by_columns),
            Rule(columns, partial, by_columns),
            Rule(replicated, replicated, whole, sums_weights=True),
        ),
        OpKind.ELEMENTWISE: (on_rows, on_columns, on_all),
        OpKind.ROW_WISE: (on_rows, on_all),
        OpKind.ADD: (on_rows, on_columns, on_all, Rule(partial, partial, whole)),
        OpKind.CONCAT: (on_rows, on_all),
        # Every rank adds up the loss of its own rows.
        OpKind.LOSS: (Rule(rows, partial, by_rows), Rule(replicated, partial, by_rows)),
    }


RULES: Mapping[OpKind, tuple[Rule, ...]] = _rules()
"""The ways to compute each kind of op."""

PLAN_RULES: Mapping[OpKind, tuple[Rule, ...]] = {
    kind: tuple(
        rule
        for rule in rules
        if rule.split is not Split.WHOLE
        and (rule.needs is not State.REPLICATED)
        and (kind is OpKind.AGGREGATION or State.COLUMNS not in (rule.needs, rule.gives))
        and rule.gives is not State.REPLICATED
    )
    for kind, rules in RULES.items()
}
"""The rules of plans that can pay: between aggregations, values are rows. All rows are never
gathered: the runtime sends each of them to every rank, so a halo exchange sends no more."""


ROW_WAYS = {State.HALO: RowWay.HALO, State.REPLICATED: RowWay.GATHER, State.COLUMNS: RowWay.COLUMNS}
"""The way of a plan, by the state in which an aggregation needs its input."""


class Collective(Enum):
    """Ways to change the state of a value."""

    HALO_EXCHANGE = "halo exchange"
    """Sends each row to the ranks that read the row."""
    ALL_GATHER = "padded all-gather"
    """All shards are sent as large as the largest one."""
    BROADCASTS = "all-gather by broadcasts"
    """One broadcast for each rank, of the shard's true size."""
    ALL_TO_ALL = "all-to-all"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SLICE = "slice"
    """Every rank keeps its part of what it has; nothing is sent."""


class Conversion(NamedTuple):
    """Change of a value's state by a collective; the value keeps its earlier state as well."""

    collective: Collective
    source: State
    target: State


CONVERSIONS = (
    Conversion(Collective.HALO_EXCHANGE, State.ROWS, State.HALO),
    Conversion(Collective.ALL_GATHER, State.ROWS, State.REPLICATED),
    Conversion(Collective.BROADCASTS, State.ROWS, State.REPLICATED),
    Conversion(Collective.ALL_TO_ALL, State.ROWS, State.COLUMNS),
    Conversion(Collective.ALL_TO_ALL, State.COLUMNS, State.ROWS),
    Conversion(Collective.REDUCE_SCATTER, State.PARTIAL, State.ROWS),
    Conversion(Collective.REDUCE_SCATTER, State.PARTIAL, State.COLUMNS),
    Conversion(Collective.ALL_REDUCE, State.PARTIAL, State.REPLICATED),
    Conversion(Collective.SLICE, State.REPLICATED, State.ROWS),
    Conversion(Collective.SLICE, State.REPLICATED, State.COLUMNS),
)
"""All changes of state; others take two of them."""


@dataclass(frozen=True)
class Instruction:
    """The computation of an op by a rule, or a conversion of an op's value."""

    op: str
    work: Rule | Conversion
    needs: tuple[Property, ...]
    """Precondition."""
    gives: Property
    """Postcondition."""

    @classmethod
    def compute(cls, op: PrimitiveOp, rule: Rule) -> Instruction:
        """Return the computation of an op."""
        needs = tuple(Property(v, rule.needs) for v in dict.fromkeys(op.inputs) if rule.needs)
        return cls(op.name, rule, needs, Property(op.name, rule.gives))

    @classmethod
    def convert(cls, value: str, conversion: Conversion) -> Instruction:
        """Return the conversion of a value."""
        needs = (Property(value, conversion.source),)
        return cls(value, conversion, needs, Property(value, conversion.target))

    def __str__(self) -> str:
        words = self.work.split if isinstance(self.work, Rule) else self.work.collective
        return f"{self.op}: {words.value} -> {self.gives.state.value}"


@dataclass(frozen=True)
class DistributedProgram:
    """Instructions that compute all ops on a group of ranks."""

    ops: tuple[PrimitiveOp, ...]
    """In an order in which every value is computed before an op reads it; the last one is read by
    no other op."""
    instructions: tuple[Instruction, ...] = field(repr=False)

    def aggregation_ways(self) -> dict[str, RowWay]:
        """Return the way of every aggregation, by the name of the op of the model.

        Raises:
            InputError: An aggregation is computed as a whole on every rank.
        """
        found = {}
        for op, rule in self.chosen_rules():
            if op.kind not in (OpKind.AGGREGATION, OpKind.ATTENTION):
                continue
            if rule.split is Split.WHOLE:
                raise InputError(
                    f"program: {op.name} is computed on every rank as a whole, which a plan cannot "
                    "say; search with PLAN_RULES"
                )
            assert rule.needs is not None
            found[op.part_of or op.name] = ROW_WAYS[rule.needs]
        return found

    def chosen_rules(self) -> list[tuple[PrimitiveOp, Rule]]:
        """Return the ops in the order of the program, each with the rule that computes it."""
        by_name = {op.name: op for op in self.ops}
        return [(by_name[i.op], i.work) for i in self.instructions if isinstance(i.work, Rule)]


def check_ops(ops: Sequence[PrimitiveOp]) -> None:
    """Check that ops have unique names and read earlier ones; raise ``InputError``."""
    seen: set[str] = set()
    for op in ops:
        if op.name in seen:
            raise InputError(f"program: op {op.name!r} is there twice; give every op its own name")
        for value in op.inputs:
            if value not in seen:
                raise InputError(
                    f"program: op {op.name!r} reads {value!r}, which is no earlier op; list ops "
                    "behind those that they read"
                )
        if (op.kind is OpKind.FEATURES) != (not op.inputs):
            raise InputError(f"program: op {op.name!r}: input features alone have no inputs")
        seen.add(op.name)

"""The ops of a model as a DAG of units, between which planners may cut.

A unit is a set of ops that every plan keeps on one stage: ops that share a weight, an op that
scores pairs and the op before it, and every op on a path between two ops of the set. Most units
are a single op. Sets of units are bit masks: bit u stands for unit u.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gnnpipe.plan import ModelGraph


@dataclass(frozen=True)
class Value:
    """A value that a unit computes."""

    width: int
    readers: int
    """Mask of the other units that read the value."""


@dataclass(frozen=True)
class UnitDag:
    """Units in an order in which every value is computed before a unit reads it."""

    model: ModelGraph
    units: tuple[tuple[int, ...], ...]
    """The ops of each unit, ascending."""
    values: tuple[tuple[Value, ...], ...]
    """The values that each unit computes."""

    @classmethod
    def of(cls, model: ModelGraph, joins_row_wise: bool = False) -> UnitDag:
        """Return the units of ``model``.

        ``joins_row_wise``: a row-wise op is in the unit of the op before, if that is the only op
        that it reads and the only one that reads its values. Recorded models have several times
        fewer units then.
        """
        units = _units(model, [*model.ties, *(_row_wise_runs(model) if joins_row_wise else ())])
        unit_of = {op: u for u, ops in enumerate(units) for op in ops}
        readers: dict[str, int] = {}
        for i, op in enumerate(model.ops):
            for value in op.inputs:
                readers[value] = readers.get(value, 0) | 1 << unit_of[i]
        values = tuple(
            tuple(
                Value(width, readers.get(value, 0) & ~(1 << u))
                for op in model.select(ops)
                for value, width in op.outputs.items()
            )
            for u, ops in enumerate(units)
        )
        return cls(model, units, values)

    @property
    def everything(self) -> int:
        """Mask of all units."""
        return (1 << len(self.units)) - 1

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """Mask of the other units that read a value of each unit.

        The logits must be computed in the last stage: their unit, the last one, also waits for
        units that no other unit reads.
        """
        found = []
        for values in self.values:
            mask = 0
            for value in values:
                mask |= value.readers
            found.append(mask)
        if not found[-1]:
            last = len(found) - 1
            found[:-1] = [mask or 1 << last for mask in found[:-1]]
        return tuple(found)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Mask of the units that depend on each unit, directly or through others."""
        found = [0] * len(self.units)
        for u in reversed(range(len(self.units))):
            mask = self.readers[u]
            for reader in members(mask):
                mask |= found[reader]
            found[u] = mask
        return tuple(found)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Mask of the units that each unit depends on."""
        found = [0] * len(self.units)
        for u, mask in enumerate(self.after):
            for later in members(mask):
                found[later] |= 1 << u
        return tuple(found)

    def ops(self, mask: int) -> tuple[int, ...]:
        """Return the ops of a set of units, ascending."""
        return tuple(sorted(op for u in members(mask) for op in self.units[u]))

    def names(self, u: int) -> str:
        """Return the names of a unit's ops, for messages."""
        return "+".join(op.name for op in self.model.select(self.units[u]))

    def leaving_width(self, mask: int) -> int:
        """Return the total width of values of these units that other units read, each once.

        Values of others that a stage of these units passes on do not count.
        """
        return sum(v.width for u in members(mask) for v in self.values[u] if v.readers & ~mask)

    def longest_path(self, weights: Sequence[float], mask: int) -> float:
        """Return the largest sum of ``weights`` on a path of dependent units in ``mask``."""
        reached: dict[int, float] = {}
        for u in members(mask):
            earlier = (reached[b] for b in members(self.before[u] & mask))
            reached[u] = weights[u] + max(earlier, default=0.0)
        return max(reached.values(), default=0.0)


def members(mask: int) -> Iterator[int]:
    """Yield the units of a mask, ascending.

    >>> list(members(0b1010))
    [1, 3]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _row_wise_runs(model: ModelGraph) -> Iterator[tuple[int, int]]:
    """Yield pairs (op, row-wise op) of which the second is the only reader of the first."""
    maker = {value: i for i, op in enumerate(model.ops) for value in op.outputs}
    readers: dict[int, set[int]] = {}
    for i, op in enumerate(model.ops):
        for value in op.inputs:
            readers.setdefault(maker[value], set()).add(i)
    for i, op in enumerate(model.ops):
        before = {maker[value] for value in op.inputs}
        if len(before) == 1 and not op.aggregates and not op.reads_features:
            (earlier,) = before
            if readers[earlier] == {i}:
                yield earlier, i


def _units(model: ModelGraph, ties: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the ops of each unit; a unit comes after all units that it depends on.

    ``ties``: ops that must be in one unit.
    """
    group = _tied_groups(model, ties)
    reached = _reached(model, group)
    # Groups that reach each other, through an op between two tied ops, are one unit.
    unit_of = {
        g: min(h for h in reached if h == g or (reached[g] >> h & 1 and reached[h] >> g & 1))
        for g in reached
    }
    units: dict[int, list[int]] = {}
    for op, g in enumerate(group):
        units.setdefault(unit_of[g], []).append(op)
    # A unit that depends on another one is reached by more groups.
    depth = {u: sum(mask >> u & 1 for mask in reached.values()) for u in units}
    if not reached[unit_of[group[-1]]]:
        depth[unit_of[group[-1]]] = len(reached) + 1
    return tuple(tuple(units[u]) for u in sorted(units, key=lambda u: (depth[u], u)))


def _tied_groups(model: ModelGraph, ties: Sequence[Sequence[int]]) -> list[int]:
    """Return for each op the first op that must be on its stage."""
    group = list(range(model.num_ops))
    for tie in ties:
        tied = {group[op] for op in tie}
        group = [min(tied) if g in tied else g for g in group]
    return group


def _reached(model: ModelGraph, group: Sequence[int]) -> dict[int, int]:
    """Return the mask of the groups that depend on each group; a bit is the group's number."""
    maker = {value: group[i] for i, op in enumerate(model.ops) for value in op.outputs}
    reached = dict.fromkeys(group, 0)
    for i, op in enumerate(model.ops):
        for value in op.inputs:
            reached[maker[value]] |= 1 << group[i]
    for middle in reached:
        for g, mask in reached.items():
            if mask >> middle & 1:
                reached[g] = mask | reached[middle]
    return reached

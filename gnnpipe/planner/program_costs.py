"""Times of the instructions of a distributed program on unequal devices, as maxima of linear terms.

As in HAP (arXiv 2401.05965, section 4.4), an instruction takes as long as the slowest device
computes, plus as long as the busiest link sends. For given shares both are numbers; as functions of
the shares they are maxima of linear functions, which a linear program minimises.

The link between two machines is shared by all devices of a machine. All-gather, reduce-scatter and
all-reduce are rings along the machines, so each row crosses the link of a machine once. Gradients
of halo rows arrive while a device aggregates its own rows, as in the executor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gnnpipe.perf.parts import INDEX_BYTES, SECTOR_BYTES
from gnnpipe.planner.device_group import DeviceGroup, Floats, Shares
from gnnpipe.planner.distributed_program import (
    RULES,
    Collective,
    Conversion,
    DistributedProgram,
    OpKind,
    PrimitiveOp,
    Rule,
    Split,
    State,
)
from gnnpipe.planner.primitive_work import Work


@dataclass(frozen=True, eq=False)
class Maximum:
    """``constant + max(terms @ [row shares, column shares] + offsets)``, in seconds."""

    terms: Floats
    """[m, 2 G]"""
    offsets: Floats
    """[m]"""
    constant: float = 0.0

    def at(self, shares: Shares) -> float:
        """Return the value for these shares."""
        both = np.concatenate([shares.rows, shares.columns])
        return float((self.terms @ both + self.offsets).max()) + self.constant


Cost = tuple[Maximum, ...]
"""The cost of an instruction is the sum of these."""


@dataclass(frozen=True, eq=False)
class GraphSizes:
    """Numbers of a graph, for one chunk of K."""

    rows: float
    """Vertices of a chunk."""
    crossings: float
    """Pairs (row of a chunk, other device that reads the row), M / K."""
    chunks: int
    number_bytes: int
    """Of a row that is sent."""
    weight_bytes: int
    """Of a weight."""
    boundary_per_number_s: float
    """Copying a number that is sent, on the profiled device."""


class ProgramCosts:
    """Costs of instructions near given shares, forward and backward of one chunk.

    Terms that are no linear function of the shares (rows of a halo; rows times columns of an
    all-to-all) are linear functions that are exact at ``shares``.
    """

    def __init__(
        self,
        ops: Sequence[PrimitiveOp],
        work: Mapping[str, Work],
        group: DeviceGroup,
        sizes: GraphSizes,
        shares: Shares,
    ) -> None:
        self.ops, self.work = tuple(ops), work
        self.group, self.sizes, self.shares = group, sizes, shares
        self._by_name = {op.name: op for op in ops}
        self._found: dict[tuple[object, ...], tuple[Cost, float]] = {}

    def compute_s(self, op: PrimitiveOp, rule: Rule) -> float:
        """Return the time of computing an op, forward and backward."""
        width = self._by_name[op.inputs[0]].width if op.inputs else op.width
        key = op.kind, rule, width, op.width, self.work[op.name]
        if key not in self._found:
            cost = self.compute(op, rule)
            self._found[key] = cost, sum(part.at(self.shares) for part in cost)
        return self._found[key][1]

    def convert_s(self, value: str, conversion: Conversion) -> float:
        """Return the time of a conversion, forward and backward."""
        key = conversion, self._by_name[value].width, self._hidden_s.get(value, 0.0)
        if key not in self._found:
            cost = self.convert(value, conversion)
            self._found[key] = cost, sum(part.at(self.shares) for part in cost)
        return self._found[key][1]

    def program_s(self, program: DistributedProgram) -> float:
        """Return the time of all instructions."""
        return sum(part.at(self.shares) for part in self.program(program))

    def program(self, program: DistributedProgram) -> list[Maximum]:
        """Return the costs of all instructions."""
        found: list[Maximum] = []
        for one in program.instructions:
            if isinstance(one.work, Rule):
                found += self.compute(self._by_name[one.op], one.work)
            else:
                found += self.convert(one.op, one.work)
        return found

    def compute(self, op: PrimitiveOp, rule: Rule) -> Cost:
        """Return the cost of computing an op by a rule."""
        work, group = self.work[op.name], self.group
        in_memory = op.kind not in (OpKind.DENSE, OpKind.FEATURES)
        speeds = group.memory_speeds if in_memory else group.speeds
        whole = (work.forward_s + work.backward_s) / self.sizes.chunks / speeds
        base_s = self._base_s(work) / speeds
        cost: list[Maximum] = []
        if rule.split is Split.WHOLE:
            cost.append(self._linear(np.zeros(group.count), offsets=base_s + whole))
        elif rule.split is Split.BY_ROWS:
            cost.append(self._linear(whole, offsets=base_s))
        elif rule.split is Split.BY_COLUMNS and op.kind is OpKind.AGGREGATION:
            cost.append(self._by_columns(op.width, whole, base_s))
        elif rule.split is Split.BY_COLUMNS:
            cost.append(self._linear(whole, offsets=base_s, columns=True))
        if rule.sums_weights and work.num_weights and group.count > 1:
            size_bytes = 2 * work.num_weights * self.sizes.weight_bytes / self.sizes.chunks
            cost.append(self._ring(size_bytes * (1 - 1 / group.count), 0.0))
        return tuple(cost)

    def convert(self, value: str, conversion: Conversion) -> Cost:
        """Return the cost of changing the state of a value."""
        group, sizes = self.group, self.sizes
        n = group.count
        if n == 1 or conversion.collective is Collective.SLICE:
            return ()
        numbers = sizes.rows * self._by_name[value].width
        size_bytes = 2 * numbers * sizes.number_bytes
        latency_s = 2 * (n - 1) * group.latency_s
        rows = self.shares.rows
        if conversion.collective is Collective.HALO_EXCHANGE:
            return self._halo(value, latency_s)
        if conversion.collective is Collective.ALL_TO_ALL:
            return self._all_to_all(numbers, latency_s)
        if conversion.collective is Collective.ALL_REDUCE:
            sent = self._ring(2 * size_bytes * (1 - 1 / n), 2 * latency_s)
            return (sent, self._copies(np.full(n, 2 * numbers / n)))
        is_rows = State.COLUMNS not in conversion[1:]
        if conversion.collective is Collective.BROADCASTS:
            # A device receives all rows but its own.
            latency_s = 2 * n * math.ceil(math.log2(n)) * group.latency_s
            sent = self._link(-np.ones(n) * size_bytes, size_bytes, latency_s)
            return (sent, self._copies(numbers * rows, numbers))
        # Padded to the largest shard.
        sent = self._padded(size_bytes * (n - 1), latency_s, columns=not is_rows)
        return (sent, self._copies(numbers * (rows if is_rows else self.shares.columns)))

    def _base_s(self, work: Work) -> float:
        """Return the time of a chunk that does not depend on its size."""
        return work.base_s + work.once_s / self.sizes.chunks

    # Parts of costs.

    def _linear(
        self,
        each: Floats,
        constant: float = 0.0,
        offsets: Floats | None = None,
        columns: bool = False,
    ) -> Maximum:
        """Return the largest ``each[g] * share[g] + offsets[g]``."""
        n = self.group.count
        terms = np.zeros((n, 2 * n))
        terms[np.arange(n), np.arange(n) + n * columns] = each
        return Maximum(terms, np.zeros(n) if offsets is None else offsets, constant)

    def _by_columns(self, width: int, whole: Floats, base_s: Floats) -> Maximum:
        """Return the time of aggregating some columns of all rows: all edges are read.

        ``base_s``: [G], of any number of columns.
        """
        number_bytes = self.sizes.number_bytes
        full = width * number_bytes + INDEX_BYTES
        offsets = base_s + whole * INDEX_BYTES / full
        wide = self._linear(whole * width * number_bytes / full, offsets=offsets, columns=True)
        least = whole * (min(SECTOR_BYTES, width * number_bytes) + INDEX_BYTES) / full
        narrow = self._linear(np.zeros_like(whole), offsets=base_s + least, columns=True)
        return _joined([wide, narrow], 0.0)

    def _copies(self, numbers: Floats, share_factor: float = 0.0) -> Maximum:
        """Return the time of copying ``numbers`` [G] that devices send, there and back."""
        each = 2 * self.sizes.boundary_per_number_s / self.group.memory_speeds
        if share_factor:
            return self._linear(each * share_factor)
        return self._linear(np.zeros_like(each), 0.0, each * numbers)

    def _link(self, each: Floats, offset: float, latency_s: float) -> Maximum:
        """Return the time of links if a device moves ``each * row share + offset`` bytes.

        A machine moves ``offset`` and the sum of ``each * share`` of its devices.
        """
        group, n = self.group, self.group.count
        inside = self._linear(each / group.inside_bytes_per_s)
        inside = Maximum(inside.terms, np.full(n, offset / group.inside_bytes_per_s))
        parts = [inside]
        if len(group.machines) > 1:
            terms = np.concatenate([group.machines * each, group.machines * 0], axis=1)
            offsets = np.full(len(terms), offset)
            outside = group.outside_bytes_per_s
            parts.append(Maximum(terms / outside, offsets / outside))
        return _joined(parts, latency_s)

    def _ring(self, size_bytes: float, latency_s: float) -> Maximum:
        return self._link(np.zeros(self.group.count), size_bytes, latency_s)

    def _padded(self, size_bytes: float, latency_s: float, columns: bool) -> Maximum:
        """Return the time of a ring whose every step moves the largest share of the bytes."""
        group = self.group
        slowest = group.inside_bytes_per_s
        if len(group.machines) > 1:
            slowest = min(slowest, group.outside_bytes_per_s)
        each = np.full(group.count, size_bytes / slowest)
        return self._linear(each, latency_s, columns=columns)

    def _crossing(self, sent: Floats, received: Floats, columns: bool) -> list[Maximum]:
        """Return the times of bytes in proportion to the shares, inside and between machines.

        Args:
            sent: [G, G], bytes per row share of the first device that it sends to the second.
            received: [G, G], the same by the share of the receiver: per column share with
                ``columns``, else per row share.
            columns: Whether ``received`` is by column share.
        """
        group, n = self.group, self.group.count
        same = group.machines.T @ group.machines
        found = []
        for each, by_columns in ((sent, False), (received.T, columns)):
            near = (each * same).sum(1)
            found.append(self._linear(near / group.inside_bytes_per_s, columns=by_columns))
            if len(group.machines) > 1:
                far = (each * (1 - same)).sum(1)
                terms = np.zeros((len(group.machines), 2 * n))
                terms[:, n * by_columns : n * by_columns + n] = group.machines * far
                terms /= group.outside_bytes_per_s
                found.append(Maximum(terms, np.zeros(len(terms))))
        return found

    def _all_to_all(self, numbers: float, latency_s: float) -> Cost:
        rows, columns, n = self.shares.rows, self.shares.columns, self.group.count
        size_bytes = 2 * numbers * self.sizes.number_bytes
        others = 1 - np.eye(n)
        sent, received = size_bytes * others * columns, size_bytes * others * rows[:, None]
        link = _joined(self._crossing(sent, received, columns=True), latency_s)
        copied = 2 * self.sizes.boundary_per_number_s * numbers / self.group.memory_speeds
        return link, self._linear(copied * (1 - columns))

    def halo_rows(self) -> Floats:
        """Return the rows that a device sends to another one, per row share of the sender."""
        rows, n = self.shares.rows, self.group.count
        spread = rows * (1 - rows)
        total = spread.sum()
        if total <= 0:
            return np.zeros((n, n))
        # The rows that cross between two devices are in proportion to the product of their shares.
        sent: Floats = self.sizes.crossings * rows * (1 - np.eye(n)) / total
        return sent

    def _halo(self, value: str, latency_s: float) -> Cost:
        group, sizes = self.group, self.sizes
        width = self._by_name[value].width
        rows = self.halo_rows()
        sent = rows * width * sizes.number_bytes
        both = self._crossing(sent, sent.T, columns=False)
        link = _joined(both, latency_s / 2)
        copied = 2 * sizes.boundary_per_number_s * rows.sum(1) * width / group.memory_speeds
        hidden = self._hidden_s.get(value, 0.0) / sizes.chunks / group.memory_speeds
        return link, self._linear(copied), self._after(link, hidden)

    def _after(self, link: Maximum, hidden: Floats) -> Maximum:
        """Return the time of an exchange that devices wait for after ``hidden * row share``."""
        n = self.group.count
        terms, offsets = link.terms, link.offsets + link.constant
        if hidden.any():
            own = self._linear(hidden).terms
            # The device with the least own work waits longest.
            least = own[int(np.argmin(hidden * self.shares.rows))]
            terms = terms - least
        none = np.zeros((1, 2 * n))
        return Maximum(np.concatenate([terms, none]), np.concatenate([offsets, [0.0]]))

    @cached_property
    def _hidden_s(self) -> dict[str, float]:
        """The shortest backward product of the aggregations that read a value."""
        found: dict[str, float] = {}
        for op in self.ops:
            if op.kind in (OpKind.AGGREGATION, OpKind.ATTENTION):
                for value in op.inputs:
                    own = self.work[op.name].backward_s
                    found[value] = min(found.get(value, own), own)
        return found

    def least_compute_s(self, op: PrimitiveOp) -> float:
        """Return the time of an op at the sum of all speeds, which no rule can beat."""
        work, group = self.work[op.name], self.group
        if all(rule.split is Split.NONE for rule in RULES[op.kind]):
            return 0.0
        in_memory = op.kind is not OpKind.DENSE
        speeds = group.memory_speeds if in_memory else group.speeds
        whole_s = (work.forward_s + work.backward_s) / self.sizes.chunks
        return whole_s / float(speeds.sum()) + self._base_s(work) / float(speeds.max())


def _joined(parts: Sequence[Maximum], constant: float) -> Maximum:
    """Return the maximum over all terms, plus ``constant``."""
    return Maximum(
        np.concatenate([part.terms for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        constant,
    )

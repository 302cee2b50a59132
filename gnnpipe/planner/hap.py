"""Finds the distributed program and the shares of a group of unequal devices (HAP).

HAP (arXiv 2401.05965): A* over programs with dominance pruning, and a linear program for the
shares, alternately, until the time no longer falls. HAP's release searches with the bound 0; here
the cost that is left is bounded by ``Bound``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count

import numpy as np
from scipy.optimize import linprog

from gnnpipe.errors import InputError
from gnnpipe.planner.device_group import Floats, Shares, capped
from gnnpipe.planner.distributed_program import (
    CONVERSIONS,
    RULES,
    DistributedProgram,
    Instruction,
    OpKind,
    Property,
    Rule,
    State,
    check_ops,
)
from gnnpipe.planner.program_check import check_program
from gnnpipe.planner.program_costs import Maximum, ProgramCosts

MOST_EXPANDED = 500_000
"""States after which a search gives up."""
MOST_TURNS = 8
"""Turns of A* and linear program; each but the last makes the program faster."""

Rules = Mapping[OpKind, tuple[Rule, ...]]


class Bound(Enum):
    """Lower bound of the cost that is left."""

    NONE = "none"
    """0, as in HAP's release."""
    SPEEDS = "sum of speeds"
    """Compute that is left at the sum of all speeds, and no communication."""
    CHAINS = "chains"
    """Each value that is left goes on its own cheapest chain of rules and conversions."""


@dataclass(frozen=True)
class SearchedProgram:
    """The cheapest program for given shares."""

    program: DistributedProgram
    time_s: float
    """Forward and backward of one chunk."""
    expanded: int
    """States that the search expanded."""


class _Tables:
    """Costs of all rules and conversions, and which value is read when."""

    def __init__(self, costs: ProgramCosts, rules: Rules) -> None:
        self.ops = costs.ops
        self.rules = [
            [(rule, costs.compute_s(op, rule)) for rule in rules[op.kind]] for op in self.ops
        ]
        self.moves = {
            op.name: [(c, costs.convert_s(op.name, c)) for c in CONVERSIONS] for op in self.ops
        }
        self.readers: dict[str, list[int]] = {op.name: [] for op in self.ops}
        for i, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                self.readers[value].append(i)
        self.last_read = {value: max(found, default=-1) for value, found in self.readers.items()}
        self.least_s = [costs.least_compute_s(op) for op in self.ops]
        self._reach: dict[tuple[float, ...], list[list[float]]] = {}
        self.reach_s = {op.name: self._sets(op.name) for op in self.ops}

    def _sets(self, value: str) -> list[list[float]]:
        """Return the least cost of conversions from one set of states to a larger one."""
        key = tuple(time_s for _, time_s in self.moves[value])
        if key not in self._reach:
            sets = 1 << len(State)
            moves = [(_bit(c.source), _bit(c.target), time_s) for c, time_s in self.moves[value]]
            found = [[math.inf] * sets for _ in range(sets)]
            for start, from_s in enumerate(found):
                from_s[start] = 0.0
                # A conversion makes the set, and so its number, larger.
                for there in range(start, sets):
                    if from_s[there] == math.inf:
                        continue
                    for source, target, time_s in moves:
                        if there & source:
                            more = there | target
                            from_s[more] = min(from_s[more], from_s[there] + time_s)
            self._reach[key] = found
        return self._reach[key]


_BITS = {state: 1 << i for i, state in enumerate(State)}


def _bit(state: State) -> int:
    """Return the set of one state, as a bit mask."""
    return _BITS[state]


class _ChainBound:
    """Lower bound by the cheapest way of every value to the end.

    For each value that is there, the best set of states is chosen for all of its readers, and for
    each reader the best rule among those states. The cost of a reader and of all behind it is
    divided equally among its inputs, each of which chooses for itself; so the sum over values is
    never more than what is left, and on a chain of ops it is exactly that.
    """

    def __init__(self, tables: _Tables) -> None:
        self.tables = tables
        self._known: dict[tuple[str, int, int], float] = {}
        # By reader: the state that a rule needs, and the cost from there on for one input.
        self._rules: list[list[tuple[int, float]]] = [[] for _ in tables.ops]
        # Features that are loaded later.
        self._loaded_s = [0.0] * (len(tables.ops) + 1)
        for i in reversed(range(len(tables.ops))):
            op = tables.ops[i]
            behind = [
                (rule, time_s + self._value_s(op.name, _bit(rule.gives), 0))
                for rule, time_s in tables.rules[i]
            ]
            self._loaded_s[i] = self._loaded_s[i + 1]
            if not op.inputs:
                self._loaded_s[i] += min(time_s for _, time_s in behind)
            parts = len(set(op.inputs)) or 1
            self._rules[i] = [(_bit(r.needs), t / parts) for r, t in behind if r.needs is not None]

    def _value_s(self, value: str, there: int, position: int) -> float:
        """Return the bound for the readers of a value from ``position`` on."""
        readers = [r for r in self.tables.readers[value] if r >= position]
        key = value, there, len(readers)
        if key not in self._known:
            best_s = math.inf
            for states, time_s in enumerate(self.tables.reach_s[value][there]):
                if time_s >= best_s:
                    continue
                for reader in readers:
                    rules = self._rules[reader]
                    time_s += min((t for needs, t in rules if needs & states), default=math.inf)
                best_s = min(best_s, time_s)
            self._known[key] = best_s
        return self._known[key]

    def left_s(self, position: int, properties: frozenset[Property]) -> float:
        """Return the bound for a state of the search."""
        states: dict[str, int] = {}
        for value, state in properties:
            states[value] = states.get(value, 0) | _bit(state)
        values = (self._value_s(value, there, position) for value, there in states.items())
        # The exact sum does not depend on the order of a set.
        return math.fsum((self._loaded_s[position], *values))


def _bound(kind: Bound, tables: _Tables) -> Callable[[int, frozenset[Property]], float]:
    if kind is Bound.CHAINS:
        return _ChainBound(tables).left_s
    least_s = tables.least_s if kind is Bound.SPEEDS else [0.0] * len(tables.ops)
    sums = [*np.cumsum(least_s[::-1])[::-1].tolist(), 0.0]
    return lambda position, properties: sums[position]


@dataclass(frozen=True)
class _Node:
    """A state of the search: the ops before ``position`` are computed."""

    position: int
    properties: frozenset[Property]
    """Of values that are still read."""
    time_s: float
    step: Instruction | None = None
    before: _Node | None = None

    def instructions(self) -> tuple[Instruction, ...]:
        """Return the program that leads here."""
        found = []
        node: _Node | None = self
        while node is not None and node.step is not None:
            found.append(node.step)
            node = node.before
        return tuple(reversed(found))


def find_program(
    costs: ProgramCosts,
    rules: Rules = RULES,
    bound: Bound = Bound.CHAINS,
    most_expanded: int = MOST_EXPANDED,
) -> SearchedProgram:
    """Return the cheapest program for the shares of ``costs``, by A* over programs.

    Ops are computed in their order, and an input is converted just before the first op that needs
    it in that state; every program can be brought into this form at the same cost. A state is
    dropped if another one at the same op has all of its properties and costs no more.

    Raises:
        InputError: After ``most_expanded`` states, or if no program exists with these rules.
    """
    check_ops(costs.ops)
    tables = _Tables(costs, rules)
    left_s = _bound(bound, tables)
    serial, expanded = count(), 0
    first = _Node(0, frozenset(), 0.0)
    heap = [(left_s(0, first.properties), 0, next(serial), first)]
    known: list[list[tuple[frozenset[Property], float]]] = [[] for _ in range(len(costs.ops) + 1)]
    while heap:
        _, _, _, node = heapq.heappop(heap)
        if any(t <= node.time_s and p >= node.properties for p, t in known[node.position]):
            continue
        if node.position == len(costs.ops):
            program = DistributedProgram(costs.ops, node.instructions())
            check_program(program, State.PARTIAL)
            return SearchedProgram(program, node.time_s, expanded)
        known[node.position].append((node.properties, node.time_s))
        expanded += 1
        if expanded > most_expanded:
            raise InputError(
                f"plan: the search for a sharding gave up after {most_expanded:,} states; give "
                "--stages, --shards and --chunks"
            )
        for other in _successors(node, tables):
            total_s = other.time_s + left_s(other.position, other.properties)
            if total_s < math.inf:
                heapq.heappush(heap, (total_s, -other.position, next(serial), other))
    raise InputError("plan: no program computes the loss with these rules")


def _successors(node: _Node, tables: _Tables) -> list[_Node]:
    """Return the states after one more instruction."""
    i, op = node.position, tables.ops[node.position]
    found = []
    for rule, time_s in tables.rules[i]:
        step = Instruction.compute(op, rule)
        if node.properties.issuperset(step.needs):
            kept = frozenset(p for p in node.properties if tables.last_read[p.value] > i)
            made = kept | {step.gives} if tables.readers[op.name] else kept
            found.append(_Node(i + 1, made, node.time_s + time_s, step, node))
    for value in dict.fromkeys(op.inputs):
        for conversion, time_s in tables.moves[value]:
            if Property(value, conversion.source) not in node.properties:
                continue
            if Property(value, conversion.target) in node.properties:
                continue
            step = Instruction.convert(value, conversion)
            made = node.properties | {step.gives}
            found.append(_Node(i, made, node.time_s + time_s, step, node))
    return found


# Shares.


def best_shares(parts: Sequence[Maximum], group_size: int, most: Floats | None = None) -> Shares:
    """Return the shares that minimise a sum of maxima, by a linear program (HiGHS).

    Args:
        parts: The costs of a program's instructions.
        group_size: G.
        most: Largest share of each device, [G]; None: 1.

    Raises:
        InputError: HiGHS found no optimum.
    """
    n = group_size
    # Layers are alike: equal maxima have one variable with their number as its weight.
    weights: dict[tuple[bytes, bytes], list[Maximum]] = {}
    for part in parts:
        if part.terms.any():
            weights.setdefault((part.terms.tobytes(), part.offsets.tobytes()), []).append(part)
    groups = list(weights.values())
    largest = np.ones(n) if most is None else most
    if not groups:
        return Shares.alike(capped(np.full(n, 1 / n), largest))
    terms, limits = [], []
    for k, group in enumerate(groups):
        one = group[0]
        above = np.zeros((len(one.terms), len(groups)))
        above[:, k] = -1.0
        terms.append(np.concatenate([one.terms, above], axis=1))
        limits.append(-one.offsets)
    sums = np.zeros((2, 2 * n + len(groups)))
    sums[0, :n] = sums[1, n : 2 * n] = 1.0
    scale = max(float(np.abs(one[0].terms).max()) for one in groups)
    matrix = np.concatenate(terms)
    matrix[:, : 2 * n] /= scale
    found = linprog(
        np.concatenate([np.zeros(2 * n), [float(len(group)) for group in groups]]),
        A_ub=matrix,
        b_ub=np.concatenate(limits) / scale,
        A_eq=sums,
        b_eq=[1.0, 1.0],
        bounds=[(0.0, m) for m in largest] * 2 + [(0.0, None)] * len(groups),
        method="highs",
    )
    if not found.success:
        raise InputError(f"plan: the linear program of the shares failed: {found.message}")
    both: Floats = np.clip(found.x[: 2 * n], 0.0, 1.0)
    rows, columns = both[:n] / both[:n].sum(), both[n:] / both[n:].sum()
    if not any(one[0].terms[:, n:].any() for one in groups):
        return Shares.alike(rows)
    return Shares(rows if any(one[0].terms[:, :n].any() for one in groups) else columns, columns)


def rounded(shares: Sequence[float], total: int) -> list[int]:
    """Return whole parts of ``total`` near the shares: floors, then the largest deficit first.

    >>> rounded([0.5, 0.3, 0.2], 4)
    [2, 1, 1]
    """
    wanted = np.asarray(shares, dtype=float) * total / float(np.sum(shares))
    parts = np.floor(wanted + 1e-9).astype(int)
    missing = total - int(parts.sum())
    for g in np.argsort(-(wanted - parts), kind="stable")[:missing]:
        parts[g] += 1
    return [int(part) for part in parts]


@dataclass(frozen=True)
class ShardedGroup:
    """Program and shares that alternation found."""

    found: SearchedProgram
    shares: Shares
    turns: int
    expanded: int
    """States of all turns."""

    @property
    def time_s(self) -> float:
        """Forward and backward of one chunk."""
        return self.found.time_s


def alternate(
    costs_of: Callable[[Shares], ProgramCosts],
    start: Shares,
    rules: Rules = RULES,
    moves_shares: bool = True,
    most_expanded: int = MOST_EXPANDED,
) -> ShardedGroup:
    """Search a program and its shares in turns until the time stops falling.

    Args:
        costs_of: Costs near given shares.
        start: The first shares, such as equal ones.
        rules: The rules that programs may use.
        moves_shares: Whether shares are changed at all.
        most_expanded: States after which a search of a program gives up.

    Raises:
        InputError: A search gave up, found no program, or the linear program failed.
    """
    best: ShardedGroup | None = None
    shares, expanded = start, 0
    for turn in range(1, MOST_TURNS + 1):
        costs = costs_of(shares)
        found = find_program(costs, rules, most_expanded=most_expanded)
        expanded += found.expanded
        if best is not None and found.time_s >= best.time_s * (1 - 1e-6):
            break
        best = ShardedGroup(found, shares, turn, expanded)
        if not moves_shares or costs.group.count == 1:
            break
        group = costs.group
        wanted = best_shares(costs.program(found.program), group.count, group.most)
        shares = Shares(*(group.averaged(s) for s in (wanted.rows, wanted.columns)))
    assert best is not None
    return replace(best, expanded=expanded)

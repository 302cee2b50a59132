"""Planner of stage DAGs by dynamic programming over an order of the units, with true dependencies.

The model is built up in states: sets of units that contain everything the units depend on. A stage
leads from one state to a larger one. The states are the beginnings of a branch-major order, so a
stage is an interval of the order. Two orders are tried: the lightest branch first, or next to the
join. If there are at most ``MOST_STATES`` states in all, every state is used, and then every
partition into stages is considered. In contrast to a chain, a stage waits only for the stages
that it reads from. The longest path of these dependencies decides how many chunks are in flight,
and is the second objective after the time of the slowest stage.
"""

from __future__ import annotations

from itertools import accumulate
from operator import le, or_
from typing import NamedTuple

from gnnpipe.planner.series_parallel import decompose
from gnnpipe.planner.stage_search import Stage, StageCosts, Stages
from gnnpipe.planner.unit_dag import UnitDag, members

MOST_STATES = 128
"""All states are used if there are at most so many."""
MOST_SUFFIXES = 64
"""Ways to run the rest of the model that are kept for a state."""


class _Suffix(NamedTuple):
    """Stages of the units outside a state."""

    devices: int
    length: float
    """The length of the longest path."""
    lengths: tuple[float, ...]
    """The longest path from a stage that reads a unit of the state, for each such unit."""
    stage: Stage | None
    """The first stage; None at the end."""
    rest: _Suffix | None

    def is_as_good_as(self, other: _Suffix) -> bool:
        """Whether no number is larger."""
        return (
            self.devices <= other.devices
            and self.length <= other.length
            and all(map(le, self.lengths, other.lengths))
        )


class _Step(NamedTuple):
    """The set of units between two states, as a stage."""

    mask: int
    read_later: tuple[int, ...]
    """Places, among the units of the larger state that are read later, of units of the stage."""
    kept: tuple[tuple[int, bool], ...]
    """For each unit of the smaller state that is read later: its place in the larger one (-1: only
    the stage reads the unit), and whether the stage reads it."""


class Interval:
    """Planner for one number of chunks; a ``TargetSearch``."""

    is_chain = False

    def __init__(self, costs: StageCosts) -> None:
        """Choose the states."""
        dag = costs.dag
        states = _all_states(dag)
        if states is not None:
            self.searches = [_StateSearch(costs, states, is_order=False)]
            return
        root = decompose(dag, costs.unit_times_s).root
        orders = {tuple(costs.unit_times_s[u] for u in o): o for o in (root.mirrored, root.units)}
        # Two orders of the same times are alike, up to names.
        self.searches = [
            _StateSearch(costs, [*accumulate((1 << u for u in order), or_, initial=0)], True)
            for order in orders.values()
        ]

    def find(self, target_s: float) -> Stages | None:
        """Return stages of at most ``target_s`` each, with the shortest longest path."""
        found = [best for one in self.searches if (best := one.best(target_s)) is not None]
        suffix = min(found, key=_length, default=None)
        stages: list[Stage] = []
        while suffix is not None and suffix.stage is not None:
            stages.append(suffix.stage)
            suffix = suffix.rest
        return tuple(stages) or None


def _length(suffix: _Suffix) -> tuple[float, int]:
    return suffix.length, suffix.devices


class _StateSearch:
    """Dynamic program over some states."""

    def __init__(self, costs: StageCosts, states: list[int], is_order: bool) -> None:
        """``is_order``: each state contains the one before."""
        self.costs, self.dag = costs, costs.dag
        self.states, self.is_order = states, is_order
        self._read_later = [
            tuple(u for u in members(state) if self.dag.readers[u] & ~state) for state in states
        ]
        self._steps: dict[tuple[int, int], _Step] = {}

    def best(self, target_s: float) -> _Suffix | None:
        """Return the stages with the shortest longest path, if any keep to the target."""
        count = len(self.states)
        suffixes: list[list[_Suffix]] = [[] for _ in range(count)]
        suffixes[-1] = [_Suffix(0, 0.0, (), None, None)]
        for small in reversed(range(count - 1)):
            found: list[_Suffix] = []
            # The units of the state, which stages in front will hold, need devices as well.
            most = self.costs.limits.devices - self.costs.fewest_devices(
                self.states[small], target_s
            )
            for large in range(small + 1, count):
                if self.states[small] & ~self.states[large]:
                    continue
                if self.costs.is_too_slow(self.states[large] & ~self.states[small], target_s):
                    if self.is_order:
                        break
                    continue
                found += self._extended(small, large, suffixes[large], target_s, most)
            suffixes[small] = self._best(found)
        return min(suffixes[0], key=_length, default=None)

    def _extended(
        self, small: int, large: int, suffixes: list[_Suffix], target_s: float, most: int
    ) -> list[_Suffix]:
        """Return the suffixes with the stage between two states in front.

        ``most``: devices that they may have.
        """
        if not suffixes:
            return []
        step, found, costs = self._step(small, large), [], self.costs
        # With a longer path behind, a stage may need more devices because of its memory.
        fewest = costs.fewest_shards(step.mask, 0.0, target_s)
        for suffix in suffixes if fewest else ():
            if suffix.devices + fewest > most:
                break  # they ascend by devices
            behind = max([suffix.lengths[i] for i in step.read_later], default=0.0)
            shards = fewest
            if costs.depends_on_behind:
                shards = costs.fewest_shards(step.mask, behind, target_s)
                if not shards or suffix.devices + shards > most:
                    continue
            length = behind + costs.length(step.mask, shards)
            lengths = tuple(
                max(suffix.lengths[place] if place >= 0 else 0.0, length if is_read else 0.0)
                for place, is_read in step.kept
            )
            stage, longest = Stage(step.mask, shards), max(suffix.length, length)
            found.append(_Suffix(suffix.devices + shards, longest, lengths, stage, suffix))
        return found

    def _step(self, small: int, large: int) -> _Step:
        key = small, large
        if key not in self._steps:
            mask = self.states[large] & ~self.states[small]
            later = {unit: i for i, unit in enumerate(self._read_later[large])}
            self._steps[key] = _Step(
                mask,
                tuple(i for unit, i in later.items() if mask >> unit & 1),
                tuple(
                    (later.get(unit, -1), bool(self.dag.readers[unit] & mask))
                    for unit in self._read_later[small]
                ),
            )
        return self._steps[key]

    def _best(self, found: list[_Suffix]) -> list[_Suffix]:
        """Return the suffixes that no other one is as good as, at most ``MOST_SUFFIXES``."""
        kept: list[_Suffix] = []
        for one in sorted(found, key=lambda s: s[:3]):
            if not any(other.is_as_good_as(one) for other in kept):
                kept.append(one)
                if len(kept) == MOST_SUFFIXES:
                    break
        return kept


def _all_states(dag: UnitDag) -> list[int] | None:
    """Return all sets of units without open dependencies, small ones first; None: too many."""
    found, fresh = {0}, {0}
    while fresh:
        fresh = {
            state | 1 << u
            for state in fresh
            for u in range(len(dag.units))
            if not state >> u & 1 and not dag.before[u] & ~state
        }
        found |= fresh
        if len(found) > MOST_STATES:
            return None
    return sorted(found, key=lambda state: (state.bit_count(), state))

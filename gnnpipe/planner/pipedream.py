"""PipeDream's planner: the stages form a chain, for comparison with stage DAGs.

The units are put in one order, branch by branch, and a dynamic program cuts the order into stages
(arXiv 1806.03377). Every stage waits for the stage before, so as many chunks are in flight at a
stage as there are stages from this one on, whether or not they depend on each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from gnnpipe.plan import StageDag, Transfer
from gnnpipe.planner.series_parallel import decompose
from gnnpipe.planner.stage_search import Stage, StageCosts, Stages


class _Suffix(NamedTuple):
    """Stages of the units from some place of the order on."""

    devices: int
    length: float
    """The length of all stages, which follow one another."""
    stage: Stage | None
    """The first stage; None at the end."""
    rest: _Suffix | None


class PipeDream:
    """Planner for one number of chunks; a ``TargetSearch``."""

    is_chain = True

    def __init__(self, costs: StageCosts) -> None:
        """Put the units in an order, the lightest branch first."""
        self.costs = costs
        self.order = decompose(costs.dag, costs.unit_times_s).root.units

    def find(self, target_s: float) -> Stages | None:
        """Return the shortest chain of stages of at most ``target_s`` each."""
        end = len(self.order)
        suffixes: list[list[_Suffix]] = [[] for _ in self.order]
        suffixes.append([_Suffix(0, 0.0, None, None)])
        for begin in reversed(range(end)):
            mask, found = 0, []
            for place in range(begin, end):
                mask |= 1 << self.order[place]
                if self.costs.is_too_slow(mask, target_s):
                    break
                for rest in suffixes[place + 1]:
                    shards = self.costs.fewest_shards(mask, rest.length, target_s)
                    if shards:
                        stage, devices = Stage(mask, shards), rest.devices + shards
                        length = rest.length + self.costs.length(mask, shards)
                        found.append(_Suffix(devices, length, stage, rest))
            for one in sorted(found, key=lambda s: s[:2]):
                kept = suffixes[begin]
                if one.devices <= self.costs.limits.devices and (
                    not kept or one.length < kept[-1].length
                ):
                    kept.append(one)
        if not suffixes[0]:
            return None
        stages: list[Stage] = []
        suffix: _Suffix | None = suffixes[0][-1]
        while suffix is not None and suffix.stage is not None:
            stages.append(suffix.stage)
            suffix = suffix.rest
        return tuple(stages)


def as_chain(dag: StageDag) -> StageDag:
    """Return the stages of ``dag`` with each one waiting for the stage before, forward and back.

    Where no value passes between the two, the message is empty.
    """
    pairs = {(t.source, t.target) for t in dag.transfers}
    empty = (
        Transfer(s, s + 1, {}) for s in range(dag.plan.num_stages - 1) if (s, s + 1) not in pairs
    )
    ordered = sorted((*dag.transfers, *empty), key=lambda t: (t.source, t.target))
    return replace(dag, transfers=tuple(ordered))

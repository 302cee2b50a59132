"""Search for stages: what the planners of stage DAGs share.

A planner answers one question: which stages keep every stage's time under a target? ``search`` asks
it for falling targets and several numbers of chunks, estimates the time of an epoch for every
answer by a closed form, simulates the best few, and returns the fastest.

The time of a stage is that of one chunk: forward and backward of its ops, or the messages that
leave the stage and return, whichever takes longer, plus the chunk's part of the work once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Protocol

from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.planner.costs import PlanningCosts
from gnnpipe.planner.unit_dag import UnitDag, members

FIRST_SLACK = 0.05
"""The first target is this much above the work of all units spread evenly over the devices."""
TOLERANCE = 0.005
"""Relative width at which the bisection of the target ends."""
ROUGH_TOLERANCE = 0.03
"""The same for a search whose answers are compared by another closed form."""
MOST_LAST_STEPS = 10
"""Targets just below the best time that are tried after the bisection."""
WIDER_TARGETS = (1.05, 1.1, 1.2, 1.5)
"""Multiples of the least time that are also tried: fewer stages may be faster with few chunks."""
MOST_SIMULATED = 3
"""Plans that are simulated, the best by the closed form first."""
SIMULATED_WITHIN = 1.04
"""A plan is simulated if the closed form is at most so many times that of the best plan; on
GraphPipe's workloads the form is within 4 % of the simulation."""


class InFlight(Enum):
    """Chunks that a stage holds for backward at the same time, and the length of a path."""

    ALL = "all"
    """All chunks: fill-drain and layer-sync run every forward before the first backward. The length
    of a stage is the time of one chunk in the stage, and of the stage's work once an epoch: without
    this work, devices whose gradient sums cost more than they save would shorten a path."""
    DEPTH = "depth"
    """1 + the largest number of a stage that reads from the stage: 1F1B (GraphPipe). The length of
    a stage is 1, and the number is the length of the longest path from the stage."""


@dataclass(frozen=True)
class Limits:
    """Devices that a plan may use."""

    devices: int
    memory_bytes: float = math.inf
    """Memory of each device; infinite: no limit."""
    in_flight: InFlight = InFlight.ALL
    shard_counts: tuple[int, ...] = ()
    """Numbers of devices that a stage may have, ascending; default: powers of 2."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"devices {self.devices}: a plan needs at least 1")
        counts = self.shard_counts or tuple(1 << i for i in range(self.devices.bit_length()))
        fitting = tuple(count for count in counts if count <= self.devices)
        object.__setattr__(self, "shard_counts", fitting)


@dataclass(frozen=True)
class Stage:
    """A set of units and the number of its devices."""

    mask: int
    shards: int


Stages = tuple[Stage, ...]
"""In an order in which every value is computed before a stage reads it."""


@dataclass
class StageCosts:
    """Times and memory of sets of units for one number of chunks, each computed once."""

    dag: UnitDag
    costs: PlanningCosts
    limits: Limits
    _sets: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    _times_s: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _bytes: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _lengths: dict[tuple[int, int], float] = field(default_factory=dict)

    def _both_s(self, mask: int, shards: int) -> tuple[float, float]:
        """Return the time of a stage without and with its messages."""
        found = self._times_s.get((mask, shards))
        if found is None:
            ops, _ = self._ops_and_width(mask)
            work_s = self.costs.stage_s(ops, shards)
            once_s = self.costs.epoch_s(ops, shards) / self.costs.chunks
            passing_s = 2 * self.message_s(mask, shards)
            found = self._times_s[mask, shards] = (work_s + once_s, max(work_s, passing_s) + once_s)
        return found

    def _ops_and_width(self, mask: int) -> tuple[tuple[int, ...], int]:
        """Return the ops of a set of units, and the width of the values that leave the set."""
        if mask not in self._sets:
            self._sets[mask] = self.dag.ops(mask), self.dag.leaving_width(mask)
        return self._sets[mask]

    @cached_property
    def unit_times_s(self) -> list[float]:
        """Device time of each unit, without messages."""
        count = self.limits.shard_counts[0]
        return [count * self._both_s(1 << u, count)[0] for u in range(len(self.dag.units))]

    def message_s(self, mask: int, shards: int) -> float:
        """Return the time of the messages of one chunk that leave a stage, one way."""
        _, width = self._ops_and_width(mask)
        return self.costs.message_s(width, shards) if width else 0.0

    def time_s(self, mask: int, shards: int) -> float:
        """Return the time of a stage; the largest one of a plan is the planners' objective."""
        return self._both_s(mask, shards)[1]

    def is_too_slow(self, mask: int, target_s: float) -> bool:
        """Whether a stage misses the target on any number of devices, even without messages.

        With more units a stage is too slow all the more.
        """
        # Most devices are fastest, as a rule.
        for shards in reversed(self.limits.shard_counts):
            if self._both_s(mask, shards)[0] <= target_s:
                return False
        return True

    def fewest_devices(self, mask: int, target_s: float) -> int:
        """Return a lower bound of the devices on which stages of these units keep to the target."""
        if not mask:
            return 0
        count = self.limits.shard_counts[0]
        device_s = self._both_s(mask, count)[0] * count
        return math.ceil(device_s / target_s * (1 - 1e-9))

    def _counts(self, mask: int, target_s: float) -> Iterator[int]:
        """Yield the numbers of devices that may be enough: G are at most G times as fast."""
        counts = self.limits.shard_counts
        fewest = self._both_s(mask, counts[0])[0] * counts[0] / (target_s * (1 + 1e-9))
        return (shards for shards in counts if shards >= fewest)

    @property
    def depends_on_behind(self) -> bool:
        """Whether ``fewest_shards`` depends on the path behind a stage."""
        limits = self.limits
        return limits.memory_bytes < math.inf and limits.in_flight is InFlight.DEPTH

    def fewest_shards(self, mask: int, behind: float, target_s: float) -> int:
        """Return the fewest devices on which a stage keeps to the target and fits; 0: none do.

        ``behind``: length of the longest path from the stages that read from the stage.
        """
        for shards in self._counts(mask, target_s):
            if self.time_s(mask, shards) <= target_s and self._fits(mask, shards, behind):
                return shards
        return 0

    def length(self, mask: int, shards: int) -> float:
        """Return the length of a stage on a path (see ``InFlight``)."""
        if self.limits.in_flight is InFlight.DEPTH:
            return 1.0
        key = mask, shards
        if key not in self._lengths:
            ops, _ = self._ops_and_width(mask)
            own_s = self.costs.stage_s(ops, shards) + self.costs.epoch_s(ops, shards)
            self._lengths[key] = own_s + 2 * self.message_s(mask, shards)
        return self._lengths[key]

    def _fits(self, mask: int, shards: int, behind: float) -> bool:
        if self.limits.memory_bytes == math.inf:
            return True
        chunks = self.costs.chunks
        held = chunks if self.limits.in_flight is InFlight.ALL else min(int(behind) + 1, chunks)
        key = mask, shards, held
        if key not in self._bytes:
            self._bytes[key] = self.costs.memory_bytes(self._ops_and_width(mask)[0], shards, held)
        return self._bytes[key] <= self.limits.memory_bytes

    def bottleneck_s(self, stages: Stages) -> float:
        """Return the largest time of a stage."""
        return max(self.time_s(stage.mask, stage.shards) for stage in stages)

    def pipeline_s(self, stages: Stages, is_chain: bool) -> float:
        """Estimate the time of an epoch: one chunk through the longest path, then the bottleneck.

        Forward and backward together, for schedules that run all forward actions first and for
        1F1B. The work once an epoch begins while the stages in front still run backward, which is
        taken as half of their time. ``is_chain``: every stage waits for the stage before.
        """
        front_s = [0.0] * len(stages)
        path_s = once_s = 0.0
        for i, (mask, shards) in enumerate((stage.mask, stage.shards) for stage in stages):
            ops, _ = self._ops_and_width(mask)
            once_s = max(once_s, self.costs.epoch_s(ops, shards) - front_s[i] / 2)
            end_s = front_s[i] + self.costs.stage_s(ops, shards)
            path_s = max(path_s, end_s)
            end_s += 2 * self.message_s(mask, shards)
            for j in [i + 1] if is_chain else readers_of(self.dag, stages, i):
                if j < len(stages):
                    front_s[j] = max(front_s[j], end_s)
        return path_s + (self.costs.chunks - 1) * self.bottleneck_s(stages) + once_s


class TargetSearch(Protocol):
    """A planner for one number of chunks."""

    is_chain: bool
    """Every stage waits for the stage before."""

    def find(self, target_s: float) -> Stages | None:
        """Return stages of at most this time each, if there are any."""


def readers_of(dag: UnitDag, stages: Stages, number: int) -> list[int]:
    """Return the numbers of the stages that read a value of a stage."""
    mask = 0
    for u in members(stages[number].mask):
        mask |= dag.readers[u]
    return [j for j, other in enumerate(stages) if j != number and other.mask & mask]


def depths(dag: UnitDag, stages: Stages) -> list[int]:
    """Return 1 + the largest depth of a reading stage, by stage: its chunks in flight in 1F1B."""
    found = [0] * len(stages)
    for i in reversed(range(len(stages))):
        found[i] = 1 + max((found[j] for j in readers_of(dag, stages, i)), default=0)
    return found


def falling_targets(
    costs: StageCosts, planner: TargetSearch, is_rough: bool = False
) -> list[Stages]:
    """Return a planner's answers to several targets, the one with the least bottleneck last.

    The least target is bracketed and bisected. Then targets just below the best time are tried: the
    last answer is optimal for the planner unless more than ``MOST_LAST_STEPS`` possible times lie
    within ``TOLERANCE``. ``is_rough``: stop at ``ROUGH_TOLERANCE``, without last steps.
    """
    tolerance = ROUGH_TOLERANCE if is_rough else TOLERANCE
    found: list[Stages] = []

    def is_possible(target_s: float) -> bool:
        stages = planner.find(target_s)
        if stages is not None:
            found.append(stages)
        return stages is not None

    work_s = sum(costs.unit_times_s)
    low_s, slack = work_s / costs.limits.devices, FIRST_SLACK
    target_s = low_s * (1 + slack)
    while not is_possible(target_s):
        if target_s == math.inf:
            return []
        low_s, slack = target_s, 2 * slack
        target_s = target_s * (1 + slack) if target_s < work_s else math.inf
    high_s = costs.bottleneck_s(found[-1])
    if high_s < low_s * (1 - 1e-9):
        low_s = high_s / 2
    while high_s > low_s * (1 + tolerance):
        target_s = (high_s * low_s) ** 0.5
        if is_possible(target_s):
            high_s = costs.bottleneck_s(found[-1])
        else:
            low_s = target_s
    for _ in range(0 if is_rough else MOST_LAST_STEPS):
        if not is_possible(high_s * (1 - 1e-9)):
            break
        high_s = costs.bottleneck_s(found[-1])
    # Answers to larger targets may have a longer path.
    is_possible(high_s)
    return found


@dataclass(frozen=True)
class Request:
    """A search over numbers of chunks."""

    costs_of: Callable[[int], PlanningCosts]
    """The costs for K chunks."""
    chunks: Sequence[int]
    """The numbers of chunks to try, such as powers of 2."""
    limits: Limits
    simulated_s: Callable[[Plan], float]
    """The simulated time of an epoch of a plan."""
    schedule: str = "fill-drain"


@dataclass(frozen=True)
class SearchResult:
    """The fastest plan of a search."""

    plan: Plan
    epoch_s: float
    """Simulated."""
    bottleneck_s: float
    """Time of the slowest stage for one chunk, the planners' objective."""
    depth: int
    """Stages on the longest path; of a chain, all."""
    planner: TargetSearch
    """The planner for the plan's number of chunks."""


def search(planner_of: Callable[[StageCosts], TargetSearch], request: Request) -> SearchResult:
    """Return the fastest plan that a planner finds.

    Raises:
        InputError: No plan fits the devices.
    """
    dag: UnitDag | None = None
    found: list[tuple[float, int, StageCosts, TargetSearch, Stages]] = []
    for chunks in request.chunks:
        costs = request.costs_of(chunks)
        dag = dag or UnitDag.of(costs.model)
        stage_costs = StageCosts(dag, costs, request.limits)
        planner = planner_of(stage_costs)
        for stages in candidates(stage_costs, planner):
            time_s = stage_costs.pipeline_s(stages, planner.is_chain)
            found.append((time_s, len(found), stage_costs, planner, stages))
    if not found:
        raise InputError(_why_none_fits(request))
    found.sort()
    best: list[SearchResult] = []
    for time_s, _, stage_costs, planner, stages in found[:MOST_SIMULATED]:
        if time_s <= found[0][0] * SIMULATED_WITHIN:
            plan = as_plan(stage_costs.dag, stages, stage_costs.costs.chunks, request.schedule)
            depth = len(stages) if planner.is_chain else max(depths(stage_costs.dag, stages))
            bottleneck_s = stage_costs.bottleneck_s(stages)
            simulated_s = request.simulated_s(plan)
            best.append(SearchResult(plan, simulated_s, bottleneck_s, depth, planner))
    return min(best, key=lambda one: one.epoch_s)


def candidates(costs: StageCosts, planner: TargetSearch, is_rough: bool = False) -> list[Stages]:
    """Return different stages for one number of chunks; ``is_rough`` as in ``falling_targets``."""
    found = falling_targets(costs, planner, is_rough)
    if found:
        least_s = costs.bottleneck_s(found[-1])
        best_s = costs.pipeline_s(found[-1], planner.is_chain)
        for factor in WIDER_TARGETS:
            # Only a shorter path can make up for slower stages.
            if (costs.costs.chunks - 1) * least_s * factor < best_s:
                stages = planner.find(least_s * factor)
                found += [stages] if stages is not None else []
    alone = costs.fewest_shards(costs.dag.everything, 0, math.inf)
    found += [(Stage(costs.dag.everything, alone),)] if alone else []
    return list(dict.fromkeys(found))


def as_plan(dag: UnitDag, stages: Stages, chunks: int, schedule: str) -> Plan:
    """Return the plan of these stages, with ranks numbered stage by stage."""
    planned, rank = [], 0
    for stage in stages:
        ranks = tuple(range(rank, rank + stage.shards))
        planned.append(StagePlan.even(dag.ops(stage.mask), ranks))
        rank += stage.shards
    return Plan(tuple(planned), chunks, schedule)


def _why_none_fits(request: Request) -> str:
    """Return the message for limits that no plan keeps."""
    limits, chunks = request.limits, max(request.chunks, default=0)
    if not chunks:
        return "plan: no number of chunks to try; give at least one"
    costs = request.costs_of(chunks)
    dag = UnitDag.of(costs.model)

    def needed(u: int) -> int:
        in_flight = chunks if limits.in_flight is InFlight.ALL else 1
        counts = limits.shard_counts
        return min(costs.memory_bytes(dag.units[u], shards, in_flight) for shards in counts)

    largest = max(range(len(dag.units)), key=needed)
    return (
        f"plan: no plan of {costs.model.name} fits {limits.devices} devices of "
        f"{limits.memory_bytes / 2**30:.3g} GiB; {dag.names(largest)} alone needs "
        f"{needed(largest) / 2**30:.3g} GiB a device with {chunks} chunks; try more devices, more "
        "memory or more chunks"
    )

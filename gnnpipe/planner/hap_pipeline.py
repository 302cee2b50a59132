"""Finds stages of unequal devices: groups of devices, layers by stage, and the sharding of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise

import numpy as np

from gnnpipe.perf.workload import Workload
from gnnpipe.plan import Plan, RowWay, StagePlan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner.chain import cut_chain, pipeline_time_s
from gnnpipe.planner.device_group import DeviceGroup, Floats, Shares
from gnnpipe.planner.devices import arrangements
from gnnpipe.planner.distributed_program import PLAN_RULES, DistributedProgram, OpKind, Rule, State
from gnnpipe.planner.hap import MOST_EXPANDED, Rules, ShardedGroup, alternate, rounded
from gnnpipe.planner.primitive_work import primitive_model
from gnnpipe.planner.program_costs import GraphSizes, ProgramCosts

HALO_RULES: Rules = {
    kind: tuple(
        rule
        for rule in rules
        if kind not in (OpKind.AGGREGATION, OpKind.ATTENTION) or rule.needs is State.HALO
    )
    for kind, rules in PLAN_RULES.items()
}
"""All values as rows, which travel by halo exchanges alone."""


Runs = tuple[tuple[int, int], ...]
"""First op and one past the last, by stage."""


class Choice(Enum):
    """How shares, or the layers of stages, are chosen."""

    EQUAL = "equal"
    BY_SPEED = "by speed"
    """In proportion to the speed of dense products."""
    SEARCHED = "searched"


@dataclass(frozen=True)
class Choices:
    """The freedom of a search."""

    shares: Choice = Choice.SEARCHED
    cuts: Choice = Choice.SEARCHED
    by_halo: bool = False
    """All rows travel by halo exchanges."""

    @property
    def rules(self) -> Rules:
        """The rules that programs may use."""
        return HALO_RULES if self.by_halo else PLAN_RULES


@dataclass(frozen=True)
class StageOfGroup:
    """A stage: its devices, its run of ops and its sharding."""

    ranks: tuple[int, ...]
    ops: tuple[int, int]
    """First op and one past the last."""
    sharding: ShardedGroup
    """Of the whole model on these devices."""

    def ways(self, workload: Workload) -> dict[str, RowWay]:
        """Return the way of every aggregation of the stage, by the name of its op."""
        names = {op.name for op in workload.model.ops[slice(*self.ops)]}
        ways = self.sharding.found.program.aggregation_ways()
        return {name: way for name, way in ways.items() if name in names}


@dataclass(frozen=True)
class GroupedPlan:
    """Stages and the predicted time of an epoch."""

    stages: tuple[StageOfGroup, ...]
    chunks: int
    epoch_s: float

    def runnable_plan(self, workload: Workload) -> Plan:
        """Return the plan that runs, with shares of the rows and ways of the programs.

        Raises:
            InputError: A device has no rows.
        """
        number = {op.name: i for i, op in enumerate(workload.model.ops)}
        stages: list[StagePlan] = []
        ways: dict[int, RowWay] = {}
        for stage in self.stages:
            shares = tuple(map(float, stage.sharding.shares.rows))
            stages.append(StagePlan(tuple(range(*stage.ops)), stage.ranks, shares))
            found = stage.ways(workload).items()
            ways |= {number[op]: way for op, way in found if way is not RowWay.HALO}
        dtype = workload.comm_dtype
        return Plan(tuple(stages), self.chunks, "fill-drain", comm_dtype=dtype, ways=ways)


class GroupPlanner:
    """Estimates the times of stages of a workload on a cluster."""

    def __init__(
        self,
        workload: Workload,
        memory_speeds: Sequence[float] = (),
        most_expanded: int = MOST_EXPANDED,
    ) -> None:
        """``memory_speeds``: by device, relative to the profiled one; default: ``speed``.

        ``most_expanded``: states after which the search of a program gives up.
        """
        assert workload.cluster is not None
        self.workload, self.cluster = workload, workload.cluster
        self.memory_speeds, self.most_expanded = memory_speeds, most_expanded
        self.model = primitive_model(workload)
        self._found: dict[tuple[object, ...], tuple[ShardedGroup, Floats]] = {}

    def group(self, ranks: Sequence[int], most: Floats | None = None) -> DeviceGroup:
        """Return the devices of a stage; ``most``: largest share of each, [G], or None."""
        return DeviceGroup.of(self.cluster, ranks, self.memory_speeds, most)

    def _costs_of(self, group: DeviceGroup, chunks: int) -> Callable[[Shares], ProgramCosts]:
        work = self.workload
        rows = sum(work.num_vertices.values()) / chunks
        crossings = rows * (work.halo(group.count) if group.count > 1 else 0.0)
        per_number_s = work.profile.compute_of(work.ranks_at_once).boundary_per_number_s
        bytes_of = work.memory.row_bytes, work.memory.number_bytes
        sizes = GraphSizes(rows, crossings, chunks, *bytes_of, per_number_s)
        ops, times = self.model.ops, self.model.work
        return lambda shares: ProgramCosts(ops, times, group, sizes, shares)

    def sharding(
        self, group: DeviceGroup, chunks: int, choices: Choices
    ) -> tuple[ShardedGroup, Floats]:
        """Return program and shares of a group, and the prefix sums of the model's ops, [ops + 1].

        The times are those of forward and backward of one chunk.

        Raises:
            InputError: As ``alternate``.
        """
        arrays = [group.speeds, group.memory_speeds, group.machines]
        arrays += [] if group.most is None else [group.most]
        links = group.inside_bytes_per_s, group.outside_bytes_per_s, group.latency_s
        key = *(a.tobytes() for a in arrays), *links, chunks, choices.shares, choices.by_halo
        if key not in self._found:
            costs_of = self._costs_of(group, chunks)
            is_searched = choices.shares is Choice.SEARCHED
            starts = [group.equal] if choices.shares is not Choice.BY_SPEED else [group.by_speed]
            # The turns may end in different places from equal shares and from shares by speed.
            starts += [group.by_speed] if is_searched and np.ptp(group.speeds) else []
            best = min(
                (
                    alternate(
                        costs_of, Shares.alike(s), choices.rules, is_searched, self.most_expanded
                    )
                    for s in starts
                ),
                key=lambda one: one.time_s,
            )
            prefix = self._prefix(costs_of(best.shares), best.found.program)
            self._found[key] = best, prefix
        return self._found[key]

    def _prefix(self, costs: ProgramCosts, program: DistributedProgram) -> Floats:
        """Return the prefix sums over the model's ops; a conversion counts for its reader."""
        number = {op.name: i for i, op in enumerate(self.workload.model.ops)}
        part_of = {op.name: number.get(op.part_of, -1) for op in self.model.ops}
        by_name = {op.name: op for op in self.model.ops}
        times, waiting_s = np.zeros(len(number)), 0.0
        for one in program.instructions:
            if not isinstance(one.work, Rule):
                waiting_s += costs.convert_s(one.op, one.work)
                continue
            waiting_s += costs.compute_s(by_name[one.op], one.work)
            if one.gives.value != "features":
                # The loss belongs to the last op.
                times[part_of[one.op]] += waiting_s
                waiting_s = 0.0
        return np.concatenate([[0.0], np.cumsum(times)])

    def plan(self, groups: Sequence[tuple[int, ...]], chunks: int, choices: Choices) -> GroupedPlan:
        """Return the stages on these groups of devices, in this order."""
        members = [self.group(ranks) for ranks in groups]
        if chunks > 1:
            # With stale rows, rows cannot travel by columns.
            choices = replace(choices, by_halo=True)
        found = [self.sharding(group, chunks, choices) for group in members]
        if len(groups) == 1:
            stage = StageOfGroup(groups[0], (0, self.workload.model.num_ops), found[0][0])
            return GroupedPlan((stage,), chunks, chunks * float(found[0][1][-1]))
        prefixes = [prefix for _, prefix in found]
        hop_s = max(self._per_byte_s(*pair) for pair in pairwise(groups))
        rows = sum(self.workload.num_vertices.values()) / chunks
        size_bytes = 2 * rows * self.workload.memory.row_bytes
        crossing = np.array(self.workload.crossing) * size_bytes * hop_s
        latency_s = 2 * self.cluster.link.latency_s
        cuts = self.workload.cuts
        hops = [float(crossing[cut]) + latency_s for cut in cuts]
        weights = {
            Choice.EQUAL: [1.0] * len(members),
            Choice.BY_SPEED: [float(group.speeds.sum()) for group in members],
            Choice.SEARCHED: [1 / float(prefix[-1]) for prefix in prefixes],
        }
        chosen = Choice if choices.cuts is Choice.SEARCHED else (choices.cuts,)
        tried = [_runs(weights[choice], self.workload.model.num_ops) for choice in chosen]
        tried = [runs for runs in tried if all(first in cuts for first, _ in runs[1:])]
        if choices.cuts is Choice.SEARCHED:
            tried.append(cut_chain(prefixes, cuts, hops, chunks))

        def epoch_s(runs: Runs) -> float:
            times = [float(p[b] - p[a]) for p, (a, b) in zip(prefixes, runs, strict=True)]
            sent = [float(crossing[a]) + latency_s for a, _ in runs[1:]]
            return pipeline_time_s(times, sent, chunks)

        runs = min(tried, key=epoch_s)
        stages = zip(groups, runs, (one for one, _ in found), strict=True)
        made = tuple(StageOfGroup(*stage) for stage in stages)
        return GroupedPlan(made, chunks, epoch_s(runs))

    def _per_byte_s(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Return the time of a byte from one group to the next, over all of their links."""
        both = self.group((*source, *target))
        here = both.machines[:, : len(source)].any(1)
        there = both.machines[:, len(source) :].any(1)
        if (here & there).any():
            return 1 / (both.inside_bytes_per_s * min(len(source), len(target)))
        return float(1 / (both.outside_bytes_per_s * min(here.sum(), there.sum())))


def _runs(weights: Sequence[float], num_ops: int) -> Runs:
    """Return runs of one op each, and the other ops in proportion to the weights."""
    more = rounded(weights, num_ops - len(weights))
    ends = [0, *accumulate(1 + count for count in more)]
    return tuple(pairwise(ends))


def groupings(cluster: Cluster, max_stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield groups of all devices: fast links inside and slow ones between, and other orders."""
    count = len(cluster.devices)
    for stages in range(1, min(count, max_stages) + 1):
        if count % stages == 0:
            found = (tuple(s[0] for s in slots) for slots in arrangements(cluster, count, stages))
            yield from dict.fromkeys(found)


def best_plan(
    planner: GroupPlanner, choices: Choices, stages: range, chunk_counts: Sequence[int]
) -> GroupedPlan:
    """Return the fastest plan with a number of stages in ``stages``; one stage has one chunk."""
    plans = (
        planner.plan(groups, chunks, choices)
        for groups in groupings(planner.cluster, planner.workload.model.num_ops)
        if len(groups) in stages
        for chunks in (chunk_counts if len(groups) > 1 else (1,))
    )
    return min(plans, key=lambda plan: plan.epoch_s)

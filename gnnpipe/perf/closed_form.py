"""Closed form of an epoch's time, to compare many plans of one model quickly.

All costs of an op are linear in the rows and edges of a chunk, so the costs of a stage are
differences of prefix sums over the ops. An epoch of S stages and K chunks takes the slowest stage
(K - 1) times and the longest path through the stages once, forward and backward (fill and drain,
GNNPipe, arXiv 2308.10087, section 3), and the forecast, the gradient sums and the optimizer's step.
Chunks of a shard are taken as equal. ``ProfiledCosts`` and the simulator give the exact time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from gnnpipe.collectives import LARGE_BYTES
from gnnpipe.perf.group_times import Group, GroupTimes
from gnnpipe.perf.op_table import Floats, OpTable, sum_of
from gnnpipe.perf.stage_memory import StageMemory
from gnnpipe.perf.workload import Workload
from gnnpipe.plan import ModelGraph, RowWay, StageDag, StagePlan
from gnnpipe.plan.cluster import Cluster, Link


class ClosedForm:
    """Costs of stages and epochs for K chunks of a workload; a ``planner.PlanningCosts``."""

    def __init__(
        self, workload: Workload, chunks: int, is_exact: bool = False, table: OpTable | None = None
    ) -> None:
        """Prepare the costs.

        Args:
            workload: The model, the graph's sizes and the devices.
            chunks: K.
            is_exact: Layer by layer, without stale rows (with K = 1 always).
            table: The costs of the workload's ops, if these are known.
        """
        self.workload, self._chunks = workload, chunks
        self.is_exact = is_exact or chunks == 1
        self._table = table or OpTable(workload)
        self._times = GroupTimes(self._table, chunks, self.is_exact)
        self._evens: dict[int, Group] = {}
        self._memory = StageMemory(self._table, chunks, self.is_exact)

    def with_chunks(self, chunks: int, is_exact: bool = False) -> ClosedForm:
        """Return the costs of the same work for another K."""
        return ClosedForm(self.workload, chunks, is_exact, self._table)

    @property
    def model(self) -> ModelGraph:
        """The ops."""
        return self.workload.model

    @property
    def chunks(self) -> int:
        """K."""
        return self._chunks

    # The interface of planners: equal devices, joined by the usual link.

    def stage_s(self, ops: Sequence[int], shards: int) -> float:
        """Time of forward and backward of one chunk in a stage, with its exchange of rows."""
        return sum(self.pass_s(ops, self._even(shards)))

    def epoch_s(self, ops: Sequence[int], shards: int) -> float:
        """Time that a stage needs once an epoch: gradient sum and optimizer step."""
        group = self._even(shards)
        return self._gradients_s(ops, group) + self._update_s(ops, group)

    def message_s(self, width: int, shards: int) -> float:
        """Time of sending ``width`` numbers of every row of one chunk to another stage, one way."""
        rows = sum(self.workload.num_vertices.values()) / shards / self._chunks
        return self._times.message_s(rows * width, self._link)

    def memory_bytes(self, ops: Sequence[int], shards: int, in_flight: int) -> int:
        """Memory of each device of a stage that holds ``in_flight`` chunks for backward."""
        return self._memory.alone_bytes(ops, shards, in_flight, self._even(shards).by_columns)

    def _even(self, shards: int) -> Group:
        if shards not in self._evens:
            self._evens[shards] = self._times.with_ways(Group.even(shards, self._link))
        return self._evens[shards]

    @property
    def _link(self) -> Link | None:
        cluster = self.workload.cluster
        return None if cluster is None else cluster.link

    # Stages of given devices.

    def bytes_by_share(self, dag: StageDag, stage: int) -> Mapping[float, int]:
        """Return the memory of the ranks of a plan's stage, by their share."""
        return self._memory.bytes_by_share(dag, stage)

    def shard_bytes(self, dag: StageDag, stage: int, share: float) -> int:
        """Return the memory of a rank of a plan's stage, if the rank had this share."""
        return self._memory.shard_bytes(dag, stage, share)

    def group(self, stage: StagePlan, by_columns: Collection[int] = ()) -> Group:
        """Return the devices of a stage; ranks are devices of the cluster.

        ``by_columns``: ops whose rows travel by columns.
        """
        return Group.of(stage, self.workload.cluster, by_columns)

    def with_ways(self, group: Group) -> Group:
        """Return the group with rows that travel by columns wherever this is faster."""
        return self._times.with_ways(group)

    def ways(self, stages: Sequence[StagePlan]) -> dict[int, RowWay]:
        """Return the ops of the stages whose rows travel faster by columns, for ``Plan.ways``."""
        moved = ((stage, self.with_ways(self.group(stage)).by_columns) for stage in stages)
        return {op: RowWay.COLUMNS for stage, ops in moved for op in stage.ops if op in ops}

    def pass_s(self, ops: Sequence[int], group: Group) -> tuple[float, float]:
        """Return the times of forward and backward of one chunk in a stage."""
        forward, backward = sum_of(self._times.passes(group), ops)
        return float(forward), float(backward)

    def passes(self, group: Group) -> Floats:
        """Return the prefix sums over the ops of a chunk's forward and backward, [2, ops + 1]."""
        return self._times.passes(group)

    # Work once an epoch.

    def _gradients_s(self, ops: Sequence[int], group: Group) -> float:
        """Return the time of the gradient sum that backward does not hide."""
        if group.shards == 1:
            return 0.0
        numbers = float(sum_of(self._table.parameters, ops))
        size_bytes = numbers * self.workload.memory.number_bytes
        hidden_s = self.pass_s(ops, group)[1] * (1 - 1 / len(ops))
        last_s = self._times.sum_s(min(size_bytes, 2 * LARGE_BYTES), group)
        exposed_s = self._times.sum_s(size_bytes, group) - hidden_s
        return max(exposed_s, last_s if size_bytes else 0.0)

    def _update_s(self, ops: Sequence[int], group: Group) -> float:
        """Return the time of the optimizer's step of a stage."""
        numbers = float(sum_of(self._table.parameters, ops))
        return self._table.compute.update.time_s(numbers, times=len(ops)) * group.slowdown

    # An epoch.

    def time_s(self, dag: StageDag) -> float:
        """Return the time of an epoch of a plan with these chunks."""
        plan, chunks = dag.plan, self._chunks
        moved = [op for op, way in plan.ways.items() if way is RowWay.COLUMNS]
        stages = [(stage.ops, self.group(stage, moved)) for stage in plan.stages]
        passes = [self.pass_s(*stage) for stage in stages]
        hops = self._hops(dag)
        probes = [(0.0, 0.0)] * len(stages)
        if self.workload.probes and not self.is_exact:
            probes = [self._probe_s(*stage) for stage in stages]
        begin = [float(sum_of(self._times.begin(group), ops)) for ops, group in stages]
        times, slowest_s = [], 0.0
        for way in (0, 1):
            each = [passed[way] for passed in passes]
            if self.is_exact:
                # Layer by layer, a stage needs the stage before to be nearly done.
                each = [chunks * time_s for time_s in each]
            else:
                longest = _longest_hops(len(stages), hops)
                waits = map(self._wait_s, each, stages, longest)
                with_waits = [pass_s + wait_s for pass_s, wait_s in zip(each, waits, strict=True)]
                slowest_s += (chunks - 1) * max([*with_waits, *hops.values()])
            times.append(each)
        end_s = _longest_path_s(times, hops, probes, begin)
        once = [self._gradients_s(*stage) for stage in stages]
        # Only what comes after the backward of the first stage is exposed there.
        update_s = max(self._update_s(*stage) for stage in stages)
        return end_s + slowest_s + max(once) + update_s + self._sync_s(plan.num_ranks)

    def _wait_s(self, pass_s: float, stage: tuple[Sequence[int], Group], hop_s: float) -> float:
        """Return how long the exchanges of a chunk wait for a message in the same port, one way.

        A message of ``hop_s`` overlaps with the compute between two exchanges. The rest of it
        delays the next exchange.
        """
        ops, group = stage
        filled_s, exchanges = map(float, sum_of(self._times.ports(group), ops))
        return max(hop_s - (pass_s - filled_s) / exchanges, 0.0) if exchanges else 0.0

    def _probe_s(self, ops: Sequence[int], group: Group) -> tuple[float, float]:
        """Return the times of the forecast of a stage, and of carrying it to the stale rows."""
        forecast, carry = sum_of(self._times.probes(group), ops)
        return float(forecast), float(carry)

    def _hops(self, dag: StageDag) -> dict[tuple[int, int], float]:
        """Return the time of a chunk's message of each transfer."""
        found = {}
        cluster, rows = self.workload.cluster, self.workload.num_vertices
        for transfer in dag.transfers:
            ends = dag.plan.stages[transfer.source], dag.plan.stages[transfer.target]
            # No two shards have more rows in common.
            share = min(max(stage.shares) for stage in ends)
            numbers = sum(
                rows[transfer.types.get(value, "")] * width
                for value, width in transfer.widths.items()
            )
            link = None if cluster is None else _slowest_hop(cluster, *ends)
            time_s = self._times.message_s(numbers * share / self._chunks, link)
            found[transfer.source, transfer.target] = time_s
        return found

    def _sync_s(self, ranks: int) -> float:
        """Return the time of the two all-reduces around the optimizer's step."""
        if ranks == 1:
            return 0.0
        cluster, profile = self.workload.cluster, self.workload.profile
        if cluster is None:
            latency_s = (profile.message or profile.link("exchange")).latency_s
        else:
            links = [cluster.link, *cluster.pairs.values()]
            latency_s = max(link.latency_s for link in links)
        return 4 * math.ceil(math.log2(ranks)) * latency_s


def _longest_path_s(
    times: Sequence[Sequence[float]],
    hops: Mapping[tuple[int, int], float],
    probes: Sequence[tuple[float, float]],
    begin: Sequence[float],
) -> float:
    """Return the time of one chunk through the stages and back.

    Args:
        times: Forward and backward of each stage, [2, S].
        hops: The time of each transfer's message, by source and target.
        probes: Times of each stage's forecast, and of carrying it.
        begin: Times of each stage before its first action.
    """
    forward, backward = times
    count = len(forward)
    into: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    for (source, target), hop_s in hops.items():
        into[target].append((source, hop_s))
    probed, reached, back = [0.0] * count, [0.0] * count, [0.0] * count
    for stage in range(count):
        start_s = max((probed[a] + hop_s for a, hop_s in into[stage]), default=0.0)
        probed[stage] = max(start_s * (probes[stage][0] > 0), begin[stage]) + probes[stage][0]
        start_s = max((reached[a] + hop_s for a, hop_s in into[stage]), default=0.0)
        reached[stage] = max(start_s, probed[stage] + probes[stage][1]) + forward[stage]
    for stage in reversed(range(count)):
        # All readers have passed on what they add.
        back[stage] += backward[stage]
        for a, hop_s in into[stage]:
            back[a] = max(back[a], back[stage] + hop_s)
    return max(reached) + max(back)


def _longest_hops(count: int, hops: Mapping[tuple[int, int], float]) -> list[float]:
    """Return the time of the longest message from or to each of ``count`` stages."""
    found = [0.0] * count
    for ends, hop_s in hops.items():
        for stage in ends:
            found[stage] = max(found[stage], hop_s)
    return found


def _slowest_hop(cluster: Cluster, source: StagePlan, target: StagePlan) -> Link:
    """Return the slowest link between ranks of two stages that hold the same shard."""
    if not cluster.pairs:
        return cluster.link
    pairs = zip(source.ranks, target.ranks, strict=False)
    links = [cluster.between(*pair) for pair in pairs]
    return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))

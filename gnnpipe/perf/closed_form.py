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
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gnnpipe.collectives import DEFAULT_COLLECTIVES, LARGE_BYTES, ROW_EXCHANGES, SHARD_SUMS
from gnnpipe.perf.memory import estimate_memory
from gnnpipe.perf.parts import column_work
from gnnpipe.perf.profile import OpTimes
from gnnpipe.perf.volume import fit_numbers
from gnnpipe.perf.workload import STALE_SHARE, Workload
from gnnpipe.plan import ModelGraph, Op, Plan, RowWay, StageDag, StagePlan
from gnnpipe.plan.cluster import Cluster, Link

COLUMNS_GAIN = 0.9
"""Rows travel by columns if the time of an op falls below this part of it: the closed form takes
the exchanges of columns as overlapping as well as those of a halo, which they do not quite."""

Seconds = npt.NDArray[np.float64]

SUM_BYTES = 8
"""Bytes of a number in a sum for a mean or a forecast (float64)."""


class Group(NamedTuple):
    """The devices of one stage, as far as the time of the stage depends on these."""

    shards: int
    slowdown: float = 1.0
    """1 / speed of the slowest device."""
    work: float = 1.0
    """Largest quotient of a device's share and its speed."""
    share: float = 1.0
    """Largest share."""
    link: Link | None = None
    """Slowest link between two of the devices; None: the links of the profile."""
    recompute: bool = False
    """The stage keeps only the inputs of its steps until backward."""
    by_columns: frozenset[int] = frozenset()
    """Ops whose rows travel by columns (``RowWay.COLUMNS``), also of other stages."""

    @classmethod
    def even(cls, shards: int, link: Link | None) -> Group:
        """Return G devices of speed 1 with equal shares."""
        return cls(shards, 1.0, 1 / shards, 1 / shards, link)


class _OpCosts(NamedTuple):
    """Costs of the ops for the whole graph in one chunk on one device, [ops] each."""

    forward_base_s: Seconds
    """Time that does not depend on the size of a chunk."""
    backward_base_s: Seconds
    forward_s: Seconds
    """Time that is in proportion to the size of a chunk."""
    backward_s: Seconds
    pull_s: Seconds
    """The part of ``backward_s`` during which the gradients of halo rows arrive, that of edges."""
    forward_edges_s: Seconds
    """The part of ``forward_s`` that is in proportion to the edges."""


class ClosedForm:
    """Costs of stages and epochs for K chunks of a workload; a ``planner.PlanningCosts``."""

    def __init__(self, workload: Workload, chunks: int, is_exact: bool = False) -> None:
        """``is_exact``: layer by layer, without stale rows (with K = 1 always)."""
        self.workload, self._chunks = workload, chunks
        self.is_exact = is_exact or chunks == 1
        self._compute = workload.profile.compute_of(workload.ranks_at_once)
        self._prefixes: dict[Group, tuple[Seconds, Seconds]] = {}
        self._found_costs: dict[tuple[bool, bool], _OpCosts] = {}
        self._ways: dict[Group, frozenset[int]] = {}
        self._memory: dict[tuple[object, ...], int] = {}

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
        return self.gradients_s(ops, group) + self.update_s(ops, group)

    def message_s(self, width: int, shards: int) -> float:
        """Time of sending ``width`` numbers of every row of one chunk to another stage, one way."""
        rows = sum(self.workload.num_vertices.values()) / shards / self._chunks
        return self._message_s(rows * width, self._link)

    def memory_bytes(self, ops: Sequence[int], shards: int, in_flight: int) -> int:
        """Memory of each device of a stage that holds ``in_flight`` chunks for backward."""
        ways = dict.fromkeys(self._even(shards).by_columns, RowWay.COLUMNS)
        return self.shard_memory_bytes(ops, shards, 1 / shards, in_flight, ways=ways)

    def _even(self, shards: int) -> Group:
        return self.with_ways(Group.even(shards, self._link))

    @property
    def _link(self) -> Link | None:
        cluster = self.workload.cluster
        return None if cluster is None else cluster.link

    # Stages of given devices.

    def group(self, stage: StagePlan, by_columns: Collection[int] = ()) -> Group:
        """Return the devices of a stage; ranks are devices of the cluster.

        ``by_columns``: ops whose rows travel by columns.
        """
        cluster, shards = self.workload.cluster, len(stage.ranks)
        moved = frozenset(by_columns if shards > 1 else ())
        if cluster is None:
            most = max(stage.shares)
            return Group(shards, 1.0, most, most, None, stage.recompute, moved)
        speeds = [cluster.devices[rank].speed for rank in stage.ranks]
        return Group(
            shards,
            1 / min(speeds),
            max(share / speed for share, speed in zip(stage.shares, speeds, strict=True)),
            max(stage.shares),
            slowest_link(cluster, stage.ranks),
            stage.recompute,
            moved,
        )

    def with_ways(self, group: Group) -> Group:
        """Return the group with rows that travel by columns wherever this is faster."""
        if not self.is_exact or group.shards == 1:
            return group
        if self.workload.halo(group.shards) <= 2 * (1 - group.share):
            return group  # a halo of so few rows sends fewer numbers than columns
        if group not in self._ways:
            can = [
                i for i, op in enumerate(self.model.ops) if not op.reason_against(RowWay.COLUMNS)
            ]
            pairs = (group._replace(by_columns=frozenset(ops)) for ops in ((), can))
            halo, columns = (np.add(*self._op_times(one)) for one in pairs)
            self._ways[group] = frozenset(i for i in can if columns[i] < COLUMNS_GAIN * halo[i])
        return group._replace(by_columns=self._ways[group])

    def ways(self, stages: Sequence[StagePlan]) -> dict[int, RowWay]:
        """Return the ops of the stages whose rows travel faster by columns, for ``Plan.ways``."""
        groups = [(stage.ops, self.with_ways(self.group(stage))) for stage in stages]
        return {
            op: RowWay.COLUMNS
            for ops, group in groups
            for op in sorted(group.by_columns & set(ops))
        }

    def pass_s(self, ops: Sequence[int], group: Group) -> tuple[float, float]:
        """Return the times of forward and backward of one chunk in a stage."""
        forward, backward = self.prefixes(group)
        first, last = ops[0], ops[-1]
        if len(ops) == last - first + 1:
            return float(forward[last + 1] - forward[first]), float(
                backward[last + 1] - backward[first]
            )
        chosen = np.asarray(ops)
        return float(np.diff(forward)[chosen].sum()), float(np.diff(backward)[chosen].sum())

    def prefixes(self, group: Group) -> tuple[Seconds, Seconds]:
        """Return the prefix sums over the ops of a chunk's forward and backward, [ops + 1]."""
        if group not in self._prefixes:
            both = self._op_times(group)
            forward, backward = (np.concatenate([[0.0], np.cumsum(times)]) for times in both)
            self._prefixes[group] = forward, backward
        return self._prefixes[group]

    def _op_times(self, group: Group) -> tuple[Seconds, Seconds]:
        """Return the times of each op's forward and backward for a chunk, [ops] each."""
        chunks, shards = self._chunks, group.shards
        is_precomputed = shards == 1 and self.is_exact and not self.workload.memory.rounds_rows
        costs = self._costs(is_precomputed, group.recompute and not self.workload.profile.recompute)
        part = group.work / chunks
        forward = costs.forward_base_s * group.slowdown + costs.forward_s * part
        backward = costs.backward_base_s * group.slowdown + costs.backward_s * part
        if shards == 1:
            return forward, backward
        model, workload = self.model, self.workload
        read = workload.halo(shards) / chunks
        numbers = np.array(
            [
                workload.table_rows[op.pushed_type] * op.push_width * (not op.is_mean)
                for op in model.ops
            ]
        )
        copied = self._compute.boundary_per_number_s * read * numbers * group.work
        sent = read * numbers * group.share * workload.memory.row_bytes
        exchange, busy = self._exchange_times(sent, group)
        for i, op in enumerate(model.ops):
            if op.is_mean:
                exchange[i] = self._sum_s(op.push_width * SUM_BYTES, group)
        arrives = np.maximum(exchange - costs.pull_s * part, 0.0)
        again = exchange * 0.0
        if group.by_columns:
            moved = self._column_times(numbers, group)
            for i in group.by_columns:
                exchange[i], again[i], busy[i], copied[i] = (times[i] for times in moved)
                arrives[i] = exchange[i]
                more = (self._column_work(model.ops[i], group) - group.work) / chunks
                forward[i] += more * costs.forward_edges_s[i]
                backward[i] += more * costs.pull_s[i]
        if self.is_exact and chunks > 1:
            # The exchange of a chunk overlaps with the same step of the next chunk.
            later = (chunks - 1) / chunks
            arrives = arrives / chunks + later * np.maximum(exchange - backward, 0.0)
            exchange = exchange / chunks + later * np.maximum(exchange - forward, 0.0)
        waits = copied + busy + again
        return forward + exchange + waits, backward + arrives + waits

    def _column_work(self, op: Op, group: Group) -> float:
        """Return ``Group.work`` of the work on edges by columns.

        The device with the largest share has the most columns; the slowest one reads at least as
        much as for one column.
        """
        own = np.array([group.share * op.push_width, 1.0])
        found = column_work(own, op.push_width, self.workload.memory.row_bytes)
        most, least = float(found[0]), float(found[1])
        return max(most * group.work / group.share, least * group.slowdown)

    def _column_times(self, numbers: Seconds, group: Group) -> tuple[Seconds, ...]:
        """Return times of rows that travel by columns, one way, [ops] each.

        These are: the exchange of rows for columns; that of the aggregated columns for rows, which
        is always waited for; the processor time of both; and the copies before and after.

        Args:
            numbers: [ops] that are pushed in an epoch.
            group: The devices.
        """
        model, table_rows = self.model, self.workload.table_rows
        read = np.array([table_rows[op.vertex_type] * op.push_width for op in model.ops])
        # A shard with share s sends s (1 - s) of all numbers.
        part = group.share * (1 - group.share) * self.workload.memory.row_bytes / self._chunks
        there, there_busy = self._exchange_times(numbers * part, group)
        back, back_busy = self._exchange_times(read * part, group)
        copied = 2 * self._compute.boundary_per_number_s * numbers * group.work / self._chunks
        return there, back, there_busy + back_busy, copied

    def _exchange_times(self, sent: Seconds, group: Group) -> tuple[Seconds, Seconds]:
        """Return the time on the link and the processor time of exchanges of so many bytes."""
        use = ROW_EXCHANGES[DEFAULT_COLLECTIVES.row_exchange].link_use(group.shards, 1 << 20)
        latency_s, bytes_per_s = self._speed_of(group.link, "exchange")
        has_any = sent > 0
        time_s = use.messages * latency_s + sent * (use.sent_bytes / 2**20) / bytes_per_s
        busy = sent * 0.0
        link = self.workload.profile.exchange
        if group.link is None and link is not None:
            busy = link.busy.base_s * (group.shards - 1) + link.busy.per_row_s * sent
        return time_s * has_any, busy * has_any

    def _sum_s(self, size_bytes: float, group: Group) -> float:
        use = SHARD_SUMS[DEFAULT_COLLECTIVES.shard_sum].link_use(group.shards, int(size_bytes))
        latency_s, bytes_per_s = self._speed_of(group.link, "shard_sum")
        return use.messages * latency_s + use.sent_bytes / bytes_per_s

    def _speed_of(self, link: Link | None, name: str) -> tuple[float, float]:
        """Return latency and bandwidth of a link of the cluster, or of the profile's ``name``."""
        if link is not None:
            return link.latency_s, link.bandwidth_bytes_per_s
        found = self.workload.profile.link(name)
        return found.latency_s, found.bandwidth_bytes_per_s

    def _costs(self, is_precomputed: bool, recompute: bool) -> _OpCosts:
        """Return the costs of the ops, computed once.

        ``is_precomputed``: aggregations of the input features are computed once for all epochs.
        """
        key = is_precomputed, recompute
        if key not in self._found_costs:
            names = (
                {op.name for op in self.model.ops if op.of_features} if is_precomputed else set()
            )
            self._found_costs[key] = self._op_costs(names, recompute)
        return self._found_costs[key]

    def _op_costs(self, precomputed: Collection[str], recompute: bool) -> _OpCosts:
        work, loss = self.workload, self.workload.loss_rows
        found: dict[tuple[object, ...], tuple[float, ...]] = {}
        columns = []
        for op, kind in zip(self.model.ops, work.kinds, strict=True):
            key = kind, op.vertex_type, op.pushed_type, op.name in loss.ops, op.name in precomputed
            if key not in found:
                times = self._compute.times_of(op, kind, self.model.unit)
                times = times.recomputing(op.is_linear) if recompute else times
                found[key] = self._kind_costs(op, times, op.name in precomputed)
            columns.append(found[key])
        return _OpCosts(*np.array(columns).T)

    def _kind_costs(self, op: Op, times: OpTimes, is_precomputed: bool) -> tuple[float, ...]:
        """Return a row of ``_OpCosts``, for the whole graph in one chunk."""
        work, loss = self.workload, self.workload.loss_rows
        rows, edges_of = work.table_rows[op.vertex_type], 0
        if op.aggregates and not op.is_mean and not is_precomputed:
            edges_of = work.num_edges[op.pushed_type if op.over_pairs else op.vertex_type]
        if op.name in loss.ops and op.aggregates:
            edges_of = loss.edges
        after_rows = loss.rows if op.name in loss.ops else edges_of if op.over_pairs else rows
        before_rows = work.table_rows[op.pushed_type]
        entries = work.feature_entries.get(op.vertex_type, 0) * op.reads_features
        before_entries, after_entries = entries * op.aggregates, entries * (not op.aggregates)
        sums = []
        for before, after in (
            (times.forward_before, times.forward_after),
            (times.backward_before, times.backward_after),
        ):
            base_s = after.base_s + before.base_s * op.aggregates
            size_s = after.time_s(after_rows, edges_of, after_entries, 0)
            if op.aggregates:
                size_s += before.time_s(before_rows, edges_of, before_entries, 0)
            sums.append((base_s, size_s))
        pull_s = times.backward_before.per_edge_s * edges_of * op.aggregates
        product_s = times.forward_after.per_edge_s * edges_of
        return sums[0][0], sums[1][0], sums[0][1], sums[1][1], pull_s, product_s

    # Work once an epoch.

    def gradients_s(self, ops: Sequence[int], group: Group) -> float:
        """Return the time of the gradient sum that backward does not hide."""
        if group.shards == 1:
            return 0.0
        numbers = sum(op.num_parameters for op in self.model.select(ops))
        size_bytes = numbers * self.workload.memory.number_bytes
        hidden_s = self.pass_s(ops, group)[1] * (1 - 1 / len(ops))
        last_s = self._sum_s(min(size_bytes, 2 * LARGE_BYTES), group)
        return max(self._sum_s(size_bytes, group) - hidden_s, last_s if size_bytes else 0.0)

    def update_s(self, ops: Sequence[int], group: Group) -> float:
        """Return the time of the optimizer's step of a stage."""
        numbers = sum(op.num_parameters for op in self.model.select(ops))
        return self._compute.update.time_s(numbers, times=len(ops)) * group.slowdown

    def begin_s(self, ops: Sequence[int], group: Group) -> float:
        """Return the time before the first action and after the last one of a stage."""
        work, once_s = self.workload, 0.0
        for i in ops:
            op = self.model.ops[i]
            rows = work.table_rows[op.pushed_type] * group.work * op.push_width
            if op.aggregates:
                begin, cleared = self._compute.begin, rows * op.clears * (self._chunks > 1)
                once_s += begin.base_s * group.slowdown
                once_s += begin.per_row_s * cleared + begin.per_edge_s * rows
            if op.reads_features:
                rows = work.table_rows[op.vertex_type] * group.work
                entries = work.feature_entries.get(op.vertex_type, 0) * group.work
                once_s += self._compute.ops[work.kinds[i]].finish.time_s(rows, entries=entries)
        return once_s

    def probe_s(self, ops: Sequence[int], group: Group) -> tuple[float, float]:
        """Return the times of the forecast of a stage, and of carrying it to the stale rows."""
        work = self.workload
        halo = work.halo(group.shards) if group.shards > 1 else 0.0
        forecast_s = carry_s = 0.0
        for i in ops:
            op, times = self.model.ops[i], self._compute.ops[work.kinds[i]]
            forecast_s += times.forecast.base_s * group.slowdown
            forecast_s += times.forecast.per_row_s * work.probes * group.work
            if op.is_forecast:
                stale = STALE_SHARE * (1 + halo) * work.table_rows[op.pushed_type]
                carry_s += times.carry.base_s * group.slowdown
                carry_s += times.carry.per_row_s * stale * group.work
                if group.shards > 1:
                    forecast_s += self._sum_s(fit_numbers(op) * SUM_BYTES, group)
        return forecast_s, carry_s

    def _message_s(self, numbers: float, link: Link | None) -> float:
        latency_s, bytes_per_s = self._speed_of(link, "message")
        return latency_s + numbers * self.workload.memory.row_bytes / bytes_per_s

    # Memory.

    def shard_memory_bytes(
        self,
        ops: Sequence[int],
        shards: int,
        share: float,
        in_flight: int | None = None,
        recompute: bool = False,
        ways: Mapping[int, RowWay] = MappingProxyType({}),
    ) -> int:
        """Return the estimated memory of a rank with this share; by default all chunks are held."""
        own = {op: ways[op] for op in ops if op in ways}
        at = tuple((op - ops[0], way) for op, way in own.items())
        key = self._signature(ops), shards, share, in_flight, recompute, at
        if key not in self._memory:
            self._memory[key] = self._estimate(ops, shards, share, in_flight, recompute, own)
        return self._memory[key]

    def _signature(self, ops: Sequence[int]) -> tuple[object, ...]:
        """Return a key that stages of the same kinds of ops have in common."""
        kinds, limited = self.workload.kinds, self.workload.loss_rows.ops
        first, last = ops[0], ops[-1] + 1
        crossing = self.workload.crossing
        return (
            tuple(kinds[i] for i in ops),
            tuple(i for i in ops if self.model.ops[i].name in limited),
            crossing[first],
            crossing[last] if last < len(crossing) else -1,
            # Branches: equal only as the same ops.
            ops if len(ops) < last - first else (),
        )

    def _estimate(
        self,
        ops: Sequence[int],
        shards: int,
        share: float,
        in_flight: int | None,
        recompute: bool,
        ways: Mapping[int, RowWay],
    ) -> int:
        work = self.workload
        own = set(ops)
        needed = {value for op in self.model.select(ops) for value in op.inputs}
        before = set()
        for i in reversed(range(self.model.num_ops)):
            op = self.model.ops[i]
            if i not in own and needed & op.outputs.keys():
                before.add(i)
                needed |= set(op.inputs)
        after = set(range(self.model.num_ops)) - own - before
        parts = [tuple(sorted(part)) for part in (before, own, after) if part]
        place = parts.index(tuple(sorted(own)))
        ranks = [tuple(range(i * shards, (i + 1) * shards)) for i in range(len(parts))]
        stages = tuple(
            replace(StagePlan.even(p, r), recompute=recompute)
            for p, r in zip(parts, ranks, strict=True)
        )
        plan = Plan(stages, self._chunks, "fill-drain", ways=ways)
        dag = StageDag.of(plan, self.model)
        sizes = work.shard_sizes(share, shards, self.is_exact)
        settings = replace(
            work.memory,
            is_exact=self.is_exact,
            extra_weights=work.memory.extra_weights + (work.probes > 0) * (not self.is_exact),
        )
        found = estimate_memory(dag, self.model, place, sizes, settings)
        held = 1.0 if in_flight is None else min(in_flight / self._chunks, 1.0)
        return int(found.on_device - found.activations * (1 - held))

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
            probes = [self.probe_s(*stage) for stage in stages]
        begin = [self.begin_s(*stage) for stage in stages]
        times, slowest_s = [], 0.0
        for way in (0, 1):
            each = [passed[way] for passed in passes]
            if self.is_exact:
                # Layer by layer, a stage needs the stage before to be nearly done.
                each = [chunks * time_s for time_s in each]
            else:
                slowest_s += (chunks - 1) * max(*each, *(hops.values() or [0.0]))
            times.append(each)
        end_s = self._longest_path_s(times, hops, probes, begin)
        once = [self.gradients_s(*stage) for stage in stages]
        # Only what comes after the backward of the first stage is exposed there.
        update_s = max(self.update_s(*stage) for stage in stages)
        return end_s + slowest_s + max(once) + update_s + self._sync_s(plan.num_ranks)

    def _longest_path_s(
        self,
        times: Sequence[Sequence[float]],
        hops: Mapping[tuple[int, int], float],
        probes: Sequence[tuple[float, float]],
        begin: Sequence[float],
    ) -> float:
        """Return the time of one chunk through the stages and back."""
        forward, backward = times
        count = len(forward)
        probed, reached, back = [0.0] * count, [0.0] * count, [0.0] * count
        for stage in range(count):
            into = [ends for ends in hops if ends[1] == stage]
            start_s = max((probed[a] + hops[a, b] for a, b in into), default=0.0)
            probed[stage] = max(start_s * (probes[stage][0] > 0), begin[stage]) + probes[stage][0]
            start_s = max((reached[a] + hops[a, b] for a, b in into), default=0.0)
            reached[stage] = max(start_s, probed[stage] + probes[stage][1]) + forward[stage]
        for stage in reversed(range(count)):
            out = [ends for ends in hops if ends[0] == stage]
            start_s = max((back[b] + hops[a, b] for a, b in out), default=0.0)
            back[stage] = start_s + backward[stage]
        return max(reached) + max(back)

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
            time_s = self._message_s(numbers * share / self._chunks, link)
            found[transfer.source, transfer.target] = time_s
        return found

    def _sync_s(self, ranks: int) -> float:
        """Return the time of the two all-reduces around the optimizer's step."""
        if ranks == 1:
            return 0.0
        cluster = self.workload.cluster
        if cluster is None:
            latency_s = (self.workload.profile.message or self.workload.profile.exchange).latency_s  # type: ignore[union-attr]
        else:
            links = [cluster.link, *cluster.pairs.values()]
            latency_s = max(link.latency_s for link in links)
        return 4 * math.ceil(math.log2(ranks)) * latency_s


def slowest_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """Return the least bandwidth and the largest latency between any two of the ranks."""
    links = [cluster.link]
    if cluster.pairs and len(ranks) > 1:
        here, count = set(ranks), math.comb(len(ranks), 2)
        inside = [link for (a, b), link in cluster.pairs.items() if a in here and b in here]
        links = inside if len(inside) == count else [*inside, cluster.link]
    return Link(
        min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links)
    )


def _slowest_hop(cluster: Cluster, source: StagePlan, target: StagePlan) -> Link:
    """Return the slowest link between ranks of two stages that hold the same shard."""
    if not cluster.pairs:
        return cluster.link
    pairs = zip(source.ranks, target.ranks, strict=False)
    links = [cluster.between(*pair) for pair in pairs]
    return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))

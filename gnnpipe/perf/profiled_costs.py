"""Durations and sizes of every task of a program, from a profile and the sizes of its chunks.

The simulator gets all costs through the public methods of ``ProfiledCosts``; another object with
these methods may give assumed costs. ``chunk`` is a chunk's own number, not its position in the
order. Times are in seconds and at least 0. Compute and communication are given separately; the
simulator overlaps the two as the executor does.

Bytes are counted, not estimated: over all ranks they equal ``closed_form_volume``. Compute times
are those of the profile for as many ranks at once, divided by the speed of each rank's device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from gnnpipe.collectives import LinkUse
from gnnpipe.perf.parts import Part, PlanSizes, Side, column_work, step_parts
from gnnpipe.perf.profile import Affine, OpTimes, Profile, aggregates_again, op_kind
from gnnpipe.perf.simulate import TaskKind
from gnnpipe.perf.volume import ColumnNumbers, fit_numbers
from gnnpipe.plan import (
    ModelGraph,
    Op,
    RowWay,
    Segments,
    StageDag,
    Transfer,
    column_bounds,
    op_gradient_steps,
)
from gnnpipe.plan.cluster import Cluster
from gnnpipe.schedule import Direction, SpecialPosition

WAYS = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}
"""Beginnings of the names of fields in ``OpTimes``."""
SUM_BYTES = 8
"""Bytes of a number in the sums of a forecast's fit and of a mean over all vertices (float64)."""


class ColumnMove(Enum):
    """All-to-alls of rows that travel by columns; the last two move gradients."""

    PUSHED_TO_COLUMNS = auto()
    READ_TO_ROWS = auto()
    READ_TO_COLUMNS = auto()
    PUSHED_TO_ROWS = auto()


class ProfiledCosts:
    """Costs from a profile, for the profiled devices and links or for those of a cluster."""

    def __init__(
        self,
        profile: Profile,
        dag: StageDag,
        model: ModelGraph,
        sizes: PlanSizes,
        *,
        number_bytes: int,
        row_bytes: int,
        ranks_at_once: int,
        cluster: Cluster | None = None,
    ) -> None:
        """Prepare the costs of one plan.

        Args:
            profile: Times of ops and links.
            dag: The stages of the plan.
            model: The ops.
            sizes: Sizes of the chunks in every stage.
            number_bytes: Bytes of a number of a weight.
            row_bytes: Bytes of a number of a row in a message.
            ranks_at_once: Ranks that compute at once on one machine.
            cluster: Devices by rank, and links; ``None``: those of the profile.

        Raises:
            InputError: The profile lacks an op or a link that the plan needs.
        """
        plan = dag.plan
        self.plan, self.model, self._sizes = plan, model, sizes
        self._number_bytes, self._row_bytes = number_bytes, row_bytes
        self._profile, self._compute = profile, profile.compute_of(ranks_at_once)
        self._cluster = cluster
        self._speeds = [device.speed for device in cluster.devices] if cluster else []
        self._recompute_every = 1
        recomputed = {op for stage in plan.stages if stage.recompute for op in stage.ops}
        self._ops = [self._times_of(op, i in recomputed) for i, op in enumerate(model.ops)]
        self._parts = [step_parts(model, stage.ops) for stage in plan.stages]
        self._steps: dict[tuple[Direction, int, int], npt.NDArray[np.float64]] = {}
        self._messages: dict[tuple[int, int], dict[tuple[int, int], npt.NDArray[np.int64]]] = {}
        self._pulls: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
        self._gradients: dict[int, list[int]] = {}
        """Weights whose gradients each step completes, by stage."""
        self._exchanges: dict[tuple[Direction, int, int], npt.NDArray[np.int64]] = {}
        self._pushes = [
            [[model.ops[part.op] for part in parts if part.side is Side.BEFORE] for parts in steps]
            for steps in self._parts
        ]
        self._transfers: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        """Transfers by (source, target)."""
        for transfer in dag.transfers:
            self._transfers[transfer.source, transfer.target].append(transfer)
        if cluster is None:
            self._check_links()

    def _check_links(self) -> None:
        """``InputError`` if the profile lacks a link that the plan needs."""
        if self.plan.num_stages > 1:
            self._profile.link("message")
        if self.plan.most_shards > 1:
            self._profile.link("exchange")
            self._profile.link("shard_sum")

    def with_speeds(self, speeds: Sequence[float]) -> ProfiledCosts:
        """Return the same costs for devices of these speeds by rank; empty: as they are."""
        found = copy(self)
        found._speeds = list(speeds) or self._speeds
        return found

    def recomputing(self, every: int) -> ProfiledCosts:
        """Return the costs with ``every`` steps recomputed together.

        A profile of steps that were recomputed one by one gets the time of the further passes. Any
        other profile was taken with this number (``predict`` checks it) and contains their time.
        """
        found = copy(self)
        found._recompute_every = every if self._profile.recompute_every == 1 else 1
        found._steps = {}
        return found

    def _times_of(self, op: Op, is_recomputed: bool) -> OpTimes:
        times = self._compute.times_of(op, op_kind(op))
        # A profile that was taken with --recompute has the times of recomputation in it.
        if is_recomputed and not self._profile.recompute:
            return times.recomputing(op.is_linear)
        return times

    def _slowdown(self, stage: int, shard: int) -> float:
        """Return the factor on the compute times of a rank."""
        if not self._speeds:
            return 1.0
        return 1.0 / self._speeds[self.plan.placement.rank(stage, shard)]

    def begin_s(self, stage: int, shard: int) -> float:
        """Return the time of the work before the first action of an epoch.

        Clearing tables of gradients, taking and restoring snapshots, drawing masks.
        """
        work = self._sizes.stages[stage].begin_work(self._stage_ops(stage), shard)
        time_s = self._compute.begin.time_s(work.rows, work.edges, times=work.times)
        return time_s * self._slowdown(stage, shard)

    def step_s(self, way: Direction, stage: int, shard: int, chunk: int, step: int) -> float:
        """Return the time of one step of one chunk on one rank, without waiting for others.

        Forward: aggregate the rows that step - 1 pushed (not for step 0), compute, write the pushed
        rows into the table; after the last step of the last stage also the loss. Backward: the
        transposed aggregation, for halo rows and own rows (not for the last step, which pushes
        nothing), then autograd; with recomputation also the forward of the step. Both include
        reading and adding rows for other shards.
        """
        key = way, stage, step
        if key not in self._steps:
            self._steps[key] = self._step_times(*key)
        return float(self._steps[key][shard, chunk]) * self._slowdown(stage, shard)

    def _step_times(self, way: Direction, stage: int, step: int) -> npt.NDArray[np.float64]:
        """Return the seconds of a step, [G, K]."""
        sizes = self._sizes.stages[stage]
        total = np.zeros((sizes.shards, sizes.chunks))
        for part in self._parts[stage][step]:
            op, costs = self.model.ops[part.op], self._part_times(way, part)
            rows, _, entries = sizes.columns(op, part.side)
            edges = self._edges(stage, part)
            total += costs.base_s + costs.per_row_s * rows
            total += costs.per_edge_s * edges + costs.per_entry_s * entries
            if way == Direction.BACKWARD and self._recompute_every > 1:
                again = self._run_again(stage, step, part)
                total += again.base_s + again.per_row_s * rows
                total += again.per_edge_s * edges + again.per_entry_s * entries
            if part.side is Side.BEFORE and not op.is_mean:
                # A row that travels by columns is copied when it is sent and when it arrives.
                by_columns = self.plan.way(part.op) is RowWay.COLUMNS
                copied = 2 * rows if by_columns else self._sent_rows(Direction.FORWARD, stage, op)
                total += self._compute.boundary_per_number_s * copied * op.push_width
        return total if self._cluster else total + self._busy_times(way, stage, step)

    def _run_again(self, stage: int, step: int, part: Part) -> Affine:
        """Return the time of recomputing a part, minus that of one recomputation step by step."""
        segments = Segments(len(self._parts[stage]), self._recompute_every)
        op, once = self.model.ops[part.op], self._part_times(Direction.FORWARD, part)
        times = segments.times_again(step) - 1
        edges = float(times)
        if not aggregates_again(op.is_linear, part.side is Side.AFTER):
            # Only a single chunk on a single shard aggregates again, as it has no table.
            is_alone = self.plan.chunks == self.plan.stages[stage].shards == 1
            edges = float(segments.aggregations_again(step) * is_alone)
        return replace(once.scaled(times), per_edge_s=once.per_edge_s * edges)

    def _busy_times(self, way: Direction, stage: int, step: int) -> npt.NDArray[np.float64]:
        """Return the processor seconds of messages and exchanges during a step, [G, K]."""
        shards, chunks = self.plan.stages[stage].shards, self.plan.chunks
        total, last = np.zeros((shards, chunks)), len(self._parts[stage]) - 1
        first_step, last_step = (0, last) if way == Direction.FORWARD else (last, 0)
        for ends in self._transfers:
            source, target = ends if way == Direction.FORWARD else ends[::-1]
            if (target, first_step) == (stage, step) or (source, last_step) == (stage, step):
                busy = self._profile.link("message").busy
                # Each value with rows is sent by itself. What a rank does once a message for each
                # other rank, less than half of the time without bytes, is counted with it.
                for vertex_type, width in self._widths_between(*ends):
                    for pair, rows in self._sizes.rows_between(*ends, vertex_type).items():
                        size_bytes = rows * (width * self._row_bytes)
                        time_s = busy.base_s + busy.per_row_s * size_bytes
                        total[pair[ends.index(stage)]] += time_s * (rows > 0)
        if shards > 1 and step < last and self.has_exchange(way, stage, step):
            busy = self._profile.link("exchange").busy
            total += busy.base_s * (shards - 1)
            total += busy.per_row_s * self._exchanged_bytes(way, stage, step)
        if shards > 1 and self.plan.ways:
            total += self._busy_with_columns(way, stage, step)
        return total

    def _busy_with_columns(self, way: Direction, stage: int, step: int) -> npt.NDArray[np.float64]:
        """Return the processor seconds of the exchanges around products with columns, [G, K].

        Forward the columns that the step read return; backward those that it pulls return, and
        those of the gradients that it recorded leave.
        """
        shards, last = self.plan.stages[stage].shards, len(self._parts[stage]) - 1
        moves = [(step - 1, ColumnMove.READ_TO_ROWS)]
        if way == Direction.BACKWARD:
            moves = [(step - 1, ColumnMove.READ_TO_COLUMNS)]
            moves += [(step, ColumnMove.PUSHED_TO_ROWS)] * (step < last)
        busy, total = self._profile.link("exchange").busy, np.zeros((shards, self.plan.chunks))
        for pushing, move in moves:
            if self.has_columns(stage, pushing):
                total += busy.base_s * (shards - 1)
                total += busy.per_row_s * self._column_bytes(stage, pushing, move)
        return total

    def _edges(self, stage: int, part: Part) -> npt.NDArray[np.float64]:
        """Return the edges that a part works on for whole rows, [G, K].

        By columns a shard works on all edges of a chunk, but on its columns only.
        """
        op, shares = self.model.ops[part.op], self.plan.stages[stage].shares
        edges = self._sizes.stages[stage].columns(op, part.side)[1].astype(np.float64)
        if self.plan.way(part.op) is not RowWay.COLUMNS:
            return edges
        own = np.diff(column_bounds(op.push_width, shares)).astype(np.float64)
        return np.outer(column_work(own, op.push_width, self._row_bytes), edges.sum(0))

    def _part_times(self, way: Direction, part: Part) -> Affine:
        found: Affine = getattr(self._ops[part.op], f"{WAYS[way]}_{part.side}")
        return found

    def finish_s(self, stage: int, shard: int) -> float:
        """Return the extra time of the last backward step of an epoch.

        This step computes the gradient of the weight that multiplies the features, for all chunks.
        """
        total = 0.0
        for op, times in self._stage_times(stage):
            if op.reads_features:
                work = self._sizes.stages[stage].feature_work(op, shard)
                total += times.finish.time_s(work.rows, entries=work.entries)
        return total * self._slowdown(stage, shard)

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """Return the part of a backward step that overlaps with the exchange of halo gradients.

        This part is the product for the own rows, here all that grows with the edges (edges of halo
        rows are few). Not called with one shard, nor for the last step.
        """
        if (stage, step) not in self._pulls:
            sizes = self._sizes.stages[stage]
            total = np.zeros((sizes.shards, sizes.chunks))
            for part in self._parts[stage][step]:
                if part.side is Side.BEFORE:
                    per_edge_s = self._part_times(Direction.BACKWARD, part).per_edge_s
                    total += per_edge_s * self._edges(stage, part)
            self._pulls[stage, step] = total
        return float(self._pulls[stage, step][shard, chunk]) * self._slowdown(stage, shard)

    def probe_s(self, kind: TaskKind, stage: int, shard: int) -> float:
        """Return the time of FORECAST or CARRY on one rank, without communication."""
        total, sizes = 0.0, self._sizes.stages[stage]
        for op, times in self._stage_times(stage):
            probes = float(sizes.probes[op.vertex_type][shard])
            if kind == TaskKind.FORECAST:
                total += times.forecast.time_s(probes)
            elif op.is_forecast:
                total += times.carry.time_s(float(sizes.stale[op.pushed_type][shard]))
        return total * self._slowdown(stage, shard)

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """Return the bytes of each sum over the shards that FORECAST needs for its fits; one copy.

        Not called with one shard.
        """
        return [fit_numbers(op) * SUM_BYTES for op in self._stage_ops(stage) if op.is_forecast]

    def update_s(self, stage: int, shard: int) -> float:
        """Return the time of the optimizer's step on one rank."""
        ops = self._stage_ops(stage)
        weights = sum(op.num_parameters for op in ops)
        time_s = self._compute.update.time_s(weights, times=len(ops))
        return time_s * self._slowdown(stage, shard)

    def message_pairs(self, source: int, target: int) -> Sequence[tuple[int, int]]:
        """Return the pairs (shard of ``source``, shard of ``target``) that own common rows.

        A message between two stages has a part for each pair.
        """
        return self._sizes.split.overlaps(source, target)

    def message_bytes(
        self, way: Direction, source: int, target: int, pair: tuple[int, int], chunk: int
    ) -> int:
        """Return the bytes that a shard of stage ``source`` sends to a shard of ``target``.

        All values of one chunk, or in backward their gradients. If ``chunk`` is
        ``SpecialPosition.PROBE``: the values of the probe rows, old and new. ``pair``: the shards,
        as in ``message_pairs``.
        """
        if way == Direction.BACKWARD:
            source, target, pair = target, source, pair[::-1]
        if chunk != SpecialPosition.PROBE:
            return int(self._bytes_between(source, target)[pair][chunk])
        return sum(
            2 * width * self._row_bytes * int(self._sizes.probes_between(source, target, t)[pair])
            for t, width in self._widths_between(source, target)
        )

    def _widths_between(self, source: int, target: int) -> Iterator[tuple[str, int]]:
        """Yield the vertex type and width of each value that ``source`` sends to ``target``."""
        for transfer in self._transfers.get((source, target), ()):
            for value, width in transfer.widths.items():
                yield transfer.types.get(value, ""), width

    def _bytes_between(
        self, source: int, target: int
    ) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
        """Return the bytes [K] of each chunk's message by pair of shards; both ways are equal."""
        ends = source, target
        if ends not in self._messages:
            none = np.zeros(self.plan.chunks, dtype=np.int64)
            total = dict.fromkeys(self.message_pairs(*ends), none)
            for vertex_type, width in self._widths_between(*ends):
                for pair, rows in self._sizes.rows_between(*ends, vertex_type).items():
                    total[pair] = total[pair] + rows * (width * self._row_bytes)
            self._messages[ends] = total
        return self._messages[ends]

    def has_exchange(self, way: Direction, stage: int, step: int) -> bool:
        """Whether the step pushes rows for neighbours, and not only for means over all vertices.

        Backward: whether it reads gradients of halo rows. Not called with one shard, nor for the
        last step, which pushes nothing.
        """
        found = sum(not op.is_mean for op in self._pushing(stage, step))
        return found > (len(self._by_columns(stage, step)) if way == Direction.BACKWARD else 0)

    def has_columns(self, stage: int, step: int) -> bool:
        """Whether rows that the step pushes travel by columns; not if ``step`` is -1."""
        return step >= 0 and len(self._by_columns(stage, step)) > 0

    def product_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """Return the time of the products with the columns of the rows that ``step`` pushed.

        This is a part of the next step's ``step_s``.
        """
        total = 0.0
        for part in self._parts[stage][step + 1]:
            if part.side is Side.AFTER and self.plan.way(part.op) is RowWay.COLUMNS:
                times = self._part_times(Direction.FORWARD, part)
                total += times.per_edge_s * float(self._edges(stage, part)[shard, chunk])
        return total * self._slowdown(stage, shard)

    def column_bytes(self, move: ColumnMove, stage: int, shard: int, chunk: int, step: int) -> int:
        """Return the bytes that a rank sends for the rows of the aggregations that ``step`` feeds.

        Only called if the step ``has_columns``.
        """
        return int(self._column_bytes(stage, step, move)[shard, chunk])

    def _column_bytes(self, stage: int, step: int, move: ColumnMove) -> npt.NDArray[np.int64]:
        """Return the bytes of ``column_bytes`` for every shard and chunk, [G, K]."""
        sizes, shares = self._sizes.stages[stage], self.plan.stages[stage].shares
        total = np.zeros((sizes.shards, sizes.chunks), dtype=np.int64)
        for op in self._by_columns(stage, step):
            rows = sizes.rows[op.pushed_type]
            if move in (ColumnMove.READ_TO_ROWS, ColumnMove.READ_TO_COLUMNS):
                rows = sizes.columns(op, Side.AFTER)[0]
            numbers = ColumnNumbers.of(op.push_width, shares, rows)
            is_back = move in (ColumnMove.READ_TO_ROWS, ColumnMove.PUSHED_TO_ROWS)
            total += (numbers.to_rows if is_back else numbers.to_columns) * self._row_bytes
        return total

    def _by_columns(self, stage: int, step: int) -> list[Op]:
        """Return the ops whose rows a step pushes by columns."""
        if not self.plan.ways:
            return []
        parts = self._parts[stage][step]
        return [
            self.model.ops[part.op]
            for part in parts
            if part.side is Side.BEFORE and self.plan.way(part.op) is RowWay.COLUMNS
        ]

    def exchange_bytes(self, way: Direction, stage: int, shard: int, chunk: int, step: int) -> int:
        """Return the bytes that a rank sends to all other shards of its stage for one step.

        Forward: the boundary rows that the step pushed, and their columns; backward: the gradients
        of its halo rows. Only called if the step ``has_exchange``.
        """
        return int(self._exchanged_bytes(way, stage, step)[shard, chunk])

    def _exchanged_bytes(self, way: Direction, stage: int, step: int) -> npt.NDArray[np.int64]:
        """Return the bytes of ``exchange_bytes`` for every shard and chunk, [G, K]."""
        key = way, stage, step
        if key not in self._exchanges:
            sizes = self._sizes.stages[stage]
            total = np.zeros((sizes.shards, sizes.chunks), dtype=np.int64)
            by_columns = self._by_columns(stage, step)
            for op in self._pushing(stage, step):
                if not op.is_mean and op not in by_columns:
                    rows = self._sent_rows(way, stage, op)
                    total += rows * (op.push_width * self._row_bytes)
            if way == Direction.FORWARD:
                total += self._column_bytes(stage, step, ColumnMove.PUSHED_TO_COLUMNS)
            self._exchanges[key] = total
        return self._exchanges[key]

    @cached_property
    def _gathered(self) -> frozenset[str]:
        """Ops whose rows are gathered."""
        ways = self.plan.ways.items()
        return frozenset(self.model.ops[op].name for op, way in ways if way is RowWay.GATHER)

    def _sent_rows(self, way: Direction, stage: int, op: Op) -> npt.NDArray[np.int64]:
        """Return the rows that each shard sends for an op, once for each shard that reads it.

        Forward its boundary rows, backward gradients of its halo rows, [G, K]. By ``GATHER`` all
        own rows go to all other shards.
        """
        sizes, is_forward = self._sizes.stages[stage], way == Direction.FORWARD
        if op.name not in self._gathered:
            return (sizes.boundary if is_forward else sizes.halo)[op.pushed_type]
        rows = sizes.rows[op.pushed_type]
        return rows * (sizes.shards - 1) if is_forward else rows.sum(0) - rows

    def mean_bytes(self, stage: int, step: int) -> Sequence[int]:
        """Return the bytes of each sum for a mean that the step pushes, in order; one copy.

        Each sum is waited for as soon as it has started: forward after the step, backward after the
        step that read the mean.
        """
        return [op.push_width * SUM_BYTES for op in self._pushing(stage, step) if op.is_mean]

    def _pushing(self, stage: int, step: int) -> list[Op]:
        """Return the ops that push at the end of a step, in order."""
        return self._pushes[stage][step]

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        """Return the bytes of the weight gradients that these steps complete; one copy."""
        if stage not in self._gradients:
            complete = op_gradient_steps(self.model, self.plan.stages[stage].ops)
            numbers = [0] * len(self._parts[stage])
            for op, step in zip(self._stage_ops(stage), complete, strict=True):
                numbers[step] += op.num_parameters
            self._gradients[stage] = numbers
        return sum(self._gradients[stage][slice(*steps)]) * self._number_bytes

    def message_s(self, source: int, target: int, size_bytes: int) -> float:
        """Return the time of a message on an idle link, from when both ranks are ready."""
        if self._cluster is not None:
            link = self._cluster.between(source, target)
            return link.latency_s + size_bytes / link.bandwidth_bytes_per_s
        return self._profile.link("message").time_s(size_bytes)

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """Return the time of an exchange among the shards on idle links, once all are ready.

        ``sizes_bytes``: bytes that each shard sends to all others together. In a cluster the
        slowest link between the shards counts.
        """
        use = self.plan.collectives.rows.link_use(len(sizes_bytes), max(sizes_bytes))
        is_measured = self._profile.collectives.row_exchange == self.plan.collectives.row_exchange
        return self._collective_s(stage, use, "exchange" if is_measured else None)

    def shard_sum_s(self, stage: int, size_bytes: int) -> float:
        """Return the time of all phases of a sum of ``size_bytes`` (one copy) over the shards.

        Includes the copies into and out of a contiguous buffer.
        """
        use = self.plan.collectives.sum.link_use(self.plan.stages[stage].shards, size_bytes)
        is_measured = self._profile.collectives.shard_sum == self.plan.collectives.shard_sum
        return self._collective_s(stage, use, "shard_sum" if is_measured else None)

    def shard_sum_bytes(self, stage: int, size_bytes: int) -> int:
        """Return the bytes that all shards of a stage send for a sum of ``size_bytes``."""
        return self.plan.collectives.sum.sent_bytes(self.plan.stages[stage].shards, size_bytes)

    def shard_sum_phases(self) -> int:
        """Return the phases of a sum, which follow one another and take equally long."""
        return self.plan.collectives.sum.phases

    def _collective_s(self, stage: int, use: LinkUse, measured: str | None) -> float:
        """Return the seconds of a collective.

        ``measured``: its times in the profile; ``None``: estimated from the times of messages.
        """
        cluster = self._cluster
        if cluster is None:
            name = measured or ("message" if self._profile.message else "exchange")
            link = self._profile.link(name, self.plan.stages[stage].shards)
            return link.time_s(use.sent_bytes, use.messages)
        pairs = combinations(self.plan.stages[stage].ranks, 2)
        links = [cluster.between(*pair) for pair in pairs] if cluster.pairs else [cluster.link]
        return max(
            link.latency_s * use.messages + use.sent_bytes / link.bandwidth_bytes_per_s
            for link in links
        )

    def sync_s(self) -> float:
        """Return the time of an all-reduce of a few numbers over all ranks, at least two.

        The latency of a tree: 2 ceil(log2(ranks)) consecutive messages.
        """
        if self._cluster is not None:
            links = [self._cluster.link, *self._cluster.pairs.values()]
            latency_s = max(link.latency_s for link in links)
        else:
            latency_s = (self._profile.message or self._profile.link("exchange")).latency_s
        return 2 * math.ceil(math.log2(self.plan.num_ranks)) * latency_s

    def link(self, source: int, target: int) -> str:
        """Return the name of the link that a message uses; here each pair of ranks has its own.

        Messages on links of the same name are served one after another, first come, first served.
        """
        return f"link {source} to {target}"

    def group(self, stage: int) -> str:
        """Return the name of the link that collectives of the stage's shards use."""
        return f"shards of stage {stage}"

    def port_s(self, sent_bytes: float) -> float:
        """Return the seconds for which so many bytes fill a port of a rank; 0: ranks have no ports.

        A port is as fast as a message. In a cluster every link has a bandwidth of its own.
        """
        message = self._profile.message
        if self._cluster is not None or message is None:
            return 0.0
        return sent_bytes / message.bandwidth_bytes_per_s

    def _stage_ops(self, stage: int) -> list[Op]:
        return self.model.select(self.plan.stages[stage].ops)

    def _stage_times(self, stage: int) -> list[tuple[Op, OpTimes]]:
        return [(self.model.ops[i], self._ops[i]) for i in self.plan.stages[stage].ops]

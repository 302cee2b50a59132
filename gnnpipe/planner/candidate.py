"""A plan with its costs, and the devices and limits that it is searched for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.perf.memory import estimate_memory
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.simulate import Timeline, simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.perf.workload import Workload, alike_shards
from gnnpipe.plan import Plan, StageDag, StagePlan, gradient_buckets
from gnnpipe.planner.device_group import Floats, capped, largest_share
from gnnpipe.schedule import CheckedProgram, training_program, with_forecast

MAX_CHUNKS = 32
"""Largest K; with more stale chunks the accuracy has not been validated (docs/benchmarks)."""

FULL = 0.02
"""A device is full if it cannot hold this part of its rows more."""


@dataclass(frozen=True)
class SearchSpace:
    """The devices and limits that a plan is searched for."""

    workload: Workload
    num_devices: int
    uses_all: bool = False
    """Every device must get work, as each rank of a torchrun."""
    device_bytes: Sequence[int] = ()
    """Memory of every device; empty: no limit."""
    max_stale_chunks: int = 1
    """Largest K of a schedule with stale rows; 1: exact schedules only."""
    max_chunks: int = MAX_CHUNKS
    """Largest K of any schedule; 1 for a model that cannot be divided."""
    exact_share: float = 0.0
    """Share of the epochs of a stale plan that are exact."""
    can_recompute: bool = True
    """Stages that do not fit otherwise may recompute."""
    rounded: Workload | None = None
    """The same work with rows in bf16; None: not to be considered."""
    may_round: bool = False
    """The plan may have rows in bf16. If not, the result only says what these would gain."""
    in_order: bool = False
    """Only the first devices may be chosen, as for the ranks of a run."""

    @property
    def workloads(self) -> list[Workload]:
        """The work, for each number type of the rows that a plan may have."""
        rounded = [self.rounded] if self.rounded is not None and self.may_round else []
        return [self.workload, *rounded]


@dataclass(frozen=True)
class Candidate:
    """A plan with its costs."""

    plan: Plan
    devices: tuple[int, ...]
    """The device of every rank."""
    form: ClosedForm
    exact_form: ClosedForm
    dag: StageDag
    exact_share: float
    epochs: int = 1
    """Epochs between two flushes, in a schedule that spans them."""

    @property
    def shape(self) -> tuple[int, str, int, str]:
        """S, G, K and the schedule."""
        plan = self.plan
        return plan.num_stages, plan.shards_text, plan.chunks, plan.schedule

    @property
    def kind(self) -> tuple[object, ...]:
        """The shape, and the depth of the stages: a DAG and a chain of one shape differ."""
        return *self.shape, self.dag.depth

    @property
    def name(self) -> str:
        """The shape as text, with the depth if stages run side by side."""
        stages, shards, chunks, schedule = self.shape
        depth = f", depth {self.dag.depth}" if self.dag.depth < stages else ""
        recompute = ", recompute" if self.plan.recomputes else ""
        columns = ", columns" if self.plan.ways else ""
        rows = ", bf16 rows" if self.form.workload.memory.rounds_rows else ""
        return f"{stages} x {shards} x {chunks} ({schedule}{depth}{recompute}{columns}{rows})"

    @cached_property
    def closed_form_s(self) -> float:
        """Mean time of an epoch of the whole run by the closed form."""
        return self._mean_s(self.form.time_s(self.dag))

    def _mean_s(self, usual_s: float) -> float:
        if self.form.is_exact or not self.exact_share:
            return usual_s
        share = self.exact_share
        return (1 - share) * usual_s + share * self.exact_form.time_s(self.dag)

    @cached_property
    def program(self) -> CheckedProgram:
        """The program up to a flush, usually of an epoch, with the forecast of stale rows."""
        work = self.form.workload
        buckets = gradient_buckets(work.model, self.plan, work.memory.number_bytes)
        program = training_program(self.dag, buckets, epochs=self.epochs)
        return with_forecast(self.dag, program) if work.probes else program

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated program; alike shards are simulated once."""
        work, form = self.form.workload, self.form
        costs = ProfiledCosts(
            work.profile,
            self.dag,
            work.model,
            work.plan_sizes(self.plan, form.is_exact),
            number_bytes=work.memory.number_bytes,
            row_bytes=work.memory.row_bytes,
            ranks_at_once=work.ranks_at_once,
            cluster=work.cluster,
        )
        # Shards with equal shares may have one column more or less.
        widths = [work.model.ops[op].push_width for op in self.plan.ways]
        is_even = all(width % self.plan.most_shards == 0 for width in widths)
        lanes = alike_shards(self.dag, work.cluster) if is_even else None
        return simulate(program_tasks(self.program, costs, lanes=lanes))

    @property
    def epoch_s(self) -> float:
        """Time of a usual epoch by simulation."""
        return self.timeline.makespan_s / self.epochs

    @cached_property
    def simulated_s(self) -> float:
        """Mean time of an epoch of the whole run by simulation."""
        return self._mean_s(self.epoch_s)

    @cached_property
    def memory_bytes(self) -> list[int]:
        """Estimate of every rank."""
        found = [0] * self.plan.num_ranks
        for stage, size_of in zip(self.plan.stages, self._bytes_by_share, strict=True):
            for rank, share in zip(stage.ranks, stage.shares, strict=True):
                found[rank] = size_of[share]
        return found

    @cached_property
    def _bytes_by_share(self) -> list[Mapping[float, int]]:
        """Estimates of the ranks of each stage, by share."""
        stages = range(self.plan.num_stages)
        if self.program.steps_by_chunk:
            return [self._bytes_in_flight(stage) for stage in stages]
        return [self.form.bytes_by_share(self.dag, stage) for stage in stages]

    def _bytes_in_flight(self, stage: int) -> Mapping[float, int]:
        """Return the estimates of a stage that holds some chunks, and versions of its weights."""
        work, program, own = self.form.workload, self.program, self.plan.stages[stage]
        settings = replace(
            work.memory,
            is_exact=False,
            in_flight=program.in_flight,
            # Predicted weights: a copy of the real ones, where steps lie between F and B.
            version_copies=tuple(int(max(gaps) > 0) for gaps in program.version_gaps),
        )
        found = {}
        for share in dict.fromkeys(own.shares):
            sizes = work.shard_sizes(share, own.shards, is_exact=False)
            made = estimate_memory(self.dag, work.model, stage, sizes, settings)
            found[share] = made.on_device
        return found

    def _shard_bytes(self, stage: StagePlan, share: float) -> int:
        """Return the estimate of a rank of one of the stages, if it had this share."""
        return self.form.shard_bytes(self.dag, self.plan.stages.index(stage), share)

    def largest_shares(self, stage: StagePlan, device_bytes: Sequence[int]) -> Floats:
        """Return the largest share of each rank of a stage that its device can hold, [G]."""
        limits = [device_bytes[self.devices[rank]] for rank in stage.ranks]
        size_of = partial(self._shard_bytes, stage)
        by_limit = {limit: largest_share(size_of, limit) for limit in set(limits)}
        return np.array([by_limit[limit] for limit in limits])

    def with_smaller_shares(self, device_bytes: Sequence[int]) -> Candidate:
        """Return the plan with fewer rows on devices that cannot hold theirs.

        The other ranks of the stage get more, in proportion to their shares. A stage whose devices
        together cannot hold all rows stays as it is.
        """
        plan, work = self.plan, self.form.workload
        stages = list(plan.stages)
        for i in self.stages_over(device_bytes):
            most = self.largest_shares(stages[i], device_bytes)
            if min(most) > 0 and sum(most) >= 1:
                shares = capped(np.array(stages[i].shares), most)
                stages[i] = replace(stages[i], shares=tuple(map(float, shares)))
        moved = replace(plan, stages=tuple(stages))
        has_rows = moved.split.can_cut(work.num_vertices, plan.chunks)
        return self.with_plan(moved) if moved != plan and has_rows else self

    def limited_ranks(self, device_bytes: Sequence[int]) -> Iterator[tuple[int, float, float]]:
        """Yield the ranks whose share is as large as their memory allows, and less than by speed.

        With their share, and the share that they would have by speed.
        """
        cluster = self.form.workload.cluster
        for stage in self.plan.stages if device_bytes else ():
            speeds = [1.0 if cluster is None else cluster.devices[r].speed for r in stage.ranks]
            for rank, share, speed in zip(stage.ranks, stage.shares, speeds, strict=True):
                limit = device_bytes[self.devices[rank]]
                is_full = self._shard_bytes(stage, (1 + FULL) * share) > limit
                if is_full and share < (1 - FULL) * speed / sum(speeds):
                    yield rank, share, speed / sum(speeds)

    def stages_over(self, device_bytes: Sequence[int]) -> frozenset[int]:
        """Return the stages with a rank that needs more memory than its device has."""
        if not device_bytes:
            return frozenset()
        sizes = self.memory_bytes
        return frozenset(
            i
            for i, stage in enumerate(self.plan.stages)
            if any(sizes[rank] > device_bytes[self.devices[rank]] for rank in stage.ranks)
        )

    def with_costs_of(self, form: ClosedForm) -> Candidate:
        """Return the same stages with the costs of another workload on the same devices."""
        plan = replace(self.plan, comm_dtype=form.workload.comm_dtype)
        return replace(
            self,
            plan=plan,
            dag=replace(self.dag, plan=plan),
            form=form.with_chunks(plan.chunks, self.form.is_exact),
            exact_form=form.with_chunks(plan.chunks, True),
        )

    def with_plan(self, plan: Plan) -> Candidate:
        """Return another plan with the same ops by stage, devices and number of chunks."""
        return replace(self, plan=plan, dag=replace(self.dag, plan=plan))

    def recomputing(self, stages: Collection[int]) -> Candidate:
        """Return the same plan with recomputation in these stages and in no other."""
        parts = tuple(
            replace(stage, recompute=i in stages) for i, stage in enumerate(self.plan.stages)
        )
        return self.with_plan(replace(self.plan, stages=parts))

    def by_halo_if_over(self, device_bytes: Sequence[int]) -> Candidate:
        """Return the same plan without rows by columns in stages that do not fit with these."""
        if not self.plan.ways:
            return self
        over = self.stages_over(device_bytes)
        heavy = {op for i in over for op in self.plan.stages[i].ops}
        ways = {op: way for op, way in self.plan.ways.items() if op not in heavy}
        return self.with_plan(replace(self.plan, ways=ways)) if over else self

    def without_needless_recomputation(self, device_bytes: Sequence[int]) -> Candidate:
        """Return the same plan, in which stages that fit without recomputation do not recompute."""
        chosen = {i for i, stage in enumerate(self.plan.stages) if stage.recompute}
        if not chosen:
            return self
        needed = chosen & self.recomputing(()).stages_over(device_bytes)
        return self if needed == chosen else self.recomputing(needed)

    def excess(self, device_bytes: Sequence[int]) -> float:
        """Return the largest quotient of a rank's memory and its device's; 0 without limits."""
        if not device_bytes:
            return 0.0
        pairs = zip(self.memory_bytes, self.devices, strict=True)
        return max(size / device_bytes[device] for size, device in pairs)

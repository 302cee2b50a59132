"""The result of a search of plans, and the reasons for it in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gnnpipe.output import human_bytes
from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.perf.what_if import critical_shares, task_group, task_place
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.planner.candidate import Candidate, SearchSpace

LINK_FACTORS = (2.0, 0.5, 4.0, 0.25, 10.0, 0.1)
"""Changes of the links under which the runner-up is tried, the smallest first."""

SHOWN_RUNS = 4
"""Runs of consecutive ops of a stage that are shown."""

SHOWN_RANKS = 8
"""With more ranks, lines for single ranks are left out."""


@dataclass(frozen=True)
class FoundPlan:
    """Result of the search; ``lines`` explain it."""

    best: Candidate
    runner_up: Candidate | None
    num_candidates: int
    num_refused: int
    """Faster candidates that do not fit into memory."""
    space: SearchSpace
    cost_s: float
    """Processor time of the search."""
    rounded: Candidate | None = None
    """The fastest plan found with rows in bf16, if the plan may not have these."""
    by_target: tuple[str, ...] = ()
    """Lines of a choice by the predicted time to a target."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.best.plan

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of the cluster for every rank of the plan."""
        return self.best.devices

    def lines(self) -> Iterator[str]:
        """Yield the plan, the reasons for it, and the memory that it needs, as text."""
        yield from self.plan_lines()
        yield from self.prediction_lines()
        yield from self.by_target
        yield from self.search_lines()
        yield from self._memory_lines()

    def plan_lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        best, plan = self.best, self.plan
        runs = [_stage_text(stage) for stage in plan.stages]
        shown = "; ".join(runs if len(runs) <= SHOWN_RANKS else [*runs[:3], "...", runs[-1]])
        yield (
            f"plan: {best.name} stages x shards x chunks on {plan.num_ranks} of "
            f"{self.space.num_devices} devices; ops by stage: {shown}"
        )
        chosen = self.devices
        if self.space.workload.cluster is not None and len(chosen) < self.space.num_devices:
            numbers = ", ".join(map(str, chosen[:SHOWN_RANKS]))
            numbers += ", ..." * (len(chosen) > SHOWN_RANKS)
            yield f"devices of the cluster by rank: {numbers}"
        if any(len(set(stage.shares)) > 1 for stage in plan.stages):
            even = tuple(replace(s, shares=(1 / s.shards,) * s.shards) for s in plan.stages)
            equal = best.with_plan(replace(plan, stages=even))
            is_over = bool(equal.stages_over(self.space.device_bytes))
            cost = "not fit" if is_over else f"cost {self._cost_of(equal.plan)}"
            yield f"shares of the work: {_shares_text(plan)}; equal shares would {cost}"
        limited = list(best.limited_ranks(self.space.device_bytes))
        for rank, share, usual in limited[:SHOWN_RANKS]:
            yield (
                f"memory limits rank {rank} to {share:.0%} of the work of its stage; by speed it "
                f"would have {usual:.0%}"
            )
        if len(limited) > SHOWN_RANKS:
            yield f"... and {len(limited) - SHOWN_RANKS} more ranks"
        if plan.ways:
            ops = _runs_text(sorted(plan.ways))
            cost = self._cost_of(replace(plan, ways={}))
            yield f"rows travel by columns in ops {ops}; by halo they would cost {cost}"
        if plan.recomputes:
            stages = [str(i) for i, stage in enumerate(plan.stages) if stage.recompute]
            numbers = ", ".join(stages[:SHOWN_RANKS]) + ", ..." * (len(stages) > SHOWN_RANKS)
            yield f"stages that recompute, because they do not fit into memory otherwise: {numbers}"

    def _cost_of(self, plan: Plan) -> str:
        """Return by how much another plan is slower by simulation, in per cent."""
        other = self.best.with_plan(plan)
        return f"{other.simulated_s / self.best.simulated_s - 1:.1%} more time"

    def prediction_lines(self) -> Iterator[str]:
        """Yield the time of an epoch and its critical path."""
        best, plan = self.best, self.plan
        yield f"predicted: {best.epoch_s:.4g} s an epoch"
        name = task_place if plan.num_ranks <= SHOWN_RANKS else task_group
        path = list(critical_shares(best.timeline, name).items())[:4]
        yield "why: critical path " + ", ".join(f"{share:.0%} {place}" for place, share in path)

    def search_lines(self) -> Iterator[str]:
        """Yield what the search compared: exact epochs, the runner-up, rows in bf16, its cost."""
        best = self.best
        if best.epoch_s != best.simulated_s:
            yield f"with its exact epochs: {best.simulated_s:.4g} s an epoch on average"
        if self.runner_up is not None:
            slower = self.runner_up.simulated_s / best.simulated_s - 1
            yield (
                f"runner-up: {self.runner_up.name}, predicted {self.runner_up.simulated_s:.4g} s "
                f"an epoch, {slower:.1%} more than the {best.simulated_s:.4g} s of the plan; "
                f"{what_would_win(best, self.runner_up)}"
            )
        if self.rounded is not None:
            saved = 1 - self.rounded.simulated_s / best.simulated_s
            yield "--comm-dtype bf16, which changes results, would " + (
                f"save {saved:.1%}: {self.rounded.name}, {self.rounded.simulated_s:.4g} s"
                if saved > 0
                else "save nothing"
            )
        yield (
            f"search: {self.num_candidates} candidates, {self.cost_s:.2g} s of processor; "
            f"{self.num_refused} did not fit into memory"
        )

    def _memory_lines(self) -> Iterator[str]:
        sizes, limits = self.best.memory_bytes, self.space.device_bytes
        ranks: Iterable[int] = range(len(sizes))
        if len(sizes) > SHOWN_RANKS:
            ranks = [max(ranks, key=sizes.__getitem__)]
            yield f"memory: the rank that takes most is rank {max(ranks)}"
        for rank in ranks:
            of = f" of {human_bytes(limits[self.devices[rank]])}" if limits else ""
            yield f"memory of rank {rank}: {human_bytes(sizes[rank])}{of}"


def _shares_text(plan: Plan) -> str:
    """Return the shares of the first ranks of each stage, for up to so many stages."""
    stages = plan.stages[:SHOWN_RANKS]
    return "; ".join(", ".join(f"{s:.2g}" for s in stage.shares[:SHOWN_RANKS]) for stage in stages)


def _stage_text(stage: StagePlan) -> str:
    """Return the ops and ranks of a stage."""
    ranks = ", ".join(map(str, stage.ranks[:SHOWN_RANKS]))
    if len(stage.ranks) > 2 and stage.ranks == tuple(range(stage.ranks[0], stage.ranks[-1] + 1)):
        ranks = f"{stage.ranks[0]}-{stage.ranks[-1]}"
    return f"{_runs_text(stage.ops)} on rank{'s' * (len(stage.ranks) > 1)} {ranks}"


def _runs_text(ops: Sequence[int]) -> str:
    """Return ascending ops as runs of consecutive ones."""
    firsts = [op for op in ops if op - 1 not in ops]
    lasts = [op for op in ops if op + 1 not in ops]
    runs = zip(firsts[:SHOWN_RUNS], lasts, strict=False)
    text = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)
    return text + ", ..." * (len(firsts) > SHOWN_RUNS)


def what_would_win(best: Candidate, other: Candidate) -> str:
    """Return the smallest change of the links that makes the other candidate faster.

    By the closed form, corrected by what the simulator says for the links as they are.
    """
    errors = [c.simulated_s / c.closed_form_s for c in (best, other)]
    for factor in LINK_FACTORS:
        times = [
            replace(
                c, form=_with_links(c.form, factor), exact_form=_with_links(c.exact_form, factor)
            )
            for c in (best, other)
        ]
        if times[1].closed_form_s * errors[1] < times[0].closed_form_s * errors[0]:
            words = f"{factor:g} times as fast" if factor > 1 else f"{1 / factor:g} times as slow"
            return f"it wins with links {words}"
    return "links 10 times as fast or slow do not make it win"


def _with_links(form: ClosedForm, factor: float) -> ClosedForm:
    return ClosedForm(form.workload.with_links(factor), form.chunks, form.is_exact)

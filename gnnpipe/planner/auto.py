"""``--plan auto``: searches the shape of a run, by a closed form first and by simulation at last.

Candidates are all numbers of devices W = S x G, numbers of chunks K in powers of two, exact and
stale schedules, orders of unequal devices along the stages and shares of their rows. Stages are
cut by the times of the ops on the devices of each stage. The closed form ranks all candidates; the
best ``SIMULATED`` that fit into memory are simulated. In exact plans, rows travel by columns where
the closed form says that this is faster. Where devices are unequal, a linear program searches their
shares for the simulated plans that are nearly as fast as the best. The fastest one is the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from gnnpipe.errors import InputError
from gnnpipe.garbage_collector import collector_paused
from gnnpipe.output import human_bytes
from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.perf.group_times import Group
from gnnpipe.perf.workload import Workload
from gnnpipe.plan import Plan, ShardSplit, StageDag, StagePlan
from gnnpipe.planner.candidate import MAX_CHUNKS, Candidate, SearchSpace
from gnnpipe.planner.chain import cut_chain
from gnnpipe.planner.devices import arrangements, by_machine, stage_counts
from gnnpipe.planner.found_plan import FoundPlan
from gnnpipe.planner.interval import Interval
from gnnpipe.planner.planner import AUTO, PLANNERS, PlanRequest, Shape
from gnnpipe.planner.searched_shares import with_searched_shares
from gnnpipe.planner.series_parallel import has_branches
from gnnpipe.planner.stage_search import Limits, StageCosts, as_plan, candidates
from gnnpipe.planner.unit_dag import UnitDag
from gnnpipe.schedule import EXACT_SCHEDULE

SIMULATED = 3
"""Candidates that are simulated at most."""

RECOMPUTE_ROUNDS = 4
"""How often the stages that recompute are chosen anew after a cut."""

MARGIN = 1.1
"""The third is simulated only if its closed form is less than this factor over the best time."""

SHARES_MARGIN = 1.1
"""Simulated plans of up to this factor over the best time have their shares searched."""

EXACT_AFTER_JUMPS = 0.05
"""Assumed share of epochs that are exact because gradients jumped: 11 of 200 in docs/adr/0019."""


@collector_paused()
def find_plan(space: SearchSpace) -> FoundPlan:
    """Return the fastest plan that fits; ``InputError`` if none does."""
    start_s = time.process_time()
    shapes = sorted(plan_shapes(space), key=lambda shape: shape.least_s)
    # The fastest plan of each shape that fits, the fastest shape first.
    fitting: dict[tuple[object, ...], Candidate] = {}
    refused: list[Candidate] = []
    limit_s = math.inf
    for shape in shapes:
        if shape.least_s >= limit_s:
            break
        first = shape.planned()
        if first.closed_form_s >= limit_s:
            continue
        candidate = fitted(first, shape.planned, space)
        if candidate.stages_over(space.device_bytes):
            refused.append(candidate)
            continue
        if candidate.closed_form_s >= limit_s:
            continue
        known = fitting.get(candidate.kind, candidate)
        fitting[candidate.kind] = min(known, candidate, key=lambda c: c.closed_form_s)
        if len(fitting) >= SIMULATED:
            limit_s = sorted(c.closed_form_s for c in fitting.values())[SIMULATED - 1]
    several = [c for c in fitting.values() if c.plan.chunks > 1]
    fastest = min(several, key=lambda c: c.closed_form_s, default=None)
    counts = [(fastest.plan.chunks, fastest.form.is_exact)] if fastest is not None else []
    for planned in _dag_candidates(space, [(1, True), *counts]):
        candidate = fitted(planned, planned.recomputing, space)
        if not candidate.stages_over(space.device_bytes):
            known = fitting.get(candidate.kind, candidate)
            fitting[candidate.kind] = min(known, candidate, key=lambda c: c.closed_form_s)
    if not fitting:
        raise _nothing_fits(space, refused)
    best = _simulated(fitting.values(), space)
    rounded = _rounded(space, list(fitting.values()))
    return FoundPlan(
        best[0],
        best[1] if len(best) > 1 else None,
        len(shapes),
        len(refused),
        space,
        time.process_time() - start_s,
        rounded,
    )


def _simulated(fitting: Collection[Candidate], space: SearchSpace) -> list[Candidate]:
    """Return the best candidates by the closed form, simulated, the fastest one first."""
    best: list[Candidate] = []
    for candidate in sorted(fitting, key=lambda c: c.closed_form_s)[:SIMULATED]:
        if len(best) < 2 or candidate.closed_form_s < MARGIN * best[0].simulated_s:
            best = sorted([*best, candidate], key=lambda c: c.simulated_s)
    near = [c for c in best if c.simulated_s < SHARES_MARGIN * best[0].simulated_s]
    for place, candidate in enumerate(near):
        moved = with_searched_shares(candidate, space.device_bytes)
        if moved is not None and not moved.stages_over(space.device_bytes):
            best[place] = min(candidate, moved, key=lambda c: c.simulated_s)
    return sorted(best, key=lambda c: c.simulated_s)


def _rounded(space: SearchSpace, found: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest of the plans with rows in bf16, if the result may not have these."""
    if space.rounded is None or space.may_round:
        return None
    fastest = sorted(found, key=lambda c: c.closed_form_s)[: 2 * SIMULATED]
    forms = {
        devices: ClosedForm(space.rounded.with_devices(devices), 1)
        for devices in {candidate.devices for candidate in fastest}
    }
    rounded = [candidate.with_costs_of(forms[candidate.devices]) for candidate in fastest]
    by_time = sorted(rounded, key=lambda c: c.closed_form_s)
    return next((c for c in by_time if not c.stages_over(space.device_bytes)), None)


def every_candidate(space: SearchSpace) -> Iterator[Candidate]:
    """Yield the plans of all shapes and numbers of chunks, for comparison with the search."""
    yield from (fitted(shape.planned(), shape.planned, space) for shape in plan_shapes(space))
    for planned in _dag_candidates(space, _chunk_counts(space)):
        yield fitted(planned, planned.recomputing, space)


def fitted(
    candidate: Candidate, planned: Callable[[Collection[int]], Candidate], space: SearchSpace
) -> Candidate:
    """Return the candidate, or one whose stages fit.

    In stages that do not fit otherwise, no rows travel by columns, which takes the matrix of the
    whole graph. If this is not enough, devices that are too small get fewer rows, or the stages
    recompute, or both, or some stages the one and some the other, whatever is the fastest by the
    closed form.

    ``planned``: returns the candidate for given stages that recompute. If no choice of stages fits,
    the result does not fit either.
    """
    limits = space.device_bytes
    candidate = candidate.by_halo_if_over(limits)
    if not candidate.stages_over(limits):
        return candidate
    again = _recomputing(candidate, planned, space)
    both = again.with_smaller_shares(limits).without_needless_recomputation(limits)
    moved = candidate.with_smaller_shares(limits)
    tried = [moved, again, both]
    if space.can_recompute:
        tried.append(moved.recomputing(moved.stages_over(limits)))
    fitting = [one for one in tried if not one.stages_over(limits)]
    return min(fitting, key=lambda c: c.closed_form_s, default=again)


def _recomputing(
    candidate: Candidate, planned: Callable[[Collection[int]], Candidate], space: SearchSpace
) -> Candidate:
    """Return the candidate with recomputation in the stages that do not fit otherwise."""
    chosen: frozenset[int] = frozenset()
    for _ in range(RECOMPUTE_ROUNDS if space.can_recompute else 0):
        over = candidate.stages_over(space.device_bytes)
        if over <= chosen:
            break
        # Stages that recompute are slower, so that the ops may be cut differently.
        chosen |= over
        candidate = planned(chosen).by_halo_if_over(space.device_bytes)
    return candidate.without_needless_recomputation(space.device_bytes)


def _nothing_fits(space: SearchSpace, refused: Sequence[Candidate]) -> InputError:
    if not refused:
        return InputError(
            f"--plan auto: no plan uses all {space.num_devices} ranks with at least one vertex "
            "in every chunk; start fewer ranks"
        )
    nearest = min(refused, key=lambda c: c.excess(space.device_bytes))
    needs = [
        (size / space.device_bytes[device], rank, size, space.device_bytes[device])
        for rank, (size, device) in enumerate(
            zip(nearest.memory_bytes, nearest.devices, strict=True)
        )
    ]
    _, rank, size, limit = max(needs)
    return InputError(
        f"--plan auto: no plan fits into memory; the nearest, {nearest.name}, needs "
        f"{human_bytes(size)} (estimated) on rank {rank}, whose device has {human_bytes(limit)}; "
        "try a smaller --hidden or more devices"
    )


@dataclass(frozen=True)
class PlanShape:
    """A candidate before its ops are assigned to stages."""

    space: SearchSpace
    devices: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    """The stages, without their ops."""
    groups: tuple[Group, ...]
    """Their devices."""
    form: ClosedForm
    exact_form: ClosedForm

    @cached_property
    def least_s(self) -> float:
        """Lower bound of the time of an epoch: stages in perfect balance and free messages."""
        form, groups = self.form, {self.form.with_ways(group) for group in set(self.groups)}
        passed_s = min(float(form.passes(group)[:, -1].sum()) for group in groups)
        if form.is_exact:
            return passed_s * form.chunks
        overlap = 1 + (form.chunks - 1) / len(self.stages)
        return (1 - self.space.exact_share) * passed_s * overlap

    def planned(self, recomputing: Collection[int] = ()) -> Candidate:
        """Return the candidate whose stages are runs of consecutive ops.

        ``recomputing``: the stages that recompute.
        """
        form, work, parts, groups = self.form, self.form.workload, self.stages, self.groups
        if recomputing:
            parts = tuple(replace(p, recompute=i in recomputing) for i, p in enumerate(parts))
            groups = tuple(
                group._replace(recompute=i in recomputing) for i, group in enumerate(groups)
            )
        # Alike stages have the same prefix sums.
        sums = {group: form.passes(form.with_ways(group)).sum(0) for group in set(groups)}
        prefixes = [sums[group] for group in groups]
        hops = [0.0] * len(work.cuts)
        if len(prefixes) > 1:
            fewest = min(stage.shards for stage in parts)
            hops = [2 * form.message_s(work.crossing[cut], fewest) for cut in work.cuts]
        runs = cut_chain(prefixes, work.cuts, hops, 1 if form.is_exact else form.chunks)
        stages = tuple(
            replace(part, ops=tuple(range(*run))) for run, part in zip(runs, parts, strict=True)
        )
        is_layered = form.is_exact and form.chunks > 1
        schedule = EXACT_SCHEDULE if is_layered else "fill-drain"
        ways = form.ways(stages)
        plan = Plan(stages, form.chunks, schedule, comm_dtype=work.comm_dtype, ways=ways)
        dag, share = StageDag.of(plan, work.model), self.space.exact_share
        return Candidate(plan, self.devices, form, self.exact_form, dag, share)


def plan_shapes(space: SearchSpace) -> Iterator[PlanShape]:
    """Yield all candidates, without regard to memory."""
    counts = _chunk_counts(space)
    # Equal devices have one workload and its costs in common, however many there are.
    known: dict[int, dict[tuple[int, bool], ClosedForm]] = {}
    for chosen, whole in product(_device_sets(space), space.workloads):
        workload = whole.with_devices(chosen)
        forms = known.get(id(workload))
        if forms is None:
            one = ClosedForm(workload, 1)
            forms = known[id(workload)] = {count: one.with_chunks(*count) for count in counts}
        for stages in stage_counts(len(chosen), len(chosen) == space.num_devices):
            if stages > len(workload.cuts) + 1:
                continue
            for slots in arrangements(workload.cluster, len(chosen), stages):
                parts = tuple(StagePlan((0,), *slot) for slot in slots)
                groups = tuple(Group.of(part, workload.cluster) for part in parts)
                split = ShardSplit.of(list({part.shares: 0 for part in parts}))
                for form in forms.values():
                    if split.can_cut(workload.num_vertices, form.chunks):
                        exact_form = forms[form.chunks, True]
                        yield PlanShape(space, chosen, parts, groups, form, exact_form)


def _dag_candidates(space: SearchSpace, counts: Sequence[tuple[int, bool]]) -> Iterator[Candidate]:
    """Yield plans whose stages form a DAG, for a model with branches on equal devices.

    On as many devices as may be used. ``counts``: pairs of K and whether the schedule is exact.
    """
    return (c for work in space.workloads for c in _dag_candidates_of(space, work, counts))


def _dag_candidates_of(
    space: SearchSpace, work: Workload, counts: Sequence[tuple[int, bool]]
) -> Iterator[Candidate]:
    """Yield the candidates of ``_dag_candidates`` for rows of one number type."""
    is_equal = work.cluster is None or (
        len(set(work.cluster.devices)) == 1 and not work.cluster.pairs
    )
    units = UnitDag.of(work.model, joins_row_wise=True)
    if not is_equal or space.num_devices == 1 or not has_branches(units):
        return
    chosen = max(_device_sets(space), key=len)
    workload = work.with_devices(chosen)
    one = ClosedForm(workload, 1)
    for chunks, is_exact in counts:
        form = one.with_chunks(chunks, is_exact)
        # Memory is estimated for whole plans alone: for every set of ops it would take long.
        costs = StageCosts(units, form, Limits(len(chosen)))
        schedule = EXACT_SCHEDULE if is_exact and chunks > 1 else "fill-drain"
        exact_form = one.with_chunks(chunks, True)
        for stages in candidates(costs, Interval(costs), is_rough=True):
            plan = as_plan(units, stages, chunks, schedule)
            plan = replace(plan, comm_dtype=work.comm_dtype, ways=form.ways(plan.stages))
            has_rows = plan.split.can_cut(work.num_vertices, chunks)
            if plan.num_ranks == len(chosen) and has_rows:
                dag = StageDag.of(plan, work.model)
                yield Candidate(plan, chosen, form, exact_form, dag, space.exact_share)


def _chunk_counts(space: SearchSpace) -> list[tuple[int, bool]]:
    """Return pairs of K and whether the schedule is exact."""
    found = [(1, True)]
    powers = [1 << i for i in range(1, MAX_CHUNKS.bit_length())]
    for chunks in powers:
        # Also for the exact epochs of stale plans.
        if chunks <= space.max_chunks:
            found.append((chunks, True))
        if chunks <= min(space.max_chunks, space.max_stale_chunks):
            found.append((chunks, False))
    return found


def _device_sets(space: SearchSpace) -> Iterator[tuple[int, ...]]:
    """Yield sets of devices, ascending: all, and powers of two of the fastest ones."""
    count, cluster = space.num_devices, space.workload.cluster
    order = range(count) if cluster is None or space.in_order else by_machine(cluster)
    counts = {count} if space.uses_all else {count, *(1 << i for i in range(count.bit_length()))}
    for size in sorted(size for size in counts if size <= count):
        yield tuple(sorted(order[:size]))


class AutoPlanner:
    """The registered name; the commands search with the devices and costs that they know."""

    def num_ranks(self, shape: Shape) -> None:
        """Return None: the plan uses the ranks that are there."""
        del shape

    def plan(self, request: PlanRequest) -> Plan:
        """Raise ``InputError``: a request has no devices and no costs."""
        raise InputError(
            f"--plan auto: {request.model.name}: this command does not search; take the plan.json "
            "of `gnnpipe train --plan auto`, and give --plan FILE"
        )


PLANNERS.add(AUTO, AutoPlanner())

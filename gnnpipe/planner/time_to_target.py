"""``--plan auto --target-metric``: the plan with the least predicted time to a validation metric.

The time is that of an epoch by simulation times the epochs that the kind of schedule needs. How
many these are is an assumption, stated here and in the output, for it cannot be known before the
run (docs/adr/0050-auto-by-time-to-target.md). Only their ratio decides, not the metric's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnnpipe.errors import InputError
from gnnpipe.plan import ModelGraph
from gnnpipe.planner.auto import SIMULATED, find_plan, plan_shapes
from gnnpipe.planner.candidate import MAX_CHUNKS, Candidate, SearchSpace
from gnnpipe.planner.found_plan import FoundPlan

ASYNC = "async"
"""The schedule with an optimizer step after each chunk."""

EPOCHS_OF_ASYNC = 0.5
"""Assumed epochs of ``async`` for one of the full batch, up to ``SHALLOW`` layers; deeper: 1."""

SHALLOW = 8
"""Most aggregations, one after another, of a model that needs fewer epochs with ``async``."""

CHUNKS_PER_STAGE = 4
"""Least quotient of K and S: with fewer chunks accuracy falls (docs/how-to)."""


def epochs_of_async(model: ModelGraph) -> float:
    """Return the assumed epochs of ``async`` for one epoch of the full batch."""
    depth = model.num_steps(range(model.num_ops)) - 1
    return EPOCHS_OF_ASYNC if depth <= SHALLOW else 1.0


def find_plan_for_target(
    space: SearchSpace, epochs: int, why_not: str = "", must_be_async: bool = False
) -> FoundPlan:
    """Return the plan that is predicted to be the first at the target.

    Args:
        space: As for ``find_plan``.
        epochs: Epochs between two flushes of ``async``.
        why_not: Why the run cannot have this schedule; '' if it can.
        must_be_async: The run began with this schedule.

    Raises:
        InputError: No plan fits.
    """
    found = find_plan(space)
    if why_not:
        return replace(found, by_target=(f"time to the target: no {ASYNC} plan: {why_not}",))
    fastest = min(async_candidates(space, epochs), key=lambda c: c.simulated_s, default=None)
    if fastest is None:
        why = f"none of {MAX_CHUNKS} chunks with at most {MAX_CHUNKS // CHUNKS_PER_STAGE} stages"
        line = f"time to the target: no {ASYNC} plan: {why} fits"
        if must_be_async:
            raise InputError(f"--plan auto: the run began with --schedule {ASYNC}, and {why} fits")
        return replace(found, by_target=(line,))
    ratio = epochs_of_async(fastest.form.model)
    relative = ratio * fastest.simulated_s / found.best.simulated_s
    lines = _lines(found.best, fastest, ratio, relative)
    if relative >= 1 and not must_be_async:
        return replace(found, by_target=lines)
    return replace(found, best=fastest, runner_up=None, rounded=None, by_target=lines)


def async_candidates(space: SearchSpace, epochs: int) -> Iterator[Candidate]:
    """Yield the best ``async`` plans by closed form that fit into memory.

    Nothing is forecast and no epoch is exact. Backward is counted over all edges, though it goes
    over those inside the chunk alone, whose number depends on the partition.
    """
    work = replace(space.workload, probes=0)
    own = replace(space, workload=work, rounded=None, exact_share=0.0, can_recompute=False)
    found = []
    for shape in plan_shapes(own):
        has_chunks = shape.form.chunks == MAX_CHUNKS and not shape.form.is_exact
        if has_chunks and CHUNKS_PER_STAGE * len(shape.stages) <= MAX_CHUNKS:
            planned = shape.planned()
            plan = replace(planned.plan, schedule=ASYNC)
            found.append(replace(planned.with_plan(plan), epochs=epochs))
    fitting = (c for c in found if not c.stages_over(space.device_bytes))
    yield from sorted(fitting, key=_rough_s)[:SIMULATED]


def _rough_s(candidate: Candidate) -> float:
    """Return the closed form of an epoch by fill-drain, with a step after each chunk."""
    form = candidate.form
    steps = (form.epoch_s(stage.ops, stage.shards) for stage in candidate.plan.stages)
    return candidate.closed_form_s + (form.chunks - 1) * max(steps)


def _lines(other: Candidate, chunked: Candidate, ratio: float, relative: float) -> tuple[str, ...]:
    """Return the comparison as text; ``relative``: time of ``chunked`` over that of ``other``."""
    compared = (
        f"time to the target: {other.name} {other.simulated_s:.4g} s an epoch, {chunked.name} "
        f"{chunked.simulated_s:.4g} s; {ASYNC} is assumed to need {ratio:g} times as many epochs "
        f"(docs/adr/0050-auto-by-time-to-target.md), so it takes {relative:.2f} times as long"
    )
    if relative >= 1:
        return (compared,)
    warning = (
        f"--schedule {ASYNC} steps after each chunk, and so trains otherwise than the full batch; "
        "its learning rate falls over --epochs: give it as many as it needs, not more"
    )
    return compared, warning

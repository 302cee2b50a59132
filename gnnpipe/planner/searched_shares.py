"""Gives the unequal devices of a plan's stages the shares that HAP's linear program finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnnpipe.errors import InputError
from gnnpipe.planner.candidate import Candidate
from gnnpipe.planner.hap_pipeline import Choices, GroupPlanner

MOST_EXPANDED = 20_000
"""States after which the search of a program gives up, some seconds."""


def with_searched_shares(
    candidate: Candidate, device_bytes: Sequence[int] = ()
) -> Candidate | None:
    """Return the plan with other shares of the rows; None if there is nothing to search.

    Every stage of unequal devices gets the shares that ``planner.hap`` finds for the whole model on
    these devices, none larger than the memory of the device allows. None also if the search finds
    no program or gives up, and for models over several vertex types or over pairs of vertices.

    ``device_bytes``: memory of every device; empty: no limit.
    """
    form, plan = candidate.form, candidate.plan
    work, chunks = form.workload, plan.chunks
    if work.cluster is None or len(work.num_vertices) > 1:
        return None
    if any(op.over_pairs for op in work.model.ops):
        return None
    speeds = [device.speed for device in work.cluster.devices]
    if not any(len({speeds[rank] for rank in stage.ranks}) > 1 for stage in plan.stages):
        return None
    choices = Choices(by_halo=not form.is_exact)
    stages = []
    try:
        planner = GroupPlanner(work, most_expanded=MOST_EXPANDED)
        for stage in plan.stages:
            if len({speeds[rank] for rank in stage.ranks}) > 1:
                most = candidate.largest_shares(stage, device_bytes) if device_bytes else None
                group = planner.group(stage.ranks, most)
                found, _ = planner.sharding(group, chunks, choices)
                stage = replace(stage, shares=tuple(map(float, found.shares.rows)))
            stages.append(stage)
    except InputError:
        return None
    if any(min(stage.shares) <= 0 for stage in stages):
        return None
    moved = replace(plan, stages=tuple(stages), ways=form.ways(stages))
    if not moved.split.can_cut(work.num_vertices, chunks):
        return None
    return candidate.with_plan(moved).by_halo_if_over(device_bytes)

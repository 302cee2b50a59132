"""Shares of unequal devices by the linear program, in the plans of ``--plan auto``."""

from dataclasses import replace

import pytest
from planned import FAST, GRAPH, devices, space_of

from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import find_plan
from gnnpipe.planner.auto import every_candidate
from gnnpipe.planner.searched_shares import with_searched_shares

UNLIKE = Cluster(devices(1.0, 0.5, 0.25), FAST)


def on_all(space):
    found = (c for c in every_candidate(space) if c.plan.num_stages == c.plan.chunks == 1)
    return max(found, key=lambda c: (c.plan.num_ranks, len(set(c.plan.stages[0].shares))))


def test_faster_devices_get_more_rows():
    # So many rows that launches of kernels hardly count.
    large = replace(GRAPH, vertices=1_000_000, edges=20_000_000)
    candidate = on_all(space_of(UNLIKE, large))
    even = tuple(replace(stage, shares=(1 / 3,) * 3) for stage in candidate.plan.stages)
    moved = with_searched_shares(candidate.with_plan(replace(candidate.plan, stages=even)))
    first, second, third = moved.plan.stages[0].shares
    assert first > second > third > 0
    equal_s = candidate.with_plan(replace(candidate.plan, stages=even)).simulated_s
    assert moved.simulated_s < equal_s / 1.25
    # Shares by speed are nearly the best if devices differ in one number.
    assert moved.simulated_s == pytest.approx(candidate.simulated_s, rel=0.1)


def test_slow_devices_also_launch_kernels_slowly():
    """Where launches count, a slow device gets fewer rows than in proportion to its speed."""
    by_speed = on_all(space_of(UNLIKE))
    assert by_speed.plan.stages[0].shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    searched = with_searched_shares(by_speed)
    assert searched.plan.stages[0].shares[2] < 0.95 / 7
    assert searched.simulated_s < 0.95 * by_speed.simulated_s


def test_what_cannot_be_searched_stays():
    equal = on_all(space_of(Cluster(devices(1.0, 1.0), FAST)))
    assert with_searched_shares(equal) is None


def test_the_search_of_a_plan_uses_it_where_it_is_faster(monkeypatch):
    space = replace(space_of(UNLIKE, hidden=256), max_stale_chunks=1)
    found = find_plan(space).best
    monkeypatch.setattr("gnnpipe.planner.auto.with_searched_shares", lambda best, limits: None)
    usual = find_plan(space).best
    moved = with_searched_shares(usual)
    assert found.simulated_s == min(usual.simulated_s, moved.simulated_s)

"""Shares of the rows that fit into the memory of each device."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers import quick_config, small_graph
from planned import BIG, FAST, GRAPH, SLOW, devices, space_of

from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, StageDag, StagePlan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import GivenPlan, find_plan
from gnnpipe.planner.auto import every_candidate, fitted
from gnnpipe.planner.device_group import DeviceGroup, capped, largest_share
from gnnpipe.planner.searched_shares import with_searched_shares
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import least_memory_bytes, memory_of_rank
from gnnpipe.setup.prepare import prepare

STEPS = 20


def grid(ranks):
    """All shares in steps of 1 / ``STEPS``, none of them zero."""
    cuts = product(range(1, STEPS), repeat=ranks - 1)
    return [np.array([*cut, STEPS - sum(cut)]) / STEPS for cut in cuts if sum(cut) < STEPS]


@pytest.mark.parametrize("seed", range(20))
def test_no_shares_within_the_limits_balance_better(seed):
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(2, 5))
    speeds = draw.choice([0.25, 0.5, 1.0], ranks)
    most = draw.uniform(0.05, 1.0, ranks)
    most *= max(1.0, 1.01 / most.sum())
    found = capped(speeds / speeds.sum(), most)
    assert found.sum() == pytest.approx(1)
    assert (found <= most).all()
    others = [(shares / speeds).max() for shares in grid(ranks) if (shares <= most).all()]
    assert (found / speeds).max() <= min(others, default=np.inf) * (1 + 1e-9)


def test_shares_below_the_limits_stay():
    shares = np.array([0.5, 0.3, 0.2])
    assert capped(shares, np.array([0.5, 0.4, 0.9])).tolist() == shares.tolist()


def test_a_group_begins_within_its_limits_and_alike_devices_stay_alike():
    cluster = Cluster(devices(1.0, 1.0, 1.0), FAST)
    group = DeviceGroup.of(cluster, range(3), most=np.array([1.0, 1.0, 0.2]))
    assert group.equal == pytest.approx([0.4, 0.4, 0.2])
    assert group.by_speed == pytest.approx([0.4, 0.4, 0.2])
    # The third device is no stand-in for the others: it would get more than it can hold.
    assert group.averaged(np.array([0.5, 0.3, 0.2])) == pytest.approx([0.4, 0.4, 0.2])


def test_the_largest_share_is_found():
    def size_bytes(share):
        return int(1000 + 10_000 * max(share, 2 * share - 0.3))

    for limit, expected in ((500, 0.0), (1000, 0.0), (3000, 0.2), (9000, 0.55), (10**6, 1.0)):
        found = largest_share(size_bytes, limit)
        assert found == pytest.approx(expected, abs=0.02)
        assert found == 0 or size_bytes(found) <= limit
    # Most of the memory is needed above a share of one half.
    found = largest_share(lambda share: int(1000 + 1e6 * max(0.0, share - 0.5)), 2000)
    assert found == pytest.approx(0.501, abs=1e-4)
    # A share a little below 1 takes as many whole rows as 1.
    assert largest_share(lambda share: 10 * math.ceil(50 * share), 499) <= 49 / 50


def sharded(space):
    """One stage and one chunk on all devices, with equal shares, before memory counts."""
    found = [
        c
        for c in every_candidate(replace(space, device_bytes=()))
        if c.plan.num_stages == c.plan.chunks == 1 and c.plan.num_ranks == space.num_devices
    ]
    even = found[0]
    shares = (1 / space.num_devices,) * space.num_devices
    stages = tuple(replace(stage, shares=shares) for stage in even.plan.stages)
    return even.with_plan(replace(even.plan, stages=stages))


def limits_of(space, part):
    """Memory of the devices: the last one can hold ``part`` of an equal share."""
    even = sharded(space)
    stage = even.plan.stages[0]
    few = even._shard_bytes(stage, part / space.num_devices)
    return [*[BIG] * (space.num_devices - 1), few]


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.5, 1.0)])
@pytest.mark.parametrize("part", [0.7, 0.3])
def test_a_small_device_gets_the_rows_that_fit(speeds, part):
    space = space_of(Cluster(devices(*speeds), FAST))
    limits = limits_of(space, part)
    even = sharded(space)
    assert even.stages_over(limits) == {0}
    moved = even.with_smaller_shares(limits)
    assert not moved.stages_over(limits)
    shares = moved.plan.stages[0].shares
    assert shares[2] == pytest.approx(part / 3, rel=5e-3)
    assert shares[0] == pytest.approx(shares[1])


def two_stages():
    """Two stages of two devices each, with equal shares and no limits; and the space."""
    space = space_of(Cluster(devices(1.0, 1.0, 1.0, 1.0), FAST))
    shape = (2, "2", 1)
    even = next(c for c in every_candidate(space) if c.shape[:3] == shape and not c.plan.ways)
    # A cut in the middle, so that both stages have layers that may recompute.
    model = even.form.model
    ops, cut = tuple(range(model.num_ops)), model.ops.index(model.aggregations[3])
    stages = tuple(
        replace(stage, ops=own, shares=(0.5, 0.5))
        for stage, own in zip(even.plan.stages, (ops[:cut], ops[cut:]), strict=True)
    )
    plan = replace(even.plan, stages=stages)
    return replace(even, plan=plan, dag=StageDag.of(plan, model)), space


def test_one_stage_gets_shares_that_fit_though_another_cannot():
    even, space = two_stages()
    first, second = even.plan.stages
    small = even._shard_bytes(first, 0.3)
    # The second stage fits if it recomputes, and with no other shares.
    sizes = [
        even._shard_bytes(second, 0.5),
        even.recomputing({1})._shard_bytes(even.recomputing({1}).plan.stages[1], 0.5),
    ]
    assert sizes[1] < sizes[0]
    middle = sum(sizes) // 2
    limits = [BIG, small, middle, middle]
    moved = even.with_smaller_shares(limits)
    assert moved.plan.stages[0].shares == pytest.approx((0.7, 0.3), abs=1e-3)
    assert moved.plan.stages[1] == second
    assert moved.stages_over(limits) == {1}
    found = fitted(even, even.recomputing, replace(space, device_bytes=limits))
    assert not found.stages_over(limits)
    assert found.closed_form_s <= moved.recomputing({1}).closed_form_s


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.5, 1.0)])
def test_the_search_equals_the_best_shares_of_a_grid(speeds):
    """By the simulator, over all shares in steps of 1/20 whose plans fit."""
    space = space_of(Cluster(devices(*speeds), FAST))
    limits = limits_of(space, 0.4)
    moved = sharded(space).with_smaller_shares(limits)
    searched = with_searched_shares(moved, limits) or moved
    found = min(moved, searched, key=lambda c: c.simulated_s)
    assert not found.stages_over(limits)
    stage = moved.plan.stages[0]
    plans = [replace(stage, shares=tuple(map(float, shares))) for shares in grid(3)]
    tried = [moved.with_plan(replace(moved.plan, stages=(one,))) for one in plans]
    fitting = [one for one in tried if not one.stages_over(limits)]
    assert 0 < len(fitting) < len(tried)
    assert found.simulated_s <= 1.01 * min(one.simulated_s for one in fitting)


CLUSTER = """
[[devices]]
count = 2
speed = 1.0
memory_bytes = 80e9

[[devices]]
speed = 1.0
memory_bytes = {small}

[link]
bandwidth_bytes_per_s = 300e9
latency_s = 10e-6
"""


def test_auto_plans_for_a_cluster_with_one_small_card(tmp_path):
    free = space_of(Cluster(devices(1.0, 1.0, 1.0), FAST))
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(small=limits_of(free, 0.5)[-1]), encoding="utf-8")
    space = replace(space_of(Cluster.read(str(file))), uses_all=True, max_chunks=1)
    limits = space.device_bytes
    found = find_plan(space)
    (stage,) = found.plan.stages
    assert not found.best.stages_over(limits)
    assert stage.shares[2] == pytest.approx(1 / 6, rel=0.02)
    text = "\n".join(found.lines())
    assert (
        "memory limits rank 2 to 17% of the work of its stage; by speed it would have 33%" in text
    )
    assert "equal shares would not fit" in text
    # With enough memory no rank is limited.
    enough = find_plan(replace(space, device_bytes=[BIG] * 3))
    assert enough.plan.stages[0].shares == pytest.approx([1 / 3] * 3)
    assert "memory limits" not in "\n".join(enough.lines())
    few = replace(stage, shares=(0.5, 0.4, 0.1))
    by_hand = enough.best.with_plan(replace(enough.plan, stages=(few,)))
    assert not list(by_hand.limited_ranks([BIG] * 3))


def test_a_card_that_holds_nothing_gets_nothing():
    space = space_of(Cluster(devices(1.0, 1.0, 1.0), SLOW), replace(GRAPH, halo=0.1))
    # Less than the bias of the last layer and its rows of a few vertices.
    limits = [BIG, BIG, 100]
    even = sharded(space)
    assert even.with_smaller_shares(limits) is even
    found = find_plan(replace(space, device_bytes=limits))
    assert 2 not in found.devices
    with pytest.raises(InputError, match="no plan fits into memory"):
        find_plan(replace(space, device_bytes=limits, uses_all=True))


def test_a_run_is_not_refused_for_the_mean_of_unequal_shares():
    """The least memory of a rank is that of its own share of the rows."""
    graph = small_graph(n=400)
    config = quick_config(model="gcn", layers=2, hidden=64)
    ops = tuple(range(prepare(config, Mesh.alone(), graph).model_graph.num_ops))
    plan = Plan((StagePlan(ops, (0, 1), (0.9, 0.1)),), 1, "fill-drain")
    prepared = prepare(config, Mesh.alone(), graph, planner=GivenPlan(plan))
    large, small = (least_memory_bytes(prepared, 0, shard) for shard in range(2))
    assert small < 0.3 * large
    for shard, least in enumerate((large, small)):
        assert least <= memory_of_rank(prepared, 0, shard).total

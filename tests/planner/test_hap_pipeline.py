from itertools import combinations, pairwise

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe.config import TrainConfig
from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.plan import Plan, RowWay, StageDag
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.planner import GivenPlan, find_plan
from gnnpipe.planner.candidate import Candidate
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.planner.hap_pipeline import Choice, Choices, GroupPlanner, best_plan, groupings
from gnnpipe.profiling.scenario import GraphShape, model_on_shape
from gnnpipe.profiling.search import search_space, workload_of_shape

FREE = Link(1e15, 0.0)
EQUAL = Choices(Choice.EQUAL, Choice.EQUAL, by_halo=True)
BY_SPEED = Choices(Choice.BY_SPEED, Choice.BY_SPEED, by_halo=True)
ALL = range(1, 100)


def planner_on(speeds, link=FREE, pairs=None, *, layers=12, halo=0.5, edges=20_000_000):
    cluster = Cluster(tuple(Device(speed, 10**11) for speed in speeds), link, pairs or {})
    config = TrainConfig(model="gcn", layers=layers, hidden=64)
    shape = GraphShape(1_000_000, edges, 65, 64, halo=halo, stored=20_000_000)
    model = model_on_shape(config, shape)
    return GroupPlanner(
        workload_of_shape(config, shape, model, Hardware(sheets="a100:10gbe", cluster=cluster))
    )


def layers_of(plan, planner):
    """Number of layers of each stage: of its aggregations."""
    ops = planner.workload.model.ops
    return [sum(op.aggregates for op in ops[slice(*stage.ops)]) for stage in plan.stages]


def test_a_rank_at_half_speed_gets_half_the_rows():
    # So many edges that the launches of kernels, which rows do not change, hardly count.
    planner = planner_on([1.0, 0.5], halo=0.0, edges=100_000_000)
    found = best_plan(planner, Choices(), range(1, 2), (1,))
    assert found.stages[0].sharding.shares.rows == pytest.approx([2 / 3, 1 / 3], rel=1e-3)
    equal = best_plan(planner, EQUAL, range(1, 2), (1,))
    assert equal.epoch_s / found.epoch_s == pytest.approx(1.5, rel=0.01)


def test_a_rank_at_half_speed_gets_half_the_layers():
    planner = planner_on([1.0, 0.5], layers=12)
    found = best_plan(planner, Choices(), range(2, 3), (32,))
    assert layers_of(found, planner) in ([8, 4], [4, 8])
    equal, by_speed = (
        best_plan(planner, choices, range(2, 3), (32,)) for choices in (EQUAL, BY_SPEED)
    )
    assert layers_of(equal, planner) == [6, 6]
    assert layers_of(by_speed, planner) in ([8, 4], [4, 8])


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 0.5), (0.3, 1.0, 0.7)])
def test_cuts_equal_the_best_of_all(speeds):
    planner = planner_on(speeds, Link(1e9, 1e-5), layers=8)
    groups, num_ops = ((0,), (1,), (2,)), planner.workload.model.num_ops
    assert planner.workload.cuts == tuple(range(1, num_ops))
    for chunks in (2, 16):
        found = planner.plan(groups, chunks, Choices())
        prefixes = [planner.sharding(planner.group(g), chunks, Choices())[1] for g in groups]
        # Rows of 64 numbers, there and back, over links of 1 GB/s and 10 us.
        hop_s = 2 * 1_000_000 / chunks * 64 * 4 / 1e9 + 2e-5
        times = []
        for inner in combinations(range(1, num_ops), 2):
            runs = pairwise((0, *inner, num_ops))
            each = [float(p[b] - p[a]) for p, (a, b) in zip(prefixes, runs, strict=True)]
            times.append((chunks - 1) * max(*each, hop_s) + sum(each) + 2 * hop_s)
        assert found.epoch_s == pytest.approx(min(times), rel=1e-2)
        assert found.epoch_s >= min(times) * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0, 1.0, 1.0, 0.5), (1.0, 0.5, 0.5, 0.25)])
@pytest.mark.parametrize("stages", [range(1, 2), range(2, 5)])
def test_freedom_never_makes_it_slower(speeds, stages):
    near = Link(1e10, 1e-5)
    planner = planner_on(speeds, Link(1e9, 5e-5), {(0, 1): near, (2, 3): near}, halo=1.5)
    found = best_plan(planner, Choices(), stages, (4, 16))
    for less in (
        EQUAL,
        BY_SPEED,
        Choices(by_halo=True),
        Choices(shares=Choice.EQUAL),
        Choices(cuts=Choice.EQUAL),
    ):
        assert found.epoch_s <= best_plan(planner, less, stages, (4, 16)).epoch_s * (1 + 1e-9)


def test_a_slow_link_between_two_fast_islands_is_between_stages():
    near = Link(1e11, 1e-6)
    pairs = {(a, b): near for island in ((0, 2), (1, 3)) for a, b in [island]}
    planner = planner_on([1.0] * 4, Link(1e8, 1e-4), pairs, halo=2.0)
    found = best_plan(planner, Choices(), ALL, (8,))
    assert {frozenset(stage.ranks) for stage in found.stages} == {
        frozenset((0, 2)),
        frozenset((1, 3)),
    }


def test_columns_travel_where_halos_are_larger_than_the_graph():
    """Each row is read by 3 of 3 others: 3 N numbers, against 2 x 3/4 N by columns."""
    way = {}
    for halo in (0.5, 3.0):
        planner = planner_on([1.0] * 4, Link(1e9, 0.0), halo=halo)
        stage = best_plan(planner, Choices(), range(1, 2), (1,)).stages[0]
        way[halo] = stage.ways(planner.workload)[planner.workload.model.aggregations[5].name]
    assert way == {0.5: RowWay.HALO, 3.0: RowWay.COLUMNS}


def test_one_group_takes_as_long_as_its_program():
    planner = planner_on([1.0, 0.5], Link(1e9, 1e-5))
    found = best_plan(planner, Choices(), range(1, 2), (1,))
    assert found.epoch_s == pytest.approx(found.stages[0].sharding.time_s, rel=1e-9)


def test_groups_hold_every_device_once():
    near = Link(1e10, 0.0)
    pairs = {(0, 1): near, (2, 3): near}
    cluster = Cluster(tuple(Device(s, 10**9) for s in (1.0, 0.5, 1.0, 0.5)), Link(1e9, 0), pairs)
    found = list(groupings(cluster, 4))
    assert {len(groups) for groups in found} == {1, 2, 4}
    assert all(sorted(r for g in groups for r in g) == [0, 1, 2, 3] for groups in found)


def test_equal_devices_share_equally():
    planner = planner_on([1.0, 1.0, 0.5, 1.0], Link(1e11, 1e-5))
    stage = best_plan(planner, Choices(), range(1, 2), (1,)).stages[0]
    share = dict(zip(stage.ranks, stage.sharding.shares.rows.tolist(), strict=True))
    assert share[0] == pytest.approx(share[1]) == pytest.approx(share[3])
    assert share[2] < share[0]


def simulated_s(space, plan):
    """The time of a plan on all devices, by the simulator."""
    every = tuple(range(space.num_devices))
    work = space.workload.with_devices(every)
    is_exact = plan.chunks == 1
    forms = ClosedForm(work, plan.chunks, is_exact), ClosedForm(work, plan.chunks, True)
    dag = StageDag.of(plan, work.model)
    return Candidate(plan, every, *forms, dag, space.exact_share).simulated_s


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 1.0, 1.0, 0.5)])
@pytest.mark.parametrize("link", [Link(1.3e9, 5e-5), Link(1e10, 1e-5)])
@pytest.mark.parametrize("halo", [0.5, 1.8])
def test_auto_finds_plans_as_fast_as_grouped_ones(speeds, link, halo):
    planner = planner_on(speeds, link, halo=halo)
    hardware = Hardware(sheets="a100:10gbe", cluster=planner.cluster)
    config = TrainConfig(model="gcn", layers=12, hidden=64)
    space = search_space(config, planner.workload, hardware)
    best_s = find_plan(space).best.simulated_s
    for stages, chunks in ((range(1, 2), (1,)), (range(2, 5), (8, 32))):
        plan = best_plan(planner, Choices(), stages, chunks).runnable_plan(planner.workload)
        assert best_s <= 1.02 * simulated_s(space, plan)


def trained(stages, chunks, halo):
    """Largest difference to one autograd graph, and the shape of a grouped plan, on a rank."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.runtime.comm.world import World
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    planner = planner_on((1.0, 0.5, 0.5), Link(2e10, 0.0), layers=4, halo=halo)
    found = best_plan(planner, Choices(), range(stages, stages + 1), (chunks,))
    plan = found.runnable_plan(planner.workload)
    plan = Plan.from_json(plan.to_json())
    # One feature more than hidden columns, and as many classes, as in the shape: the same ops.
    graph = small_graph(n=120, features=9, classes=8, sparse=True)
    mesh = Mesh.of(World.meet(3, "cpu"), plan.placement)
    config = quick_config(model="gcn", layers=4, hidden=8, epochs=3)
    prepared = prepare(config, mesh, graph, planner=GivenPlan(plan))
    shares = [share for stage in plan.stages for share in stage.shares]
    difference = max(c.largest for c in compare_epochs(graph, prepared, mesh, 3))
    return difference, shares, set(plan.ways.values())


@pytest.mark.parametrize(("stages", "chunks", "halo"), [(1, 1, 0.2), (1, 1, 2.0), (3, 4, 0.2)])
def test_grouped_plans_train_as_one_device(stages, chunks, halo):
    difference, shares, ways = run_ranks(trained, 3, stages, chunks, halo)[0]
    assert difference < 1e-9
    assert ways == ({RowWay.COLUMNS} if halo > 1 else set())
    assert (len(set(shares)) > 1) == (stages == 1)

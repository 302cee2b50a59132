"""Planners of stage DAGs: against brute force, against each other, and under limits."""

import re
from dataclasses import replace

import brute_force
import pytest
from assumed_costs import AssumedCosts, branches, model_of, random_costs, random_model

from gnnpipe.errors import InputError
from gnnpipe.plan import StageDag
from gnnpipe.planner.graphpipe import GraphPipe
from gnnpipe.planner.interval import Interval
from gnnpipe.planner.pipedream import PipeDream, as_chain
from gnnpipe.planner.stage_search import (
    InFlight,
    Limits,
    Request,
    StageCosts,
    depths,
    falling_targets,
    search,
)
from gnnpipe.planner.unit_dag import UnitDag

PLANNERS = (GraphPipe, Interval, PipeDream)


def found_by(planner, costs, limits):
    """The stages with the least bottleneck, and the costs that the planner saw; None: no plan."""
    stage_costs = StageCosts(UnitDag.of(costs.model), costs, limits)
    answers = falling_targets(stage_costs, planner(stage_costs))
    return (answers[-1] if answers else None), stage_costs


def value_of(stages, costs, limits):
    """Slowest stage and longest path, by the formulas of the brute force."""
    dag, model = UnitDag.of(costs.model), costs.model
    parts, shards = [list(dag.ops(s.mask)) for s in stages], [s.shards for s in stages]
    slowest = max(
        brute_force.stage_s(model, costs, *one) for one in zip(parts, shards, strict=True)
    )
    order = brute_force.reading_parts(model, parts)
    if limits.in_flight is InFlight.DEPTH:
        return slowest, max(depths(dag, stages))
    return slowest, max(brute_force.paths(model, costs, parts, shards, order))


def case(seed):
    """A random model with costs and limits; every third memory limit is tight."""
    model = random_model(seed)
    rule = (InFlight.ALL, InFlight.DEPTH)[seed // 4 % 2]
    costs = random_costs(seed, model, weight_bytes=10, held_bytes=(0, 5)[seed % 2])
    return costs, Limits(1 + seed % 4, (10**6, 60, 35)[seed % 3], rule, (1, 2))


@pytest.mark.parametrize("block", range(4))
def test_the_interval_planner_equals_brute_force(block):
    seen = 0
    for seed in range(50 * block, 50 * (block + 1)):
        costs, limits = case(seed)
        is_1f1b = limits.in_flight is InFlight.DEPTH
        args = costs.model, costs, limits.devices, limits.memory_bytes, is_1f1b
        best = brute_force.best(*args)
        stages, _ = found_by(Interval, costs, limits)
        assert (stages is None) == (best is None), seed
        if best is not None:
            seen += 1
            assert value_of(stages, costs, limits) == pytest.approx(best), seed
    assert seen > 40


def test_the_other_planners_are_never_better_and_mostly_as_good():
    """GraphPipe's pieces and a chain's intervals leave out some sets of ops by construction."""
    equal = dict.fromkeys(PLANNERS, 0)
    for seed in range(200):
        costs, limits = case(seed)
        best = value_or_none(Interval, costs, limits)
        for planner in PLANNERS:
            value = value_or_none(planner, costs, limits)
            if best is None or value is None:
                assert best is not None or value is None
                equal[planner] += best is value
                continue
            assert value[0] >= best[0] - 1e-9, (planner, seed)
            equal[planner] += value[0] == pytest.approx(best[0])
    assert equal[Interval] == 200
    assert equal[GraphPipe] >= 150


def value_or_none(planner, costs, limits):
    stages, _ = found_by(planner, costs, limits)
    return None if stages is None else value_of(stages, costs, limits)


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_all_planners_agree_on_a_sequential_model(devices):
    costs = random_costs(devices, branches(1, 12), chunks=4)
    values = {value_or_none(planner, costs, Limits(devices, 10**9)) for planner in PLANNERS}
    assert len({round(value[0], 9) for value in values}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_interval_planner_is_never_worse_than_the_chain(seed):
    """Also with so many ops that the states are those of one order."""
    costs = random_costs(seed, random_model(seed, most=24))
    limits = Limits(1 + seed % 7, 10**9)
    chain, interval = (value_or_none(p, costs, limits) for p in (PipeDream, Interval))
    assert interval[0] <= chain[0] + 1e-9


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("seed", range(12))
def test_every_plan_is_valid_and_fits(planner, seed):
    costs = random_costs(seed, random_model(seed, most=12), weight_bytes=10, held_bytes=3)
    limits = Limits(6, 70, (InFlight.ALL, InFlight.DEPTH)[seed % 2])
    stages, stage_costs = found_by(planner, costs, limits)
    if stages is None:
        return
    assert sum(stage.shards for stage in stages) <= 6
    dag = stage_costs.dag
    held = range(len(stages), 0, -1) if planner is PipeDream else depths(dag, stages)
    for stage, depth in zip(stages, held, strict=True):
        in_flight = costs.chunks if limits.in_flight is InFlight.ALL else min(depth, costs.chunks)
        assert costs.memory_bytes(dag.ops(stage.mask), stage.shards, in_flight) <= 70
    result = search(planner, Request(lambda chunks: costs, [costs.chunks], limits, lambda p: 1.0))
    # Raises if the order of the stages is wrong, or an op is in no stage or in two.
    StageDag.of(result.plan, costs.model)


def test_in_flight_limits_memory():
    """A chain of 4 holds 4, 3, 2, 1 chunks in 1F1B, and all 8 in fill-drain."""
    costs = AssumedCosts(branches(1, 3), chunks=8, held_bytes=10)
    limits = Limits(4, 40, InFlight.DEPTH, (1,))
    for planner in (GraphPipe, Interval):
        assert len(found_by(planner, costs, limits)[0]) == 4
        assert len(found_by(planner, costs, replace(limits, memory_bytes=39))[0]) == 3
        assert found_by(planner, costs, replace(limits, memory_bytes=29))[0] is None
        assert found_by(planner, costs, replace(limits, in_flight=InFlight.ALL))[0] is None


def test_equal_branches_are_solved_once():
    """Twice the branches, with other names, need only a few more entries."""
    solved = []
    for count in (8, 16):
        costs = AssumedCosts(branches(count, 4), chunks=4, op_s={4 * count: 0.1})
        stage_costs = StageCosts(UnitDag.of(costs.model), costs, Limits(32, 10**9))
        planner = GraphPipe(stage_costs)
        assert planner.find(2.5) is not None
        solved.append(planner.num_solved)
    assert solved[1] < 2.5 * solved[0]
    # A branch that costs more is another piece, though its names and shape are the same.
    costs = AssumedCosts(branches(8, 4), chunks=4, op_s={0: 1.5, 32: 0.1})
    unequal = GraphPipe(StageCosts(UnitDag.of(costs.model), costs, Limits(32, 10**9)))
    assert unequal.find(2.5) is not None
    assert unequal.num_solved > solved[0]


@pytest.mark.parametrize("planner", PLANNERS)
def test_gradient_sums_count_on_a_path(planner):
    """Two stages of two devices are a shorter path than four stages, but for their sums."""

    class Summed(AssumedCosts):
        def epoch_s(self, ops, shards):
            return self.once_s * (shards - 1)

    for once_s, shards in ((0.0, [2, 2]), (5.0, [1, 1, 1, 1])):
        costs = Summed(branches(1, 3), chunks=64, split_s=0.0, once_s=once_s)
        stage_costs = StageCosts(
            UnitDag.of(costs.model), costs, Limits(4, 10**9, shard_counts=(1, 2))
        )
        assert [stage.shards for stage in planner(stage_costs).find(1.1)] == shards


def test_a_light_join_takes_no_device_of_its_own():
    costs = AssumedCosts(branches(2, 2), chunks=8, op_s={4: 0.01})
    stages, stage_costs = found_by(GraphPipe, costs, Limits(4, 10**9, shard_counts=(1,)))
    assert stage_costs.bottleneck_s(stages) == pytest.approx(1.01)
    assert max(depths(stage_costs.dag, stages)) == 2 + 1
    edges = {"start": [], "a": ["start"], "b": ["start"], "c": ["a"], "d": ["b"]}
    forked = AssumedCosts(model_of(edges), chunks=8, op_s={0: 0.01})
    stages, stage_costs = found_by(GraphPipe, forked, Limits(4, 10**9, shard_counts=(1,)))
    assert stage_costs.bottleneck_s(stages) == pytest.approx(1.01)


@pytest.mark.parametrize(("times", "true_s", "converted_s"), [("21131", 5, 5), ("32351", 8, 9)])
def test_a_dag_that_is_not_series_parallel_is_converted(times, true_s, converted_s):
    """The longest path says what the conversion costs: nothing, or a second."""
    edges = {"a": [], "b": [], "c": ["a", "b"], "d": ["b"], "e": ["c", "d"]}
    given = {op: float(times[op]) for op in range(5)}
    costs = AssumedCosts(model_of(edges), chunks=4, op_s=given)
    result = search(GraphPipe, Request(lambda k: costs, [4], Limits(3, 10**9), lambda p: 1.0))
    conversion, plan = result.planner.decomposition, result.plan
    dag = UnitDag.of(costs.model)
    added = {tuple(dag.names(u) for u in pair) for pair in conversion.added}
    assert added == {("b", "a")}
    assert (conversion.longest_path_s, conversion.converted_path_s) == (true_s, converted_s)
    # A plan has true dependencies: d does not wait for a.
    made = {v: i for i, op in enumerate(costs.model.ops) for v in op.outputs}
    stage_of = {op: i for i, stage in enumerate(plan.stages) for op in stage.ops}
    true = {
        (stage_of[made[v]], stage_of[i]) for i, op in enumerate(costs.model.ops) for v in op.inputs
    }
    sent = {(t.source, t.target) for t in StageDag.of(plan, costs.model).transfers}
    assert sent == {pair for pair in true if pair[0] != pair[1]}


def test_a_series_parallel_dag_needs_no_conversion():
    costs = AssumedCosts(branches(3, 2))
    planner = GraphPipe(StageCosts(UnitDag.of(costs.model), costs, Limits(3, 10**9)))
    assert planner.decomposition.added == ()
    assert planner.decomposition.longest_path_s == planner.decomposition.converted_path_s == 3.0


def test_ops_that_share_a_weight_stay_together_with_all_between():
    edges = {"a": [], "b": ["a"], "c": ["b"], "d": ["a"], "e": ["c", "d"]}
    model = model_of(edges, a=("w",), c=("w",))
    dag = UnitDag.of(model)
    assert sorted(dag.units) == [(0, 1, 2), (3,), (4,)]
    for planner in PLANNERS:
        stages, _ = found_by(planner, AssumedCosts(model), Limits(4, 10**9))
        assert any(set(dag.ops(stage.mask)) >= {0, 1, 2} for stage in stages)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_stage_of_the_logits_is_the_last(planner):
    """Also if no other op reads the end of the longest branch."""
    model = model_of({"a": [], "b": ["a"], "c": ["b"], "unread": ["c"], "logits": ["a"]})
    costs = AssumedCosts(model)
    for devices in (2, 3, 5):
        request = Request(lambda k: costs, [4], Limits(devices, 10**9), lambda p: 1.0)
        plan = search(planner, request).plan
        assert 4 in plan.stages[-1].ops
        StageDag.of(plan, model)


@pytest.mark.parametrize("planner", PLANNERS)
def test_limits_that_nothing_fits(planner):
    costs = AssumedCosts(branches(2, 2), chunks=4, weight_bytes=2**31)
    request = Request(lambda chunks: costs, [4], Limits(2, 2**30), lambda plan: 1.0)
    message = "plan: no plan of assumed fits 2 devices of 1 GiB; .* alone needs 2 GiB a device"
    with pytest.raises(InputError, match=message):
        search(planner, request)
    with pytest.raises(InputError, match=re.escape("devices 0: a plan needs at least 1")):
        Limits(0, 1)


def test_a_chain_waits_for_the_stage_before():
    costs = AssumedCosts(branches(2, 1), chunks=2)
    limits = Limits(3, 10**9, shard_counts=(1,))
    request = Request(lambda chunks: costs, [2], limits, lambda p: 1.0)
    dag = StageDag.of(search(PipeDream, request).plan, costs.model)
    assert [(t.source, t.target) for t in dag.transfers] == [(0, 2), (1, 2)]
    chain = as_chain(dag)
    assert [(t.source, t.target) for t in chain.transfers] == [(0, 1), (0, 2), (1, 2)]
    assert chain.transfers[0].widths == {}

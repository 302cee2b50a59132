"""The closed form of an epoch beside the simulator, and alike shards that are simulated once."""

from dataclasses import replace
from itertools import pairwise

import pytest
from profiles import profile_of

from gnnpipe.config import TrainConfig
from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.perf.profile import LinkTimes
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.simulate import simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.perf.workload import alike_shards
from gnnpipe.plan import Placement, Plan, StageDag, StagePlan
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.profiling.scenario import GraphShape, model_on_shape
from gnnpipe.profiling.search import workload_of_shape
from gnnpipe.schedule import training_program, with_forecast

SHAPE = GraphShape(64_000, 640_000, 32, 8, halo=0.5)


def workload(cluster=None, **changes):
    config = TrainConfig(**{"layers": 8, "hidden": 64} | changes)
    model = model_on_shape(config, SHAPE)
    hardware = Hardware(sheets="a100:10gbe", cluster=cluster)
    return workload_of_shape(config, SHAPE, model, hardware)


def plan_of(work, stages, shards, chunks, schedule="fill-drain", shares=None):
    ops = range(work.model.num_ops)
    bounds = [len(ops) * i // stages for i in range(stages + 1)]
    ranks = Placement.grid(stages, shards).stages
    shares = shares or (1 / shards,) * shards
    parts = (
        StagePlan(tuple(ops[a:b]), held, shares)
        for (a, b), held in zip(pairwise(bounds), ranks, strict=True)
    )
    return StageDag.of(Plan(tuple(parts), chunks, schedule), work.model)


def simulated_s(work, dag, lanes=None):
    program = training_program(dag)
    is_exact = program.is_exact
    costs = ProfiledCosts(
        work.profile,
        dag,
        work.model,
        work.plan_sizes(dag.plan, is_exact),
        number_bytes=4,
        row_bytes=4,
        ranks_at_once=1,
        cluster=work.cluster,
    )
    return simulate(program_tasks(with_forecast(dag, program), costs, lanes=lanes)).makespan_s


def test_a_stage_takes_the_sum_of_its_ops():
    config = TrainConfig(layers=3, hidden=8, dropout=0.0)
    shape = GraphShape(1000, 4000, 16, 8, stored=2000)
    model = model_on_shape(config, shape)
    work = workload_of_shape(config, shape, model, Hardware(profile_of(model)))
    # Every part of an op: 0.5 s, 1 ms a row, 1 us an edge and 0.1 us a feature. An aggregation has
    # four parts, before and after it, forward and backward; a row-wise op two, without edges.
    # None of these reads features, and two chunks halve what grows with rows and edges.
    aggregation, row_wise = 4 * (0.5 + 1e-3 * 500 + 1e-6 * 2000), 2 * (0.5 + 1e-3 * 500)
    first, second = (i for i, op in enumerate(model.ops[:-2]) if op.aggregates)
    assert ClosedForm(work, 2).stage_s([first], 1) == pytest.approx(aggregation)
    assert ClosedForm(work, 2).stage_s([first + 1], 1) == pytest.approx(row_wise)
    stage = range(first, second + 1)
    assert not any(op.aggregates for op in model.select(stage[1:-1]))
    both = 2 * aggregation + (len(stage) - 2) * row_wise
    assert ClosedForm(work, 2).stage_s(stage, 1) == pytest.approx(both)


def test_a_message_takes_latency_and_bytes():
    form = ClosedForm(workload(Cluster((Device(1.0, 1),) * 4, Link(1e9, 1e-4))), 4)
    # 64 columns of 64,000 / 4 / 2 rows, 4 bytes each.
    assert form.message_s(64, 2) == pytest.approx(1e-4 + 64 * 8000 * 4 / 1e9)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("schedule", ["fill-drain", "layer-sync"])
def test_one_rank_takes_what_the_simulator_says(chunks, schedule):
    work = workload()
    dag = plan_of(work, 1, 1, chunks, schedule)
    form = ClosedForm(work, chunks, schedule == "layer-sync")
    assert form.time_s(dag) == pytest.approx(simulated_s(work, dag), rel=0.01)


@pytest.mark.parametrize("shape", [(2, 1, 8), (4, 1, 16), (1, 4, 1), (2, 2, 8), (4, 2, 1)])
def test_several_ranks_take_about_what_the_simulator_says(shape):
    work = workload()
    dag = plan_of(work, *shape)
    assert ClosedForm(work, shape[2]).time_s(dag) == pytest.approx(simulated_s(work, dag), rel=0.15)


@pytest.mark.parametrize("shape", [(2, 2, 8), (4, 2, 16)])
def test_an_exchange_fills_a_port_for_no_longer_than_it_takes(shape):
    """Messages may be slower than exchanges."""
    work = workload()
    slow = LinkTimes(5e-5, 1.25e8, 0.0)
    work = replace(work, profile=replace(work.profile, message=slow))
    dag = plan_of(work, *shape)
    assert ClosedForm(work, shape[2]).time_s(dag) == pytest.approx(simulated_s(work, dag), rel=0.1)


def test_memory_grows_with_the_chunks_in_flight():
    form = ClosedForm(workload(), 8)
    few, all_chunks = (form.memory_bytes([2, 3], 2, count) for count in (2, 8))
    assert few < all_chunks
    assert form.memory_bytes([2, 3], 4, 8) < all_chunks


@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 4, 4), (2, 3, 1)])
def test_alike_shards_are_simulated_once(shape):
    work = workload()
    dag = plan_of(work, *shape)
    assert alike_shards(dag, None) == [0]
    assert simulated_s(work, dag, [0]) == pytest.approx(simulated_s(work, dag), rel=1e-9)


def test_shards_on_unlike_devices_are_simulated_apart():
    devices = (Device(1.0, 1), Device(0.5, 1)) * 4
    work = workload(Cluster(devices, Link(1e9, 1e-4)))
    dag = plan_of(work, 2, 4, 4)
    assert alike_shards(dag, work.cluster) == [0, 1]
    assert simulated_s(work, dag, [0, 1]) == pytest.approx(simulated_s(work, dag), rel=1e-9)

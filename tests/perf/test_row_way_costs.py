"""Costs of the ways of rows: bytes, work, and the order of products and exchanges."""

import pytest
from profiles import prepared_of, profile_of

import gnnpipe
from gnnpipe.perf.simulate import TaskKind, simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.profiling.predict import run_costs
from gnnpipe.profiling.scenario import GraphShape

SHAPES = [(1, 2, 1), (1, 3, 1), (1, 3, 4), (2, 2, 4)]


def run_of(shape, row_way="columns", **changes):
    settings = dict(zip(("stages", "shards", "chunks"), shape, strict=True))
    exact = {"staleness": "exact"} if shape[2] > 1 else {}
    given = {"model": "gcnii", "layers": 4, "hidden": 7, "row_way": row_way}
    return prepared_of(**given | settings | exact | changes)


def tasks_of(prepared, overlap=True):
    costs = run_costs(prepared, profile_of(prepared.model_graph), 2)
    return program_tasks(prepared.program, costs, overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("row_way", ["gather", "columns"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_on_the_wires_are_the_closed_form(shape, row_way, overlap):
    prepared = run_of(shape, row_way)
    tasks = tasks_of(prepared, overlap)
    exchanges = TaskKind.EXCHANGE_FORWARD, TaskKind.EXCHANGE_BACKWARD
    sent = sum(what.size_bytes for what in tasks.what if what.kind in exchanges)
    assert sent == prepared.volume.graph


@pytest.mark.parametrize("shape", SHAPES)
def test_every_product_is_sent_back(shape):
    prepared = run_of(shape)
    tasks = tasks_of(prepared)
    timeline = simulate(tasks)
    steps = sum(steps - 1 for steps in prepared.dag.steps)
    kinds = [what.kind for what in tasks.what]
    assert kinds.count(TaskKind.PRODUCT) == steps * shape[1] * shape[2]
    assert kinds.count(TaskKind.PULL) == steps * shape[1] * shape[2]
    for way in (TaskKind.EXCHANGE_FORWARD, TaskKind.EXCHANGE_BACKWARD):
        assert kinds.count(way) == 2 * steps * shape[2]
    for number, what in enumerate(tasks.what):
        if what.kind is TaskKind.PRODUCT:
            same = [
                other
                for other, found in enumerate(tasks.what)
                if found.kind is TaskKind.FORWARD
                and found[1:6] == what[1:6]  # stage, shard, chunk and step
            ]
            back = [
                task
                for task in tasks.before[same[0]]
                if tasks.what[task].kind is TaskKind.EXCHANGE_FORWARD
            ]
            assert len(back) == 1
            assert timeline.end_s[number] <= timeline.start_s[back[0]]
            assert timeline.end_s[back[0]] <= timeline.start_s[same[0]]


def test_the_work_on_edges_is_divided_by_columns():
    """Each shard reads the index of every edge, and at least 32 bytes of a row."""
    by_way = {}
    for way in ("halo", "columns"):
        prepared = run_of((1, 2, 1), way, hidden=8)
        costs = run_costs(prepared, profile_of(prepared.model_graph), 2)
        by_way[way] = [costs.pull_s(0, shard, 0, 1) for shard in range(2)]
    # 8 columns of 4 bytes and 8 bytes of an index: half of the columns takes all of the time.
    assert sum(by_way["columns"]) == pytest.approx(2 * sum(by_way["halo"]))
    assert by_way["columns"][0] == pytest.approx(by_way["columns"][1])
    assert by_way["halo"][0] != pytest.approx(by_way["halo"][1])


def simulated(way, halo, shards=8):
    shape = GraphShape(100_000, 20_000_000, 65, 16, halo=halo, stored=2_000_000)
    config = gnnpipe.TrainConfig(layers=4, hidden=64, shards=shards, row_way=way, quiet=True)
    return gnnpipe.simulate(config, shape=shape, hardware="a100:10gbe")


def test_columns_pay_on_a_dense_graph_alone():
    dense, sparse = (
        [simulated(way, halo).predicted_epoch_time_s for way in ("halo", "columns")]
        for halo in (4.0, 0.2)
    )
    assert dense[0] > 1.3 * dense[1]
    assert sparse[0] < sparse[1]


def test_a_shape_counts_the_bytes_of_columns():
    counted = simulated("columns", 4.0).comm_bytes_per_epoch["graph"]
    # Three layers push 64 columns, and the last one a column for each of 16 classes. Their rows
    # are sent and come back, forward and backward: four times.
    assert counted == 4 * (3 * 64 + 16) * 100_000 * 4 * 7 // 8
    # The matrix of the whole graph.
    assert simulated("columns", 0.1).memory_bytes > simulated("halo", 0.1).memory_bytes

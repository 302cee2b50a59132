"""From a prepared run and a profile to the time and the bytes of its epochs."""

from dataclasses import replace

import pyg_models
import pytest
from helpers import small_graph
from profiles import ONE_HOT, prepared_of, profile_of
from torch import nn

from gnnpipe.errors import InputError
from gnnpipe.perf.profile import Affine
from gnnpipe.perf.simulate import simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.profiling.predict import run_costs
from gnnpipe.schedule import SpecialPosition


def test_one_rank_takes_the_sum_of_its_steps():
    prepared = prepared_of(model="gcnii", layers=3, chunks=3)
    costs = run_costs(prepared, profile_of(prepared.model_graph), 1)
    made = simulate(program_tasks(prepared.program, costs)).makespan_s
    steps = sum(
        costs.step_s(way, 0, 0, chunk, step)
        for way in "FB"
        for chunk in range(3)
        for step in range(prepared.dag.steps[0])
    )
    ends = costs.begin_s(0, 0) + costs.finish_s(0, 0) + costs.update_s(0, 0)
    probes = sum(costs.probe_s(kind, 0, 0) for kind in ("FORECAST", "CARRY"))
    assert made == pytest.approx(steps + ends + probes)


def normed(**changes):
    """A norm between two layers: two means over all vertices, of rows and of their squares."""
    model = pyg_models.Normed(nn.BatchNorm1d(pyg_models.HIDDEN))
    return prepared_of(small_graph(features=pyg_models.IN), model, **changes)


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 2, 2), (2, 2, 3)])
def test_bytes_on_the_wires_are_the_closed_form(shape, has_norm):
    settings = dict(zip(("stages", "shards", "chunks"), shape, strict=True))
    prepared = normed(**settings) if has_norm else prepared_of(model="gcnii", layers=4, **settings)
    tasks = program_tasks(
        prepared.program, run_costs(prepared, profile_of(prepared.model_graph), 4)
    )
    sent = {"pipeline": 0, "graph": 0, "gradient": 0, "control": 0}
    wires = {
        "SEND_F": "pipeline",
        "SEND_B": "pipeline",
        "EXCHANGE_F": "graph",
        "EXCHANGE_B": "graph",
        "REDUCE_MEAN": "graph",
        "REDUCE_FIT": "control",
        "REDUCE_GRAD": "gradient",
    }
    for what in tasks.what:
        name = wires.get(what.kind)
        if name is not None:
            is_probe = what.position == SpecialPosition.PROBE
            sent["control" if is_probe else name] += what.size_bytes
    assert sent | {"total": prepared.volume.total} == prepared.volume.to_dict()


def test_sums_of_the_fits_take_the_wire_and_no_device():
    prepared = prepared_of(model="gcnii", layers=4, chunks=3, stages=2, shards=2)
    cluster = Cluster((Device(0.5, 1), *[Device(1.0, 1)] * 3), Link(1e9, 1e-4))
    profile = profile_of(prepared.model_graph)
    costs = run_costs(prepared, profile, 4)
    slow = run_costs(prepared, profile, 4, cluster=cluster)
    tasks = program_tasks(prepared.program, slow)
    fits = [i for i, what in enumerate(tasks.what) if what.kind == "REDUCE_FIT"]
    assert len(fits) == 4  # an aggregation each
    for i in fits:
        assert tasks.duration_s[i] == slow.shard_sum_s(0, costs.fit_bytes(0)[0])
    for rank, speed in ((0, 0.5), (2, 1.0)):
        own = [
            tasks.duration_s[i]
            for i, what in enumerate(tasks.what)
            if what.kind == "FORECAST" and 2 * what.stage + what.shard == rank
        ]
        assert sum(own) == pytest.approx(costs.probe_s("FORECAST", rank // 2, 0) / speed)


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 3), (2, 2, 3)])
def test_sums_of_means_are_waited_for_at_once(shape):
    """Forward each a sum, and back; whatever comes next on any device waits for it."""
    stages, shards, chunks = shape
    prepared = normed(stages=stages, shards=shards, chunks=chunks)
    costs = run_costs(prepared, profile_of(prepared.model_graph), 4)
    tasks = program_tasks(prepared.program, costs)
    means = sum(op.is_mean for op in prepared.model_graph.ops)
    sums = [i for i, what in enumerate(tasks.what) if what.kind == "REDUCE_MEAN"]
    assert len(sums) == 2 * means * chunks > 0
    ranks = [
        [i for i, resource in enumerate(tasks.resource) if resource == rank]
        for rank in range(stages * shards)
    ]
    for i in sums:
        stage = tasks.what[i].stage
        for own in ranks[stage * shards : (stage + 1) * shards]:
            last = max(j for j in own if j < i)
            following = min(j for j in own if j > i)
            assert last in tasks.before[i]
            assert i in tasks.before[following]
    # A step that pushes for means alone exchanges no rows.
    exchanged = {(w.stage, w.step) for w in tasks.what if w.kind.startswith("EXCHANGE_")}
    pushing = [op for op in prepared.model_graph.ops if op.aggregates and not op.is_mean]
    assert len(exchanged) == len(pushing)


@pytest.mark.parametrize(
    ("name", "there"),
    [("dtype", "float64"), ("comm_dtype", "bf16"), ("matmul_dtype", "bf16"), ("kernel", "csr")],
)
def test_a_profile_of_other_settings_is_refused(name, there):
    prepared = prepared_of(model="gcn")
    profile = profile_of(prepared.model_graph, **{name: there})
    with pytest.raises(InputError, match=f"profile: {name}: was taken with {there}"):
        run_costs(prepared, profile, 1)


def test_a_profile_without_a_forecast_is_refused_where_there_is_one():
    prepared = prepared_of(model="gcn", chunks=2)
    profile = profile_of(prepared.model_graph)
    bare = [
        replace(times, ops={k: replace(op, forecast=Affine()) for k, op in times.ops.items()})
        for times in profile.compute
    ]
    with pytest.raises(InputError, match="--staleness auto"):
        run_costs(prepared, replace(profile, compute=tuple(bare)), 1)


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [("gcn", (2, 1, 3), 3), ("gcnii", (2, 1, 3), 2 * 3), ("gcn", (1, 2, 3), 4 * 3)],
)
def test_what_processors_do_for_a_message_is_added_at_both_ends(model, shape, count):
    """A second for each: of 1 or 2 values of 3 chunks, or of 3 chunks at 4 pushes, both ways."""
    stages, shards, chunks = shape
    settings = {"stages": stages, "shards": shards, "chunks": chunks}
    prepared = prepared_of(ONE_HOT, model=model, layers=4, **settings)
    plain = profile_of(prepared.model_graph)
    busy = replace(plain.message, busy=Affine(1.0))
    more = run_costs(prepared, replace(plain, message=busy, exchange=busy), 2)
    less = run_costs(prepared, plain, 2)
    for way in "FB":
        for stage in range(stages):
            for shard in range(shards):
                added = sum(
                    more.step_s(way, stage, shard, c, k) - less.step_s(way, stage, shard, c, k)
                    for c in range(chunks)
                    for k in range(prepared.dag.steps[stage])
                )
                assert added == pytest.approx(count)

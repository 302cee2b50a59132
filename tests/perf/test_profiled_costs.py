"""Costs by a profile: bytes as they are sent, times of the profile."""

import numpy as np
import pytest
from helpers import quick_config, run_ranks, small_graph
from profiles import ONE_HOT, prepared_of, profile_of

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.planner import GivenPlan
from gnnpipe.profiling.predict import run_costs
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.schedule import SpecialPosition
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import prepare


def bytes_of(shapes, model):
    """Counted bytes, and those that the costs say, by shape."""
    from gnnpipe import Trainer

    found = []
    for stages, shards, chunks in shapes:
        config = TrainConfig(
            model=model,
            layers=4,
            hidden=8,
            stages=stages,
            shards=shards,
            chunks=chunks,
            epochs=2,
            out="off",
            cache_dir="off",
            quiet=True,
        )
        trainer = Trainer(config, graph=small_graph())
        counted = trainer.fit().comm_bytes_per_epoch
        found.append((counted, predicted_bytes(trainer._setup()[1])))
    return found


def costs_of(prepared):
    return ProfiledCosts(
        profile_of(prepared.model_graph),
        prepared.dag,
        prepared.model_graph,
        chunk_sizes(prepared),
        number_bytes=prepared.dtype.itemsize,
        row_bytes=prepared.row_dtype.itemsize,
        ranks_at_once=2,
    )


def predicted_bytes(prepared):
    plan, said = prepared.plan, costs_of(prepared)
    chunks = range(plan.chunks)
    ends = [
        (t.source, t.target, said.message_pairs(t.source, t.target)) for t in prepared.dag.transfers
    ]
    pipeline = sum(
        said.message_bytes("F", a, b, (g, h), c) + said.message_bytes("B", b, a, (h, g), c)
        for a, b, pairs in ends
        for g, h in pairs
        for c in chunks
    )
    graph = sum(
        said.exchange_bytes(way, stage, g, c, step)
        for way in "FB"
        for stage, steps in enumerate(prepared.dag.steps)
        for step in range(steps - 1)
        for g in range(plan.stages[stage].shards)
        for c in chunks
    )
    gradient = sum(
        2 * (plan.stages[s].shards - 1) * said.gradient_bytes(s, (0, steps))
        for s, steps in enumerate(prepared.dag.steps)
    )
    probes = sum(
        said.message_bytes("F", a, b, pair, SpecialPosition.PROBE)
        for a, b, pairs in ends
        for pair in pairs
    )
    return {"pipeline": pipeline, "graph": graph, "gradient": gradient, "pilots": probes}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gcnii", "sage"])
def test_costs_count_the_bytes_that_are_sent(model):
    shapes = [(2, 1, 3), (1, 2, 3)]
    for counted, said in run_ranks(bytes_of, 2, shapes, model)[0]:
        assert {k: counted[k] for k in ("pipeline", "graph", "gradient")} == {
            k: said[k] for k in ("pipeline", "graph", "gradient")
        }
        assert said["pilots"] <= counted["control"]
        assert (said["pilots"] > 0) == (said["pipeline"] > 0)


@pytest.mark.parametrize("staleness", ["exact", "auto"])
def test_costs_count_the_bytes_between_stages_of_unlike_shards(staleness):
    schedule, graph = "layer-sync" if staleness == "exact" else "fill-drain", small_graph(n=90)
    config = quick_config(model="gcnii", layers=3, chunks=2, staleness=staleness)
    model = prepare(config, Mesh.alone(), graph).model_graph
    # A stage for each layer, which begins with the aggregation.
    _, second, third = (i for i, op in enumerate(model.ops) if op.aggregates)
    stages = (
        StagePlan(tuple(range(second)), (0, 3), (0.5, 0.5)),
        StagePlan(tuple(range(second, third)), (2,), (1.0,)),
        StagePlan(tuple(range(third, model.num_ops)), (1, 4, 5), (0.25, 0.25, 0.5)),
    )
    plan = GivenPlan(Plan(stages, 2, schedule))
    prepared = prepare(config, Mesh.alone(), graph, planner=plan)
    said, volume = predicted_bytes(prepared), prepared.volume
    found = (said["pipeline"], said["graph"], said["gradient"])
    assert found == (volume.pipeline, volume.graph, volume.gradient)
    assert (said["pilots"] > 0) == (staleness == "auto")
    tasks = program_tasks(prepared.program, costs_of(prepared))
    sent = sum(t.size_bytes for t in tasks.what if t.kind.is_send and t.chunk >= 0)
    assert sent == volume.pipeline


def test_costs_are_those_of_the_profile():
    prepared = prepared_of(ONE_HOT, model="gcn", layers=2, chunks=2)
    said, sizes = costs_of(prepared), chunk_sizes(prepared).stages[0]
    rows, edges = int(sizes.rows[""][0, 1]), int(sizes.edges[""][0, 1])
    assert rows + int(sizes.rows[""][0, 0]) == 34
    assert edges + int(sizes.edges[""][0, 0]) == prepared.graph.num_edges
    # The last aggregation reads for the rows that the loss asks for; others are not made.
    last = prepared.model_graph.ops[-3:]
    assert [op.aggregates for op in last] == [True, False, False]
    assert prepared.loss_rows.ops == {op.name for op in last}
    loss_rows, into_asked = int(sizes.loss_row_counts[0, 1]), int(sizes.loss_row_edges[0, 1])
    assert 0 < loss_rows < rows
    # The middle step: what was aggregated, a row-wise call, and what the next one pushes.
    names = [op.name for op in prepared.model_graph.ops]
    assert names == ["linear", "aggregate", "drop", "aggregate_1", "linear_2", "add_1"]
    made, pushed = 0.5 + 1e-3 * rows + 1e-6 * edges, 0.5 + 1e-3 * rows + 1e-6 * into_asked
    between = 0.5 + 1e-3 * rows
    assert said.step_s("F", 0, 0, 1, 1) == pytest.approx(made + between + pushed)
    # The last step: what was aggregated, the map and the bias.
    last_s = 0.5 + 1e-3 * loss_rows + 1e-6 * into_asked, 2 * (0.5 + 1e-3 * loss_rows)
    assert said.step_s("B", 0, 0, 1, 2) == pytest.approx(sum(last_s))
    assert said.pull_s(0, 0, 1, 1) == pytest.approx(1e-6 * into_asked)
    assert said.pull_s(0, 0, 1, 1) < said.step_s("B", 0, 0, 1, 1)
    assert said.message_s(0, 1, 10**6) == pytest.approx(1e-4 + 1e-3)


def test_a_profile_of_something_else_is_refused():
    prepared = prepared_of(model="gcn", layers=2)
    other = profile_of(prepared_of(model="sage").model_graph)
    with pytest.raises(InputError, match="profile: has no op like "):
        ProfiledCosts(
            other,
            prepared.dag,
            prepared.model_graph,
            chunk_sizes(prepared),
            number_bytes=4,
            row_bytes=4,
            ranks_at_once=1,
        )


def test_a_profile_of_other_heads_is_refused():
    """Attention's time goes by its heads."""
    profile = profile_of(
        prepared_of(model="gat", layers=3, hidden=16, model_args="heads=2").model_graph
    )
    other = prepared_of(model="gat", layers=3, hidden=16, model_args="heads=4")
    name = other.model_graph.aggregations[0].name
    with pytest.raises(InputError, match=rf"no op like {name} .*kept 4 an edge.*kept 2 an edge"):
        run_costs(other, profile, 1)


def test_a_profile_without_links_is_refused_where_there_are_stages():
    prepared = prepared_of(model="gcn", layers=2, stages=2)
    profile = profile_of(prepared.model_graph, message=None)
    with pytest.raises(InputError, match="torchrun"):
        ProfiledCosts(
            profile,
            prepared.dag,
            prepared.model_graph,
            chunk_sizes(prepared),
            number_bytes=4,
            row_bytes=4,
            ranks_at_once=1,
        )


def test_stale_rows_are_counted_as_they_are_read():
    """Their mean over orders is near what the orders give."""
    from gnnpipe.setup.build import build_rank

    prepared = prepared_of(graph=small_graph(400, 4), model="gcn", layers=2, chunks=6)
    forecaster = build_rank(prepared, Mesh.alone()).executor.forecaster
    stale = next(iter(forecaster._stale.values()))
    stale._is_always[:] = False
    rng = np.random.default_rng(0)
    pairs = prepared.program.stale_pairs(0)
    counts = [len(stale.in_order(rng.permutation(6).tolist(), pairs)) for _ in range(40)]
    assert int(chunk_sizes(prepared).stages[0].stale[""][0]) == pytest.approx(
        np.mean(counts), rel=0.05
    )

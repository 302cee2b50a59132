"""Law 5 for the uniform planner: it equals brute force, and its costs are those of the layers."""

from itertools import combinations, pairwise

import pytest
from helpers import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.config import TrainConfig
from gnnpipe.plan.model_graph import EDGE_FLOPS
from gnnpipe.planner import GraphCounts
from gnnpipe.planner.uniform import op_costs, split_evenly
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare


def slowest(costs, runs):
    return max(sum(costs[a:b]) for a, b in runs)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=8), st.data())
def test_split_equals_brute_force(costs, data):
    free = st.sets(st.integers(1, max(len(costs) - 1, 1)), max_size=len(costs) - 1)
    cuts = sorted(data.draw(free))
    widths = [data.draw(st.integers(0, 3)) for _ in cuts]
    stages = data.draw(st.integers(1, len(cuts) + 1))
    runs = split_evenly(costs, stages, cuts, widths)
    assert [runs[0][0], runs[-1][1], len(runs)] == [0, len(costs), stages]
    assert all(a < b for a, b in runs)
    splits = [
        (list(pairwise((0, *chosen, len(costs)))), sum(widths[cuts.index(c)] for c in chosen))
        for chosen in combinations(cuts, stages - 1)
    ]
    timed = [
        (
            slowest(costs, split),
            total,
            max((widths[cuts.index(a)] for a, _ in split[1:]), default=0),
        )
        for split, total in splits
    ]
    fastest, least = balanced(timed)
    for most in sorted(set(widths)):
        narrow = [one for one in timed if one[2] <= most]
        if narrow and balanced(narrow)[0] <= fastest * 1.05:
            if balanced(narrow)[1] <= 0.75 * least:
                fastest, least = balanced(narrow)
            break
    assert slowest(costs, runs) == pytest.approx(fastest)
    assert sum(widths[cuts.index(start)] for start, _ in runs[1:]) <= least


def balanced(timed):
    """Time of the fastest splits, and least total width of these."""
    fastest = min(time for time, *_ in timed)
    return fastest, min(total for time, total, _ in timed if time <= fastest * (1 + 1e-12))


def test_no_stage_begins_inside_a_layer_for_a_little_balance():
    """Between two layers 8 numbers a row cross, inside of a layer 16."""
    costs, cuts = [1.0, 3.1, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0], range(1, 8)
    widths = [8 if cut % 2 == 0 else 16 for cut in cuts]
    assert split_evenly(costs, 2, cuts, widths) == ((0, 4), (4, 8))
    uneven = [1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 1.0, 1.0]
    assert split_evenly(uneven, 2, cuts, widths) == ((0, 5), (5, 8))


@pytest.mark.slow
def test_thousands_of_ops_and_stages():
    costs = [1.0 + i % 7 for i in range(3000)]
    cuts = range(1, 3000)
    runs = split_evenly(costs, 1024, cuts, [i % 3 for i in cuts])
    assert len(runs) == 1024
    assert slowest(costs, runs) <= sum(costs) / 1024 + max(costs)


def test_what_crosses_a_cut():
    graph = prepared(model="gcnii").model_graph
    for cut, width in enumerate(graph.crossing()):
        later = {value for op in graph.ops[cut:] for value in op.inputs}
        made = [item for op in graph.ops[:cut] for item in op.outputs.items()]
        assert width == sum(w for value, w in made if value in later)


def prepared(hidden=8, **settings):
    config = TrainConfig(layers=4, hidden=hidden, cache_dir="off", **settings)
    return prepare(config, Mesh.alone(), small_graph(sparse=True))


@pytest.mark.parametrize(("model", "encoders"), [("gcn", 1), ("sage", 2)])
def test_costs_count_stored_features_only(model, encoders):
    # Features that are wider than the model are mapped before they are aggregated.
    graph = prepared(model=model, hidden=4).model_graph
    few, many = (
        op_costs(graph, GraphCounts({"": 60}, {"": 300}, {"": entries})) for entries in (10, 110)
    )
    assert sum(op.reads_features for op in graph.ops) == encoders
    for op, less, more in zip(graph.ops, few, many, strict=True):
        assert more - less == (2 * 4 * 100 if op.reads_features else 0)
    # The two layers between the first and the last one are alike.
    starts = [i for i, op in enumerate(graph.ops) if op.aggregates]
    second, third = few[starts[1] : starts[2]], few[starts[2] : starts[3]]
    assert second == third[: len(second)]


def test_aggregated_features_cost_nothing_per_epoch():
    graph = prepared(model="sage", hidden=32).model_graph
    costs = op_costs(graph, GraphCounts({"": 60}, {"": 300}, {"": 110}))
    (given,) = (i for i, op in enumerate(graph.ops) if op.is_given)
    assert costs[given] == 0
    assert all(costs[i] >= EDGE_FLOPS * op.push_width * 300 for i, op in enumerate(graph.ops))


def test_memory_estimate_falls_with_every_axis():
    alone = memory_by_rank(prepared(model="gcnii"))[0].total
    for shape in ({"stages": 4}, {"shards": 4}):
        ranks = memory_by_rank(prepared(model="gcnii", **shape))
        assert len(ranks) == 4
        assert all(rank.total < alone for rank in ranks)
    staged = memory_by_rank(prepared(model="gcnii", stages=2))
    assert staged[0].features > 0
    assert staged[1].features == 0
    snapshot = memory_by_rank(prepared(model="gcnii", chunks=4, staleness="paper"))[0]
    stale = prepared(model="gcnii", chunks=4, staleness="none")
    plain = memory_by_rank(stale)[0]
    # A table and gradients, of the last layer for the rows that the loss asks for; then two tables.
    widths, n = [op.push_width for op in stale.model_graph.aggregations], stale.graph.num_vertices
    last = stale.model_graph.ops.index(stale.model_graph.aggregations[-1])
    assert stale.loss_rows.ops == {op.name for op in stale.model_graph.ops[last:]}
    assert plain.history == 4 * (2 * n * sum(widths) - (n - stale.loss_rows.rows) * widths[-1])
    assert snapshot.history - plain.history == 4 * n * sum(widths)


def test_memory_estimate_counts_pilots_and_kept_weights():
    plain = memory_by_rank(prepared(model="gcn", chunks=4, staleness="none"))[0]
    probes = memory_by_rank(prepared(model="gcn", chunks=4, staleness="auto"))[0]
    both = memory_by_rank(prepared(model="gcn", chunks=4, staleness="auto", keep_weights="best"))[0]
    assert plain.weights % 4 == 0
    assert probes.weights == plain.weights // 4 * 5
    assert both.weights == plain.weights // 4 * 6
    assert probes.structure > plain.structure
    assert probes.features > plain.features
    assert probes.history == plain.history

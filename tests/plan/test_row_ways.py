"""The ways of the rows in a plan."""

from dataclasses import replace

import pytest
from helpers import quick_config, small_graph
from hypothesis import given
from hypothesis import strategies as st

from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, RowWay, StagePlan, column_bounds
from gnnpipe.planner import GivenPlan
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

GRAPH = small_graph(features=9, sparse=True)
"""With features wider than a layer, so that both layers push rows."""


@given(st.integers(1, 300), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_columns_are_divided_by_shares(width, parts):
    shares = [part / sum(parts) for part in parts]
    bounds = column_bounds(width, shares)
    assert (bounds[0], bounds[-1]) == (0, width)
    assert sorted(bounds) == bounds
    for first, last, share in zip(bounds[:-1], bounds[1:], shares, strict=True):
        assert abs(last - first - width * share) <= 1 + 1e-9


def model_of(model="gcn", **settings):
    config = quick_config(model=model, layers=2, hidden=8, **settings)
    return prepare(config, Mesh.alone(), GRAPH).model_graph


def aggregations_of(model):
    return [i for i, op in enumerate(model.ops) if op.aggregates]


def prepared_with(ways, model="gcn", ranks=(0, 1), **settings):
    """A run of 2 layers in one stage; ``ways``: by op, or 'first' and 'second' aggregation."""
    config = quick_config(model=model, layers=2, hidden=8, **settings)
    described = model_of(model, **settings)
    numbers = dict(zip(("first", "second"), aggregations_of(described), strict=True))
    ways = {numbers.get(op, op): way for op, way in ways.items()}
    stage = StagePlan.even(tuple(range(described.num_ops)), ranks)
    plan = Plan((stage,), config.chunks, "fill-drain", ways=ways)
    plan = Plan.from_json(plan.to_json())
    return prepare(replace(config, chunks=1), Mesh.alone(), GRAPH, planner=GivenPlan(plan))


def test_other_ops_travel_by_halo():
    prepared = prepared_with({"second": RowWay.COLUMNS})
    first, second = aggregations_of(prepared.model_graph)
    found = {op: prepared.plan.way(op) for op in range(prepared.model_graph.num_ops)}
    assert found.pop(second) is RowWay.COLUMNS
    assert first in found
    assert set(found.values()) == {RowWay.HALO}


@pytest.mark.parametrize(
    ("ways", "settings", "message"),
    [
        ({6: RowWay.COLUMNS}, {}, r"plan: ways: 6: must be an op from 0 to 5"),
        ({3: RowWay.COLUMNS}, {}, r"columns: op 3 \(linear_1\) aggregates no rows of neighbours"),
        (
            {"second": RowWay.COLUMNS},
            {"model": "gat"},
            r"columns: op 6 \(part_\d_of_convs_1\) computes messages",
        ),
        ({"second": RowWay.GATHER}, {"ranks": (0,)}, r"gather: op 4 .* is on a single rank"),
        (
            {"second": RowWay.COLUMNS},
            {"ranks": (0,)},
            r"op 4 .* is on a single rank, which sends no",
        ),
        (
            {"second": RowWay.COLUMNS},
            {"chunks": 4},
            r"columns: 4 chunks read stale rows.*--staleness ex",
        ),
    ],
)
def test_a_way_that_an_op_cannot_use_is_refused(ways, settings, message):
    with pytest.raises(InputError, match=message):
        prepared_with(ways, **settings)


def flagged(**settings):
    config = quick_config(layers=2, hidden=8, shards=2, row_way="columns", **settings)
    return prepare(config, Mesh.alone(), GRAPH)


def test_the_flag_gives_every_op_its_way():
    prepared = flagged()
    first, second = aggregations_of(prepared.model_graph)
    assert prepared.plan.ways == {first: RowWay.COLUMNS, second: RowWay.COLUMNS}
    assert f"rows travel among shards by columns (ops {first}, {second})" in head_lines(prepared)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gat"}, r"--row-way columns: GAT: op \d \(\w*convs_0\) computes messages"),
        ({"chunks": 3}, r"--row-way columns: 3 chunks read stale rows"),
        ({"plan": "x.json"}, r"--shards 2, --row-way columns: no effect with --plan 'x.json'"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        flagged(**settings)


def test_a_flag_without_effect_is_refused():
    with pytest.raises(InputError, match="--row-way columns: with --shards 1 no rows travel"):
        quick_config(layers=2, hidden=8, row_way="columns")
    assert quick_config(layers=2, hidden=8, row_way="halo").shards == 1


def test_an_unknown_way_is_refused():
    plan = Plan((StagePlan.even((0, 1), (0, 1)),), 1, "fill-drain", ways={1: RowWay.COLUMNS})
    text = plan.to_json().replace("columns", "pigeons")
    with pytest.raises(InputError, match="ways: 1 'pigeons': must be one of halo, gather, columns"):
        Plan.from_json(text)

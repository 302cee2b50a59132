"""The ways of the rows in a plan."""

from dataclasses import replace

import pytest
from helpers import quick_config, small_graph
from hypothesis import given
from hypothesis import strategies as st

from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, RowWay, StageDag, StagePlan, column_bounds
from gnnpipe.planner import GivenPlan
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare


@given(st.integers(1, 300), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_columns_are_divided_by_shares(width, parts):
    shares = [part / sum(parts) for part in parts]
    bounds = column_bounds(width, shares)
    assert (bounds[0], bounds[-1]) == (0, width)
    assert sorted(bounds) == bounds
    for first, last, share in zip(bounds[:-1], bounds[1:], shares, strict=True):
        assert abs(last - first - width * share) <= 1 + 1e-9


def prepared_with(ways, model="gcn", ranks=(0, 1), **settings):
    """A run of 2 layers in one stage with these ways."""
    config = quick_config(model=model, layers=2, hidden=8, **settings)
    plan = Plan((StagePlan.even((0, 1), ranks),), config.chunks, "fill-drain", ways=ways)
    plan = Plan.from_json(plan.to_json())
    return prepare(replace(config, chunks=1), Mesh.alone(), small_graph(), planner=GivenPlan(plan))


def test_other_ops_travel_by_halo():
    plan = prepared_with({1: RowWay.COLUMNS}).plan
    assert [plan.way(0), plan.way(1)] == [RowWay.HALO, RowWay.COLUMNS]


@pytest.mark.parametrize(
    ("ways", "settings", "message"),
    [
        ({2: RowWay.COLUMNS}, {}, r"plan: ways: 2: must be an op from 0 to 1"),
        ({1: RowWay.COLUMNS}, {"model": "gat"}, r"columns: layer 1 \(gat1\) computes messages"),
        ({1: RowWay.GATHER}, {"ranks": (0,)}, r"gather: layer 1 .* is on a single rank"),
        ({1: RowWay.COLUMNS}, {"ranks": (0,)}, r"layer 1 .* is on a single rank, which sends no"),
        ({1: RowWay.COLUMNS}, {"chunks": 4}, r"columns: 4 chunks read stale rows.*--staleness ex"),
    ],
)
def test_a_way_that_an_op_cannot_use_is_refused(ways, settings, message):
    with pytest.raises(InputError, match=message):
        prepared_with(ways, **settings)


def flagged(**settings):
    config = quick_config(layers=2, hidden=8, shards=2, row_way="columns", **settings)
    return prepare(config, Mesh.alone(), small_graph())


def test_the_flag_gives_every_op_its_way():
    prepared = flagged()
    assert prepared.plan.ways == {0: RowWay.COLUMNS, 1: RowWay.COLUMNS}
    assert "rows travel among shards by columns (layers 0-1)" in head_lines(prepared)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gat"}, r"--row-way columns: gat: layer 0 \(gat0\) computes messages"),
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


def test_an_op_without_neighbours_is_refused():
    model = prepared_with({}).model_graph
    plan = Plan((StagePlan.even((0, 1), (0, 1)),), 1, "fill-drain", ways={0: RowWay.COLUMNS})
    rowwise = replace(model, ops=(replace(model.ops[0], push_width=0), model.ops[1]))
    with pytest.raises(InputError, match=r"columns: layer 0 .* aggregates no rows of neighbours"):
        StageDag.of(plan, rowwise)

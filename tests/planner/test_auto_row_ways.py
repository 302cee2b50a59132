"""``--plan auto`` and rows that travel by columns: where it chooses these, and at what cost."""

from dataclasses import replace

import pytest
from planned import GRAPH, SLOW, devices, space_of

from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.plan import RowWay
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import GivenPlan, find_plan
from gnnpipe.planner.auto import every_candidate

DENSE = replace(GRAPH, edges=60_000_000, halo=4.0)
EIGHT = Cluster(devices(*[1.0] * 8), SLOW)
UNLIKE = Cluster(devices(1.0, 0.5, 1.0, 0.5, 1.0, 1.0), SLOW)


def sharded(space):
    """Return the candidate of one stage on all devices, for one chunk."""
    every = (c for c in every_candidate(space) if c.plan.num_stages == c.plan.chunks == 1)
    return max(every, key=lambda c: (c.plan.num_ranks, len(set(c.plan.stages[0].shares))))


SLOW = pytest.mark.slow
"""The gate leaves these cases out."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cluster", [EIGHT, UNLIKE])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(
    "model", ["gcn", pytest.param("gcnii", marks=SLOW), pytest.param("sage", marks=SLOW)]
)
def test_columns_are_chosen_where_they_are_faster_by_simulation(cluster, chunks, model):
    space = space_of(cluster, DENSE, model=model, hidden=32)
    exact = [c for c in every_candidate(space) if c.form.is_exact and c.plan.chunks == chunks]
    chosen = [c for c in exact if c.plan.ways]
    assert chosen
    for candidate in chosen:
        by_halo = candidate.with_plan(replace(candidate.plan, ways={}))
        assert candidate.simulated_s < by_halo.simulated_s
        # What the closed form saves is what the simulator saves.
        saved, simulated = (
            by_halo.closed_form_s - candidate.closed_form_s,
            by_halo.simulated_s - candidate.simulated_s,
        )
        assert saved == pytest.approx(simulated, abs=0.15 * by_halo.simulated_s)


def test_a_sparse_graph_goes_by_halo():
    for candidate in every_candidate(space_of(EIGHT, replace(GRAPH, halo=0.2))):
        assert not candidate.plan.ways


def test_attention_and_stale_rows_go_by_halo():
    for candidate in every_candidate(space_of(EIGHT, DENSE, model="gat")):
        assert not candidate.plan.ways
    stale = [c for c in every_candidate(space_of(EIGHT, DENSE)) if not c.form.is_exact]
    assert stale
    assert not any(candidate.plan.ways for candidate in stale)


@SLOW
def test_stages_that_do_not_fit_by_columns_go_by_halo():
    space = space_of(EIGHT, DENSE, hidden=32)
    by_columns = sharded(space)
    by_halo = by_columns.with_plan(replace(by_columns.plan, ways={}))
    # The matrix of the whole graph lies on every device.
    needs = max(by_columns.memory_bytes), max(by_halo.memory_bytes)
    assert needs[0] > needs[1]
    limited = sharded(replace(space, device_bytes=[needs[0] - 1] * 8))
    assert not limited.plan.ways
    assert not limited.plan.recomputes


def test_the_closed_form_knows_the_ways_of_a_given_plan():
    candidate = sharded(space_of(EIGHT, DENSE, hidden=32))
    assert set(candidate.plan.ways.values()) == {RowWay.COLUMNS}
    form = ClosedForm(candidate.form.workload, 1)
    assert form.time_s(candidate.dag) == candidate.closed_form_s
    one = dict(list(candidate.plan.ways.items())[:1])
    partly = candidate.with_plan(replace(candidate.plan, ways=one))
    by_halo = candidate.with_plan(replace(candidate.plan, ways={}))
    assert candidate.closed_form_s < partly.closed_form_s < by_halo.closed_form_s


@pytest.mark.slow
def test_the_result_says_what_halo_exchanges_and_equal_shares_would_cost():
    space = space_of(UNLIKE, DENSE, hidden=128)
    found = find_plan(replace(space, max_stale_chunks=1))
    lines = list(replace(found, best=sharded(space)).plan_lines())
    columns, shares = (
        next(line for line in lines if line.startswith(begin))
        for begin in ("rows travel by columns in ops ", "shares of the work: ")
    )
    assert "by halo they would cost " in columns
    assert "equal shares would cost " in shares
    assert "-" not in columns.rpartition("cost ")[2] + shares.rpartition("cost ")[2]
    assert GivenPlan(type(found.plan).from_json(found.plan.to_json())).given == found.plan

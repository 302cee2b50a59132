"""Plans whose ranks have unequal shares: the partition follows them, and training stays exact."""

from dataclasses import replace

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe.graph.partition import vertex_work
from gnnpipe.plan import Plan
from gnnpipe.planner import GivenPlan


def trained(shares, stages, chunks):
    """Largest difference to one autograd graph, and the work of each shard; on every rank."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh, graph = Mesh.join(stages, 2), small_graph(n=120)
    config = quick_config(
        model="gcn", layers=4, stages=stages, shards=2, chunks=chunks, dtype="float64", epochs=3
    )
    plan = prepare(config, mesh, graph).plan
    plan = replace(plan, stages=tuple(replace(stage, shares=shares) for stage in plan.stages))
    prepared = prepare(config, mesh, graph, planner=GivenPlan(Plan.from_json(plan.to_json())))
    difference = max(c.largest for c in compare_epochs(graph, prepared, mesh, 3))
    work = vertex_work(graph)[prepared.chunking.perm]
    shard = prepared.chunking.shard_of_row()
    return difference, [float(work[shard == g].sum() / work.sum()) for g in range(2)]


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (1, 3), (2, 3)])
def test_a_plan_with_unequal_shares(stages, chunks):
    for difference, work in run_ranks(trained, 2 * stages, (0.7, 0.3), stages, chunks):
        assert difference < 1e-9
        # A chunk has some 40 vertices here; one vertex is 2 % of it.
        assert work == pytest.approx([0.7, 0.3], abs=0.05)

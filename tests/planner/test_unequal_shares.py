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


UNEQUAL = {2: (1 / 3, 2 / 3), 3: (1 / 6, 1 / 6, 4 / 6)}


def trained_twice(model, chunks, shares):
    """Losses, weights and work by shard with equal and with unequal shares; with dropout."""
    import torch

    from gnnpipe import Trainer
    from gnnpipe.plan import StagePlan
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.runtime.comm.world import World
    from gnnpipe.setup.prepare import prepare

    ranks, graph = tuple(range(len(shares))), small_graph(n=150)
    world, found = World.meet(len(ranks), "cpu"), []
    config = quick_config(
        model=model, layers=3, hidden=8, chunks=chunks, staleness="exact", epochs=5, dropout=0.4
    )
    alone = prepare(replace(config, chunks=1), Mesh.alone(), graph)
    ops = tuple(range(alone.model_graph.num_ops))
    for each in ((1 / len(ranks),) * len(ranks), shares):
        schedule = "layer-sync" if chunks > 1 else "fill-drain"
        plan = Plan((StagePlan(ops, ranks, each),), chunks, schedule)
        trainer = Trainer(replace(config, chunks=1), graph, plan=plan, world=world)
        losses = [row.loss for row in trainer.fit().history]
        weights = torch.cat([t.flatten() for t in trainer.model.state_dict().values()])
        work = vertex_work(graph)[trainer._setup()[1].chunking.perm]
        shard = trainer._setup()[1].chunking.shard_of_row()
        by_shard = [float(work[shard == g].sum() / work.sum()) for g in ranks]
        found.append((losses, weights, by_shard))
    return found


@pytest.mark.parametrize("ranks", UNEQUAL)
@pytest.mark.parametrize(("model", "chunks"), [("gcn", 1), ("gcnii", 3), ("gat", 1)])
def test_unequal_shares_train_as_equal_ones(model, chunks, ranks):
    shares = UNEQUAL[ranks]
    for (losses, weights, _), (again, others, work) in run_ranks(
        trained_twice, ranks, model, chunks, shares
    ):
        assert losses == pytest.approx(again, rel=1e-9)
        assert weights.numpy() == pytest.approx(others.numpy(), rel=1e-9, abs=1e-12)
        assert work == pytest.approx(list(shares), abs=0.05)

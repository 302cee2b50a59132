"""--recompute: the same bits on every shape, and forward saves no tensors."""

import pytest
import torch
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.ops import norm_relu_blocks
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage
from gnnpipe.setup.build import build_rank

OURS = ("gcn", "sage", "gcnii", "resgcn", "gat")


def losses_and_weights(shape, model, recompute, mesh=None, **more):
    stages, shards, chunks = shape
    config = quick_config(
        model=model,
        layers=4,
        hidden=8,
        stages=stages,
        shards=shards,
        chunks=chunks,
        dtype="float32",
        recompute=recompute,
        **more,
    )
    trainer = Trainer(config, graph=small_graph(sparse=True), world=mesh)
    result = trainer.fit()
    return [row.loss for row in result.history], trainer.model.state_dict()


def assert_same(shape, model, mesh=None, **more):
    losses, weights = losses_and_weights(shape, model, False, mesh, **more)
    again, others = losses_and_weights(shape, model, True, mesh, **more)
    assert again == losses
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name


@pytest.mark.parametrize(
    ("model", "chunks", "staleness", "dropout", "rows_at_once"),
    [
        ("gcn", 1, "none", 0.5, 7),
        ("sage", 2, "paper", 0.3, 7),
        ("gcnii", 5, "auto", 0.5, 7),
        ("resgcn", 2, "exact", 0.0, 1000),
        ("gat", 5, "none", 0.3, 1000),
        ("gat", 2, "exact", 0.5, 7),
    ],
)
def test_same_bits(model, chunks, staleness, dropout, rows_at_once, monkeypatch):
    """Every model, number of chunks, staleness, dropout and number of rows in a block."""
    monkeypatch.setattr(norm_relu_blocks, "rows_at_once", lambda x, width: rows_at_once)
    assert_same((1, 1, chunks), model, staleness=staleness, dropout=dropout)


def on_ranks(shape):
    mesh = Mesh.join(shape[0], shape[1])
    for model in OURS:
        assert_same(shape, model, mesh)
    return True


@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 2, 3), (2, 2, 3)])
def test_same_bits_on_ranks(shape):
    assert all(run_ranks(on_ranks, shape[0] * shape[1], shape))


@pytest.mark.parametrize("model", OURS)
def test_a_plan_recomputes_as_the_flag_does(model):
    """Only the stage of the plan that says so keeps no tensors."""
    config = quick_config(model=model, layers=4, hidden=8, dtype="float32")
    ops = tuple(range(Trainer(config, graph=small_graph(sparse=True)).plan.num_ops))
    plan = Plan((StagePlan(ops, (0,), (1.0,), recompute=True),), 3, "fill-drain")
    trainer = Trainer(config, graph=small_graph(sparse=True), plan=plan)
    losses = [row.loss for row in trainer.fit().history]
    again, weights = losses_and_weights((1, 1, 3), model, True)
    assert losses == again
    found = trainer.model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    mesh, prepared = trainer._setup()
    assert build_rank(prepared, mesh).executor.stage.segments is not None


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("model", OURS)
def test_forward_saves_no_tensors(model, chunks, monkeypatch):
    forward, kept = Stage.forward, []

    def watched(self, chunk, steps):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t.nbytes), t)[1], lambda t: t
        ):
            return forward(self, chunk, steps)

    monkeypatch.setattr(Stage, "forward", watched)
    losses_and_weights((1, 1, chunks), model, False)
    assert sum(kept) > 0
    kept.clear()
    losses_and_weights((1, 1, chunks), model, True)
    assert kept == []

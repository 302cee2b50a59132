"""Law 8: with frozen weights, L epochs make every history table exact."""

import pytest
import torch
from helpers import run_ranks, small_graph
from torch.nn.functional import cross_entropy

from gnnpipe.config import TrainConfig

LAYERS = 4


def frozen_run(model, stages, shards, epochs, **settings):
    """Loss of each epoch without optimizer steps, and this rank's tables by layer."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import train_epoch

    mesh = Mesh.join(stages, shards)
    config = TrainConfig(
        model=model,
        layers=LAYERS,
        hidden=8,
        stages=stages,
        shards=shards,
        chunks=6,
        dropout=0.0,
        dtype="float64",
        cache_dir="off",
        **({"staleness": "none", "shuffle_chunks": True} | settings),
    )
    prepared = prepare(config, mesh, small_graph())
    rank_runtime = build_rank(prepared, mesh)
    rank_runtime.executor.optimizer = None
    losses = [
        train_epoch(rank_runtime, mesh, prepared.program, prepared.chunk_order(e), e)
        for e in range(epochs)
    ]
    stage = rank_runtime.executor.stage
    layout = rank_runtime.target
    rows = torch.from_numpy(prepared.chunking.perm[list(layout.own) + list(layout.halo)].copy())
    tables = {name: history.table for name, history in stage.histories.items()}
    return losses, rows, tables


def exact_tables(model):
    """Loss of one forward pass of plain PyG, and the rows that it aggregates, by op."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare

    config = TrainConfig(
        model=model, layers=LAYERS, hidden=8, dropout=0.0, dtype="float64", cache_dir="off"
    )
    graph = small_graph()
    prepared = prepare(config, Mesh.alone(), graph)
    module, pushed = prepared.model.module, []
    for i, conv in enumerate(module.convs):
        # GCNII aggregates its rows; attention those of its linear map, unless of features.
        if model == "gat" and i > 0:
            conv.lin.register_forward_hook(lambda lin, given, made: pushed.append(made))
        else:
            conv.register_forward_pre_hook(lambda conv, given: pushed.append(given[0]))
    with torch.no_grad():
        logits = module(torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index))
    train = torch.from_numpy(graph.train_mask)
    loss = cross_entropy(logits[train], torch.from_numpy(graph.y)[train]).item()
    names = [op.name for op in prepared.model_graph.aggregations]
    return loss, dict(zip(names, pushed, strict=True))


@pytest.mark.parametrize("model", ["gcnii", "gat"])
def test_frozen_weights_make_the_tables_exact(model):
    loss, truth = exact_tables(model)
    losses, rows, tables = frozen_run(model, 1, 1, LAYERS + 1)
    assert abs(losses[0] - loss) > 1e-6, "the first epoch must still be stale"
    assert losses[-1] == pytest.approx(loss, rel=1e-12)
    for name, table in tables.items():
        torch.testing.assert_close(table, truth[name][rows], rtol=1e-11, atol=1e-12)


def test_frozen_weights_make_the_tables_exact_on_four_ranks():
    loss, truth = exact_tables("gcnii")
    for losses, rows, tables in run_ranks(frozen_run, 4, "gcnii", 2, 2, LAYERS + 1):
        assert losses[-1] == pytest.approx(loss, rel=1e-12)
        for name, table in tables.items():
            torch.testing.assert_close(table, truth[name][rows], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("model", ["gcnii", "gat"])
def test_frozen_weights_leave_nothing_to_forecast(model):
    """Old and new probe rows are equal, so the map is the identity bit by bit."""
    losses, _, tables = frozen_run(model, 1, 1, LAYERS + 1)
    settings = {"staleness": "auto", "exact_epochs": 0, "probes": 36}
    same_losses, _, same_tables = frozen_run(model, 1, 1, LAYERS + 1, **settings)
    assert same_losses == losses
    for name, table in tables.items():
        assert torch.equal(same_tables[name], table)

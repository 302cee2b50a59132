"""Recorded PyG models train as in plain PyG, for any number of chunks."""

import copy

import numpy as np
import pyg_models
import pytest
import torch
import torch.nn.functional as F
from helpers import NoDropout, assert_all_within, carrying, quick_config, small_graph
from recorded import ON_RANKS, largest_difference, made, plain_losses
from torch import nn

from gnnpipe import Trainer
from gnnpipe.capture.recorded_model import capture


@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_equals_plain_pyg_step_by_step(name, monkeypatch):
    """Losses, predictions and every entry of the state dict, by the user's own names."""
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    graph = carrying(small_graph(directed=True), pyg_models.CARRIED.get(name))
    model = made(name)
    plain = copy.deepcopy(model).double()
    trainer = Trainer(quick_config(epochs=4), graph=graph, model=model)
    losses = [row.loss for row in trainer.fit().history]
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    found = {k: torch.from_numpy(v) for k, v in graph.edge_data.items()}
    carried = {k: v.double() if v.is_floating_point() else v for k, v in found.items()}
    optimizer = torch.optim.Adam(plain.parameters(), lr=trainer.config.lr)
    truth = []
    with NoDropout():
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x, edges, **carried)[train], y[train])
            loss.backward()
            optimizer.step()
            truth.append(loss.item())
    np.testing.assert_allclose(losses, truth, rtol=1e-8)
    plain.eval()
    torch.testing.assert_close(
        trainer.predict(), plain(x, edges, **carried).detach(), rtol=1e-6, atol=1e-8
    )
    assert trainer.model is model
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-8)
    model.eval()
    torch.testing.assert_close(
        model(x, edges, **carried), plain(x, edges, **carried), rtol=1e-6, atol=1e-8
    )


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("staleness", ["auto", "exact"])
@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_chunks_on_one_process(name, staleness):
    """With dropout on."""
    assert_all_within(largest_difference([(1, 1, 4)], [name], staleness=staleness))


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.slow
@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_recomputed(name):
    shapes = [(1, 1, 1), (1, 1, 6)] if name in ON_RANKS else [(1, 1, 6)]
    assert_all_within(largest_difference(shapes, [name], recompute=True))


def test_stale_statistics_are_warned_of():
    with pytest.warns(UserWarning, match="normalises over all vertices.*--chunks 1"):
        Trainer(quick_config(chunks=4), graph=small_graph(), model=made("graph norm")).fit()


@pytest.mark.parametrize("offset", [10.0, 1000.0])
def test_batch_norm_of_rows_far_from_zero_in_float32(offset):
    """The mean of the squares minus the square of the mean would be all rounding."""
    graph = small_graph()
    graph.x[:] += np.float32(offset)
    torch.manual_seed(0)
    model = pyg_models.Normed(nn.BatchNorm1d(8))
    truth = plain_losses(model, graph, 4, torch.float32)
    found = Trainer(quick_config(epochs=4, dtype="float32"), graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-4)


def test_a_copy_of_a_recording_leaves_the_modules_as_they_were():
    """``branches`` has a Sequential with an in-place ReLU, which the recorded calls replace."""
    graph = small_graph()
    recorded = capture(made("branches"), graph)
    twin = copy.deepcopy(recorded)
    assert str(twin.module) == str(recorded.module) == str(made("branches"))


def test_the_mode_in_which_a_model_is_given_does_not_matter():
    losses = []
    for mode in (True, False):
        model = made("GAT").train(mode)
        found = Trainer(quick_config(), graph=small_graph(), model=model).fit()
        losses.append([r.loss for r in found.history])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["transformer", "GAT"])
def test_a_chunk_may_have_no_edges(name):
    run = quick_config(chunks=20, epochs=2, partitioner="range")
    assert Trainer(run, graph=small_graph(n=20), model=made(name)).fit().loss > 0

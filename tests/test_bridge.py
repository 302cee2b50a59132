"""Law 1 for models of the user's own: unmodified PyG modules, on any shape."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyg_models
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NoDropout,
    assert_all_within,
    carrying,
    differences_of_shapes,
    quick_config,
    run_ranks,
    small_graph,
)
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer

EPOCHS = 3


def made(name, seed=0):
    torch.manual_seed(seed)
    return pyg_models.MODELS[name]()


@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_equals_plain_pyg_step_by_step(name, monkeypatch):
    """Losses, predictions and every entry of the state dict, by the user's own names."""
    from gnnpipe.models.layer import Rows

    monkeypatch.setattr(Rows, "dropout", lambda self, x, probability, site: x)
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


def parts_of(name, rank, chunks):
    graph = small_graph(directed=True, sparse=chunks > 1)
    return carrying(graph, pyg_models.CARRIED.get(name)), made(name, seed=rank), {}


def largest_difference(shapes, names, **settings):
    return differences_of_shapes(shapes, names, EPOCHS, parts_of, **settings)


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("staleness", ["auto", "exact"])
@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_chunks_on_one_process(name, staleness):
    """With dropout on."""
    assert_all_within(largest_difference([(1, 1, 6)], [name], staleness=staleness))


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_recomputed(name):
    assert_all_within(largest_difference([(1, 1, 1), (1, 1, 6)], [name], recompute=True))


# One of each kind; what the others differ in is seen on one process.
ON_RANKS = (
    "GCN jk lstm",
    "GIN",
    "GAT",
    "PNA",
    "EdgeCNN batch norm",
    "gcnii",
    "deep dense",
    "appnp",
    "own softmax",
    "GIN batch norm",
    "GraphSAGE layer norm",
    "zoo",
    "branches",
    "weighted",
    "attributed",
    "rgcn",
    "LINKX",
    "embedded",
    "sgc",
)


def test_two_ranks():
    shapes = [(2, 1, 1), (1, 2, 1), (2, 1, 6)]
    assert_all_within(run_ranks(largest_difference, 2, shapes, ON_RANKS)[0])


def test_four_ranks():
    assert_all_within(run_ranks(largest_difference, 4, [(2, 2, 6)], ON_RANKS)[0])


def trained(name):
    """A run's result and the state dict that every rank ends with."""
    graph = small_graph()
    trainer = Trainer(quick_config(stages=2, chunks=4), graph=graph, model=made(name))
    result = trainer.fit()
    return result, {k: v.numpy() for k, v in trainer.model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("name", ["branches", "GCN batch norm"])
def test_bytes_and_weights_after_two_stages(name):
    for result, weights in run_ranks(trained, 2, name):
        assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form
        assert result.comm_bytes_per_epoch["pipeline"] > 0
        assert weights.keys() == made(name).state_dict().keys()
        alone = Trainer(quick_config(chunks=4), graph=small_graph(), model=made(name))
        np.testing.assert_allclose(result.loss, alone.fit().loss, rtol=1e-9)
        for key, value in alone.model.state_dict().items():
            np.testing.assert_allclose(weights[key], value.numpy(), rtol=1e-6, atol=1e-9)


def bytes_on_two_shards():
    run = quick_config(shards=2, chunks=4, epochs=2)
    result = Trainer(run, graph=small_graph(), model=made("GCN batch norm")).fit()
    return result.comm_bytes_per_epoch, result.comm_bytes_closed_form


def test_the_bytes_of_a_mean_are_the_closed_form():
    for counted, formula in run_ranks(bytes_on_two_shards, 2):
        assert counted == formula
        # Two norms of 8 columns, means of rows and squares, 4 chunks, there and back, 2 shards.
        assert counted["graph"] > 2 * 16 * 4 * 2 * 2 * 8


def test_stale_statistics_are_warned_of():
    with pytest.warns(UserWarning, match="normalises over all vertices.*--chunks 1"):
        Trainer(quick_config(chunks=4), graph=small_graph(), model=made("graph norm")).fit()


def test_lazy_weights_take_their_shape():
    model = pyg_models.Two(lambda a, b: pyg.SAGEConv(-1, b))
    assert Trainer(quick_config(), graph=small_graph(), model=model).fit().loss > 0


class Categories(nn.Module):
    """A column of x is a category."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(6, 8), pyg.GATConv(8, 3)

    def forward(self, x, edge_index):
        return self.conv(self.table(x[:, 0].long()), edge_index)


def test_a_column_of_features_may_be_a_category():
    graph = small_graph()
    graph.x[:] = np.floor(np.abs(graph.x)).clip(max=5)
    torch.manual_seed(0)
    model = Categories()
    truth = plain_losses(model, graph, 4)
    found = Trainer(quick_config(epochs=4), graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


TWICE = """
import os

import torch
from torch_geometric.nn import GraphSAGE
from gnnpipe import TrainConfig, Trainer

for _ in range(2):
    torch.manual_seed(0)
    config = TrainConfig(dataset="karate", epochs=1, out="off", quiet=True, stages=2)
    trainer = Trainer(config, model=GraphSAGE(34, 8, 2, 4))
    # One write for a line: ranks share the pipe.
    os.write(1, f"{trainer.fit().loss}\\n".encode())
    trainer.close()
"""


def test_ranks_may_meet_again(tmp_path):
    """torchrun's store still knows the first group."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, *words],
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    losses = done.stdout.split()
    assert len(losses) == 4
    assert len(set(losses)) == 1


class Tied(nn.Module):
    """One convolution, three times."""

    def __init__(self):
        super().__init__()
        self.encode, self.conv = nn.Linear(7, 3), pyg.GCNConv(3, 3)

    def forward(self, x, edge_index):
        x = self.encode(x)
        for _ in range(3):
            x = self.conv(x, edge_index).relu()
        return x


def plain_losses(model, graph, epochs, dtype=torch.float64, weight_decay=0.0):
    model = copy.deepcopy(model).to(dtype)
    x, edges = torch.from_numpy(graph.x).to(dtype), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01, weight_decay=weight_decay)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class TwoNames(Tied):
    """Two linear layers with one weight."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.conv.lin.weight

    def forward(self, x, edge_index):
        return self.last(super().forward(x, edge_index).tanh())


@pytest.mark.parametrize("kind", [Tied, TwoNames])
def test_shared_weights_are_one_weight_on_one_stage(kind):
    from gnnpipe.capture import capture
    from gnnpipe.setup.model_graph import describe

    torch.manual_seed(0)
    model, graph = kind(), small_graph()
    truth = plain_losses(model, graph, 4)
    described = describe(capture(copy.deepcopy(model), graph), graph)
    assert described.num_parameters == sum(p.numel() for p in model.parameters())
    using = [i for i, op in enumerate(described.ops) if "conv.lin.weight" in op.weights]
    assert len(using) > 1
    assert not set(described.cuts) & set(range(using[0] + 1, using[-1] + 1))
    found = Trainer(quick_config(epochs=4), graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


def frozen_on_two_shards():
    torch.manual_seed(0)
    model = pyg_models.Sgc()
    model.conv.lin.bias.requires_grad_(False)
    before = model.conv.lin.bias.detach().clone()
    Trainer(quick_config(shards=2, weight_decay=0.1), graph=small_graph(), model=model).fit()
    return float((model.conv.lin.bias - before).abs().max())


def test_frozen_weights_stay():
    assert run_ranks(frozen_on_two_shards, 2) == [0.0, 0.0]


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


def test_the_mode_in_which_a_model_is_given_does_not_matter():
    losses = []
    for mode in (True, False):
        model = made("GAT").train(mode)
        found = Trainer(quick_config(), graph=small_graph(), model=model).fit()
        losses.append([r.loss for r in found.history])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["transformer", "GAT"])
def test_a_chunk_may_have_no_edges(name):
    run = quick_config(chunks=60, epochs=2, partitioner="range")
    assert Trainer(run, graph=small_graph(), model=made(name)).fit().loss > 0


def test_the_table_of_convolutions_is_what_the_script_writes():
    script = Path(__file__).resolve().parents[1] / "scripts" / "conv_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=120, check=False)
    assert done.returncode == 0, "python scripts/conv_table.py"


class ByName(nn.Module):
    """Its calls have no argument but by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = pyg.GCNConv(16, 8), nn.Linear(16, 3)

    def forward(self, x, edge_index):
        a = self.conv(x=x, edge_index=edge_index)
        return self.last(input=torch.cat(tensors=[a, F.relu(input=a)], dim=1))


def test_arguments_by_name():
    config = quick_config(epochs=2, chunks=3)
    graph = small_graph(n=60, features=16, degree=3)
    assert Trainer(config, graph=graph, model=ByName()).fit().loss > 0

"""Law 1 for models of the user's own: unmodified PyG modules, on any shape."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyg_models
import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import TrainConfig, Trainer
from gnnpipe.errors import InputError

EPOCHS = 3


def made(name, seed=0):
    torch.manual_seed(seed)
    return pyg_models.MODELS[name]()


def config(**settings):
    return TrainConfig(
        **{"epochs": EPOCHS, "out": "off", "cache_dir": "off", "dtype": "float64", "quiet": True}
        | settings
    )


class NoDropout(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_equals_plain_pyg_step_by_step(name, monkeypatch):
    """Losses, predictions and every entry of the state dict, by the user's own names."""
    from gnnpipe.models.layer import Rows

    monkeypatch.setattr(Rows, "dropout", lambda self, x, probability, site: x)
    graph, model = small_graph(directed=True), made(name)
    plain = copy.deepcopy(model).double()
    trainer = Trainer(config(epochs=4), graph=graph, model=model)
    losses = [row.loss for row in trainer.fit().history]
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    optimizer = torch.optim.Adam(plain.parameters(), lr=trainer.config.lr)
    truth = []
    with NoDropout():
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x, edges)[train], y[train])
            loss.backward()
            optimizer.step()
            truth.append(loss.item())
    np.testing.assert_allclose(losses, truth, rtol=1e-8)
    plain.eval()
    torch.testing.assert_close(trainer.predict(), plain(x, edges).detach(), rtol=1e-6, atol=1e-8)
    assert trainer.model is model
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-8)
    model.eval()
    torch.testing.assert_close(model(x, edges), plain(x, edges), rtol=1e-6, atol=1e-8)


def largest_difference(shapes, names, **settings):
    """Against one autograd graph that walks the same chunks; runs on every rank."""
    from gnnpipe.runtime.mesh import Mesh
    from gnnpipe.train.prepare import prepare
    from gnnpipe.train.verify import verify

    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for name in names:
            run = config(stages=stages, shards=shards, chunks=chunks, **settings)
            # Every rank has weights of its own; those of rank 0 must win.
            model = made(name, seed=mesh.rank)
            prepared = prepare(run, mesh, small_graph(directed=True, sparse=chunks > 1), model)
            worst = max(verify(prepared, mesh, EPOCHS), key=lambda c: c.largest)
            found.append((worst.largest, f"{name} ({stages},{shards},{chunks}) {worst}"))
    return found


def assert_equal(found):
    largest = max(found)
    assert largest[0] <= 1e-10, largest[1]


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("staleness", ["auto", "exact"])
@pytest.mark.parametrize("name", pyg_models.MODELS)
def test_chunks_on_one_process(name, staleness):
    """With dropout on."""
    assert_equal(largest_difference([(1, 1, 6)], [name], staleness=staleness))


# One of each kind; what the others differ in is seen on one process.
ON_RANKS = (
    "GCN jk lstm", "GIN", "GAT", "PNA", "EdgeCNN", "gcnii", "deep dense", "appnp", "own softmax",
    "GIN batch norm", "GraphSAGE layer norm", "zoo", "branches",
)  # fmt: skip


def test_two_ranks():
    shapes = [(2, 1, 1), (1, 2, 1), (2, 1, 6)]
    assert_equal(run_ranks(largest_difference, 2, shapes, ON_RANKS)[0])


def test_four_ranks():
    assert_equal(run_ranks(largest_difference, 4, [(2, 2, 6)], ON_RANKS)[0])


def trained(name):
    """A run's result and the state dict that every rank ends with."""
    graph = small_graph()
    trainer = Trainer(config(stages=2, chunks=4), graph=graph, model=made(name))
    result = trainer.fit()
    return result, {k: v.numpy() for k, v in trainer.model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("name", ["branches", "GCN batch norm"])
def test_bytes_and_weights_after_two_stages(name):
    for result, weights in run_ranks(trained, 2, name):
        assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form
        assert result.comm_bytes_per_epoch["pipeline"] > 0
        assert weights.keys() == made(name).state_dict().keys()
        alone = Trainer(config(chunks=4), graph=small_graph(), model=made(name))
        np.testing.assert_allclose(result.loss, alone.fit().loss, rtol=1e-9)
        for key, value in alone.model.state_dict().items():
            np.testing.assert_allclose(weights[key], value.numpy(), rtol=1e-6, atol=1e-9)


def bytes_on_two_shards():
    run = config(shards=2, chunks=4, epochs=2)
    result = Trainer(run, graph=small_graph(), model=made("GCN batch norm")).fit()
    return result.comm_bytes_per_epoch, result.comm_bytes_closed_form


def test_the_bytes_of_a_mean_are_the_closed_form():
    for counted, formula in run_ranks(bytes_on_two_shards, 2):
        assert counted == formula
        # Two norms of 8 columns, means of rows and squares, 4 chunks, there and back, 2 shards.
        assert counted["graph"] > 2 * 16 * 4 * 2 * 2 * 8


def test_stale_statistics_are_warned_of():
    with pytest.warns(UserWarning, match="normalises over all vertices.*--chunks 1"):
        Trainer(config(chunks=4), graph=small_graph(), model=made("graph norm")).fit()


def test_lazy_weights_take_their_shape():
    model = pyg_models.Two(lambda a, b: pyg.SAGEConv(-1, b))
    assert Trainer(config(), graph=small_graph(), model=model).fit().loss > 0


class Wrong(nn.Module):
    """One fault each."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.conv, self.lin = pyg.GCNConv(7, 3), nn.Linear(3, 3)
        self.pool = pyg.MeanAggregation()
        self.register_buffer("scale", torch.ones(1))
        self.lstm = pyg.SAGEConv(3, 3, aggr="lstm")

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return getattr(self, self.fault)(x, edge_index)

    def branch(self, x, edge_index):
        return x if x.sum() > 0 else -x

    def mean(self, x, edge_index):
        return x - x.mean(dim=0)

    def softmax(self, x, edge_index):
        return x * x.softmax(dim=0)

    def noise(self, x, edge_index):
        return x + torch.randn_like(x)

    def count(self, x, edge_index):
        return x * x.size(0)

    def reduced(self, x, edge_index):
        return x + self.lin(x.sum(0))

    def pooled(self, x, edge_index):
        return self.pool(x, torch.zeros(60, dtype=torch.int64))

    def edges(self, x, edge_index):
        return x + edge_index.sum()

    def two(self, x, edge_index):
        return x, self.lin(x)

    def wide(self, x, edge_index):
        return torch.cat([x, x], dim=1)

    def always(self, x, edge_index):
        return F.dropout(x, 0.5)

    def only_training(self, x, edge_index):
        return self.lin(x) if self.training else x

    def held_back(self, x, edge_index):
        with torch.no_grad():
            h = self.lin(x)
        return h + x

    def depth(self, x, edge_index):
        return self.lin(x) if torch.rand(1).item() < 0.5 else x

    def in_place(self, x, edge_index):
        return F.relu_(self.lin(x))

    def state(self, x, edge_index):
        self.scale.mul_(0.5)
        return x * self.scale

    def argument(self, x, edge_index):
        return x * (2.0 if self.training else 1.0)

    def dropped_weight(self, x, edge_index):
        return x @ F.dropout(self.lin.weight, 0.5, training=self.training)

    def ordered(self, x, edge_index):
        return self.lstm(x, edge_index)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("branch", r"cannot be traced.*test_bridge\.py, line \d+: return x if x.sum"),
        ("mean", r"mean does not keep one row.*x - x\.mean"),
        ("softmax", r"softmax mixes vertices.*x\.softmax"),
        ("noise", "randn_like mixes vertices or draws random numbers"),
        ("count", r"mul mixes vertices.*x \* x\.size\(0\)"),
        ("reduced", "sum does not keep one row for each vertex"),
        ("pooled", "pool.*pools over all vertices"),
        ("edges", "sum works on the edges outside of a convolution"),
        ("two", r"must return one tensor \[N, classes\]"),
        ("wide", "gives 6 numbers for each vertex, but the graph has 3 classes"),
        ("always", r"dropout stays on in evaluation.*training=self\.training"),
        ("only_training", "other things in training than in evaluation"),
        ("held_back", r"the gradient of \w+\.\w+ is another in its recording"),
        ("depth", r"decides by random numbers|cannot be traced"),
        ("in_place", r"relu_ changes a value in place.*use relu"),
        ("state", r"mul_? changes scale in place"),
        ("argument", "other things in training than in evaluation"),
        ("dropped_weight", "dropout of a weight"),
        ("ordered", r"lstm \(SAGEConv\) does not give the same rows"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name_and_line(fault, message):
    with pytest.raises(InputError, match=message):
        Trainer(config(), graph=small_graph(), model=Wrong(fault)).fit()


class Needs(nn.Module):
    def forward(self, x, edge_index, batch):
        return x


class NoEdges(nn.Module):
    def forward(self, x):
        return x


def test_forward_must_take_features_and_edges():
    wrong = (
        (Needs(), "needs 'batch'"), (NoEdges(), "then edge_index"), (Needs, "is the class Needs"),
    )  # fmt: skip
    for model, message in wrong:
        with pytest.raises(InputError, match=message):
            Trainer(config(), graph=small_graph(), model=model).fit()


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
    from gnnpipe.models.bridge import capture
    from gnnpipe.train.describe import describe

    torch.manual_seed(0)
    model, graph = kind(), small_graph()
    truth = plain_losses(model, graph, 4)
    described = describe(capture(copy.deepcopy(model), 7), graph)
    assert described.num_parameters == sum(p.numel() for p in model.parameters())
    using = [i for i, op in enumerate(described.ops) if "conv.lin.weight" in op.weights]
    assert len(using) > 1
    assert not set(described.cuts) & set(range(using[0] + 1, using[-1] + 1))
    found = Trainer(config(epochs=4), graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


def frozen_on_two_shards():
    torch.manual_seed(0)
    model = pyg_models.Sgc()
    model.conv.lin.bias.requires_grad_(False)
    before = model.conv.lin.bias.detach().clone()
    Trainer(config(shards=2, weight_decay=0.1), graph=small_graph(), model=model).fit()
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
    found = Trainer(config(epochs=4, dtype="float32"), graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-4)


def test_the_mode_in_which_a_model_is_given_does_not_matter():
    losses = []
    for mode in (True, False):
        model = made("GAT").train(mode)
        found = Trainer(config(), graph=small_graph(), model=model).fit()
        losses.append([r.loss for r in found.history])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["transformer", "GAT"])
def test_a_chunk_may_have_no_edges(name):
    run = config(chunks=60, epochs=2, partitioner="range")
    assert Trainer(run, graph=small_graph(), model=made(name)).fit().loss > 0


def test_the_table_of_convolutions_is_what_the_script_writes():
    script = Path(__file__).resolve().parents[1] / "scripts" / "conv_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=120, check=False)
    assert done.returncode == 0, "python scripts/conv_table.py"

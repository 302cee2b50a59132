"""Trial run on a sample: lazy weights, kinds of features, faults behind weights of zero."""

import numpy as np
import pyg_models
import pytest
import torch
import torch.nn.functional as F
import torch_geometric
from helpers import pyg_data, quick_config, small_graph
from recorded import plain_losses
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.transforms import AddSelfLoops

from gnnpipe import Graph, Trainer
from gnnpipe.capture.trial.sample_graph import make_sample
from gnnpipe.errors import InputError


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


class ShownRows(pyg.MessagePassing):
    """Centres the rows that it is shown."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(7, 3)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x - x.mean(0)))


def check_chunks(model):
    truth = plain_losses(model, small_graph(), 3)
    run = quick_config(chunks=4, staleness="exact", require_capture=True)
    found = Trainer(run, graph=small_graph(), model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


def test_what_a_convolution_is_shown_must_not_matter():
    check_chunks(ShownRows())


class Gated(pyg.MessagePassing):
    """What depends on the whole graph is multiplied by a weight that starts at zero."""

    def __init__(self, fault):
        super().__init__(aggr="add")
        self.fault = fault
        self.lin, self.gate = nn.Linear(7, 3), nn.Parameter(torch.zeros(1))
        self.table, self.norm = nn.Parameter(torch.zeros(500, 1)), nn.BatchNorm1d(3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x, edge_index):
        h = self.lin(x)
        if self.fault == "degree":
            degree = torch_geometric.utils.degree(edge_index[0], x.size(0))
            h = h * (1 + self.gate * degree[:, None])
        elif self.fault == "large degree":
            degree = torch_geometric.utils.degree(edge_index[0], x.size(0))
            h = h * degree.clamp(min=8)[:, None]
        elif self.fault == "mean":
            h = h + self.gate * h.mean(0)
        elif self.fault == "table":
            h = h + self.table[: x.size(0)]
        elif self.fault == "norm":
            h = h + self.norm(h)
        return h + self.propagate(edge_index, h=h)

    def message(self, h_j):
        return h_j


class Largest(nn.Module):
    """The same outside of a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate = pyg.GCNConv(7, 3), nn.Parameter(torch.zeros(1))

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return h + self.gate * h.amax(0)


@pytest.mark.parametrize("part", ["degree", "large degree", "mean", "norm"])
def test_a_weight_that_starts_at_zero_hides_nothing(part):
    torch.manual_seed(0)
    check_chunks(Gated(part))


def test_nor_rows_of_a_table():
    run = quick_config(require_capture=True)
    with pytest.raises(InputError, match=r"Gated\)? (does not give the same rows|fails)"):
        Trainer(run, graph=small_graph(), model=Gated("table")).fit()


def test_nor_outside_of_a_convolution():
    run = quick_config(require_capture=True)
    with pytest.raises(InputError, match="amax does not keep one row"):
        Trainer(run, graph=small_graph(), model=Largest()).fit()


class Of(nn.Module):
    """Convolutions of a function of the features."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b = pyg.SAGEConv(7, 8), pyg.SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.b(self.a(self.function(x), edge_index).relu(), edge_index)


def shares(x):
    return np.abs(x) / np.abs(x).sum(1, keepdims=True)


def one_hot(x):
    return np.eye(x.shape[1])[x.argmax(1)]


DOMAINS = {
    "log of positive numbers": (np.exp, torch.log),
    "root of shares": (shares, torch.sqrt),
    "entropy": (shares, lambda x: torch.special.entr(x) / x),
    "arcsine": (lambda x: np.tanh(x) / 2, torch.asin),
    "negative categories": (
        lambda x: np.floor(x).clip(-1, 2),
        lambda x: F.one_hot(x.long() + 1, 4).sum(-1) * x.exp(),
    ),
    "binary categories": (lambda x: x > 0, lambda x: F.one_hot(x.long(), 2)[..., 1].to(x.dtype)),
    "inverse of large numbers": (lambda x: 1e5 + 1e4 * np.tanh(x), lambda x: 1e5 / x),
    "one-hot rows": (one_hot, lambda x: x),
    "a constant": (np.ones_like, torch.log1p),
}


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", DOMAINS)
def test_features_are_drawn_from_the_domain_of_the_graph(name, chunks):
    make, function = DOMAINS[name]
    graph = small_graph()
    graph.x[:] = make(graph.x.astype(np.float64))
    model = Of(function)
    truth = plain_losses(model, graph, 3)
    run = quick_config(chunks=chunks, staleness="exact", require_capture=True)
    found = Trainer(run, graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


def test_a_maximum_of_binary_features_is_no_constant():
    """Every half of the graph has the same maximum; a chunk need not."""
    graph = small_graph()
    graph.x[:] = graph.x > 0
    run = quick_config(chunks=4, staleness="exact")
    with pytest.raises(InputError, match="amax does not keep one row"):
        Trainer(run, graph=graph, model=Of(lambda x: x / x.amax(0))).fit()


class PerNeighbour(pyg.MessagePassing):
    """Divides by the number of neighbours, which is never 0 in the graph."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = nn.Linear(7, 3)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)) / self.propagate(
            edge_index, x=x.new_ones(len(x), 1)
        )


def test_the_sample_has_isolated_vertices_only_if_the_graph_has():
    graph = small_graph()
    assert not make_sample(PerNeighbour(), graph).graph.degrees.all()
    connected = Graph.from_pyg(AddSelfLoops()(pyg_data(graph)))
    assert make_sample(PerNeighbour(), connected).graph.degrees.all()
    run = quick_config(chunks=4, staleness="exact", require_capture=True)
    torch.manual_seed(0)
    model = PerNeighbour()
    truth = plain_losses(model, connected, 3)
    found = Trainer(run, graph=connected, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


class Products(nn.Module):
    """Two weights that are multiplied from the right, and one with a row for each vertex."""

    def __init__(self, n, features, width):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(features, width) / 4)
        self.second = nn.Parameter(torch.randn(width, 8) / 4)
        self.rows = nn.Parameter(torch.randn(n, 8) / 4)
        self.conv = pyg.GCNConv(8, 3)

    def forward(self, x, edge_index):
        x = (x @ self.first).relu()
        x = F.linear(x, self.second.tanh().t()) + self.rows
        return self.conv(x.relu(), edge_index)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(("features", "width"), [(60, 16), (60, 60), (7, 60)])
def test_a_weight_with_as_many_rows_as_vertices(features, width, chunks):
    graph = small_graph(n=60, features=features)
    model = Products(60, features, width)
    truth = plain_losses(model, graph, 3)
    run = quick_config(chunks=chunks, staleness="exact", require_capture=True)
    found = Trainer(run, graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


class Frozen(nn.Module):
    """A norm and a dropout that stay in eval mode."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = pyg.GCNConv(7, 8), kind(8), pyg.GCNConv(8, 3)
        self.drop = nn.Dropout(0.5)
        norm = getattr(self.norm, "module", self.norm)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.drop.eval()
        return self

    def forward(self, x, edge_index):
        return self.b(self.drop(self.norm(self.a(x, edge_index))).relu(), edge_index)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, pyg.BatchNorm])
def test_a_frozen_norm_and_dropout_are_row_wise_work(kind, chunks):
    graph, model = small_graph(), Frozen(kind)
    truth = plain_losses(model.train(), graph, 3)
    before = {name: value.clone() for name, value in model.norm.named_buffers()}
    run = quick_config(chunks=chunks, staleness="exact", require_capture=True)
    trainer = Trainer(run, graph=graph, model=model)
    np.testing.assert_allclose([r.loss for r in trainer.fit().history], truth, rtol=1e-8)
    for name, value in model.norm.named_buffers():
        assert torch.equal(value, before[name].to(value.dtype)), name
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    torch.testing.assert_close(trainer.predict(), model(x, edges).detach(), rtol=1e-8, atol=1e-10)


class Mapped(nn.Module):
    """A convolution of rows that pass through ``change``."""

    def __init__(self, change):
        super().__init__()
        self.change, self.lin, self.conv = change, nn.Linear(7, 8), pyg.GCNConv(8, 3)

    def forward(self, x, edge_index):
        return self.change(self.conv(self.lin(x), edge_index))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (torch.log, "its result is NaN on a sample"),
        (lambda x: x + (0 * x).sqrt(), r"the gradient of lin\.weight is NaN on a sample"),
    ],
)
def test_nan_on_the_sample_is_named(change, what):
    with pytest.raises(InputError, match=f"model: {what} .*; keep logarithms, roots"):
        Trainer(quick_config(chunks=2), graph=small_graph(), model=Mapped(change)).fit()


class OneClassLess(nn.Module):
    """Gives a class a score of minus infinity; and others when it is traced, if ``lies``."""

    def __init__(self, lies):
        super().__init__()
        self.lies, self.conv = lies, pyg.GCNConv(7, 3)

    def forward(self, x, edge_index):
        is_traced = type(x) is not torch.Tensor
        x = self.conv(x, edge_index)
        if self.lies and is_traced:
            x = 2 * x
        return torch.cat([x, torch.full_like(x[:, :1], -torch.inf)], 1)


def test_minus_infinity_hides_no_other_difference():
    graph = small_graph(classes=4)
    graph.y[graph.y == 3] = 0
    run = quick_config(chunks=2, epochs=1)
    assert Trainer(run, graph=graph, model=OneClassLess(lies=False)).fit().loss > 0
    with pytest.raises(InputError, match="gives other numbers than the model on a sample"):
        Trainer(run, graph=graph, model=OneClassLess(lies=True)).fit()

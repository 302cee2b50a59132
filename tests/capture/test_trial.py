"""Trial run on a sample: lazy weights, kinds of features, faults behind weights of zero."""

import numpy as np
import pyg_models
import pytest
import torch
import torch_geometric
from helpers import quick_config, small_graph
from recorded import plain_losses
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
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


def test_what_a_convolution_is_shown_must_not_matter():
    run = quick_config(require_capture=True)
    with pytest.raises(InputError, match=r"\(?ShownRows\)? (does not give the same rows|fails)"):
        Trainer(run, graph=small_graph(), model=ShownRows()).fit()


class Gated(pyg.MessagePassing):
    """What is wrong with it is multiplied by a weight that starts at zero."""

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


@pytest.mark.parametrize("fault", ["degree", "large degree", "mean", "table", "norm"])
def test_a_weight_that_starts_at_zero_hides_nothing(fault):
    run = quick_config(require_capture=True)
    with pytest.raises(InputError, match=r"Gated\)? (does not give the same rows|fails)"):
        Trainer(run, graph=small_graph(), model=Gated(fault)).fit()


def test_nor_outside_of_a_convolution():
    run = quick_config(require_capture=True)
    with pytest.raises(InputError, match="amax does not keep one row"):
        Trainer(run, graph=small_graph(), model=Largest()).fit()

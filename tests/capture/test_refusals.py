"""Models that cannot be cut into chunks are refused, by name and line."""

import pytest
import torch
import torch.nn.functional as F
from helpers import carrying, quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.errors import InputError


class Wrong(nn.Module):
    """One fault each."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.conv, self.lin = pyg.GCNConv(7, 3), nn.Linear(3, 3)
        self.pool = pyg.MeanAggregation()
        self.register_buffer("scale", torch.ones(1))
        self.lstm = pyg.SAGEConv(3, 3, aggr="lstm")
        self.net = pyg.GraphUNet(3, 3, 3, 1)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return getattr(self, self.fault)(x, edge_index)

    def branch(self, x, edge_index):
        return x if x.sum() > 0 else -x

    def library(self, x, edge_index):
        return self.net(x, edge_index)

    def softmax(self, x, edge_index):
        return x * x.softmax(dim=0)

    def noise(self, x, edge_index):
        return x + torch.randn_like(x)

    def pooled(self, x, edge_index):
        return self.pool(x, torch.zeros(60, dtype=torch.int64))

    def edges(self, x, edge_index):
        return x + x[edge_index[0]].sum()

    def two(self, x, edge_index):
        return x, self.lin(x)

    def wide(self, x, edge_index):
        return torch.cat([x, x], dim=1)

    def always(self, x, edge_index):
        return F.dropout(x, 0.5)

    def held_back(self, x, edge_index):
        with torch.no_grad():
            x.mul_(2.0)  # without the factor in the gradient
        return x

    def depth(self, x, edge_index):
        return self.lin(x) if torch.rand(1).item() < 0.5 else x

    def in_place(self, x, edge_index):
        return torch.zero_(self.lin(x))

    def state(self, x, edge_index):
        self.scale.mul_(0.5)
        return x * self.scale

    def dropped_weight(self, x, edge_index):
        return x @ F.dropout(self.lin.weight, 0.5, training=self.training)

    def ordered(self, x, edge_index):
        return self.lstm(x, edge_index)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "library",
            r"refusals\.py, line \d+: return self\.net\(x, .*, in PyG's \w+\.\w+ \(\w+\.py, l",
        ),
        ("branch", r"cannot be traced.*test_refusals\.py, line \d+: return x if x.sum"),
        ("softmax", r"softmax mixes vertices.*x\.softmax"),
        ("noise", "randn_like mixes vertices or draws random numbers"),
        ("pooled", "pool.*pools over all vertices"),
        ("edges", r"add makes rows of values of edges.*x\[edge_index\[0\]\]\.sum"),
        ("two", r"must return one tensor \[N, classes\]"),
        ("wide", "gives 6 numbers for each vertex, but the graph has 3 classes"),
        ("always", r"dropout stays on in evaluation.*training=self\.training"),
        ("held_back", r"the gradient of \w+\.\w+ is another in its recording"),
        ("depth", r"decides by random numbers|cannot be traced"),
        ("in_place", r"zero_ changes a value in place.*use a new one"),
        ("state", r"mul_? changes scale in place"),
        ("dropped_weight", "dropout of a weight"),
        ("ordered", r"lstm \(SAGEConv\) does not give the same rows"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name_and_line(fault, message):
    with pytest.raises(InputError, match=message):
        Trainer(quick_config(require_capture=True), graph=small_graph(), model=Wrong(fault)).fit()


class WrongOnEdges(nn.Module):
    """One fault each, with what edges carry."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.first = fault, pyg.GCNConv(7, 3)
        self.conv = pyg.TransformerConv(3, 3, edge_dim=4)
        self.norm, self.lin = nn.BatchNorm1d(4), nn.Linear(3, 4)

    def forward(self, x, edge_index, edge_attr):
        x = self.first(x, edge_index)
        return self.conv(x, edge_index, getattr(self, self.fault)(x, edge_index, edge_attr))

    def normed(self, x, edge_index, edge_attr):
        return self.norm(edge_attr)

    def mixed(self, x, edge_index, edge_attr):
        return edge_attr + self.lin(x[edge_index[0]].mean(0))

    def scaled(self, x, edge_index, edge_attr):
        return edge_attr / edge_attr.sum()

    def shuffled(self, x, edge_index, edge_attr):
        return edge_attr.flip(0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("normed", "dropout or normalisation works on the edges"),
        ("mixed", "work on the edges does not give the same rows"),
        ("scaled", r"sum does not keep one row for each edge.*edge_attr\.sum"),
        ("shuffled", "flip mixes edges"),
    ],
)
def test_what_mixes_edges_is_refused(fault, message):
    graph = carrying(small_graph(), "edge_attr")
    with pytest.raises(InputError, match=message):
        Trainer(quick_config(require_capture=True), graph=graph, model=WrongOnEdges(fault)).fit()


def test_what_edges_do_not_carry_is_asked_for_in_vain():
    with pytest.raises(InputError, match="needs 'edge_attr', which the graph lacks"):
        Trainer(
            quick_config(require_capture=True), graph=small_graph(), model=WrongOnEdges("normed")
        ).fit()


def test_what_edges_carry_and_nobody_reads_is_told_of():
    graph = carrying(small_graph(), "edge_weight")
    with pytest.warns(UserWarning, match="SAGEConv does not use its edge_weight"):
        Trainer(quick_config(), graph=graph, model=pyg.SAGEConv(7, 3)).fit()
    with pytest.warns(UserWarning, match="GCN does not use its edge_weight"):
        Trainer(quick_config(), graph=graph).fit()


@pytest.mark.parametrize("count", [50, 70])
def test_a_weight_for_each_vertex_has_as_many_rows(count):
    with pytest.raises(InputError, match=f"edge_lin.weight has {count} rows, .* 60 vertices"):
        Trainer(
            quick_config(require_capture=True),
            graph=small_graph(),
            model=pyg.LINKX(count, 7, 8, 3, 1),
        ).fit()


class Needs(nn.Module):
    def forward(self, x, edge_index, batch):
        return x


class EdgesFirst(nn.Module):
    def forward(self, edge_index, x):
        return x


def test_forward_must_take_features_and_edges():
    wrong = (
        (Needs(), "needs 'batch'"),
        (EdgesFirst(), "then edge_index"),
        (Needs, "is the class Needs"),
    )
    for model, message in wrong:
        with pytest.raises(InputError, match=message):
            Trainer(quick_config(require_capture=True), graph=small_graph(), model=model).fit()


class Dead(nn.Module):
    """Its norm is called twice, and one result is read by nobody."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(7), pyg.GCNConv(7, 3)

    def forward(self, x, edge_index):
        x = self.norm(x)
        self.norm(2 * x)
        return self.conv(x, edge_index)


def test_statistics_that_do_not_move_are_told():
    with pytest.warns(UserWarning, match="norm has a call whose result is never used"):
        Trainer(quick_config(), graph=small_graph(), model=Dead()).fit()


class Doubling(nn.Linear):
    """Another map in evaluation, and with dropout."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training) * (2 - self.training)


def edge_conv(first):
    return pyg.EdgeConv(nn.Sequential(first, nn.BatchNorm1d(3)))


def hooked():
    linear = nn.Linear(14, 3)
    linear.register_forward_hook(lambda module, given, out: out if module.training else 2 * out)
    return linear


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: pyg.EdgeConv(pyg.MLP([14, 8, 8, 3])), "EdgeConv.*right behind the first linear"),
        # Their forward would never be called.
        (lambda: edge_conv(Doubling(14, 3)), "BatchNorm1d that cannot be taken apart"),
        (lambda: edge_conv(hooked()), "BatchNorm1d that cannot be taken apart"),
        (lambda: pyg.GCN(7, 8, 2, 3, flow="target_to_source"), "from target to source"),
    ],
)
def test_why_a_convolution_is_refused_is_told(model, words):
    with pytest.raises(InputError, match=words):
        Trainer(
            quick_config(require_capture=True), graph=small_graph(directed=True), model=model()
        ).fit()

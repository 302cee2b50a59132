"""Queries about recorded calls: ops, weights, arguments."""

import copy
from types import MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, small_graph
from recorded import plain_losses
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.capture import capture
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.model_graph import describe
from gnnpipe.setup.prepare import prepare
from gnnpipe.verification.comparison import compare_epochs


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


class DropsAll(nn.Module):
    """Dropout of 1 behind a norm, by function, and of attention: all of it gives zeros."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = pyg.GCNConv(7, 8), nn.LayerNorm(8), nn.Dropout(1.0)
        self.skip, self.last, self.b = nn.Linear(8, 8), nn.Linear(8, 3), pyg.GCNConv(8, 3)
        self.gat = pyg.GATConv(8, 3, dropout=1.0)

    def forward(self, x, edge_index):
        x = self.a(x, edge_index)
        h = self.skip(x) + self.drop(self.norm(x).relu())
        h = h + F.dropout(self.skip(x), 1.0, self.training)
        return self.last(h.relu()) + self.b(h, edge_index) + self.gat(h, edge_index)


@pytest.mark.parametrize("chunks", [1, 4])
def test_dropout_of_one_gives_zeros(chunks):
    torch.manual_seed(0)
    model, graph = DropsAll(), small_graph()
    truth = plain_losses(model, graph, 4)
    run = quick_config(epochs=4, chunks=chunks, staleness="exact", require_capture=True)
    found = Trainer(run, graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


def test_reference_drops_all():
    graph, mesh = small_graph(), Mesh.join(1, 1)
    prepared = prepare(quick_config(chunks=4), mesh, graph, DropsAll())
    assert max(c.largest for c in compare_epochs(graph, prepared, mesh, 3)) < 1e-10


class Reshapes(pyg.MessagePassing):
    """Is recorded call by call, because it normalises over the whole graph."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.lin, self.norm = nn.Linear(width_in, width_out), nn.BatchNorm1d(width_out)

    def forward(self, x, edge_index):
        x = torch.reshape(self.lin(x), (x.size(0), -1))
        return self.norm(self.propagate(edge_index, x=x))


class Sizes(nn.Module):
    """Passes sizes of recorded values to functions of torch that are written in C++."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = Reshapes(7, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        x = torch.reshape(x, (x.size(0), -1))
        x = torch.full_like(x, x.size(1)) / 7 + torch.narrow(x, 1, 0, x.size(1))
        h = self.conv(x * torch.linspace(1, 2, x.size(1), dtype=x.dtype), edge_index)
        return self.last(torch.roll(h, h.size(1) // 2, 1))


def test_sizes_are_arguments_of_functions_written_in_cpp():
    torch.manual_seed(0)
    model, graph = Sizes(), small_graph()
    truth = plain_losses(model, graph, 3)
    run = quick_config(epochs=3, chunks=4, staleness="exact", require_capture=True)
    found = Trainer(run, graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


def doubled(conv, x, edge_index):
    return 2 * type(conv).forward(conv, x, edge_index)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_forward_of_one_object_is_run_and_not_the_rule_of_its_class(chunks):
    torch.manual_seed(0)
    model, graph = Tied(), small_graph()
    model.conv.forward = MethodType(doubled, model.conv)
    truth = plain_losses(model, graph, 4)
    config = quick_config(epochs=4, chunks=chunks, staleness="exact" if chunks > 1 else "auto")
    found = Trainer(config, graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


@pytest.mark.parametrize("has_hook", [False, True])
def test_an_identity_is_no_op_unless_it_has_a_hook(has_hook):
    module = pyg.GCN(7, 8, 2, 3, norm=None)
    assert type(module.norms[0]) is nn.Identity
    if has_hook:
        module.norms[0].register_forward_hook(lambda module, given, out: out * 2)
    recording = capture(module, small_graph()).recording
    assert ("model_norms_0" in [op.name for op in recording.ops]) == has_hook

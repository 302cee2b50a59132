"""GINConv on wide rows sums what the first Linear of its perceptron makes of them."""

import copy

import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.nn import GINConv

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

WIDE, HIDDEN, CLASSES = 20, 8, 3


def perceptron(width_in, width_out):
    return nn.Sequential(
        nn.Linear(width_in, width_out),
        nn.BatchNorm1d(width_out),
        nn.ReLU(),
        nn.Linear(width_out, 8),
    )


class Net(nn.Module):
    """A perceptron, then a single Linear."""

    def __init__(self, hooked=False, train_eps=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = GINConv(perceptron(WIDE, HIDDEN), train_eps=train_eps)
        self.second = GINConv(nn.Linear(HIDDEN, CLASSES), eps=0.5)
        if hooked:
            self.first.nn.register_forward_hook(lambda module, given, out: out * 2.0)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def graph_of(sparse):
    return small_graph(features=WIDE, sparse=sparse)


def pushed(model, sparse):
    prepared = prepare(quick_config(), Mesh.alone(), graph_of(sparse), model.double())
    return [op.push_width for op in prepared.model_graph.ops if op.aggregates and not op.is_mean]


@pytest.mark.parametrize(
    ("hooked", "sparse", "widths"),
    [(False, True, [HIDDEN, CLASSES]), (False, False, [CLASSES]), (True, True, [CLASSES])],
    ids=["sparse", "dense: aggregated once", "a hook on the perceptron"],
)
def test_widths_of_the_rows_that_are_summed(hooked, sparse, widths):
    assert pushed(Net(hooked), sparse) == widths


def losses_on_ranks(shape):
    stages, shards, chunks = shape
    config = quick_config(
        stages=stages, shards=shards, chunks=chunks, staleness="exact", lr=0.01, weight_decay=0.0
    )
    result = Trainer(config, model=Net().double(), graph=graph_of(True)).fit()
    return [row.loss for row in result.history]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 4), (2, 1, 4), (1, 2, 1)], ids=str)
def test_losses_are_those_of_plain_pyg(shape):
    data = pyg_data(graph_of(True)).apply(lambda t: t.double() if t.is_floating_point() else t)
    model = copy.deepcopy(Net()).double()
    truth = plain_pyg_losses(model, data, (data.x, data.edge_index), 3)
    found = run_ranks(losses_on_ranks, shape[0] * shape[1], shape)
    for losses in found:
        assert losses == pytest.approx(truth, rel=1e-9)


def test_a_perceptron_may_be_a_function():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = GINConv(torch.relu), nn.Linear(WIDE, CLASSES)

        def forward(self, x, edge_index):
            return self.out(self.conv(x, edge_index))

    assert pushed(Plain(), True) == []

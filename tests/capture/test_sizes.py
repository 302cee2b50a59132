"""Tensors of a single number as sizes: recorded, run as it is, or refused; plain PyG's losses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import plain_pyg_losses, pyg_data, quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import degree

from gnnpipe import Trainer
from gnnpipe.errors import InputError

SIZES = {
    "zeros": lambda x, n: x + torch.zeros(n, 8).sum(0),
    "new_zeros": lambda x, n: x + x.new_zeros(n).sum(),
    "new_ones": lambda x, n: x + x.new_ones((n, 8)).sum(0),
    "full": lambda x, n: x + torch.full((n, 8), 2.0).sum(0),
    "arange": lambda x, n: x + torch.arange(n).sum(),
    "linspace": lambda x, n: x + torch.linspace(0, 1, n).sum(),
    "one_hot": lambda x, n: x + F.one_hot(x.argmax(1), n - n + 8),
    "expand": lambda x, n: x + torch.ones(1).expand(n - n + 8),
    "int": lambda x, n: x * int(n),
    "range": lambda x, n: sum(x for _ in range(n)),
    "topk": lambda x, n: x + x.topk(n - n + 2, 1).values.sum(1, keepdim=True),
    "dropout": lambda x, n: F.dropout(x, n * 0.0, True),
}


class Sized(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.first, self.second = pyg.GCNConv(7, 8), pyg.GCNConv(8, 3)

    def forward(self, x, edge_index):
        n = degree(edge_index[1], x.size(0), dtype=torch.long).max()
        return self.second(SIZES[self.name](self.first(x, edge_index), n), edge_index)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_forward_computes(name, capfd):
    graph, model = small_graph(), Sized(name).double()
    data, plain = pyg_data(graph), copy.deepcopy(model)
    truth = plain_pyg_losses(plain, data, (data.x.double(), data.edge_index), 2)
    for chunks in (1, 4):
        config, refused = quick_config(epochs=2, chunks=chunks, staleness="exact"), ""
        try:
            found = [row.loss for row in Trainer(config, graph, copy.deepcopy(model)).fit().history]
        except InputError as error:
            found, refused = truth, str(error)
        assert found == pytest.approx(truth, rel=1e-9)
        assert not refused or (chunks > 1 and "test_sizes.py, line" in refused)
    assert capfd.readouterr().err == ""

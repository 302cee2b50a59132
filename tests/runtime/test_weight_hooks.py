"""Hooks on weights see the whole gradient once a step, as in plain PyG, on every shape."""

import copy

import numpy as np
import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

from gnnpipe import Trainer

EPOCHS = 4


class Net(nn.Module):
    """Maps the features, has a weight with a row per vertex, and uses ``shared`` in two steps."""

    def __init__(self, n=60):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.embedding = nn.Linear(7, 8), nn.Parameter(torch.randn(n, 8))
        self.a, self.shared, self.b = GCNConv(8, 8), nn.Linear(8, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index):
        x = self.shared(self.first(x) + self.embedding).relu()
        return self.b(self.shared(self.a(x, edge_index)).relu(), edge_index)


def clamped(p):
    p.grad.clamp_(-1e-3, 1e-3)


HOOKS = {
    "clamp": lambda p: p.register_hook(lambda g: g.clamp(-1e-3, 1e-3)),
    "length": lambda p: p.register_hook(lambda g: g / (g.norm() + 1e-12)),
    "post": lambda p: p.register_post_accumulate_grad_hook(clamped),
}


def hooked(name):
    model = Net()
    for p in model.parameters():
        HOOKS[name](p)
    return model


def plain(name):
    data = pyg_data(small_graph())
    return plain_pyg_losses(hooked(name).double(), data, (data.x.double(), data.edge_index), EPOCHS)


def ours(name, **settings):
    run = quick_config(epochs=EPOCHS, require_capture=True, staleness="exact", **settings)
    model = hooked(name)
    result = Trainer(run, graph=small_graph(), model=model).fit()
    assert all(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    return [row.loss for row in result.history]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", HOOKS)
def test_equals_plain_pyg(name, chunks):
    np.testing.assert_allclose(ours(name, chunks=chunks), plain(name), rtol=1e-9)


def on_shards(name):
    return ours(name, chunks=3, shards=2)


def test_equals_plain_pyg_on_shards():
    for found in run_ranks(on_shards, 2, "length"):
        np.testing.assert_allclose(found, plain("length"), rtol=1e-9)


def test_a_hook_is_called_once_a_step_and_may_remove_itself():
    model, seen, removed = Net(), [], []
    model.first.weight.register_hook(lambda g: seen.append(g.shape))
    handle = model.a.lin.weight.register_hook(lambda g: (removed.append(g), handle.remove())[1])
    run = quick_config(epochs=EPOCHS, chunks=4, staleness="exact")
    Trainer(run, graph=small_graph(), model=model).fit()
    assert seen == [(8, 7)] * EPOCHS
    assert len(removed) == 1
    copy.deepcopy(model)

"""Random masks of rows in forward are dropout, as in PyG's RevGNN."""

import pytest
import torch
import torch.nn.functional as F
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), pyg.SAGEConv(width, width)

    def forward(self, x, edge_index, dropout_mask=None):
        x = self.norm(x).relu()
        if self.training and dropout_mask is not None:
            x = x * dropout_mask
        return self.conv(x, edge_index)


class RevGNN(nn.Module):
    """After PyG's example, with one mask for all layers."""

    def __init__(self, dropout=0.4):
        super().__init__()
        self.dropout = dropout
        self.lin1, self.lin2 = nn.Linear(7, 8), nn.Linear(8, 3)
        self.convs = nn.ModuleList(
            pyg.GroupAddRev(Block(4), num_groups=2, disable=True) for _ in range(3)
        )

    def forward(self, x, edge_index):
        x = self.lin1(x)
        mask = None
        if self.training and self.dropout > 0:
            mask = torch.zeros_like(x).bernoulli_(1 - self.dropout)
            mask = mask.requires_grad_(False)
            mask = mask / (1 - self.dropout)
        for conv in self.convs:
            x = conv(x, edge_index, mask)
        return F.dropout(self.lin2(x.relu()), p=self.dropout, training=self.training)


class NoMasks(TorchFunctionMode):
    """Masks of ones, and no dropout."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return args[0]
        if func is torch.Tensor.bernoulli_:
            return args[0].fill_(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunks", [1, 4])
def test_equals_plain_pyg_where_masks_are_one(chunks, monkeypatch):
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    torch.manual_seed(0)
    model, graph = RevGNN().double(), small_graph()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    run = quick_config(epochs=4, chunks=chunks, staleness="exact", require_capture=True)
    found = [r.loss for r in Trainer(run, graph=graph, model=model).fit().history]
    model.load_state_dict(state)
    data = pyg_data(graph)
    with NoMasks():
        truth = plain_pyg_losses(model, data, (data.x.double(), data.edge_index), 4)
    assert found == pytest.approx(truth, rel=1e-9)


def test_masks_are_drawn_with_their_probability():
    """With one layer of weights 1 the loss tells the share of ones."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.conv = nn.Linear(7, 3), pyg.GCNConv(7, 3)

        def forward(self, x, edge_index):
            mask = torch.ones_like(x)
            mask.bernoulli_(0.25)
            return self.lin(x * 0 + mask) + 0 * self.conv(x, edge_index)

    graph, model = small_graph(n=3000), Shares()
    nn.init.ones_(model.lin.weight)
    nn.init.zeros_(model.lin.bias)
    shares = []

    def loss(logits, y):
        shares.append((float(logits.detach().sum()) / 21, len(logits)))
        return logits.sum()

    run = quick_config(epochs=1, eval_every=0, require_capture=True)
    Trainer(run, graph=graph, model=model, loss_fn=loss).fit()
    total, count = shares[-1]
    assert abs(total / count - 0.25) < 0.02


def losses(shapes):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        torch.manual_seed(0)
        shape = {"stages": stages, "shards": shards, "chunks": chunks}
        run = quick_config(epochs=4, staleness="exact", **shape)
        trainer = Trainer(run, graph=small_graph(), model=RevGNN().double(), world=mesh)
        found.append([row.loss for row in trainer.fit().history])
    return found


@pytest.mark.slow
def test_masks_do_not_depend_on_the_shape():
    torch.manual_seed(0)
    run = quick_config(epochs=4, chunks=4, staleness="exact")
    truth = [
        r.loss for r in Trainer(run, graph=small_graph(), model=RevGNN().double()).fit().history
    ]
    for found in run_ranks(losses, 2, ((2, 1, 4), (1, 2, 4))):
        for one in found:
            assert one == pytest.approx(truth, rel=1e-9)

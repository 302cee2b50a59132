"""Work that a model does in training alone, or in evaluation alone, is recorded."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import NoDropout, plain_pyg_losses, pyg_data, quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer

IN, HIDDEN, OUT = 7, 8, 3


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(IN, HIDDEN), pyg.GCNConv(HIDDEN, OUT)
        self.lin, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x, edge_index):
        return self.second(self.between(self.first(x, edge_index)), edge_index)


class Dropping(Base):
    def between(self, x):
        x = x.relu()
        if self.training:
            x = F.dropout(x, 0.1)
        return x


class Mapping(Base):
    """Maps in training, scales in evaluation, and both end with the same calls."""

    def between(self, x):
        x = self.lin(x) if self.training else x * 0.5
        return self.norm(x).relu()


class Last(Base):
    def forward(self, x, edge_index):
        x = self.second(self.first(x, edge_index).relu(), edge_index)
        return x if self.training else x.log_softmax(dim=-1)


class Convolving(Base):
    """Another convolution in evaluation."""

    def forward(self, x, edge_index):
        h = self.first(x, edge_index).relu()
        return self.second(h, edge_index) if self.training else self.second(h * 2, edge_index)


class Setting(Base):
    """Another setting in evaluation."""

    def between(self, x):
        return F.leaky_relu(x, 0.2 if self.training else 0.1) * (2.0 if self.training else 1.0)


class WithoutGradients(Base):
    """A map whose weights get no gradients, in training alone."""

    def between(self, x):
        with torch.set_grad_enabled(not self.training):
            held = self.lin(x)
        return held + x


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("model", [Dropping, Mapping, Last, Convolving, Setting, WithoutGradients])
def test_both_modes_equal_plain_pyg(model, chunks, monkeypatch):
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    torch.manual_seed(0)
    model, graph = model(), small_graph()
    plain, data = copy.deepcopy(model).double(), pyg_data(graph)
    run = quick_config(epochs=4, chunks=chunks, staleness="exact", require_capture=True)
    trainer = Trainer(run, graph=graph, model=model)
    found = [row.loss for row in trainer.fit().history]
    with NoDropout():
        truth = plain_pyg_losses(plain, data, (data.x.double(), data.edge_index), 4)
    assert found == pytest.approx(truth, rel=1e-9)
    logits = plain.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(trainer.predict(), logits, 1e-8, 1e-9)

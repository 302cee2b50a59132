"""A model's own buffers with a row for each vertex: types, positions, masks."""

import pytest
import torch
from helpers import (
    assert_all_within,
    differences_of_shapes,
    plain_pyg_losses,
    pyg_data,
    quick_config,
    run_ranks,
    small_graph,
)
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer

N, IN, HIDDEN, OUT, TYPES = 60, 7, 8, 3, 4


class ByType(nn.Module):
    """A map for each type of vertices, positions as features, and rows that a mask clears."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(N, 3, generator=generator, dtype=torch.float64)
        self.register_buffer("node_type", torch.arange(N) % TYPES)
        self.register_buffer("position", drawn, persistent=False)
        self.register_buffer("is_known", drawn[:, 0] > 0.2)
        self.first = pyg.HeteroLinear(IN, HIDDEN, TYPES)
        self.conv, self.out = pyg.SAGEConv(HIDDEN + 3, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.embed = nn.Embedding(TYPES, HIDDEN)

    def forward(self, x, edge_index):
        x = self.first(x, self.node_type).relu()
        x = torch.cat([x, self.position], dim=1) * self.is_known[:, None]
        return self.out(self.conv(x, edge_index) + self.embed(self.node_type))


def made(seed=0):
    torch.manual_seed(seed)
    return ByType().double()


@pytest.mark.parametrize("chunks", [1, 4])
def test_equals_plain_pyg(chunks):
    graph = small_graph(seed=3, n=N, directed=True)
    data, plain, model = pyg_data(graph), made(), made()
    data.x = data.x.double()
    config = quick_config(epochs=4, chunks=chunks, staleness="exact", require_capture=True)
    trainer = Trainer(config, graph=graph, model=model)
    losses = [row.loss for row in trainer.fit().history]
    truth = plain_pyg_losses(plain, data, (data.x, data.edge_index), 4)
    assert losses == pytest.approx(truth, rel=1e-9)
    assert torch.allclose(trainer.predict(), plain.eval()(data.x, data.edge_index), 1e-8, 1e-9)
    assert torch.equal(model.node_type, plain.node_type)
    assert model.state_dict().keys() == plain.state_dict().keys()


def on_ranks(shapes):
    def parts(name, rank, chunks):
        return small_graph(seed=3, n=N, directed=True), made(rank), {}

    return differences_of_shapes(shapes, ["buffers"], 3, parts)


@pytest.mark.slow
def test_every_shape_equals_one_autograd_graph():
    for found in run_ranks(on_ranks, 2, ((2, 1, 4), (1, 2, 1), (1, 2, 4))):
        assert_all_within(found)

"""Law 1: (1,1,1) equals plain PyG, step by step, for models written as a PyG user writes them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import small_graph
from torch import nn
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv, SAGEConv

from gnnpipe import TrainConfig, Trainer

LAYERS, HIDDEN = 4, 8


class PlainGCN(nn.Module):
    def __init__(self, graph):
        super().__init__()
        sizes = [graph.num_features] + [HIDDEN] * (LAYERS - 1) + [graph.num_classes]
        self.convs = nn.ModuleList(self.conv(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(LAYERS - 1))

    def conv(self, a, b):
        return GCNConv(a, b)

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


class PlainSAGE(PlainGCN):
    def conv(self, a, b):
        return SAGEConv(a, b)


class PlainDeep(nn.Module):
    """Encoder, layers, decoder: what GCNII and ResGCN+ share."""

    def __init__(self, graph, norms=LAYERS):
        super().__init__()
        self.encode = nn.Linear(graph.num_features, HIDDEN)
        self.decode = nn.Linear(HIDDEN, graph.num_classes)
        self.convs = nn.ModuleList(self.conv(i) for i in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(norms))


class PlainGCNII(PlainDeep):
    def conv(self, i):
        return GCN2Conv(HIDDEN, alpha=0.1, theta=0.5, layer=i + 1)

    def forward(self, x, edge_index):
        x = h0 = self.encode(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, h0, edge_index)).relu()
        return self.decode(x)


class PlainResGCN(PlainDeep):
    def __init__(self, graph):
        super().__init__(graph, LAYERS + 1)

    def conv(self, i):
        return GCNConv(HIDDEN, HIDDEN)

    def forward(self, x, edge_index):
        x = self.encode(x)
        for i in range(LAYERS):
            x = x + self.convs[i](self.norms[i](x).relu(), edge_index)
        return self.decode(self.norms[LAYERS](x).relu())


class PlainGAT(nn.Module):
    def __init__(self, graph):
        super().__init__()
        sizes = [graph.num_features] + [HIDDEN] * LAYERS
        self.convs = nn.ModuleList(GATConv(a, b // 4, heads=4) for a, b in pairwise(sizes))
        self.decode = nn.Linear(HIDDEN, graph.num_classes)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = F.elu(conv(x, edge_index))
        return self.decode(x)


PLAIN = {
    "gcn": PlainGCN,
    "sage": PlainSAGE,
    "gcnii": PlainGCNII,
    "resgcn": PlainResGCN,
    "gat": PlainGAT,
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_equals_plain_pyg_step_by_step(name, sparse):
    graph = small_graph(sparse=sparse, directed=True)
    config = TrainConfig(
        model=name,
        layers=LAYERS,
        hidden=HIDDEN,
        dropout=0.0,
        epochs=8,
        eval_every=1,
        weight_decay=5e-4,
        out="off",
    )
    trainer = Trainer(config, graph=graph)
    plain = PLAIN[name](graph)
    plain.load_state_dict(trainer.model.state_dict())
    x = torch.from_numpy(graph.x.toarray() if sparse else graph.x)
    y, edge_index = torch.from_numpy(graph.y), torch.from_numpy(graph.edge_index)
    train, test = torch.from_numpy(graph.train_mask), torch.from_numpy(graph.test_mask)
    optimizer = torch.optim.Adam(plain.parameters(), lr=config.lr, weight_decay=5e-4)
    losses, scores = [], []
    for _ in range(config.epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x, edge_index)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            right = plain(x, edge_index).argmax(1) == y
        scores.append(float(right[test].double().mean()))
    rows = trainer.fit().history
    np.testing.assert_allclose([r.loss for r in rows], losses, rtol=1e-5)
    np.testing.assert_allclose([r.scores.test_acc for r in rows], scores, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(trainer.predict(), plain(x, edge_index), rtol=1e-3, atol=1e-4)


def test_gradients_of_earlier_training_are_dropped():
    graph = small_graph()
    config = TrainConfig(model="gcn", epochs=2, dropout=0.0, out="off", quiet=True)
    expected = [row.loss for row in Trainer(config, graph=graph).fit().history]
    module = Trainer(config, graph=graph).model
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    found = Trainer(config, graph=graph, model=module).fit().history
    assert [row.loss for row in found] == expected

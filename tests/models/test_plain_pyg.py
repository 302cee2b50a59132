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
    def __init__(self, ours, graph):
        super().__init__()
        sizes = [graph.num_features] + [HIDDEN] * (LAYERS - 1) + [graph.num_classes]
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(LAYERS - 1))
        for conv, layer in zip(self.convs, ours, strict=True):
            conv.lin.weight.data.copy_((layer.encode if layer.is_first else layer.lin).weight)

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


class PlainSAGE(PlainGCN):
    def __init__(self, ours, graph):
        nn.Module.__init__(self)
        sizes = [graph.num_features] + [HIDDEN] * (LAYERS - 1) + [graph.num_classes]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(LAYERS - 1))
        for conv, layer in zip(self.convs, ours, strict=True):
            first = layer.is_first
            conv.lin_l.weight.data.copy_((layer.encode if first else layer.lin).weight)
            conv.lin_r.weight.data.copy_((layer.encode_self if first else layer.lin_self).weight)
            conv.lin_l.bias.data.zero_()


class PlainDeep(nn.Module):
    """Encoder, layers, decoder: what GCNII and ResGCN+ share."""

    def __init__(self, ours, graph):
        super().__init__()
        self.encode = nn.Linear(graph.num_features, HIDDEN)
        self.decode = nn.Linear(HIDDEN, graph.num_classes)
        self.convs = nn.ModuleList(self.conv(i) for i in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(LAYERS))
        self.encode.weight.data.copy_(ours[0].encode.weight)
        self.encode.bias.data.copy_(ours[0].encode.bias)
        self.decode.load_state_dict(ours[-1].decode.state_dict())
        for conv, layer in zip(self.convs, ours, strict=True):
            self.take(conv, layer)


class PlainGCNII(PlainDeep):
    def conv(self, i):
        return GCN2Conv(HIDDEN, alpha=0.1, theta=0.5, layer=i + 1)

    def take(self, conv, layer):
        conv.weight1.data.copy_(layer.lin.weight.t())

    def forward(self, x, edge_index):
        x = h0 = self.encode(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, h0, edge_index)).relu()
        return self.decode(x)


class PlainResGCN(PlainDeep):
    def __init__(self, ours, graph):
        super().__init__(ours, graph)
        self.norm_out = nn.LayerNorm(HIDDEN)

    def conv(self, i):
        return GCNConv(HIDDEN, HIDDEN)

    def take(self, conv, layer):
        conv.lin.weight.data.copy_(layer.lin.weight)

    def forward(self, x, edge_index):
        x = self.encode(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x).relu(), edge_index)
        return self.decode(self.norm_out(x).relu())


class PlainGAT(nn.Module):
    def __init__(self, ours, graph):
        super().__init__()
        sizes = [graph.num_features] + [HIDDEN] * LAYERS
        self.convs = nn.ModuleList(GATConv(a, b // 4, heads=4) for a, b in pairwise(sizes))
        self.decode = nn.Linear(HIDDEN, graph.num_classes)
        self.decode.load_state_dict(ours[-1].decode.state_dict())
        for conv, layer in zip(self.convs, ours, strict=True):
            lin = layer.encode if layer.is_first else layer.lin
            conv.load_state_dict({**layer.conv.state_dict(), "lin.weight": lin.weight})

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
    plain = PLAIN[name](trainer.model.stack(), graph)
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

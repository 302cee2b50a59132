"""Models for link prediction, as a user would type them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GAE, GATConv, GCNConv


class Net(nn.Module):
    """PyG's examples/link_pred.py."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv1 = GCNConv(7, 16)
        self.conv2 = GCNConv(16, 8)
        self.dropout = dropout

    def encode(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


class Predictor(Net):
    """With the learned scores of OGB's examples."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.lins = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 1)])

    def decode(self, z, edge_label_index):
        h = z[edge_label_index[0]] * z[edge_label_index[1]]
        h = F.dropout(self.lins[0](h).relu(), self.dropout, self.training)
        return self.lins[1](h)


class Attends(nn.Module):
    """No decode, no encode: forward gives the rows."""

    def __init__(self):
        super().__init__()
        self.conv = GATConv(7, 4, heads=2)
        self.lin = nn.Linear(8, 5)

    def forward(self, x, edge_index):
        return self.lin(self.conv(x, edge_index).tanh())


class Directed(nn.Module):
    """Another score for (u, v) than for (v, u)."""

    def forward(self, z, edge_label_index, sigmoid=False):
        first, second = z.chunk(2, dim=1)
        return (first[edge_label_index[0]] * second[edge_label_index[1]]).sum(1)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(7, 8)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


MODELS = {
    "net": Net,
    "predictor": Predictor,
    "attends": Attends,
    "gae": lambda: GAE(Inner(), Directed()),
}


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]()

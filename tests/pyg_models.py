"""Models as PyG's users write them; nothing in here knows of gnnpipe. 7 features, 3 classes."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Linear
from torch_geometric import nn as pyg
from torch_geometric.utils import softmax

IN, HIDDEN, OUT = 7, 8, 3


class Arxiv(nn.Module):
    """After PyG's ogbn-arxiv example, with LayerNorm."""

    def __init__(self, conv=pyg.GCNConv):
        super().__init__()
        sizes = [IN, HIDDEN, HIDDEN, OUT]
        self.convs = nn.ModuleList(conv(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))

    def forward(self, x, adj_t):
        for i, conv in enumerate(self.convs[:-1]):
            x = conv(x, adj_t)
            x = self.norms[i](x)
            x = F.relu(x, inplace=True)
            x = F.dropout(x, p=0.5, training=self.training)
        x = self.convs[-1](x, adj_t)
        return x.log_softmax(dim=-1)


class GCNII(nn.Module):
    def __init__(self, shared_weights=True):
        super().__init__()
        self.lins = nn.ModuleList([Linear(IN, HIDDEN), Linear(HIDDEN, OUT)])
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(HIDDEN, 0.1, 0.5, i + 1, shared_weights=shared_weights) for i in range(4)
        )

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.3, training=self.training)
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = F.dropout(x, 0.3, training=self.training)
            x = conv(x, x_0, edge_index).relu()
        return self.lins[1](x)


class Deep(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.encode = Linear(IN, HIDDEN)
        width, layers = HIDDEN, []
        for _ in range(3):
            conv = pyg.GENConv(width, HIDDEN, norm="layer")
            norm = nn.LayerNorm(HIDDEN)
            layers.append(
                pyg.DeepGCNLayer(conv, norm, nn.ReLU(inplace=True), block=block, dropout=0.1)
            )
            width += HIDDEN if block == "dense" else 0
        self.layers = nn.ModuleList(layers)
        self.decode = Linear(width, OUT)

    def forward(self, x, edge_index):
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.decode(x)


class Appnp(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = Linear(IN, HIDDEN), Linear(HIDDEN, OUT)
        self.prop = pyg.APPNP(3, 0.1)

    def forward(self, x, edge_index):
        x = F.dropout(self.lin1(x).relu(), training=self.training)
        return self.prop(self.lin2(x), edge_index)


class Sgc(nn.Module):
    is_kept = False

    def __init__(self):
        super().__init__()
        self.conv = pyg.SGConv(IN, OUT, K=3, cached=self.is_kept)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class Kept(Sgc):
    is_kept = True


class MaxConv(pyg.MessagePassing):
    """A convolution of the user's own."""

    def __init__(self, size_in, size_out):
        super().__init__(aggr="max")
        self.lin = Linear(2 * size_in, size_out)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], dim=-1))


class SoftConv(pyg.MessagePassing):
    """Another: attention with a softmax over the edges into a vertex, and dropout of it."""

    def __init__(self, size_in, size_out):
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.score = Linear(size_in, size_out), Linear(2 * size_out, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j, index, ptr, size_i):
        score = F.leaky_relu(self.score(torch.cat([x_i, x_j], dim=-1)))
        score = softmax(score, index, ptr, size_i)
        return F.dropout(score, 0.4, self.training) * x_j


class Two(nn.Module):
    """Two layers of any convolution."""

    def __init__(self, conv):
        super().__init__()
        self.first, self.second = conv(IN, HIDDEN), conv(HIDDEN, OUT)

    def forward(self, x, edge_index):
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


class Zoo(nn.Module):
    """Convolutions with a rule that no other model here has."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                pyg.MixHopConv(IN, 4, powers=[0, 1, 2]),
                pyg.TAGConv(12, HIDDEN, K=2),
                pyg.LEConv(HIDDEN, HIDDEN),
                pyg.ClusterGCNConv(HIDDEN, HIDDEN),
                pyg.SSGConv(HIDDEN, HIDDEN, 0.1, K=2),
                pyg.ChebConv(HIDDEN, HIDDEN, K=3),
                pyg.GatedGraphConv(HIDDEN, 2),
                pyg.LGConv(),
                pyg.AntiSymmetricConv(HIDDEN),
                pyg.GraphConv(HIDDEN, OUT, aggr="mean"),
            ]
        )

    def forward(self, x, edge_index):
        for conv in self.convs[:-2]:
            x = conv(x, edge_index).relu_()
        x = F.elu_(self.convs[-2](x, edge_index))
        return self.convs[-1](x, edge_index)


class Branches(nn.Module):
    """A GNN beside an MLP, mixed by weights of their own and taken apart again."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            Linear(IN, HIDDEN), nn.ReLU(inplace=True), nn.Dropout(0.3), Linear(HIDDEN, HIDDEN)
        )
        self.near, self.far = pyg.GCNConv(IN, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)
        self.mix = nn.Parameter(torch.zeros(2))
        self.out = Linear(HIDDEN, OUT)

    def forward(self, x, edge_index):
        wide = self.far(self.near(x, edge_index).tanh(), edge_index)
        mix = self.mix.softmax(0)
        low, high = (mix[0] * self.mlp(x) + mix[1] * wide).chunk(2, dim=-1)
        heads = torch.cat([high, low], dim=1).view(x.size(0), 2, -1)
        return self.out((heads * heads.sum(-1, keepdim=True)).flatten(1))


class Normed(nn.Module):
    """Two layers with a normalisation between them."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.second = (
            pyg.GCNConv(IN, HIDDEN),
            norm,
            pyg.SAGEConv(HIDDEN, OUT),
        )

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


class Weighted(nn.Module):
    """Every convolution that takes edge weights and has a rule."""

    def __init__(self):
        super().__init__()
        self.first = pyg.GCNConv(IN, HIDDEN)
        self.second = pyg.GCN2Conv(HIDDEN, 0.1)
        self.convs = nn.ModuleList(
            [
                pyg.GraphConv(HIDDEN, HIDDEN, aggr="mean"),
                pyg.GraphConv(HIDDEN, HIDDEN),
                pyg.MixHopConv(HIDDEN, 4, powers=[2, 0]),
                pyg.TAGConv(HIDDEN, HIDDEN, K=2),
                pyg.LEConv(HIDDEN, HIDDEN),
                pyg.SSGConv(HIDDEN, HIDDEN, 0.1, K=2),
                pyg.ChebConv(HIDDEN, HIDDEN, K=3),
                pyg.GatedGraphConv(HIDDEN, 2),
                pyg.LGConv(),
                pyg.SimpleConv("mean"),
                pyg.APPNP(2, 0.1),
                pyg.SGConv(HIDDEN, OUT, K=2),
            ]
        )

    def forward(self, x, edge_index, edge_weight=None):
        x = h = self.first(x, edge_index, edge_weight).relu()
        x = self.second(x, h, edge_index, edge_weight)
        for conv in self.convs:
            x = conv(x.tanh(), edge_index, edge_weight)
        return x


class Attributed(nn.Module):
    """Edge features, read as they are, and encoded in forward."""

    def __init__(self, conv=None):
        super().__init__()
        self.first = conv or pyg.TransformerConv(IN, HIDDEN, heads=2, concat=False, edge_dim=4)
        self.encode = nn.ModuleList(Linear(4, HIDDEN) for _ in range(2))
        self.second = pyg.GINEConv(Linear(HIDDEN, HIDDEN))
        self.third = pyg.GENConv(HIDDEN, OUT, norm="layer", edge_dim=HIDDEN)

    def forward(self, x, edge_index, edge_attr):
        x = F.dropout(self.first(x, edge_index, edge_attr).relu(), 0.3, self.training)
        x = self.second(x, edge_index, self.encode[0](edge_attr).relu_())
        scale = 2.0
        return self.third(x, edge_index, edge_attr=F.relu(self.encode[1](edge_attr) * scale))


class Typed(nn.Module):
    """An R-GCN: edges of three types, also several between the same two vertices."""

    def __init__(self, **settings):
        super().__init__()
        self.first = pyg.RGCNConv(IN, HIDDEN, 3, **settings)
        self.second = pyg.RGCNConv(HIDDEN, OUT, 3, **settings)

    def forward(self, x, edge_index, edge_type):
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)


class Embedded(nn.Module):
    """A row of its own for each vertex, beside the features; N = 60."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 4)
        self.place = nn.Parameter(torch.randn(60, 1) / 10)
        self.first, self.second = pyg.SAGEConv(IN + 4, HIDDEN), pyg.GATConv(HIDDEN, OUT)

    def forward(self, x, edge_index):
        x = torch.cat([x, F.dropout(self.table.weight, 0.2, self.training)], dim=-1)
        return self.second(self.first(x, edge_index).relu() + self.place, edge_index)


def edge_norm(inside, outside):
    """EdgeConv as PyG's point cloud examples write it: a BatchNorm over edges."""
    norm = nn.BatchNorm1d(HIDDEN, momentum=None, affine=False)
    layers = [Linear(2 * inside, HIDDEN, bias=False), norm, nn.ELU(), nn.Dropout(0.2)]
    aggr = pyg.aggr.SoftmaxAggregation(learn=True)
    return pyg.EdgeConv(nn.Sequential(*layers, nn.Linear(HIDDEN, outside)), aggr)


def basic(kind, **settings):
    return lambda: kind(IN, HIDDEN, 3, out_channels=OUT, dropout=0.2, **settings)


DEGREES = torch.tensor([1, 5, 9, 4, 2])
MODELS = {
    **{f"GCN jk {jk}": basic(pyg.GCN, jk=jk) for jk in (None, "cat", "max", "lstm")},
    "GraphSAGE": basic(pyg.GraphSAGE),
    "GIN": basic(pyg.GIN, jk="cat"),
    "GAT": basic(pyg.GAT, heads=2),
    "GATv2": basic(pyg.GAT, heads=2, v2=True, jk="max"),
    "PNA": basic(
        pyg.PNA,
        aggregators=["mean", "max", "std"],
        scalers=["identity", "amplification"],
        deg=DEGREES,
    ),
    "EdgeCNN": basic(pyg.EdgeCNN),
    "EdgeCNN batch norm": basic(pyg.EdgeCNN, norm="batch", jk="cat"),
    "edge norm": lambda: Two(edge_norm),
    "arxiv": Arxiv,
    "products": lambda: Arxiv(pyg.SAGEConv),
    "gcnii": GCNII,
    "gcnii, two weights": lambda: GCNII(False),
    **{f"deep {block}": (lambda block=block: Deep(block)) for block in ("res+", "dense", "plain")},
    "appnp": Appnp,
    "sgc": Sgc,
    "own max": lambda: Two(MaxConv),
    "own softmax": lambda: Two(SoftConv),
    "transformer": lambda: Two(lambda a, b: pyg.TransformerConv(a, b, dropout=0.2, beta=True)),
    "SAGE max": lambda: Two(lambda a, b: pyg.SAGEConv(a, b, aggr="max")),
    "gated": lambda: Two(pyg.ResGatedGraphConv),
    "GCN batch norm": basic(pyg.GCN, norm="batch"),
    "GIN batch norm": basic(pyg.GIN, norm="batch", jk="cat"),
    "GraphSAGE layer norm": basic(pyg.GraphSAGE, norm="layer"),
    "batch norm, no statistics": lambda: Normed(nn.BatchNorm1d(HIDDEN, track_running_stats=False)),
    "batch norm, mean": lambda: Normed(nn.BatchNorm1d(HIDDEN, momentum=None, affine=False)),
    "graph norm": lambda: Normed(pyg.GraphNorm(HIDDEN)),
    "pair norm": lambda: Normed(pyg.PairNorm()),
    "pair norm, each": lambda: Normed(pyg.PairNorm(scale_individually=True)),
    "mean subtraction": lambda: Normed(pyg.MeanSubtractionNorm()),
    "zoo": Zoo,
    "branches": Branches,
    "LINKX": lambda: pyg.LINKX(60, IN, HIDDEN, OUT, 2, dropout=0.2),
    "LINKX weighted": lambda: pyg.LINKX(60, IN, HIDDEN, OUT, 2, 2, 2),
    "embedded": Embedded,
    "GCN weighted": basic(pyg.GCN, jk="cat"),
    "GCN improved": basic(pyg.GCN, improved=True),
    "GCN improved, unweighted": basic(pyg.GCN, improved=True),
    "sgc cached": Kept,
    "weighted": Weighted,
    "attributed": Attributed,
    "GAT attributed": basic(pyg.GAT, heads=2, edge_dim=4),
    "NNConv": lambda: Attributed(pyg.NNConv(IN, HIDDEN, Linear(4, IN * HIDDEN), aggr="mean")),
    "rgcn": Typed,
    "rgcn bases": lambda: Typed(num_bases=2),
}
CARRIED = {
    "GCN weighted": "edge_weight",
    "GCN improved": "edge_weight",
    "weighted": "edge_weight",
    "attributed": "edge_attr",
    "GAT attributed": "edge_attr",
    "NNConv": "edge_attr",
    "rgcn": "edge_type",
    "rgcn bases": "edge_type",
    "LINKX weighted": "edge_weight",
}
"""What the edges of the graph must carry for a model."""

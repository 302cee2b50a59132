"""Models with branches, each written in several orders, as PyG's users write them.

Nothing in here knows of gnnpipe. 7 features, 3 classes.
"""

from __future__ import annotations

from itertools import pairwise

import hetero_models
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

IN, HIDDEN, OUT, DEPTH = 7, 8, 3, 3
LAYER_BY_LAYER, BRANCH_BY_BRANCH, LAST_BRANCH_FIRST = WRITINGS = (
    "layer by layer",
    "branch by branch",
    "last branch first",
)


class Written(nn.Module):
    """A model whose forward calls its layers in the order ``writing``."""

    def __init__(self, writing, dropout):
        super().__init__()
        self.writing, self.dropout = writing, dropout

    def drop(self, x):
        return F.dropout(x.relu(), self.dropout, self.training)

    def places(self, branches, depth=DEPTH):
        """(branch, layer) in the order of the writing."""
        if self.writing == LAYER_BY_LAYER:
            return [(b, layer) for layer in range(depth) for b in range(branches)]
        order = reversed(range(branches)) if self.writing == LAST_BRANCH_FIRST else range(branches)
        return [(b, layer) for b in order for layer in range(depth)]


def layers(kind, width_in=IN):
    sizes = [width_in, *[HIDDEN] * DEPTH]
    return nn.ModuleList(kind(a, b) for a, b in pairwise(sizes))


class Towers(Written):
    """Four GCNs side by side, joined at the end."""

    def __init__(self, writing, dropout=0.5, branches=4):
        super().__init__(writing, dropout)
        self.convs = nn.ModuleList(layers(pyg.GCNConv) for _ in range(branches))
        self.out = nn.Linear(branches * HIDDEN, OUT)

    def forward(self, x, edge_index):
        h = [x] * len(self.convs)
        for b, layer in self.places(len(h)):
            h[b] = self.drop(self.convs[b][layer](h[b], edge_index))
        return self.out(torch.cat(h, dim=1))


class Jumping(Written):
    """Two GCNs, and a linear map of what every layer gives, summed up."""

    def __init__(self, writing, dropout=0.5):
        super().__init__(writing, dropout)
        self.convs = nn.ModuleList(layers(pyg.GCNConv) for _ in range(2))
        self.heads = nn.ModuleList(layers(nn.Linear, HIDDEN) for _ in range(2))

    def forward(self, x, edge_index):
        h, found = [x, x], {}
        for b, layer in self.places(2):
            h[b] = self.drop(self.convs[b][layer](h[b], edge_index))
            found[b, layer] = h[b]
            if self.writing == BRANCH_BY_BRANCH:
                found[b, layer] = self.drop(self.heads[b][layer](h[b]))
        places = [(b, layer) for b in range(2) for layer in range(DEPTH)]
        if self.writing != BRANCH_BY_BRANCH:
            for b, layer in reversed(places):
                found[b, layer] = self.drop(self.heads[b][layer](found[b, layer]))
        return torch.cat([found[place] for place in places], dim=1)[:, :OUT]


class WideAndDeep(Written):
    """An MLP of the features beside a GNN."""

    def __init__(self, writing, dropout=0.5):
        super().__init__(writing, dropout)
        self.gnn, self.mlp = layers(pyg.GCNConv), layers(nn.Linear)
        self.out = nn.Linear(2 * HIDDEN, OUT)

    def forward(self, x, edge_index):
        h = [x, x]
        for b, layer in self.places(2):
            h[b] = self.mlp[layer](h[b]) if b else self.gnn[layer](h[b], edge_index)
            h[b] = self.drop(h[b])
        return self.out(torch.cat(h, dim=1))


class Hops(Written):
    """As SIGN: an MLP for every power of the adjacency matrix."""

    def __init__(self, writing, dropout=0.5):
        super().__init__(writing, dropout)
        self.hop = pyg.SimpleConv(aggr="mean")
        self.mlps = nn.ModuleList(layers(nn.Linear) for _ in range(3))
        self.out = nn.Linear(3 * HIDDEN, OUT)

    def forward(self, x, edge_index):
        h = [x]
        for _ in range(2):
            h.append(self.hop(h[-1], edge_index))
        for b, layer in self.places(3):
            h[b] = self.drop(self.mlps[b][layer](h[b]))
        return self.out(torch.cat(h, dim=1))


class Assorted(Written):
    """Sums over vertices and a buffer, attention with dropout, and a layer that branches share."""

    def __init__(self, writing, dropout=0.5):
        super().__init__(writing, dropout)
        attention = pyg.GATConv(HIDDEN, HIDDEN, heads=2, concat=False, dropout=dropout)
        self.first = nn.ModuleList(nn.Linear(IN, HIDDEN) for _ in range(3))
        self.convs = nn.ModuleList([pyg.SAGEConv(HIDDEN, HIDDEN), attention, nn.Identity()])
        self.shared, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(3 * HIDDEN, OUT)
        self.register_buffer("centre", torch.zeros(HIDDEN))

    def layer(self, b, layer, x, edge_index):
        if layer == 0:
            return self.drop(self.first[b](x))
        if layer == 2:
            return self.shared(x)
        if b < 2:
            return self.drop(self.convs[b](x, edge_index))
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - x.mean(0, keepdim=True)

    def forward(self, x, edge_index):
        h = [x, x, x]
        for b, layer in self.places(3):
            h[b] = self.layer(b, layer, h[b], edge_index)
        return self.out(torch.cat(h, dim=1) + 0.1 * self.centre.repeat(3))


class RandomEdges(Written):
    """Two GCNs, of which each drops edges of its own."""

    def __init__(self, writing, dropout=0.5):
        super().__init__(writing, dropout)
        self.convs = nn.ModuleList(layers(pyg.GCNConv) for _ in range(2))
        self.out = nn.Linear(2 * HIDDEN, OUT)

    def forward(self, x, edge_index):
        h, edges = [x, x], [edge_index, edge_index]
        for b, layer in self.places(2):
            if layer == 0:
                edges[b], _ = dropout_edge(edge_index, 0.5, training=self.training)
            h[b] = self.drop(self.convs[b][layer](h[b], edges[b]))
        return self.out(torch.cat(h, dim=1))


class Relations(Written):
    """Two stacks of HeteroConv, of which each knows some of the relations."""

    KNOWN = (
        (("paper", "cites", "paper"), ("paper", "written_by", "author")),
        (("author", "writes", "paper"), ("paper", "written_by", "author")),
    )

    def __init__(self, writing, dropout=0.5):
        super().__init__(writing, dropout)
        sizes = hetero_models.WIDTHS.items()
        self.encode = nn.ModuleDict({t: nn.Linear(w, HIDDEN) for t, w in sizes})
        self.convs = nn.ModuleList(
            nn.ModuleList(
                pyg.HeteroConv({r: pyg.SAGEConv((HIDDEN, HIDDEN), HIDDEN) for r in known})
                for _ in range(2)
            )
            for known in self.KNOWN
        )
        self.out = nn.Linear(2 * HIDDEN, OUT)

    def forward(self, x_dict, edge_index_dict):
        starts = {t: self.encode[t](x) for t, x in x_dict.items()}
        h = [starts, starts]
        for b, layer in self.places(2, 2):
            h[b] = self.convs[b][layer](h[b], edge_index_dict)
            h[b] = {t: self.drop(x) for t, x in h[b].items()}
        return self.out(torch.cat([one["paper"] for one in h], dim=1))


MODELS = {
    "towers": Towers,
    "jumping": Jumping,
    "wide and deep": WideAndDeep,
    "hops": Hops,
    "assorted": Assorted,
    "relations": Relations,
}

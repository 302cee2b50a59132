"""Models over several types of vertices, as PyG's users write them, and a small graph for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import HeteroData

HIDDEN, OUT = 8, 3
COUNTS = {"paper": 50, "author": 37, "subject": 9}
WIDTHS = {"paper": 7, "author": 5}
RELATIONS = {
    ("paper", "cites", "paper"): 160,
    ("author", "writes", "paper"): 120,
    ("paper", "written_by", "author"): 110,
    ("subject", "of", "paper"): 60,
    ("paper", "on", "subject"): 55,
}


def hetero_data(seed=0, subjects=True):
    """Three types; subjects have no features."""
    rng = np.random.default_rng(seed)
    data = HeteroData()
    names = [t for t in COUNTS if subjects or t != "subject"]
    for name in names:
        data[name].num_nodes = COUNTS[name]
        if name in WIDTHS:
            x = rng.standard_normal((COUNTS[name], WIDTHS[name]))
            data[name].x = torch.from_numpy(x.astype(np.float32))
    for (source, name, target), count in RELATIONS.items():
        if source in names and target in names:
            ends = rng.integers(0, [[COUNTS[source]], [COUNTS[target]]], (2, count))
            ends = np.unique(ends[:, ends[0] != ends[1]], axis=1)
            data[source, name, target].edge_index = torch.from_numpy(ends)
    data["paper"].y = torch.from_numpy(rng.integers(0, OUT, COUNTS["paper"]))
    part = torch.arange(COUNTS["paper"]) % 3
    for i, field in enumerate(("train_mask", "val_mask", "test_mask")):
        data["paper"][field] = part == i
    return data


class Hetero(nn.Module):
    """HeteroConv as in PyG's examples: another convolution for every relation."""

    def __init__(self):
        super().__init__()
        self.encode = nn.ModuleDict({t: nn.Linear(w, HIDDEN) for t, w in WIDTHS.items()})
        self.subjects = nn.Embedding(COUNTS["subject"], HIDDEN)
        self.convs = nn.ModuleList()
        edge_norm = [nn.Linear(2 * HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()]
        edge_conv = pyg.EdgeConv(nn.Sequential(*edge_norm))
        for cites in (pyg.GCNConv(HIDDEN, HIDDEN), edge_conv):
            self.convs.append(
                pyg.HeteroConv(
                    {
                        ("paper", "cites", "paper"): cites,
                        ("author", "writes", "paper"): pyg.SAGEConv((HIDDEN, HIDDEN), HIDDEN),
                        ("paper", "written_by", "author"): pyg.GATConv(
                            (HIDDEN, HIDDEN), HIDDEN, add_self_loops=False, dropout=0.2
                        ),
                        ("subject", "of", "paper"): pyg.GraphConv((HIDDEN, HIDDEN), HIDDEN),
                        ("paper", "on", "subject"): pyg.SAGEConv((HIDDEN, HIDDEN), HIDDEN, "max"),
                    },
                    aggr="sum",
                )
            )
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {t: self.encode[t](x).relu() for t, x in x_dict.items()}
        x_dict["subject"] = self.subjects.weight
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
            x_dict = {
                t: nn.functional.dropout(x.relu(), 0.2, self.training) for t, x in x_dict.items()
            }
        return self.out(x_dict["paper"])


class Dropping(nn.Module):
    """Dropout of rows inside of convolutions between types."""

    def __init__(self):
        super().__init__()
        self.encode = nn.ModuleDict({t: nn.Linear(w, HIDDEN) for t, w in WIDTHS.items()})

        def mlp():
            return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Dropout(0.5))

        ends = [("author", "writes", "paper"), ("paper", "written_by", "author")]
        near = ("paper", "cites", "paper")
        self.convs = nn.ModuleList(
            pyg.HeteroConv({r: pyg.GINConv(mlp(), aggr="max") for r in (*ends, near)}, aggr="max")
            for _ in range(2)
        )
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {t: self.encode[t](x) for t, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return self.out(x_dict["paper"])


class LayerNormed(nn.Module):
    """LayerNorm, ReLU and dropout by type; the last layer reads the rows of authors alone."""

    def __init__(self):
        super().__init__()
        self.encode = nn.ModuleDict({t: nn.Linear(w, HIDDEN) for t, w in WIDTHS.items()})
        relations = [("author", "writes", "paper"), ("paper", "written_by", "author")]
        self.conv = pyg.HeteroConv({r: pyg.SAGEConv((HIDDEN, HIDDEN), HIDDEN) for r in relations})
        self.last = pyg.SAGEConv((HIDDEN, HIDDEN), HIDDEN)
        self.norms = nn.ModuleDict({t: nn.LayerNorm(HIDDEN) for t in WIDTHS})
        self.out = nn.Linear(HIDDEN, OUT)

    def activate(self, vertex_type, x):
        """Dropout of the activated rows of a type."""
        return nn.functional.dropout(self.norms[vertex_type](x).relu(), 0.2, self.training)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {t: self.encode[t](x) for t, x in x_dict.items()}
        x_dict = {t: self.activate(t, x) for t, x in self.conv(x_dict, edge_index_dict).items()}
        edges = edge_index_dict["author", "writes", "paper"]
        paper = self.last((x_dict["author"], x_dict["paper"]), edges)
        return self.out(self.activate("paper", paper))


class Sage(nn.Module):
    """A model of one type, for ``to_hetero``."""

    def __init__(self, conv=pyg.SAGEConv, norm=False):
        super().__init__()
        self.first, self.second = conv((-1, -1), HIDDEN), conv((-1, -1), OUT)
        self.norm = pyg.BatchNorm(HIDDEN) if norm else nn.Identity()

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


def to_hetero(**settings):
    return pyg.to_hetero(Sage(**settings), hetero_data(subjects=False).metadata(), aggr="mean")


class Han(nn.Module):
    """After PyG's HAN example."""

    def __init__(self):
        super().__init__()
        metadata = hetero_data(subjects=False).metadata()
        self.conv = pyg.HANConv(WIDTHS, HIDDEN, metadata, heads=2, dropout=0.3)
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x_dict, edge_index_dict):
        out = self.conv(x_dict, edge_index_dict)
        return self.out(out["paper"])


class Hgt(nn.Module):
    """After PyG's HGT example."""

    def __init__(self, layers=2):
        super().__init__()
        metadata = hetero_data(subjects=False).metadata()
        self.encode = nn.ModuleDict({t: pyg.Linear(-1, HIDDEN) for t in WIDTHS})
        self.convs = nn.ModuleList(pyg.HGTConv(HIDDEN, HIDDEN, metadata, 2) for _ in range(layers))
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {t: self.encode[t](x).relu_() for t, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return self.out(x_dict["paper"])


MODELS = {
    "han": Han,
    "hgt": Hgt,
    "hetero conv": Hetero,
    "dropping": Dropping,
    "layer norm": LayerNormed,
    "to_hetero": to_hetero,
    "to_hetero batch norm": lambda: to_hetero(norm=True),
}
NO_SUBJECTS = ("han", "hgt", "to_hetero", "to_hetero batch norm")

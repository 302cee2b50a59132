"""Helpers for tests of recorded models: the models of ``pyg_models`` on a small graph."""

import copy

import pyg_models
import torch
import torch.nn.functional as F
from helpers import carrying, differences_of_shapes, small_graph

EPOCHS = 3


def made(name, seed=0):
    torch.manual_seed(seed)
    return pyg_models.MODELS[name]()


def parts_of(name, rank, chunks):
    graph = small_graph(directed=True, sparse=chunks > 1)
    return carrying(graph, pyg_models.CARRIED.get(name)), made(name, seed=rank), {}


def largest_difference(shapes, names, **settings):
    return differences_of_shapes(shapes, names, EPOCHS, parts_of, **settings)


def plain_losses(model, graph, epochs, dtype=torch.float64, weight_decay=0.0):
    model = copy.deepcopy(model).to(dtype)
    x, edges = torch.from_numpy(graph.x).to(dtype), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01, weight_decay=weight_decay)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# One model of each kind, for tests that are slow on all models.
ON_RANKS = (
    "GCN jk lstm",
    "GIN",
    "GAT",
    "PNA",
    "EdgeCNN batch norm",
    "gcnii",
    "deep dense",
    "appnp",
    "own softmax",
    "GIN batch norm",
    "GraphSAGE layer norm",
    "zoo",
    "branches",
    "weighted",
    "attributed",
    "rgcn",
    "LINKX",
    "embedded",
    "sgc",
)

"""Convolutions that run on blocks only call by call give the losses of plain PyG on any shape."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_within, differences_of_shapes, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    degree,
    remove_self_loops,
    scatter,
)

from gnnpipe import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:graph .* does not use its edge_attr")
IN, HIDDEN, OUT, DIM = 7, 8, 3, 2


class Signed(pyg.MessagePassing):
    """A mean over one list of edges, and another one over a second list."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.liked, self.disliked = nn.Linear(IN, HIDDEN), nn.Linear(IN, HIDDEN)

    def forward(self, x, liked, disliked):
        out = self.liked(self.propagate(liked, x=x))
        return out - self.disliked(self.propagate(disliked, x=x))


class BySign(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = Signed(), nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr):
        is_liked = edge_attr[:, 0] > 0
        return self.out(self.conv(x, edge_index[:, is_liked], edge_index[:, ~is_liked]).relu())


class Hyper(pyg.MessagePassing):
    """From vertices to hyperedges and back, divided by the numbers of members."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(IN, HIDDEN)

    def forward(self, x, edge_index):
        ones = x.new_ones(edge_index.size(1))
        members = scatter(ones, edge_index[1], dim_size=x.size(0)).clamp(min=1)
        memberships = scatter(ones, edge_index[0], dim_size=x.size(0)).clamp(min=1)
        rows = self.propagate(edge_index, x=self.lin(x), share=1 / members)
        return self.propagate(edge_index.flip(0), x=rows.relu(), share=1 / memberships)

    def message(self, x_j, share_i):
        return x_j * share_i.view(-1, 1)


class OfHyperedges(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = Hyper(), nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr=None):
        return self.out(self.conv(x, edge_index))


class OneNumberPerRow(nn.Module):
    """Rows without columns, [N], are dropped, sent and read over the edges."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(IN, HIDDEN), pyg.GraphConv(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr=None):
        x = self.first(x)
        size = x.norm(dim=1).tanh()
        source, target = edge_index
        near = scatter(size[source] - size[target], target, dim_size=x.size(0))
        return self.second(x * near.unsqueeze(1), edge_index) + size[:, None]


class OfLayers(pyg.MessagePassing):
    """Attends over layers of a neighbour [N, L, F], weighed by degrees; checks shapes."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.query = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, edge_index):
        if x.dim() != 3 or x.shape[-1] != HIDDEN:
            raise ValueError("rows have another shape")
        assert x.size(-1) == self.query.in_features
        found = degree(edge_index[1], x.size(0), dtype=x.dtype).clamp(min=1)
        norm = found.pow(-0.5)[edge_index[0]]
        return self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_i, x_j, norm):
        score = (self.query(x_i[:, -1:]) * x_j).sum(-1, keepdim=True).softmax(1)
        return (score * x_j).sum(1) * norm.view(-1, 1)


class JumpingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.conv, self.out = nn.Linear(IN, HIDDEN), OfLayers(), nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr=None):
        x = self.first(x).relu()
        return self.out(self.conv(torch.stack([x, x.tanh()], dim=1), edge_index))


class LearnedWeights(nn.Module):
    """Weights of the edges are learned; convolutions normalise by their sums."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(DIM, 1)
        self.first, self.second = pyg.GCNConv(IN, HIDDEN), pyg.TAGConv(HIDDEN, OUT, K=2)

    def forward(self, x, edge_index, edge_attr):
        weight = self.weight(edge_attr).sigmoid().squeeze(-1)
        return self.second(self.first(x, edge_index, weight).relu(), edge_index, weight)


class WeightsOfMlp(LearnedWeights):
    """PyG's MLP calls dropout with probability 0."""

    def __init__(self):
        super().__init__()
        self.weight = pyg.MLP([DIM, 4, 1], norm=None)


class LearnedWeightsReadTwice(nn.Module):
    """Two convolutions read learned weights with the turned edges, a third with those as given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(DIM, 1)
        self.first, self.second = pyg.GraphConv(IN, HIDDEN), pyg.GraphConv(HIDDEN, HIDDEN)
        self.third = pyg.GraphConv(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr):
        weight, turned = self.weight(edge_attr).sigmoid().squeeze(-1), edge_index.flip(0)
        x = self.first(x, turned, weight).relu()
        x = torch.cat(x.chunk(2, dim=1), dim=1)
        x = self.second(x, turned, weight).relu()
        return self.third(x, edge_index, weight)


class PathfinderDiscovery(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.PDNConv(IN, HIDDEN, DIM, 4), pyg.PDNConv(HIDDEN, OUT, DIM, 4)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class LearnedStates(nn.Module):
    """Learned states of edges [E, F] move with edges that forward removes, adds and chooses."""

    def __init__(self):
        super().__init__()
        self.rows, self.edges = nn.Linear(IN, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr):
        x = self.rows(x).relu()
        states = self.edges(edge_attr).tanh()
        edges, states = remove_self_loops(edge_index, states)
        is_kept = edges[0] % 3 > 0
        edges, states = edges[:, is_kept], states[is_kept]
        edges, states = add_self_loops(edges, states, fill_value=0.5, num_nodes=x.size(0))
        messages = states * x[edges[0]]
        return self.out(scatter(messages, edges[1], dim_size=x.size(0), reduce="mean"))


class LearnedWeightsBothWays(nn.Module):
    """Learned weights of given edges, of their reverses and of self-loops, put together by hand."""

    def __init__(self):
        super().__init__()
        self.rows, self.weight = nn.Linear(IN, HIDDEN), nn.Linear(DIM, 1)
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr):
        n, loops = x.size(0), torch.arange(x.size(0))
        weight = self.weight(edge_attr).sigmoid().squeeze(-1)
        weight = torch.cat([weight, 0.5 * weight, weight.new_ones(n)])
        source, target = torch.cat([edge_index, edge_index.flip(0), loops.repeat(2, 1)], dim=1)
        total = scatter(weight, target, dim_size=n)
        messages = (weight / total[target]).unsqueeze(-1) * self.rows(x)[source]
        return self.out(scatter(messages, target, dim_size=n).relu())


class LoopsOfMeans(nn.Module):
    """New self-loops get the mean or the sum of the learned values into their vertex."""

    def __init__(self):
        super().__init__()
        self.rows, self.edges = nn.Linear(IN, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr):
        n, x = x.size(0), self.rows(x).relu()
        states = self.edges(edge_attr).tanh()
        edges, means = add_self_loops(edge_index, states, fill_value="mean", num_nodes=n)
        rest, others = add_remaining_self_loops(edge_index, states, fill_value="add", num_nodes=n)
        found = scatter(means * x[edges[0]], edges[1], dim_size=n)
        return self.out(found + scatter(others * x[rest[0]], rest[1], dim_size=n))


MODELS = [
    LoopsOfMeans,
    LearnedWeightsBothWays,
    BySign,
    OfHyperedges,
    OneNumberPerRow,
    JumpingAttention,
    LearnedWeights,
    WeightsOfMlp,
    LearnedWeightsReadTwice,
    PathfinderDiscovery,
    LearnedStates,
]


def graph_with_attributes(n=60):
    """Some vertices have a self-loop."""
    rng, graph = np.random.default_rng(1), small_graph(seed=3, n=n, directed=True)
    loops = np.stack([np.arange(0, n, 4)] * 2)
    source, target = np.concatenate([graph.edge_index, loops], axis=1)
    order = np.lexsort((source, target))
    return replace(
        graph,
        indptr=np.concatenate([[0], np.cumsum(np.bincount(target, minlength=n))]),
        indices=source[order].astype(np.int32),
        edge_attr=rng.uniform(-1, 1, (len(source), DIM)).astype(np.float32),
    )


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def plain_losses(kind, graph, epochs):
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    given = x, edges, torch.from_numpy(graph.edge_attr).double()
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    model, losses = made(kind), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*given)[train], y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_equals_plain_pyg(kind, chunks):
    graph = graph_with_attributes()
    config = quick_config(epochs=4, chunks=chunks, staleness="exact", require_capture=True)
    history = Trainer(config, graph=graph, model=made(kind)).fit().history
    assert [row.loss for row in history] == pytest.approx(plain_losses(kind, graph, 4), rel=1e-9)


def on_ranks(shapes, staleness):
    def parts(kind, rank, chunks):
        return graph_with_attributes(), made(kind, rank), {"staleness": staleness}

    # Weights that several calls share must stay on one stage.
    cut = [kind for kind in MODELS if kind is not LearnedWeightsReadTwice]
    found = []
    for shape in shapes:
        found += differences_of_shapes([shape], MODELS if shape[0] == 1 else cut, 3, parts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["exact", "auto"])
def test_every_shape_equals_one_autograd_graph(staleness):
    for found in run_ranks(on_ranks, 2, ((2, 1, 4), (1, 2, 1), (1, 2, 4)), staleness):
        assert_all_within(found)

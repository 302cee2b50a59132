"""Work on edges in forward is recorded, and gives the losses of plain PyG on any shape."""

import pytest
import torch
import torch.nn.functional as F
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
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    degree,
    dropout_edge,
    remove_self_loops,
    scatter,
    softmax,
    to_undirected,
)

from gnnpipe import InputError, Trainer, verify
from gnnpipe.capture import capture
from gnnpipe.capture.edge_work.program import random_numbers_of
from gnnpipe.runtime.comm.mesh import Mesh

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
IN, HIDDEN, OUT = 7, 8, 3


class TwoLayers(nn.Module):
    """Two convolutions on edges that ``edges`` makes."""

    conv = pyg.GCNConv

    def __init__(self):
        super().__init__()
        self.first, self.second = self.conv(IN, HIDDEN), self.conv(HIDDEN, OUT)

    def forward(self, x, edge_index):
        given = self.edges(x, edge_index)
        return self.second(F.elu(self.first(x, *given)), *given)


class Loops(TwoLayers):
    conv = pyg.SAGEConv

    def edges(self, x, edge_index):
        return (add_self_loops(edge_index, num_nodes=x.size(0))[0],)


class LoopsOfAttention(TwoLayers):
    conv = pyg.TransformerConv

    def edges(self, x, edge_index):
        edge_index, _ = remove_self_loops(edge_index)
        loops = torch.arange(x.shape[0], device=edge_index.device)
        return (torch.cat([edge_index, torch.stack([loops, loops])], dim=1),)


class Undirected(TwoLayers):
    def edges(self, x, edge_index):
        return (to_undirected(edge_index, num_nodes=x.size(0)),)


class Reversed(TwoLayers):
    conv = pyg.GraphConv

    def edges(self, x, edge_index):
        return (edge_index.flip(0),)


class WeightsByDegree(TwoLayers):
    conv = pyg.GraphConv

    def edges(self, x, edge_index):
        row, col = edge_index
        weight = degree(col, x.size(0), dtype=x.dtype).clamp(min=1).pow(-0.5)
        return edge_index, weight[row] * weight[col]


class DegreesAsFeatures(TwoLayers):
    def edges(self, x, edge_index):
        return (edge_index,)

    def forward(self, x, edge_index):
        found = degree(edge_index[1], x.size(0), dtype=x.dtype)
        x = self.first(x, edge_index).relu() / found.clamp(min=1).unsqueeze(-1)
        return self.second(x, edge_index) * torch.log1p(found)[:, None] / found.mean()


class TutorialConv(pyg.MessagePassing):
    """As in PyG's tutorial on convolutions of one's own."""

    def __init__(self, width_in, width_out):
        super().__init__(aggr="add")
        self.lin = nn.Linear(width_in, width_out, bias=False)
        self.bias = nn.Parameter(torch.full((width_out,), 0.1))

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        inverse = deg.pow(-0.5)
        inverse[inverse == float("inf")] = 0
        norm = inverse[row] * inverse[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Tutorial(TwoLayers):
    conv = TutorialConv

    def edges(self, x, edge_index):
        return (edge_index,)


class ByHand(TwoLayers):
    """Gathers and scatters in forward."""

    conv = nn.Linear

    def edges(self, x, edge_index):
        return ()

    def forward(self, x, edge_index):
        row, col = edge_index
        x = self.first(x).relu()
        total = x.new_zeros(x.size(0), HIDDEN).index_add_(0, col, x[row])
        mean = scatter(x[row] - x[col], col, dim=0, dim_size=x.size(0), reduce="mean")
        most = torch.zeros_like(x).scatter_reduce(
            0, col.view(-1, 1).expand(-1, HIDDEN), x[row], reduce="amax"
        )
        return self.second(total + mean + most + x)


class AttentionByHand(nn.Module):
    """One layer of attention, written with ``softmax`` and ``scatter``."""

    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.attention = nn.Linear(2 * HIDDEN, 1)

    def forward(self, x, edge_index):
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        source, target = edge_index
        score = F.leaky_relu(self.attention(torch.cat([x[source], x[target]], dim=-1)), 0.2)
        alpha = softmax(score, target, num_nodes=x.size(0))
        return self.out(scatter(alpha * x[source], target, dim_size=x.size(0), reduce="sum").relu())


class EdgeStates(nn.Module):
    """After MeshGraphNet: every edge has a state, which each layer updates."""

    def __init__(self):
        super().__init__()
        self.vertices, self.edges = nn.Linear(IN, HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.of_edges = nn.ModuleList(nn.Linear(3 * HIDDEN, HIDDEN) for _ in range(3))
        self.of_rows = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, OUT)

    def forward(self, x, edge_index):
        x, (row, col) = self.vertices(x).relu(), edge_index
        e = self.edges(torch.cat([x[row], x[col]], dim=1)).relu()
        for of_edges, of_rows in zip(self.of_edges, self.of_rows, strict=True):
            e = e + of_edges(torch.cat([e, x[row], x[col]], dim=1)).relu()
            total = scatter(e, col, dim=0, dim_size=x.size(0), reduce="sum")
            x = x + of_rows(torch.cat([x, total], dim=1)).relu()
        return self.out(x)


class Matrices(TwoLayers):
    """Products with matrices made of the edges; a square of one has edges of its own."""

    conv = nn.Linear

    def forward(self, x, edge_index):
        n, ones = x.size(0), x.new_ones(edge_index.size(1))
        matrix = torch.sparse_coo_tensor(
            edge_index.flip(0), ones, (n, n), check_invariants=False
        ).coalesce()
        x = torch.sparse.mm(matrix, self.first(x)).relu()
        return (matrix @ matrix) @ self.second(x)


class KeptNorm(TwoLayers):
    """Keeps the weights of the first call."""

    kept = None

    @staticmethod
    def conv(width_in, width_out):
        return pyg.GCNConv(width_in, width_out, normalize=False)

    def edges(self, x, edge_index):
        if self.kept is None:
            self.kept = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        edges, weight = self.kept
        return edges, weight


class AttentionInConv(pyg.MessagePassing):
    """Makes scores of edges before it propagates, and gives a size."""

    def __init__(self, width_in, width_out):
        super().__init__(aggr="add", node_dim=0)
        self.query, self.key = nn.Linear(width_in, width_out), nn.Linear(width_in, width_out)

    def forward(self, x, edge_index):
        query, key = self.query(x), self.key(x)
        edges, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        score = softmax((query[edges[1]] * key[edges[0]]).sum(-1), edges[1], num_nodes=x.size(0))
        return self.propagate(edges, x=key, score=score, size=(x.size(0), x.size(0)))

    def message(self, x_j, score):
        return x_j * score.view(-1, 1)


class AttentionInConvs(TwoLayers):
    conv = AttentionInConv

    def edges(self, x, edge_index):
        return (edge_index,)


MODELS = [
    EdgeStates,
    Matrices,
    KeptNorm,
    AttentionInConvs,
    Loops,
    LoopsOfAttention,
    Undirected,
    Reversed,
    WeightsByDegree,
    DegreesAsFeatures,
    Tutorial,
    ByHand,
    AttentionByHand,
]


@pytest.fixture(scope="module")
def graph():
    return small_graph(seed=3, n=60, directed=True)


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def plain(kind, graph):
    data = pyg_data(graph)
    data.x = data.x.double()
    model = made(kind)
    return plain_pyg_losses(model, data, (data.x, data.edge_index), 4), model


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_equals_plain_pyg(kind, chunks, graph):
    config = quick_config(
        epochs=4, dtype="float64", chunks=chunks, staleness="exact", require_capture=True
    )
    trainer = Trainer(config, graph=graph, model=made(kind))
    losses = [row.loss for row in trainer.fit().history]
    truth, model = plain(kind, graph)
    assert losses == pytest.approx(truth, rel=1e-9)
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    assert torch.allclose(trainer.predict(), model.eval()(x, edges), 1e-8, 1e-9)


def on_ranks(shapes, staleness):
    def parts(kind, rank, chunks):
        torch.manual_seed(rank)
        return small_graph(directed=True), kind(), {"staleness": staleness}

    return differences_of_shapes(shapes, MODELS, 3, parts)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["exact", "auto"])
def test_every_shape_equals_one_autograd_graph(staleness):
    shapes = ((2, 1, 4), (1, 2, 1), (1, 2, 4))
    for found in run_ranks(on_ranks, 2, shapes, staleness):
        assert_all_within(found)


def losses_on_ranks(shapes):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for kind in MODELS:
            config = quick_config(
                epochs=4, stages=stages, shards=shards, chunks=chunks, staleness="exact"
            )
            graph = small_graph(seed=3, n=60, directed=True)
            trainer = Trainer(config, graph=graph, model=made(kind), world=mesh)
            found.append([row.loss for row in trainer.fit().history])
    return found


@pytest.mark.slow
def test_ranks_equal_plain_pyg(graph):
    shapes = ((2, 1, 4), (1, 2, 1), (1, 2, 4))
    truth = [plain(kind, graph)[0] for kind in MODELS]
    for found in run_ranks(losses_on_ranks, 2, shapes):
        for losses, expected in zip(found, truth * len(shapes), strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)


class DropEdge(TwoLayers):
    conv = pyg.GCNConv

    def edges(self, x, edge_index):
        return (dropout_edge(edge_index, p=0.4, training=self.training)[0],)


class DropInTraining(TwoLayers):
    """Without an argument for the mode; the edges of evaluation are those given."""

    def edges(self, x, edge_index):
        if self.training:
            edge_index = edge_index[:, torch.rand(edge_index.size(1)) > 0.5]
        return (edge_index,)


class DropEdgeByHand(TwoLayers):
    """Another mask in each layer; a maximum runs on blocks."""

    @staticmethod
    def conv(width_in, width_out):
        return pyg.SAGEConv(width_in, width_out, aggr="max")

    def edges(self, x, edge_index):
        if self.training:
            edge_index = edge_index[:, torch.rand(edge_index.size(1)) > 0.5]
        return (edge_index,)

    def forward(self, x, edge_index):
        x = self.first(x, *self.edges(x, edge_index)).relu()
        return self.second(x, *self.edges(x, edge_index))


class DropWeights(TwoLayers):
    """Dropout of weights that are made of degrees, and degrees after dropped edges."""

    conv = pyg.GraphConv

    def edges(self, x, edge_index):
        edge_index, _ = dropout_edge(edge_index, p=0.2, training=self.training)
        row, col = edge_index
        weight = degree(col, x.size(0), dtype=x.dtype).clamp(min=1).pow(-0.5)
        return edge_index, F.dropout(weight[row] * weight[col], 0.3, self.training)

    def forward(self, x, edge_index):
        kept, _ = dropout_edge(edge_index, p=0.5, training=self.training)
        return super().forward(x / (1 + degree(kept[0], x.size(0))[:, None]), edge_index)


class HalfOfTheEdges(TwoLayers):
    """Draws edges by a function that nothing but its draws shows to be random."""

    def edges(self, x, edge_index):
        if self.training:
            count = edge_index.size(1)
            edge_index = edge_index[:, torch.multinomial(torch.ones(count), count // 2)]
        return (edge_index,)


class DropInTutorial(DropEdge):
    conv = TutorialConv


class DropMessages(ByHand):
    def forward(self, x, edge_index):
        return super().forward(x, dropout_edge(edge_index, p=0.4, training=self.training)[0])


RANDOM = [
    DropEdge,
    DropInTraining,
    DropEdgeByHand,
    HalfOfTheEdges,
    DropWeights,
    DropInTutorial,
    DropMessages,
]


def plain_with_drawn_edges(kind, graph, epochs):
    """Losses of plain PyG with the random numbers of gnnpipe's edges, and the logits."""
    model, data, losses = made(kind), pyg_data(graph), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        optimizer.zero_grad()
        with random_numbers_of(0, epoch):
            out = model(data.x.double(), data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval()(data.x.double(), data.edge_index)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", RANDOM, ids=lambda kind: kind.__name__)
def test_random_edges_equal_plain_pyg(kind, chunks, graph):
    config = quick_config(epochs=4, chunks=chunks, staleness="exact", require_capture=True)
    trainer = Trainer(config, graph=graph, model=made(kind))
    losses = [row.loss for row in trainer.fit().history]
    truth, logits = plain_with_drawn_edges(kind, graph, 4)
    assert losses == pytest.approx(truth, rel=1e-9)
    assert torch.allclose(trainer.predict(), logits, 1e-8, 1e-9)


class DropInEvaluation(TwoLayers):
    """Drops edges whatever the mode, as PyG's ``dropout_edge`` does by default."""

    def edges(self, x, edge_index):
        return (dropout_edge(edge_index, p=0.4)[0],)


def test_random_edges_of_evaluation_follow_the_seed_alone(graph):
    """Otherwise ranks, whose generators differ, would run on different graphs."""

    def logits(state, seed):
        model = made(DropInEvaluation)
        torch.manual_seed(state)
        run = quick_config(chunks=4, staleness="exact", seed=seed, require_capture=True)
        return Trainer(run, graph=graph, model=model).predict()

    assert torch.equal(logits(1, 0), logits(2, 0))
    assert not torch.equal(logits(1, 0), logits(1, 1))


@pytest.mark.parametrize("kind", [DropEdge, DropInTraining])
def test_other_edges_in_evaluation_are_no_further_aggregation(kind, graph):
    recording = capture(made(kind), graph).recording
    assert sum(map(recording.aggregates, recording.ops)) == 2


def random_losses_on_ranks(shapes, staleness):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for kind in RANDOM:
            shape = {"stages": stages, "shards": shards, "chunks": chunks}
            config = quick_config(epochs=4, staleness=staleness, **shape)
            graph = small_graph(seed=3, n=60, directed=True)
            trainer = Trainer(config, graph=graph, model=made(kind), world=mesh)
            found.append([row.loss for row in trainer.fit().history])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["exact", "auto"])
def test_random_edges_do_not_depend_on_the_shape(staleness, graph):
    """Law 2."""
    truth = []
    for kind in RANDOM:
        config = quick_config(epochs=4, chunks=4, staleness=staleness)
        trainer = Trainer(config, graph=graph, model=made(kind))
        truth.append([row.loss for row in trainer.fit().history])
    shapes = ((2, 1, 4), (1, 2, 4))
    for found in run_ranks(random_losses_on_ranks, 2, shapes, staleness):
        for losses, expected in zip(found, truth * 2, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)


FOLLOWED = [kind for kind in (*RANDOM, DropInEvaluation) if kind is not DropWeights]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
def test_verify_follows_random_edges(kind, graph):
    for chunks in (1, 4):
        config = quick_config(chunks=chunks, staleness="exact")
        assert verify(config, graph, made(kind)).is_equal
    with pytest.raises(InputError, match="which verify follows in exact runs alone; try --stale"):
        verify(quick_config(chunks=4), graph, made(kind))


def test_verify_follows_no_dropout_on_random_edges(graph):
    with pytest.raises(InputError, match="does not follow together with dropout on edges"):
        verify(quick_config(), graph, made(DropWeights))

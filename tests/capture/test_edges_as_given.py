"""Self-loops, parallel edges, weights and values of adj_t count as in plain PyG, on any shape."""

import copy

import pytest
import torch
from helpers import (
    NoDropout,
    assert_all_within,
    differences_of_shapes,
    plain_pyg_losses,
    quick_config,
    run_ranks,
)
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data

from gnnpipe import Graph, Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse invariant checks:UserWarning"),
]

N, IN, OUT = 40, 6, 3


def given(seed=0, weights=False):
    """A directed graph with self-loops (some twice) and parallel edges."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, N, (2, 160), generator=generator)
    loops = torch.randint(0, N, (1, 12), generator=generator).expand(2, -1)
    edges = torch.cat([edges, edges[:, :50], loops, loops[:, :3]], dim=1)
    data = Data(
        x=torch.rand(N, IN, generator=generator),
        edge_index=edges,
        y=torch.randint(0, OUT, (N,), generator=generator),
        train_mask=torch.arange(N) % 2 == 0,
        val_mask=torch.arange(N) % 4 == 1,
        test_mask=torch.arange(N) % 4 == 3,
    )
    if weights:
        data.edge_weight = 0.5 + torch.rand(edges.shape[1], generator=generator)
    return data


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edge_index, edge_weight=None):
        more = () if edge_weight is None else (edge_weight,)
        x = self.first(x, edge_index, *more).relu()
        return self.second(x, edge_index, *more)


def linear(i, o):
    return pyg.MLP([i, o], norm=None)


class GCNII(nn.Module):
    """As in PyG's example: the weights are in the graph."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(IN, 8), nn.Linear(8, OUT)
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(8, 0.1, 0.5, i + 1, normalize=False) for i in range(3)
        )

    def forward(self, x, edge_index, edge_weight=None):
        x = x_0 = self.encode(x).relu()
        for conv in self.convs:
            x = conv(x, x_0, edge_index, edge_weight).relu()
        return self.decode(x)


class Appnp(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.spread = nn.Linear(IN, OUT), pyg.APPNP(3, 0.1)

    def forward(self, x, edge_index, edge_weight=None):
        return self.spread(self.lin(x), edge_index, edge_weight)


CONVS = {
    "gcn": pyg.GCNConv,
    "gcn-loopless": lambda i, o: pyg.GCNConv(i, o, add_self_loops=False),
    "sage": pyg.SAGEConv,
    "sage-max": lambda i, o: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o: pyg.GINConv(linear(i, o)),
    "graph": pyg.GraphConv,
    "graph-mean": lambda i, o: pyg.GraphConv(i, o, aggr="mean"),
    "gat": pyg.GATConv,
    "gat-loopless": lambda i, o: pyg.GATConv(i, o, add_self_loops=False),
    "gat-dropout": lambda i, o: pyg.GATConv(i, o, dropout=0.4),
    "gatv2": pyg.GATv2Conv,
    "transformer": pyg.TransformerConv,
    "tag": pyg.TAGConv,
    "sg": lambda i, o: pyg.SGConv(i, o, K=2),
    "cluster": pyg.ClusterGCNConv,
    "cheb": lambda i, o: pyg.ChebConv(i, o, K=3),
    "le": pyg.LEConv,
    "arma": lambda i, o: pyg.ARMAConv(i, o, num_stacks=2, num_layers=3, dropout=0.2),
    "arma-shared": lambda i, o: pyg.ARMAConv(i, o, num_layers=2, shared_weights=True, act=None),
    "eg": lambda i, o: pyg.EGConv(i, o, ["symnorm", "mean"], num_heads=1),
    "edge": lambda i, o: pyg.EdgeConv(linear(2 * i, o)),
    "resgated": pyg.ResGatedGraphConv,
}
WEIGHTED = ("gcn", "gcn-loopless", "graph", "graph-mean", "tag", "sg", "cheb", "le", "arma")


def made(name):
    torch.manual_seed(0)
    if name in CONVS:
        return Two(CONVS[name](IN, 8), CONVS[name](8, OUT))
    return {"gcnii": GCNII, "appnp": Appnp}[name]()


def check(model, data, arguments, chunks, monkeypatch):
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    plain = copy.deepcopy(model).double()
    run = quick_config(
        epochs=4, chunks=chunks, staleness="auto" if chunks == 1 else "exact", require_capture=True
    )
    result = Trainer(run, graph=Graph.from_pyg(data), model=model).fit()
    torch.set_default_dtype(torch.float64)  # in which ClusterGCNConv counts degrees
    try:
        with NoDropout():
            truth = plain_pyg_losses(plain, data, arguments, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [row.loss for row in result.history] == pytest.approx(truth, rel=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", [*CONVS, "gcnii", "appnp"])
def test_loops_and_parallel_edges(name, chunks, monkeypatch):
    data = given()
    check(made(name), data, (data.x.double(), data.edge_index), chunks, monkeypatch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", [*WEIGHTED, "gcnii", "appnp"])
def test_weights(name, chunks, monkeypatch):
    data = given(weights=True)
    arguments = data.x.double(), data.edge_index, data.edge_weight.double()
    check(made(name), data, arguments, chunks, monkeypatch)


def matrix_of(data, dtype):
    """``adj_t`` as a torch CSR tensor with the edge weights; parallel edges stay apart."""
    order = torch.argsort(data.edge_index[1], stable=True)
    source, target = data.edge_index[:, order]
    ends = torch.searchsorted(target.contiguous(), torch.arange(N + 1))
    return torch.sparse_csr_tensor(ends, source, data.edge_weight[order].to(dtype), (N, N))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["gcn-loopless", "sage", "gin", "graph", "graph-mean", "gcnii"])
def test_values_of_an_adjacency_matrix(name, chunks, monkeypatch):
    data = given(weights=True)
    arguments = data.x.double(), matrix_of(data, torch.float64)
    data.adj_t = matrix_of(data, torch.float32)
    del data.edge_index, data.edge_weight
    check(made(name), data, arguments, chunks, monkeypatch)


def test_bare_ones_of_an_adjacency_matrix_are_no_weights(monkeypatch):
    data = given()
    data.edge_index = torch.unique(
        data.edge_index[:, data.edge_index[0] != data.edge_index[1]], dim=1
    )
    data.edge_weight = torch.ones(data.edge_index.shape[1])
    arguments = data.x.double(), data.edge_index
    data.adj_t = matrix_of(data, torch.float32)
    del data.edge_index, data.edge_weight
    check(made("gat"), data, arguments, 4, monkeypatch)


def on_ranks(shapes):
    def parts(name, rank, chunks):
        torch.manual_seed(rank)
        model = Two(CONVS[name](IN, 8), CONVS[name](8, OUT))
        return Graph.from_pyg(given()), model, {"staleness": "auto"}

    names = ["gcn", "gin", "gat-dropout", "sage-max"]
    return differences_of_shapes(shapes, names, 3, parts)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((2, 1, 4), (1, 2, 1), (1, 2, 4))], ids=["shapes"])
def test_every_shape_equals_one_autograd_graph(shapes):
    for found in run_ranks(on_ranks, 2, shapes):
        assert_all_within(found)


@pytest.mark.slow
def test_built_in_models_see_the_same(monkeypatch):
    """GCN: the graph's own self-loops are replaced, as in PyG's GCNConv; parallel edges count."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    graph = Graph.from_pyg(given())
    for name in ("gcn", "sage", "gat", "gcnii"):
        run = quick_config(model=name, layers=3, hidden=8, chunks=4)
        mesh = Mesh.alone()
        found = compare_epochs(graph, prepare(run, mesh, graph), mesh, 3)
        assert max(c.largest for c in found) < 1e-10, name

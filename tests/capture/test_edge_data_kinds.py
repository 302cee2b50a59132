"""Whole numbers of edges stay whole numbers, and relations have types and matrices of their own."""

import copy

import hetero_models
import numpy as np
import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Graph, Trainer
from gnnpipe.data.load import configured_graph
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.verification.verify import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse invariant checks:UserWarning"),
]
IN, HIDDEN, OUT, EPOCHS = 7, 8, 3, 4
BONDS = (5, 3)
"""Numbers of categories in each column."""


def bonds(flat, dtype=torch.int64):
    """A graph as PyG's ``Data`` with categories of each edge."""
    data = pyg_data(small_graph(seed=3, directed=True))
    rng = np.random.default_rng(0)
    found = rng.integers(0, BONDS, (data.edge_index.shape[1], len(BONDS)))
    data.edge_attr = torch.from_numpy(found[:, 0] if flat else found).to(dtype)
    return data


class Encoded(nn.Module):
    """As OGB's BondEncoder: an embedding for each column, in forward."""

    flat = False

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, HIDDEN) for count in BONDS)
        self.lin, self.last = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.convs = nn.ModuleList(pyg.GINEConv(nn.Linear(HIDDEN, HIDDEN)) for _ in range(2))

    def encode(self, edge_attr):
        return sum(one(edge_attr[:, i]) for i, one in enumerate(self.embeddings))

    def forward(self, x, edge_index, edge_attr):
        x, edges = self.lin(x), self.encode(edge_attr)
        for conv in self.convs:
            x = conv(x, edge_index, edges).relu()
        return self.last(x)


class Flat(Encoded):
    flat = True

    def encode(self, edge_attr):
        return self.embeddings[0](edge_attr)


class EmbeddingConv(pyg.MessagePassing):
    """Embeds the types of its edges in its messages."""

    def __init__(self, width_in, width_out):
        super().__init__(aggr="add")
        self.lin, self.embedding = nn.Linear(width_in, width_out), nn.Embedding(5, width_out)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return (x_j + self.embedding(edge_attr)).relu()


class InMessages(nn.Module):
    flat = True

    def __init__(self):
        super().__init__()
        self.first, self.second = EmbeddingConv(IN, HIDDEN), EmbeddingConv(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr), edge_index, edge_attr)


class AsItIs(Flat):
    """Cannot be recorded."""

    def forward(self, x, edge_index, edge_attr):
        out = super().forward(x, edge_index, edge_attr)
        return out + out.softmax(dim=0)


MODELS = [Encoded, Flat, InMessages]


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def plain(kind):
    data = bonds(kind.flat)
    return plain_pyg_losses(
        made(kind), data, (data.x.double(), data.edge_index, data.edge_attr), EPOCHS
    )


def run(**settings):
    return quick_config(**{"epochs": EPOCHS, "staleness": "exact", "eval_every": 0} | settings)


def losses_of(kind, world=None, **settings):
    graph = Graph.from_pyg(bonds(kind.flat))
    trainer = Trainer(run(**settings), graph=graph, model=made(kind), world=world)
    return [row.loss for row in trainer.fit().history]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_whole_numbers_are_whole_numbers_in_forward(kind, chunks):
    found = losses_of(kind, chunks=chunks, require_capture=True)
    assert found == pytest.approx(plain(kind), rel=1e-9)


def test_a_model_that_runs_as_it_is_gets_whole_numbers():
    assert losses_of(AsItIs) == pytest.approx(plain(AsItIs), rel=1e-9)


def on_ranks(shapes):
    found = []
    for stages, shards, chunks in shapes:
        shape = {"stages": stages, "shards": shards, "chunks": chunks}
        found += [losses_of(kind, Mesh.join(stages, shards), **shape) for kind in MODELS]
    return found


@pytest.mark.slow
def test_ranks_equal_plain_pyg():
    shapes = ((2, 1, 4), (1, 2, 1))
    truth = [plain(kind) for kind in MODELS] * len(shapes)
    for found in run_ranks(on_ranks, 2, shapes):
        for losses, expected in zip(found, truth, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("flat", [True, False])
def test_saved_graphs_and_npz_keep_the_type(flat, tmp_path):
    data = bonds(flat, torch.int32)
    graph = Graph.from_pyg(data)
    graph.save(tmp_path / "saved.npz")
    arrays = {k: v.numpy() for k, v in data.to_dict().items()}
    np.savez(tmp_path / "plain.npz", **arrays)
    names = ("saved.npz", "plain.npz")
    read = [configured_graph(run(dataset=str(tmp_path / name))) for name in names]
    order = np.lexsort(data.edge_index.numpy())
    for one in (graph, Graph.load(tmp_path / "saved.npz"), *read):
        assert one.edge_attr.dtype == np.int64
        assert np.array_equal(one.edge_attr, data.edge_attr.numpy()[order])


def test_resumed_runs_have_the_same_bits(tmp_path):
    whole = losses_of(Encoded, chunks=4)
    losses_of(Encoded, chunks=4, epochs=2, checkpoint_every=1, out=str(tmp_path / "a"))
    config = resumed_config(tmp_path / "a", {"epochs": EPOCHS})
    graph = Graph.from_pyg(bonds(False))
    rest = Trainer(config, graph=graph, model=made(Encoded), resume=tmp_path / "a").fit()
    assert [r.loss for r in rest.history] == whole


CITES, WRITES, BACK = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
)
WIDTH = hetero_models.HIDDEN


class Hetero(nn.Module):
    def __init__(self):
        super().__init__()
        widths = hetero_models.WIDTHS
        self.encoders = nn.ModuleDict({t: nn.Linear(w, WIDTH) for t, w in widths.items()})
        self.out = nn.Linear(WIDTH, hetero_models.OUT)
        self.make()

    def encoded(self, x_dict):
        return {t: self.encoders[t](x).relu() for t, x in x_dict.items()}


class TypesOfRelations(Hetero):
    """Kinds of citations for RGCNConv, and categories of authorship for GINEConv."""

    def make(self):
        self.kinds = nn.Embedding(4, WIDTH)
        self.conv = pyg.HeteroConv(
            {
                CITES: pyg.RGCNConv(WIDTH, WIDTH, 3),
                WRITES: pyg.GINEConv(nn.Linear(WIDTH, WIDTH)),
                BACK: pyg.SAGEConv((WIDTH, WIDTH), WIDTH),
            }
        )

    def forward(self, x_dict, edge_index_dict, edge_type_dict, edge_attr_dict):
        attributes = {WRITES: self.kinds(edge_attr_dict[WRITES])}
        h = self.conv(self.encoded(x_dict), edge_index_dict, edge_type_dict, attributes)
        return self.out(h["paper"].relu())

    @staticmethod
    def data():
        data, rng = hetero_models.hetero_data(subjects=False), np.random.default_rng(7)
        for relation, field, count in ((CITES, "edge_type", 3), (WRITES, "edge_attr", 4)):
            size = data[relation].edge_index.shape[1]
            data[relation][field] = torch.from_numpy(rng.integers(0, count, size))
        return data, {
            "edge_type_dict": (CITES, "edge_type"),
            "edge_attr_dict": (WRITES, "edge_attr"),
        }


class Matrices(Hetero):
    """Multiplies by the values of each relation's ``adj_t``."""

    def make(self):
        convs = {
            CITES: pyg.GCNConv(WIDTH, WIDTH),
            WRITES: pyg.GraphConv((WIDTH, WIDTH), WIDTH),
            BACK: pyg.SAGEConv((WIDTH, WIDTH), WIDTH),
        }
        self.convs = nn.ModuleList(pyg.HeteroConv(copy.deepcopy(convs)) for _ in range(2))

    def forward(self, x_dict, adj_t_dict):
        h = self.encoded(x_dict)
        for conv in self.convs:
            h = {t: v.relu() for t, v in conv(h, adj_t_dict).items()}
        return self.out(h["paper"] + torch.sparse.mm(adj_t_dict[WRITES], h["author"]))

    @staticmethod
    def data():
        data, rng = hetero_models.hetero_data(subjects=False), np.random.default_rng(7)
        counts = {t: data[t].x.shape[0] for t in data.node_types}
        for relation in data.edge_types:
            edges = data[relation].edge_index
            values = torch.from_numpy(rng.uniform(0.2, 2.0, edges.shape[1])).float()
            if relation == BACK:
                values = torch.ones_like(values)
            size = counts[relation[2]], counts[relation[0]]
            matrix = torch.sparse_coo_tensor(edges.flip(0), values, size).coalesce()
            data[relation].adj_t = matrix.to_sparse_csr()
            del data[relation].edge_index
        return data, {}


class MatricesAsItIs(Matrices):
    """Cannot be recorded."""

    def forward(self, x_dict, adj_t_dict):
        out = super().forward(x_dict, adj_t_dict)
        return out + out.softmax(dim=0)


def hetero_losses(kind, data, world=None, **settings):
    trainer = Trainer(run(**settings), graph=Graph.from_pyg(data), model=made(kind), world=world)
    return [row.loss for row in trainer.fit().history]


def plain_hetero(kind):
    data, more = kind.data()
    x = {k: v.double() for k, v in data.x_dict.items()}
    edges = {r: data[r].get("edge_index") for r in data.edge_types}
    if edges[CITES] is None:
        edges = {r: data[r].adj_t.to_sparse_coo().double().to_sparse_csr() for r in edges}
    given = [{relation: data[relation][field]} for relation, field in more.values()]
    return plain_pyg_losses(made(kind), data["paper"], (x, edges, *given), EPOCHS)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", [TypesOfRelations, Matrices])
def test_relations_have_types_and_matrices(kind, chunks):
    found = hetero_losses(kind, kind.data()[0], chunks=chunks, require_capture=True)
    assert found == pytest.approx(plain_hetero(kind), rel=1e-9)


def test_matrices_of_relations_where_a_model_runs_as_it_is():
    found = hetero_losses(MatricesAsItIs, MatricesAsItIs.data()[0])
    assert found == pytest.approx(plain_hetero(MatricesAsItIs), rel=1e-9)


@pytest.mark.parametrize("kind", [TypesOfRelations, Matrices])
def test_the_reference_of_verify_gets_the_same(kind):
    assert verify(run(chunks=2), Graph.from_pyg(kind.data()[0]), made(kind)).is_equal


def test_saved_relations_keep_types_and_matrices(tmp_path):
    for kind in (TypesOfRelations, Matrices):
        graph = Graph.from_pyg(kind.data()[0])
        graph.save(tmp_path / "saved.npz")
        loaded = Graph.load(tmp_path / "saved.npz")
        assert loaded.adjacency is graph.adjacency
        assert loaded.derived.keys() == graph.derived.keys()
        for name, values in graph.derived.items():
            assert loaded.derived[name].dtype == values.dtype
            assert np.array_equal(loaded.derived[name], values)


def hetero_on_ranks(shapes):
    found = []
    for stages, shards, chunks in shapes:
        shape = {"stages": stages, "shards": shards, "chunks": chunks}
        for kind in (TypesOfRelations, Matrices):
            found.append(hetero_losses(kind, kind.data()[0], Mesh.join(stages, shards), **shape))
    return found


@pytest.mark.slow
def test_relations_on_ranks_equal_plain_pyg():
    shapes = ((2, 1, 4), (1, 2, 1))
    truth = [plain_hetero(kind) for kind in (TypesOfRelations, Matrices)] * len(shapes)
    for found in run_ranks(hetero_on_ranks, 2, shapes):
        for losses, expected in zip(found, truth, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)

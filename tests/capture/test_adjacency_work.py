"""Work on a sparse matrix ``adj_t`` in forward is recorded, and gives the losses of plain PyG."""

import pytest
import torch
import torch.nn.functional as F
from helpers import plain_pyg_losses, quick_config, run_ranks
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import add_self_loops, spmm, to_edge_index

from gnnpipe import Graph, Trainer
from gnnpipe.capture.edge_work.program import random_numbers_of
from gnnpipe.errors import InputError
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSC tensor support:UserWarning"),
]
N, IN, HIDDEN, OUT, EPOCHS = 40, 6, 8, 3, 4


def given(layout=torch.sparse_csr, weights=True):
    """A directed graph whose edges are ``adj_t``, with values."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(N, N, generator=generator) < 0.1
    dense[3, 3] = dense[4, 4] = True
    data = Data(
        x=torch.rand(N, IN, generator=generator),
        edge_index=dense.nonzero().t().contiguous(),
        y=torch.randint(0, OUT, (N,), generator=generator),
        train_mask=torch.arange(N) % 2 == 0,
        val_mask=torch.arange(N) % 4 == 1,
        test_mask=torch.arange(N) % 4 == 3,
    )
    if weights:
        data.edge_weight = 0.5 + torch.rand(data.edge_index.shape[1], generator=generator)
    return ToSparseTensor(attr="edge_weight", layout=layout)(data)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x, adj_t):
        matrix = self.matrix(adj_t)
        return matrix @ self.second((matrix @ self.first(x)).relu())


class Normalised(Base):
    def matrix(self, adj_t):
        return gcn_norm(adj_t, add_self_loops=True)[0]


class WithLoops(Base):
    def matrix(self, adj_t):
        return add_self_loops(adj_t, fill_value=2.0)[0]


class Transposed(Base):
    def matrix(self, adj_t):
        return adj_t.t()


class Degrees(Base):
    """Divides by the sums of the rows, and multiplies by the given matrix too."""

    def forward(self, x, adj_t):
        degree = adj_t.sum(dim=1, keepdim=True).to_dense()
        x = torch.sparse.mm(adj_t, self.first(x)) / degree.clamp(min=1e-3)
        return self.second(x.relu() + x * degree) + adj_t @ self.second(x)


class Convolutions(nn.Module):
    """GCN2Conv and SAGEConv on normalised matrices, GATConv on the given one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.convs = nn.ModuleList(pyg.GCN2Conv(HIDDEN, 0.1, normalize=False) for _ in range(2))
        self.graph = pyg.GraphConv(HIDDEN, HIDDEN)

    def forward(self, x, adj_t):
        norm, _ = gcn_norm(adj_t, None, x.size(0))
        x = x_0 = self.first(x).relu()
        for conv in self.convs:
            x = conv(x, x_0, norm).relu()
        return self.last(self.graph(x, norm) + self.graph(x, adj_t))


class ByHand(Base):
    """Messages of the entries."""

    def forward(self, x, adj_t):
        (row, col), value = to_edge_index(adj_t)
        x = self.first(x)
        total = torch.zeros_like(x).index_add_(0, row, x[col] * value.view(-1, 1))
        return self.second(total.relu())


class Spmm(Base):
    def forward(self, x, adj_t):
        norm, _ = gcn_norm(adj_t)
        x = spmm(norm, self.first(x), reduce="mean").relu()
        return spmm(adj_t, self.second(x))


MODELS = [Normalised, WithLoops, Transposed, Degrees, Convolutions, ByHand, Spmm]


class DropValues(Base):
    def matrix(self, adj_t):
        values = F.dropout(adj_t.values(), 0.4, self.training)
        size = (adj_t.size(0), adj_t.size(1))
        return torch.sparse_csr_tensor(adj_t.crow_indices(), adj_t.col_indices(), values, size)


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def arguments(data):
    coo = data.adj_t.to_sparse_coo().double().coalesce()
    return data.x.double(), coo.to_sparse(layout=data.adj_t.layout)


def plain(kind, data):
    return plain_pyg_losses(made(kind), data, arguments(data), EPOCHS)


def run(**settings):
    return quick_config(epochs=EPOCHS, staleness="exact", eval_every=0, **settings)


def losses_of(kind, data, world=None, **settings):
    trainer = Trainer(run(**settings), graph=Graph.from_pyg(data), model=made(kind), world=world)
    return [row.loss for row in trainer.fit().history], trainer.predict()


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_equals_plain_pyg(kind, chunks):
    data = given(weights=kind is not Spmm)
    losses, logits = losses_of(kind, data, chunks=chunks, require_capture=True)
    model = made(kind)
    assert losses == pytest.approx(plain_pyg_losses(model, data, arguments(data), EPOCHS), rel=1e-9)
    assert torch.allclose(logits, model.eval()(*arguments(data)), 1e-8, 1e-9)


@pytest.mark.parametrize("kind", [Transposed, WithLoops])
def test_a_matrix_of_coordinates(kind):
    data = given(torch.sparse_coo)
    assert losses_of(kind, data, chunks=4)[0] == pytest.approx(plain(kind, data), rel=1e-9)


@pytest.mark.parametrize("chunks", [1, 4])
def test_dropped_values_equal_plain_pyg(chunks):
    data, model = given(), made(DropValues)
    found, _ = losses_of(DropValues, data, chunks=chunks, require_capture=True)
    optimizer, truth = torch.optim.Adam(model.parameters(), lr=0.01), []
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        with random_numbers_of(0, epoch):
            out = model(*arguments(data))
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        truth.append(loss.item())
    assert found == pytest.approx(truth, rel=1e-9)


class Dense(Base):
    def matrix(self, adj_t):
        return adj_t.to_dense()


class LearnedValues(Base):
    """The values depend on a weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def matrix(self, adj_t):
        values = adj_t.values() * self.scale
        size = (adj_t.size(0), adj_t.size(1))
        return torch.sparse_csr_tensor(adj_t.crow_indices(), adj_t.col_indices(), values, size)


@pytest.mark.parametrize(
    ("kind", "words"), [(Dense, "to_dense.*all pairs"), (LearnedValues, "^model: ")]
)
def test_what_cannot_be_recorded_runs_as_it_is(kind, words):
    data = given()
    with pytest.raises(InputError, match=words):
        losses_of(kind, data, require_capture=True)
    trainer = Trainer(run(), graph=Graph.from_pyg(data), model=made(kind))
    losses = [row.loss for row in trainer.fit().history]
    assert losses == pytest.approx(plain(kind, data), rel=1e-9)
    assert "runs as it is" in "".join(head_lines(trainer._setup()[1]))


def on_ranks(shapes):
    found = []
    for stages, shards, chunks in shapes:
        shape = {"stages": stages, "shards": shards, "chunks": chunks}
        mesh = Mesh.join(stages, shards)
        found += [losses_of(kind, given(), mesh, **shape)[0] for kind in MODELS if kind is not Spmm]
    return found


@pytest.mark.slow
def test_ranks_equal_plain_pyg():
    shapes = ((2, 1, 4), (1, 2, 1))
    truth = [plain(kind, given()) for kind in MODELS if kind is not Spmm] * len(shapes)
    for found in run_ranks(on_ranks, 2, shapes):
        for losses, expected in zip(found, truth, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)

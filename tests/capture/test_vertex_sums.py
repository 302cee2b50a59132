"""Sums over all vertices are exact on any shape whose program is exact."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NoDropout,
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

from gnnpipe import Trainer
from gnnpipe.errors import InputError
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare
from gnnpipe.verification.comparison import compare_epochs

IN, HIDDEN, OUT = 7, 8, 3


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(IN, HIDDEN), pyg.GCNConv(HIDDEN, OUT)
        self.lins = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x, edge_index):
        x = F.dropout(self.first(x, edge_index).relu(), 0.3, self.training)
        return self.second(self.between(x), edge_index)


class VirtualNode(Base):
    def between(self, x):
        return x + self.lins[0](x.mean(0, keepdim=True)).relu()


class Totals(Base):
    """A sum, a mean over all entries, and numbers of vertices."""

    def between(self, x):
        n = x.size(0)
        total = x.sum(dim=0) / n**0.5
        return x * total + torch.mean(x) * x.new_ones(n, 1) + x / x.shape[0]


class TwoInARow(Base):
    """The second mean is made of the first."""

    def between(self, x):
        centred = x - x.mean(dim=0)
        variance = (centred * centred).mean(dim=0)
        return centred / (variance + 1e-5).sqrt()


class Linear(Base):
    """After SGFormer's attention."""

    def between(self, x):
        q, k, v = (lin(x).view(x.size(0), 2, HIDDEN // 2) for lin in self.lins)
        q, k = q / torch.norm(q, p=2), k / torch.norm(k, p=2)
        n = q.shape[0]
        kvs = torch.einsum("lhm,lhd->hmd", k, v)
        num = torch.einsum("nhm,hmd->nhd", q, kvs) + n * v
        den = torch.einsum("nhm,hm->nh", q, k.sum(dim=0)).unsqueeze(-1) + n
        return (num / den).flatten(1)


class Products(Base):
    def between(self, x):
        q, k = F.normalize(self.lins[0](x), dim=-1), F.normalize(self.lins[1](x), dim=-1)
        return x + q @ (k.t() @ self.lins[2](x)) / x.size(0)


class OfFeatures(Base):
    """A sum of the input features."""

    def forward(self, x, edge_index):
        return super().forward(x - x.mean(0), edge_index)

    def between(self, x):
        return x


MODELS = {m.__name__: m for m in (VirtualNode, Totals, TwoInARow, Linear, Products, OfFeatures)}


def plain_losses(model, data, epochs):
    with NoDropout():
        return plain_pyg_losses(model, data, (data.x.double(), data.edge_index), epochs)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_pyg(name, chunks, monkeypatch):
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    torch.manual_seed(0)
    model, graph = MODELS[name](), small_graph()
    plain = copy.deepcopy(model).double()
    run = quick_config(epochs=5, chunks=chunks, staleness="exact", require_capture=True)
    trainer = Trainer(run, graph=graph, model=model)
    found = [row.loss for row in trainer.fit().history]
    data = pyg_data(graph)
    assert found == pytest.approx(plain_losses(plain, data, 5), rel=1e-9)
    truth = plain.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(trainer.predict(), truth, 1e-8, 1e-9)


def on_ranks(shapes):
    def parts(name, rank, chunks):
        torch.manual_seed(rank)
        return small_graph(), MODELS[name](), {"staleness": "exact"}

    return differences_of_shapes(shapes, ["VirtualNode", "Totals", "Linear"], 3, parts)


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((2, 1, 4), (1, 2, 1), (1, 2, 4))], ids=["shapes"])
def test_every_exact_shape_equals_one_autograd_graph(shapes):
    for found in run_ranks(on_ranks, 2, shapes):
        assert_all_within(found)


def stale_losses(shapes):
    found = []
    for stages, shards in shapes:
        mesh = Mesh.join(stages, shards)
        torch.manual_seed(mesh.rank)
        run = quick_config(epochs=5, stages=stages, shards=shards, chunks=4, eval_every=0)
        trainer = Trainer(run, graph=small_graph(), model=Linear(), world=mesh)
        found.append([row.loss for row in trainer.fit().history])
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
def test_stale_sums_do_not_depend_on_the_shape():
    """Law 2; parts of later chunks are those of the last epoch."""
    torch.manual_seed(0)
    run = quick_config(epochs=5, chunks=4, eval_every=0)
    truth = [r.loss for r in Trainer(run, graph=small_graph(), model=Linear()).fit().history]
    for found in run_ranks(stale_losses, 2, ((2, 1), (1, 2))):
        for losses in found:
            assert losses == pytest.approx(truth, rel=1e-9)


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("name", MODELS)
def test_with_frozen_weights_stale_sums_become_exact(name, monkeypatch):
    """Law 8."""
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    torch.manual_seed(0)
    model, graph = MODELS[name](), small_graph()
    run = quick_config(epochs=6, chunks=4, staleness="none", optimizer="SGD", lr=1e-30)
    found = [row.loss for row in Trainer(run, graph=graph, model=model).fit().history]
    (truth,) = plain_losses(copy.deepcopy(model), pyg_data(graph), 1)
    assert found[-1] == pytest.approx(truth, rel=1e-9)
    assert found[0] != pytest.approx(truth, rel=1e-6)


def test_verify_refuses_stale_sums():
    graph, mesh = small_graph(), Mesh.alone()
    prepared = prepare(quick_config(chunks=4), mesh, graph, VirtualNode())
    with pytest.raises(InputError, match="--staleness exact"):
        compare_epochs(graph, prepared, mesh, 1)


class Widest(Base):
    def between(self, x):
        return x - x.max(dim=0).values


class Over(Base):
    def between(self, x):
        return x * x.softmax(dim=0)


class FirstRow(Base):
    def between(self, x):
        return x - x[0]


@pytest.mark.parametrize("model", [Widest, Over, FirstRow])
def test_what_is_no_sum_is_refused(model):
    with pytest.raises(InputError, match=r"test_vertex_sums\.py, line"):
        Trainer(quick_config(chunks=2), graph=small_graph(), model=model()).fit()

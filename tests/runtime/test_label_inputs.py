"""Labels as inputs: the numbers of a loop of plain PyG, on every shape."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from models.test_plain_pyg import HIDDEN, LAYERS, PlainGCN
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import InputError, Trainer
from gnnpipe.ops.hashed_dropout import drawn_labels, row_keys
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

SHARE, EPOCHS, FEATURES, CLASSES = 0.4, 5, 7, 3
EXACT = {"staleness": "exact"}
ITERATIONS = [0, 2]


def drawn(count, epoch, seed=0, share=SHARE):
    return drawn_labels(row_keys(torch.arange(count)), share, seed, epoch)


def test_a_share_is_drawn_by_epoch_and_vertex_alone():
    for share in (0.03, 0.25, 0.625):
        found = torch.stack([drawn(20_000, epoch, 0, share) for epoch in range(4)]).double()
        deviation = (share * (1 - share) / 20_000) ** 0.5
        assert ((found.mean(1) - share).abs() < 4 * deviation).all()
        both = (found[0] * found[1]).mean()
        assert abs(float(both) - share**2) < 4 * deviation
    keys = row_keys(torch.arange(100))
    some = torch.tensor([5, 40, 99])
    assert (drawn_labels(keys[some], SHARE, 0, 3) == drawn(100, 3)[some]).all()
    assert (drawn(100, 3) != drawn(100, 3, seed=1)).any()


def multi_label_graph():
    graph = small_graph()
    y = np.random.default_rng(1).integers(-1, 2, (graph.num_vertices, CLASSES)).astype(np.int8)
    return replace(graph, y=y)


def labels_of(graph):
    """The labels [N, C] as numbers, 0 where unknown."""
    y = torch.from_numpy(graph.y)
    if graph.is_multi_label:
        return (y == 1).double()
    return F.one_hot(y.clamp(min=0), CLASSES).double() * (y >= 0)[:, None]


def plain(model, graph, iterations, lr=0.01, epochs=EPOCHS):
    """Losses and final logits of label reuse in plain PyG (arXiv 2103.13355)."""
    dense = graph.x.toarray() if sp.issparse(graph.x) else graph.x
    x, edges = torch.from_numpy(dense).double(), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    labels = labels_of(graph)

    def logits_with(given):
        columns = labels * given[:, None]
        with torch.no_grad():
            for _ in range(iterations):
                found = model(torch.cat([x, columns], 1), edges)
                found = found.sigmoid() if graph.is_multi_label else found.softmax(-1)
                columns = torch.where(given[:, None], columns, found)
        return model(torch.cat([x, columns], 1), edges)

    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for epoch in range(epochs):
        model.train()
        given = train & drawn(len(train), epoch)
        rest = train & ~given
        optimizer.zero_grad()
        logits = logits_with(given)[rest]
        if graph.is_multi_label:
            known = y[rest] >= 0
            truth = y[rest][known].double()
            loss = F.binary_cross_entropy_with_logits(logits[known], truth)
        else:
            loss = F.cross_entropy(logits, y[rest])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, logits_with(train) if not model.eval().training else None


class Net(nn.Module):
    """SAGE with BatchNorm, whose running statistics count every pass in training mode."""

    def __init__(self, dropout=0.0):
        super().__init__()
        # No bias before a norm: Adam would step by the sign of a gradient of rounding errors.
        self.first = pyg.SAGEConv(FEATURES + CLASSES, 8, bias=False)
        self.last = pyg.SAGEConv(8, CLASSES)
        self.norm, self.dropout = nn.BatchNorm1d(8), dropout

    def forward(self, x, edge_index):
        x = F.dropout(x, self.dropout, self.training)
        x = self.norm(self.first(x, edge_index)).relu()
        return self.last(F.dropout(x, self.dropout, self.training), edge_index)


class Linear(Net):
    """Its first layer is a linear map of the features, sparse if they are."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES + CLASSES, 8)
        self.first = pyg.GCNConv(8, 8, bias=False)

    def forward(self, x, edge_index):
        x = self.norm(self.first(self.encode(x), edge_index)).relu()
        return self.last(x, edge_index)


class Whole(Net):
    """Attends over all vertices, which cannot be recorded."""

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        x = (x @ x.t()).softmax(dim=1) @ x
        return self.last(self.norm(x), edge_index)


def made(kind, **settings):
    torch.manual_seed(0)
    return kind(**settings).double()


def trained(graph, model, iterations, **settings):
    given = {"label_inputs": SHARE, "label_iterations": iterations, "epochs": EPOCHS}
    trainer = Trainer(quick_config(**given | settings), graph=graph, model=model)
    return [row.loss for row in trainer.fit().history], trainer


def assert_is_plain(found, trainer, truth):
    losses, logits = truth
    assert found == pytest.approx(losses, rel=1e-9)
    assert torch.allclose(trainer.predict(), logits, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [Net, Linear])
def test_a_recorded_model_equals_plain_pyg(kind, sparse, chunks, iterations):
    graph, model = small_graph(sparse=sparse), made(kind)
    truth = plain(copy.deepcopy(model), graph, iterations)
    found = trained(graph, model, iterations, chunks=chunks, require_capture=True, **EXACT)
    assert_is_plain(*found, truth)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_model_that_runs_as_it_is_equals_plain_pyg(sparse, iterations):
    graph, model = small_graph(sparse=sparse), made(Whole)
    truth = plain(copy.deepcopy(model), graph, iterations)
    assert_is_plain(*trained(graph, model, iterations), truth)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_built_in_model_equals_plain_pyg(chunks, iterations):
    graph = small_graph()
    wide = replace(graph, x=np.zeros((graph.num_vertices, FEATURES + CLASSES), np.float32))
    settings = {"layers": LAYERS, "hidden": HIDDEN, "dropout": 0.0}
    same = Trainer(quick_config(**settings), graph=wide)
    model = PlainGCN(same.model.stack(), wide).double()
    truth = plain(model, graph, iterations)
    found = trained(graph, None, iterations, chunks=chunks, **settings, **EXACT)
    assert_is_plain(*found, truth)


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_several_labels_at_once_equal_plain_pyg(chunks, iterations):
    graph, model = multi_label_graph(), made(Net)
    truth = plain(copy.deepcopy(model), graph, iterations)
    assert_is_plain(*trained(graph, model, iterations, chunks=chunks, **EXACT), truth)

"""User losses: the same results on every shape; refused unless a sum over rows."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import pyg_data, quick_config, run_ranks, small_graph
from torch_geometric.nn import GCN, SGConv

from gnnpipe import InputError, TrainConfig, Trainer
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare
from gnnpipe.verification.comparison import compare_epochs


def weighted(logits, y):
    """Classes of different weight, and labels smoothed."""
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=logits.dtype)
    return F.cross_entropy(logits, y, weight=weight, reduction="sum", label_smoothing=0.1)


def own_loss(shapes):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        run = TrainConfig(
            layers=3,
            hidden=8,
            stages=stages,
            shards=shards,
            chunks=chunks,
            epochs=3,
            dtype="float64",
            cache_dir="off",
        )
        prepared = prepare(run, mesh, small_graph(), loss_fn=weighted)
        found += [c.largest for c in compare_epochs(small_graph(), prepared, mesh, 3)]
    return max(found)


def test_user_loss():
    assert own_loss([(1, 1, 1), (1, 1, 20)]) < 1e-11
    assert run_ranks(own_loss, 2, [(2, 1, 6), (1, 2, 6)])[0] < 1e-11
    graph = small_graph()
    run = TrainConfig(layers=3, hidden=8, dropout=0.0, epochs=1, out="off", cache_dir="off")
    trainer = Trainer(run, graph=graph, loss_fn=weighted)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    truth = weighted(trainer.predict()[train], y[train]) / int(train.sum())
    assert trainer.fit().loss == pytest.approx(float(truth), rel=1e-5)


TEACHER = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).double()


def distilled(logits, y, vertices, epoch):
    """The labels first; then a teacher's logits, found by vertex."""
    soft = F.kl_div(logits.log_softmax(-1), TEACHER[vertices].softmax(-1), reduction="sum")
    return F.cross_entropy(logits, y, reduction="sum") if epoch < 2 else soft


def losses_of_distilled(shapes):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        shape = {"stages": stages, "shards": shards, "chunks": chunks}
        run = quick_config(layers=3, hidden=8, dropout=0.0, epochs=4, staleness="exact", **shape)
        trainer = Trainer(run, graph=small_graph(), loss_fn=distilled, world=mesh)
        found.append([row.loss for row in trainer.fit().history])
        prepared = prepare(run, mesh, small_graph(), loss_fn=distilled)
        assert max(c.largest for c in compare_epochs(small_graph(), prepared, mesh, 4)) < 1e-10
    return found


def test_a_loss_gets_vertices_and_epoch():
    (truth,) = losses_of_distilled([(1, 1, 1)])
    for found in run_ranks(losses_of_distilled, 2, [(2, 1, 6), (1, 2, 6)]):
        for losses in found:
            assert losses == pytest.approx(truth, rel=1e-9)
    graph, torch_model = small_graph(), SGConv(7, 3).double()
    plain, data = copy.deepcopy(torch_model), pyg_data(graph)
    run = quick_config(epochs=4, chunks=4, staleness="exact")
    trainer = Trainer(run, graph=graph, model=torch_model, loss_fn=distilled)
    losses = [row.loss for row in trainer.fit().history]
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    rows = data.train_mask.nonzero()[:, 0]
    for epoch, found in enumerate(losses):
        optimizer.zero_grad()
        logits = plain(data.x.double(), data.edge_index)[rows]
        loss = distilled(logits, data.y[rows], rows, epoch) / len(rows)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (F.cross_entropy, r"for 6 rows, but .* try reduction='sum'"),
        (lambda x, y: F.cross_entropy(x, y, reduction="none"), "must return one number"),
        (lambda x, y: 3.0, "must return one number"),
        (lambda x, y: F.mse_loss(x, y), "fails on logits"),
        ("ce", "'ce' is not a function"),
    ],
)
def test_a_loss_that_is_not_a_sum_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        Trainer(TrainConfig(out="off"), graph=small_graph(), loss_fn=loss).fit()


def only_one_class(logits, y):
    """A constant where a chunk has none of it, which some losses give."""
    chosen = y == 2
    return (
        F.cross_entropy(logits[chosen], y[chosen], reduction="sum")
        if chosen.any()
        else (torch.zeros((), dtype=logits.dtype))
    )


def test_a_chunk_that_the_loss_leaves_out_loses_no_gradient():
    class Rowwise(torch.nn.Module):
        """The map of the features stands in the step of the loss."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(9, 8), torch.nn.Linear(8, 3)

        def forward(self, x, edge_index):
            return self.b(self.a(x).relu())

    graph = small_graph(n=60, features=9)
    weights = []
    for chunks in (1, 20):
        run = TrainConfig(
            chunks=chunks,
            staleness="exact",
            epochs=2,
            lr=0.1,
            dtype="float64",
            out="off",
            cache_dir="off",
            quiet=True,
        )
        trainer = Trainer(run, graph=graph, model=Rowwise(), loss_fn=only_one_class)
        trainer.fit()
        weights.append(trainer.model.state_dict())
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-9), name


def masked(logits, y):
    """The loss of OGB's scripts."""
    is_labeled = y == y
    return F.binary_cross_entropy_with_logits(logits[is_labeled], y[is_labeled], reduction="sum")


def labels_missing():
    graph = small_graph()
    y = np.random.default_rng(5).integers(-1, 2, (60, 4)).astype(np.int8)
    known = (y >= 0).any(axis=1)
    masks = {f: getattr(graph, f) & known for f in ("train_mask", "val_mask", "test_mask")}
    return replace(graph, y=y, num_classes=4, **masks)


def test_missing_labels_are_nan_in_a_users_loss():
    graph = labels_missing()
    torch.manual_seed(0)
    model = GCN(7, 8, 2, 4)
    plain = copy.deepcopy(model).double()
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    train = torch.from_numpy(graph.train_mask)
    y = torch.from_numpy(graph.y).double()[train]
    y[y < 0] = torch.nan
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    truth = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = masked(plain(x, edges)[train], y) / int((y == y).sum())
        loss.backward()
        optimizer.step()
        truth.append(loss.item())
    for chunks in (1, 6):
        run = quick_config(epochs=4, chunks=chunks, staleness="exact")
        found = Trainer(run, graph=graph, model=copy.deepcopy(model), loss_fn=masked).fit()
        assert [r.loss for r in found.history] == pytest.approx(truth, rel=1e-10)


def test_reference_gives_a_users_loss_nan_for_missing_labels():
    graph, mesh = labels_missing(), Mesh.join(1, 1)
    prepared = prepare(quick_config(chunks=6, hidden=8), mesh, graph, loss_fn=masked)
    assert max(c.largest for c in compare_epochs(graph, prepared, mesh, 3)) < 1e-11


def test_a_loss_that_does_not_mask_missing_labels_is_refused():
    def loss(logits, y):
        return F.binary_cross_entropy_with_logits(logits, y, reduction="sum")

    with pytest.raises(InputError, match=r"loss_fn: returns nan where labels are missing \(NaN\)"):
        Trainer(quick_config(), graph=labels_missing(), loss_fn=loss).fit()

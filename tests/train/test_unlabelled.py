"""Graphs without labels or without a split: predicted for, trained by the user's loss alone."""

import copy
import csv
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import pyg_data, quick_config, run_ranks, small_graph
from hetero_models import hetero_data, to_hetero
from torch_geometric import nn as pyg

from gnnpipe import Graph, TrainConfig, Trainer, resumed_config, verify
from gnnpipe.data.load import configured_graph, load_graph
from gnnpipe.errors import InputError
from gnnpipe.runtime.comm.mesh import Mesh

IN, OUT = 7, 3


def without(*fields):
    data = pyg_data(small_graph(seed=3))
    for field in fields:
        del data[field]
    return data


UNLABELLED = ("y", "train_mask", "val_mask", "test_mask")


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("fields", [UNLABELLED, ("y",), UNLABELLED[1:]], ids=["bare", "y", "split"])
def test_predictions_are_those_of_plain_pyg(fields, chunks):
    torch.manual_seed(0)
    model = pyg.GraphSAGE(IN, 8, 2, OUT)
    Trainer(quick_config(chunks=chunks), graph=small_graph(), model=model).fit()
    data = without(*fields)
    graph = Graph.from_pyg(data)
    found = Trainer(quick_config(chunks=chunks), graph=graph, model=model).predict()
    with torch.no_grad():
        truth = model.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(found, truth, 1e-9, 1e-12)


def test_a_model_that_runs_as_it_is_predicts_too():
    class Softmax(pyg.GraphSAGE):
        def forward(self, x, edge_index):
            x = super().forward(x, edge_index)
            return (x @ x.t()).softmax(dim=1) @ x

    data, model = without(*UNLABELLED), Softmax(IN, 8, 2, 5)
    found = Trainer(quick_config(), graph=Graph.from_pyg(data), model=model).predict()
    with torch.no_grad():
        truth = model.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(found, truth, 1e-9, 1e-12)


def test_a_built_in_model_needs_the_number_of_classes():
    data = without(*UNLABELLED)
    with pytest.raises(InputError, match=r"no labels, so the width.*num_classes="):
        Trainer(quick_config(), graph=Graph.from_pyg(data)).predict()
    found = Trainer(quick_config(), graph=Graph.from_pyg(data, num_classes=4)).predict()
    assert found.shape == (60, 4)


@pytest.mark.parametrize(
    ("fields", "call", "words"),
    [
        (("y",), "fit", r"'pyg': no y, which fit\(\) needs; try data\.y.* or loss_fn="),
        (UNLABELLED, "evaluate", r"'pyg': no y, which evaluate\(\) needs"),
        (UNLABELLED[1:], "fit", r"no split .*, which fit\(\) needs; .*split='60/20/20'"),
    ],
)
def test_training_needs_labels_and_a_split(fields, call, words):
    trainer = Trainer(
        quick_config(), graph=Graph.from_pyg(without(*fields)), model=pyg.GCN(IN, 8, 2, OUT)
    )
    with pytest.raises(InputError, match=words):
        getattr(trainer, call)()


def test_one_logit_for_two_classes_is_refused():
    data = pyg_data(small_graph(classes=2))
    trainer = Trainer(quick_config(), graph=Graph.from_pyg(data), model=pyg.GCN(IN, 8, 2, 1))
    with pytest.raises(InputError, match=r"gives 1 numbers .* each class needs a logit"):
        trainer.fit()


def test_classes_without_a_vertex():
    data, model = without(), pyg.GCN(IN, 8, 2, 5)
    with pytest.raises(InputError, match=r"gives 5 numbers.*3 classes; .*num_classes=5"):
        Trainer(quick_config(), graph=Graph.from_pyg(data), model=model).fit()
    graph = Graph.from_pyg(data, num_classes=5)
    assert Trainer(quick_config(), graph=graph, model=model).fit().loss > 0
    with pytest.raises(InputError, match=r"num_classes is 2"):
        Graph.from_pyg(data, num_classes=2)
    with pytest.raises(InputError, match="num_classes 5 has no meaning for regression"):
        Graph.from_pyg(data, num_classes=5, task="regression")


def separate(rows):
    """A loss without labels, summed over rows [R, 5]."""
    return F.softplus(-rows[:, 0]).sum() + rows[:, 1:].square().sum()


def separate_by_vertex(rows, vertices, epoch):
    return ((1 + vertices + epoch) * (rows[:, 0] - 1).square()).sum() + separate(rows)


class Whole(pyg.GCN):
    """Mixes all pairs of rows, and so runs as it is."""

    def forward(self, x, edge_index):
        x = super().forward(x, edge_index)
        return (x @ x.t()).softmax(dim=1) @ x


def model_of(kind):
    torch.manual_seed(0)
    return kind(IN, 8, 2, 5)


def plain_losses(kind, data, loss, epochs=3):
    """Losses of a plain PyG script, a mean over the vertices trained on."""
    model, x = model_of(kind).double(), data.x.double()
    chosen = torch.ones(60, dtype=torch.bool) if "train_mask" not in data else data.train_mask
    vertices = chosen.nonzero()[:, 0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(epochs):
        optimizer.zero_grad()
        given = () if loss is separate else (vertices, epoch)
        found = loss(model(x, data.edge_index)[chosen], *given) / len(vertices)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def losses_of(shapes, fields, kind, loss):
    found = []
    for stages, shards, chunks in shapes:
        shape = {"stages": stages, "shards": shards, "chunks": chunks}
        graph = Graph.from_pyg(without(*fields))
        mesh = Mesh.join(stages, shards)
        config = quick_config(staleness="exact", **shape)
        trainer = Trainer(config, graph=graph, model=model_of(kind), loss_fn=loss, world=mesh)
        found.append([row.loss for row in trainer.fit().history])
    return found


@pytest.mark.parametrize("fields", [UNLABELLED, ("y",), ("y", "val_mask", "test_mask")])
def test_losses_without_labels_are_those_of_plain_pyg(fields):
    for kind, shapes in ((pyg.GCN, [(1, 1, 1), (1, 1, 4)]), (Whole, [(1, 1, 1)])):
        for loss in (separate, separate_by_vertex):
            truth = plain_losses(kind, without(*fields), loss)
            for losses in losses_of(shapes, fields, kind, loss):
                assert losses == pytest.approx(truth, rel=1e-9)


def test_training_without_labels_on_several_ranks():
    truth = plain_losses(pyg.GCN, without("y"), separate_by_vertex)
    shapes = [(2, 1, 4), (1, 2, 1)]
    for found in run_ranks(losses_of, 2, shapes, ("y",), pyg.GCN, separate_by_vertex):
        for losses in found:
            assert losses == pytest.approx(truth, rel=1e-9)


def test_there_are_no_scores(tmp_path, capsys):
    graph, run = Graph.from_pyg(without(*UNLABELLED)), tmp_path / "run"
    config = quick_config(out=str(run), quiet=False, checkpoint_every=2, epochs=2)
    result = Trainer(config, graph=graph, model=model_of(pyg.GCN), loss_fn=separate).fit()
    assert math.isnan(result.test_acc)
    assert result.weights_of_epoch == 2
    assert "split 60/0/0" in capsys.readouterr().out
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert {row["val_acc"] for row in rows} == {""}
    assert json.loads((run / "result.json").read_text())["test_metric"] is None
    again = Trainer(
        resumed_config(run, {"epochs": 3}),
        graph=graph,
        model=model_of(pyg.GCN),
        loss_fn=separate,
        resume=run,
    ).fit()
    truth = plain_losses(pyg.GCN, without(*UNLABELLED), separate)
    assert [row.loss for row in again.history] == pytest.approx(truth, rel=1e-9)
    loaded = Trainer.load(run, graph=graph, model=model_of(pyg.GCN))
    assert loaded.predict().shape == (60, 5)
    with pytest.raises(InputError, match=r"no y, which evaluate\(\) needs"):
        loaded.evaluate()


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        (F.cross_entropy, {}, r"loss_fn: fails on rows \[6, 5\]; .*'pyg' has no labels.*\(rows\)"),
        (lambda rows: rows.mean(), {}, r"for 6 rows, but .* try reduction='sum'"),
        (
            separate,
            {"patience": 2, "eval_every": 1},
            r"--patience 2: pyg has no labels, and so no scores; leave",
        ),
        (separate, {"label_inputs": 0.5}, "--label-inputs 0.5: pyg has no labels; leave it out"),
        (separate, {"keep_weights": "best"}, "--keep-weights best: pyg has no labels"),
        (
            separate,
            {"lr_schedule": "plateau", "lr_patience": 1, "eval_every": 1},
            "--lr-schedule plateau: pyg has no labels",
        ),
    ],
)
def test_settings_that_need_labels_are_refused(loss, settings, words):
    graph = Graph.from_pyg(without("y"))
    trainer = Trainer(quick_config(**settings), graph=graph, model=model_of(pyg.GCN), loss_fn=loss)
    with pytest.raises(InputError, match=words):
        trainer.fit()


def test_a_loss_of_probabilities_is_tried_on_probabilities():
    class Probable(pyg.GCN):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index).sigmoid()

    def likely(rows):
        return F.binary_cross_entropy(rows, torch.ones_like(rows), reduction="sum")

    graph = Graph.from_pyg(without(*UNLABELLED))
    assert Trainer(quick_config(), graph, model_of(Probable), loss_fn=likely).fit().loss > 0


def test_files_without_labels(tmp_path):
    data = without(*UNLABELLED)
    np.savez(tmp_path / "a.npz", edge_index=data.edge_index, x=data.x, train_mask=np.arange(9))
    Graph.from_pyg(data).save(tmp_path / "b.npz")
    edges = "\n".join(f"{a},{b}" for a, b in data.edge_index.t().tolist())
    (tmp_path / "edges.csv").write_text("source,target\n" + edges)
    vertices = "\n".join(f"{i},{','.join(map(str, x))}" for i, x in enumerate(data.x.tolist()))
    (tmp_path / "vertices.csv").write_text("id,a,b,c,d,e,f,g\n" + vertices)
    for name in ("a.npz", "b.npz", "edges.csv"):
        path = str(tmp_path / name)
        read = configured_graph(TrainConfig(dataset=path), needs_labels=False)
        assert read.train_mask.sum() == (9 if name == "a.npz" else 60)
        with pytest.raises(InputError, match=r"label|'y'"):
            load_graph(path)
        expected = copy.copy(data)
        if name == "a.npz":
            expected.train_mask = torch.arange(60) < 9
        config = quick_config(dataset=path, out=str(tmp_path / f"run of {name}"))
        found = Trainer(config, model=model_of(pyg.GCN), loss_fn=separate).fit()
        truth = plain_losses(pyg.GCN, expected, separate)
        assert [row.loss for row in found.history] == pytest.approx(truth, rel=1e-5)
        loaded = Trainer.load(found.path, model=model_of(pyg.GCN))
        assert loaded.predict().shape == (60, 5)


def test_a_split_by_percentages_without_labels():
    graph = Graph.from_pyg(without(*UNLABELLED), split="50/25/25")
    assert graph.train_mask.sum() == 30


def test_a_schedule_that_follows_the_scores_is_refused():
    trainer = Trainer(
        quick_config(),
        graph=Graph.from_pyg(without("y")),
        model=model_of(pyg.GCN),
        loss_fn=separate,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
    )
    with pytest.raises(InputError, match=r"scheduler: ReduceLROnPlateau .*; pyg has no labels"):
        trainer.fit()


def test_verify_without_labels():
    graph = Graph.from_pyg(without("y"))
    config = quick_config(chunks=3)
    assert verify(config, graph, model_of(pyg.GCN), loss_fn=separate_by_vertex).is_equal
    with pytest.raises(InputError, match=r"no y, which verify\(\) needs"):
        verify(config, graph, model_of(pyg.GCN))


def test_several_types_without_labels():
    bare = hetero_data(subjects=False)
    del bare["paper"].y, bare["paper"].val_mask, bare["paper"].test_mask
    model = to_hetero()
    with torch.no_grad():
        rows = model(bare.x_dict, bare.edge_index_dict)["paper"]
    truth = rows[bare["paper"].train_mask].square().sum(1).mean().item()
    graph = Graph.from_pyg(bare, target="paper")
    config = quick_config(epochs=1, chunks=2, staleness="exact", dtype="float32")
    found = Trainer(config, graph, model, loss_fn=lambda rows: rows.square().sum()).fit()
    assert found.loss == pytest.approx(truth, rel=1e-4)


def corrupted(x, edge_index):
    return x[torch.randperm(x.size(0))], edge_index


def summary(z, *args, **kwargs):
    return z.mean(dim=0).sigmoid()


class Infomax(pyg.DeepGraphInfomax):
    def forward(self, x, edge_index):
        pos_z, neg_z, mean = super().forward(x, edge_index)
        return torch.stack([self.discriminate(z, mean) for z in (pos_z, neg_z)], dim=1)


def test_infomax_is_that_of_a_pyg_script():
    def loss(rows):
        return -(torch.log(rows[:, 0] + 1e-15) + torch.log(1 - rows[:, 1] + 1e-15)).sum()

    data = without(*UNLABELLED)
    torch.manual_seed(1)
    model = Infomax(8, pyg.GCNConv(IN, 8), summary, corrupted)
    plain = copy.deepcopy(model).double()
    optimizer, truth = torch.optim.Adam(plain.parameters(), lr=0.01), []
    torch.manual_seed(2)
    for _ in range(3):
        optimizer.zero_grad()
        found = plain.loss(*pyg.DeepGraphInfomax.forward(plain, data.x.double(), data.edge_index))
        found.backward()
        optimizer.step()
        truth.append(found.item())
    torch.manual_seed(2)
    result = Trainer(quick_config(), Graph.from_pyg(data), model, loss_fn=loss).fit()
    assert [row.loss for row in result.history] == pytest.approx(truth, rel=1e-9)

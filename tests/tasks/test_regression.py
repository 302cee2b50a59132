"""Regression: loss, scores and errors."""

import copy
import math
from dataclasses import replace

import numpy as np
import pyg_models
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from torch_geometric.data import Data

from gnnpipe import Graph, Trainer
from gnnpipe.data.load import load_graph
from gnnpipe.errors import InputError
from gnnpipe.tasks.scoring import error_sums, regression_score, target_sums


def graph_of_numbers(targets=3, missing=True, seed=1):
    g = small_graph()
    rng = np.random.default_rng(seed)
    y = (rng.standard_normal((60, targets)) + g.x[:, :1]).astype(np.float32)
    if missing:
        y[rng.random(y.shape) < 0.2] = np.nan
    known = (~np.isnan(y)).any(axis=1)
    masks = {f: getattr(g, f) & known for f in ("train_mask", "val_mask", "test_mask")}
    return replace(g, y=y, num_classes=targets, **masks)


def scores(found, y, mask, metric):
    """By the textbook, target by target."""
    each = []
    for t in range(y.shape[1]):
        known = mask & ~np.isnan(y[:, t])
        each.append((found[known, t] - y[known, t], y[known, t]))
    if metric == "r2":
        return np.mean([1 - (e**2).sum() / ((v - v.mean()) ** 2).sum() for e, v in each])
    errors = np.concatenate([e for e, _ in each])
    return np.abs(errors).mean() if metric == "mae" else math.sqrt((errors**2).mean())


@pytest.mark.parametrize("metric", ["auto", "mae", "rmse"])
def test_equals_plain_pyg(metric):
    graph = graph_of_numbers()
    torch.manual_seed(0)
    model = pyg_models.Sgc()
    plain = copy.deepcopy(model).double()
    trainer = Trainer(quick_config(epochs=4, metric=metric), graph=graph, model=model)
    result = trainer.fit()
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y).double(), torch.from_numpy(graph.train_mask)
    known = train[:, None] & ~y.isnan()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    truth = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(plain(x, edges)[known], y[known])
        loss.backward()
        optimizer.step()
        truth.append(loss.item())
    np.testing.assert_allclose([r.loss for r in result.history], truth, rtol=1e-10)
    found = plain(x, edges).detach().numpy()
    assert result.metric == ("r2" if metric == "auto" else metric)
    for part in ("train", "val", "test"):
        wanted = scores(found, y.numpy(), getattr(graph, f"{part}_mask"), result.metric)
        assert getattr(result, f"{part}_metric") == pytest.approx(wanted, rel=1e-9)
        assert math.isnan(getattr(result, f"{part}_acc"))


def on_ranks(stages, shards):
    run = quick_config(
        epochs=4, stages=stages, shards=shards, chunks=6, model="gcnii", layers=4, hidden=8
    )
    result = Trainer(run, graph=graph_of_numbers()).fit()
    return [r.loss for r in result.history], result.test_metric


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_same_results_on_ranks(shape):
    alone = on_ranks(1, 1)
    for losses, metric in run_ranks(on_ranks, 2, *shape):
        np.testing.assert_allclose(losses, alone[0], rtol=1e-9)
        assert metric == pytest.approx(alone[1], rel=1e-9)


def test_the_reference_agrees():
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh = Mesh.join(1, 1)
    prepared = prepare(quick_config(epochs=4, chunks=6, model="sage"), mesh, graph_of_numbers())
    assert max(c.largest for c in compare_epochs(graph_of_numbers(), prepared, mesh, 3)) < 1e-10


def test_the_best_epoch_has_the_least_error():
    graph = graph_of_numbers(targets=1)
    run = quick_config(metric="rmse", epochs=30, eval_every=1, keep_weights="best", lr=0.3)
    result = Trainer(run, graph=graph).fit()
    errors = [row.scores.val_metric for row in result.history]
    assert result.best_val_metric == min(errors) < errors[-1]
    assert result.best_epoch == 1 + errors.index(min(errors))


def r2(found, y):
    """R2 of float32 tensors [R, T], from the sums that every rank adds up."""
    counts = target_sums(y)
    return regression_score(error_sums(found, y, counts[:, 1] / counts[:, 0]).numpy(), "r2")


def test_a_constant_target():
    y = torch.full((4, 1), 0.1)
    assert r2(y, y) == 1.0
    assert r2(torch.zeros(4, 1), y) == 0.0
    sums = error_sums(y, y * math.nan, torch.zeros(1))
    assert math.isnan(regression_score(sums.numpy(), "rmse"))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, -1e6])
def test_r2_of_targets_far_from_zero(offset):
    """Sums of squares of such targets agree in all the digits that float64 has."""
    generator = torch.Generator().manual_seed(0)
    y = offset + torch.randn(200, 2, generator=generator).round(decimals=1)
    y[5, 0] = math.nan
    found = y.nan_to_num(offset) + 0.5 * torch.randn(200, 2, generator=generator)
    truth = scores(found.double().numpy(), y.double().numpy(), np.ones(200, dtype=bool), "r2")
    assert 0.5 < truth < 1
    assert r2(found, y) == pytest.approx(truth, rel=1e-9)


def offset_scores(stages, shards):
    g = small_graph()
    y = (1e6 + g.x[:, :1].round(1)).astype(np.float32)
    run = quick_config(epochs=1, stages=stages, shards=shards, chunks=4, model="gcn", layers=2)
    trainer = Trainer(run, graph=replace(g, y=y, num_classes=1))
    result = trainer.fit()
    mask = torch.from_numpy(g.test_mask)
    truth = torch.from_numpy(y)[mask].double()
    error = (trainer.predict()[mask] - truth).square().sum()
    return result.test_metric, 1 - float(error / (truth - truth.mean()).square().sum())


def test_r2_of_a_run_with_targets_far_from_zero():
    found, truth = offset_scores(1, 1)
    assert found == pytest.approx(truth, rel=1e-9)
    for found, truth in run_ranks(offset_scores, 2, 1, 2):
        assert found == pytest.approx(truth, rel=1e-9)


def data(y):
    part = torch.arange(5) % 3
    masks = {f"{n}_mask": part == i for i, n in enumerate(("train", "val", "test"))}
    return Data(x=torch.rand(5, 2), y=y, edge_index=torch.tensor([[0, 1], [1, 2]]), **masks)


def test_regression_is_requested_by_name(tmp_path):
    y = torch.tensor([0.5, 1, 2, 3, 4])
    with pytest.raises(InputError, match=r"y\[0\] = 0\.5.*task='regression'"):
        Graph.from_pyg(data(y))
    g = Graph.from_pyg(data(y), task="regression")
    assert g.is_regression
    assert not g.is_multi_label
    assert (g.y.shape, g.num_classes) == ((5, 1), 1)
    assert "1 target)" in repr(g)
    arrays = {k: v.numpy() for k, v in data(y).to_dict().items()}
    np.savez(tmp_path / "g.npz", **arrays, task="regression")
    assert load_graph(str(tmp_path / "g.npz")).y.tolist() == g.y.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "ranking"}, "task 'ranking'; try: classification, regression or links"),
        ({"y": torch.tensor([0, 1, 2, 3, math.inf])}, r"y\[4, 0\] = inf"),
        ({"y": torch.full((5,), math.nan)}, "no vertex is labelled.*NaN"),
        ({"y": torch.tensor([0, 1, math.nan, 1, 2])}, "test_mask: 1 of its vertices have no label"),
    ],
)
def test_values_that_are_not_numbers_are_refused(change, message):
    given = {"y": torch.rand(5), "task": "regression"} | change
    with pytest.raises(InputError, match=message):
        Graph.from_pyg(data(given["y"]), task=given["task"])


def test_metrics_fit_the_task():
    with pytest.raises(InputError, match="--metric accuracy: small has 3 targets; try one of r2"):
        Trainer(quick_config(epochs=4, metric="accuracy"), graph=graph_of_numbers()).fit()
    with pytest.raises(InputError, match="--metric mae: small has 3 classes"):
        Trainer(quick_config(epochs=4, metric="mae"), graph=small_graph()).fit()

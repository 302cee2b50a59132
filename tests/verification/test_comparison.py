"""``verify`` finds every planted fault, and no fault in a correct run."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers import quick_config, small_graph
from torch_geometric import nn as pyg

from gnnpipe.capture.recorded_model import RecordedModel
from gnnpipe.capture.stage import row_work
from gnnpipe.models import rows as rows_module
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.setup import prepare, structures
from gnnpipe.verification.comparison import compare_epochs, reference_of, relative_difference

BUILT_IN = ("gcn", "sage", "gcnii", "resgcn", "gat")


def prepared_run(name, chunks, **settings):
    graph, model = small_graph(), None
    given = {"layers": 3, "hidden": 8, "dropout": 0.3, "chunks": chunks} | settings
    if name == "pyg gcn":
        torch.manual_seed(0)
        model = pyg.GCN(7, 8, 2, 3, dropout=0.3)
    else:
        given["model"] = name
    return graph, prepare.prepare(quick_config(**given), Mesh.alone(), graph, model)


def difference(name, chunks, **settings):
    """The largest difference in two epochs, of which with chunks the second has stale rows."""
    graph, prepared = prepared_run(name, chunks, **settings)
    return max(c.largest for c in compare_epochs(graph, prepared, Mesh.alone(), 2))


def renumber_with(monkeypatch, change):
    """Every run trains on a graph that was changed when it was renumbered."""
    real = prepare.renumber
    monkeypatch.setattr(prepare, "renumber", lambda *given: change(real(*given)))


def rolled(values, among):
    found = values.copy()
    found[among] = np.roll(values[among], 1)
    return found


def wrong_labels(monkeypatch):
    renumber_with(monkeypatch, lambda g: replace(g, y=rolled(g.y, g.y >= 0)))


def wrong_mask(monkeypatch):
    renumber_with(monkeypatch, lambda g: replace(g, train_mask=rolled(g.train_mask, g.y >= 0)))


def wrong_features(monkeypatch):
    renumber_with(monkeypatch, lambda g: replace(g, x=np.roll(g.x, 1, axis=0)))


def scrambled_edges(monkeypatch):
    def scramble(graph):
        ones, n = np.ones(graph.num_edges), graph.num_vertices
        adjacency = sp.csr_array((ones, graph.indices, graph.indptr), shape=(n, n))
        order = np.random.default_rng(0).permutation(n)
        adjacency = adjacency[order][:, order]
        adjacency.sort_indices()
        indptr = adjacency.indptr.astype(np.int64)
        return replace(graph, indptr=indptr, indices=adjacency.indices.astype(np.int32))

    renumber_with(monkeypatch, scramble)


def norm_without_root(monkeypatch):
    real = structures.weighted_rows
    names = {"gcn": "gcn-loopless"}
    monkeypatch.setattr(
        structures, "weighted_rows", lambda graph, kind: real(graph, names.get(kind, kind))
    )


def unscaled_dropout(monkeypatch):
    real = rows_module.keyed_mask

    def unscaled(*given, **settings):
        mask = real(*given, **settings)
        return mask if mask is None else Mask(mask.kept, 1.0)

    monkeypatch.setattr(rows_module, "keyed_mask", unscaled)


def wrong_beta(monkeypatch):
    real = row_work.ROW_WORK[row_work.gcnii_norm_relu]

    def with_other_beta(*given, shares, **settings):
        alpha, beta = shares
        return real(*given, shares=(alpha, beta * 1.01), **settings)

    monkeypatch.setitem(row_work.ROW_WORK, row_work.gcnii_norm_relu, with_other_beta)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", [*BUILT_IN, "pyg gcn"])
def test_no_fault(name, chunks):
    assert difference(name, chunks) < 1e-12


@pytest.mark.parametrize(("chunks", "staleness"), [(1, "auto"), (4, "auto"), (4, "paper")])
@pytest.mark.parametrize("name", ["gcn", "pyg gcn"])
@pytest.mark.parametrize(
    "plant", [wrong_labels, wrong_mask, wrong_features, scrambled_edges], ids=lambda f: f.__name__
)
def test_data_of_other_vertices(plant, name, chunks, staleness, monkeypatch):
    plant(monkeypatch)
    assert difference(name, chunks, staleness=staleness) > 1e-3


@pytest.mark.parametrize(("chunks", "staleness"), [(1, "auto"), (4, "auto"), (4, "paper")])
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (norm_without_root, "gcn"),
        (norm_without_root, "gcnii"),
        (norm_without_root, "pyg gcn"),
        (wrong_beta, "gcnii"),
        *((unscaled_dropout, name) for name in (*BUILT_IN, "pyg gcn")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_wrong_models(plant, name, chunks, staleness, monkeypatch):
    """Under ``paper`` no epoch is exact."""
    plant(monkeypatch)
    assert difference(name, chunks, staleness=staleness) > 1e-4


def test_a_recorded_model_runs_as_the_user_wrote_it():
    graph, prepared = prepared_run("pyg gcn", 1)
    reference = reference_of(graph, prepared)
    assert reference._user_model is not None
    assert isinstance(prepared.model, RecordedModel)
    assert reference._user_model.module is not prepared.model.module


def test_a_gradient_that_is_a_millionth_off(monkeypatch):
    """The difference of one weight's gradient is not scaled away."""
    real = GradClip.clip

    def passes(self, loss):
        grad = dict(self._named)["convs.1.weight1"].grad
        grad += 1e-6 * grad.norm() / grad.numel() ** 0.5
        return real(self, loss)

    assert difference("gcnii", 1) < 1e-12
    monkeypatch.setattr(GradClip, "clip", passes)
    assert 5e-7 < difference("gcnii", 1) < 2e-6


def test_the_floor_of_a_difference_is_a_thousandth_of_the_usual_norm():
    large, small = torch.ones(100), torch.full((100,), 1e-2)
    truth = {"large": large, "small": small}
    found, name = relative_difference(truth | {"small": small * 1.01}, truth)
    assert (found, name) == (pytest.approx(0.01, rel=1e-4), "small"), "above the floor"
    tiny = torch.full((100,), 1e-9)
    truth = {"large": large, "small": tiny}
    found, name = relative_difference({"large": large, "small": tiny * 2}, truth)
    floor = 1e-3 * float(large.norm() / 2**0.5)
    assert (found, name) == (pytest.approx(float(tiny.norm()) / floor, rel=1e-4), "small")

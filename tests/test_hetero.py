"""Law 1 for several types of vertices and edges: unmodified PyG models, on any shape."""

import copy

import hetero_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from torch import nn

from gnnpipe import Graph, TrainConfig, Trainer

EPOCHS = 3


def made(name, seed=0):
    """Model and data."""
    torch.manual_seed(seed)
    data = hetero_models.hetero_data(subjects=name not in hetero_models.NO_SUBJECTS)
    return hetero_models.MODELS[name](), data


def config(**settings):
    return TrainConfig(
        **{"epochs": EPOCHS, "out": "off", "cache_dir": "off", "dtype": "float64", "quiet": True}
        | settings
    )


class NoDropout(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", hetero_models.MODELS)
def test_equals_plain_pyg_step_by_step(name, monkeypatch):
    from gnnpipe.models.layer import Rows

    monkeypatch.setattr(Rows, "dropout", lambda self, x, probability, site: x)
    model, data = made(name)
    x = {t: v.double() for t, v in data.x_dict.items()}
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        model(data.x_dict, data.edge_index_dict)
    plain = copy.deepcopy(model).double()
    trainer = Trainer(config(epochs=4), graph=Graph.from_pyg(data), model=model)
    losses = [row.loss for row in trainer.fit().history]
    y, train = data["paper"].y, data["paper"].train_mask
    optimizer = torch.optim.Adam(plain.parameters(), lr=trainer.config.lr)
    truth = []

    def papers():
        out = plain(x, data.edge_index_dict)
        return out["paper"] if isinstance(out, dict) else out

    with NoDropout():
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(papers()[train], y[train])
            loss.backward()
            optimizer.step()
            truth.append(loss.item())
    np.testing.assert_allclose(losses, truth, rtol=1e-8)
    plain.eval()
    torch.testing.assert_close(trainer.predict(), papers().detach(), rtol=1e-6, atol=1e-8)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-8)


def largest_difference(shapes, names, **settings):
    """Against one autograd graph that walks the same chunks; runs on every rank."""
    from gnnpipe.runtime.mesh import Mesh
    from gnnpipe.train.prepare import prepare
    from gnnpipe.train.verify import verify

    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for name in names:
            run = config(stages=stages, shards=shards, chunks=chunks, **settings)
            model, data = made(name, seed=mesh.rank)
            prepared = prepare(run, mesh, Graph.from_pyg(data), model)
            worst = max(verify(prepared, mesh, EPOCHS), key=lambda c: c.largest)
            found.append((worst.largest, f"{name} ({stages},{shards},{chunks}) {worst}"))
    return found


def assert_equal(found):
    largest = max(found)
    assert largest[0] <= 1e-10, largest[1]


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("staleness", ["auto", "exact"])
@pytest.mark.parametrize("name", hetero_models.MODELS)
def test_chunks_on_one_process(name, staleness):
    assert_equal(largest_difference([(1, 1, 6)], [name], staleness=staleness))


def test_two_ranks():
    shapes = [(2, 1, 1), (1, 2, 1), (2, 1, 6)]
    assert_equal(run_ranks(largest_difference, 2, shapes, tuple(hetero_models.MODELS))[0])


def test_four_ranks():
    assert_equal(run_ranks(largest_difference, 4, [(2, 2, 6)], tuple(hetero_models.MODELS))[0])


def bytes_sent(stages, shards):
    model, data = made("hetero conv")
    run = config(stages=stages, shards=shards, chunks=4, epochs=2)
    result = Trainer(run, graph=Graph.from_pyg(data), model=model).fit()
    return result.comm_bytes_per_epoch, result.comm_bytes_closed_form


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_bytes_are_the_closed_form(shape):
    for counted, formula in run_ranks(bytes_sent, shape[0] * shape[1], *shape):
        assert counted == formula
        assert counted["pipeline" if shape[0] > 1 else "graph"] > 0

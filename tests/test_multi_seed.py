"""Several seeds: runs, mean, deviation and errors."""

import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import run_ranks, small_graph

from gnnpipe import InputError, TrainConfig, Trainer, fit_seeds, resumed_config
from gnnpipe.report.run import read_run


def config(**settings):
    defaults = {
        "layers": 3,
        "hidden": 8,
        "chunks": 4,
        "epochs": 6,
        "eval_every": 2,
        "dtype": "float64",
        "cache_dir": "off",
        "out": "off",
        "quiet": True,
    }
    return TrainConfig(**(defaults | settings))


def test_seeds_of_a_user_model_and_loss():
    from torch_geometric.nn import SGConv

    def loss(out, y):
        return 2 * torch.nn.functional.cross_entropy(out, y, reduction="sum")

    before = torch.random.get_rng_state()
    found = fit_seeds(
        config(), 2, small_graph(), make_model=lambda: SGConv(7, 3, K=2), loss_fn=loss
    )
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(config().seed + 1)
    model = SGConv(7, 3, K=2)
    run = replace(config(), seed=config().seed + 1)
    alone = Trainer(run, graph=small_graph(), model=model, loss_fn=loss).fit()
    assert found.results[1].loss == alone.loss != found.results[0].loss
    with pytest.raises(InputError, match="make_model: returned the weights of an earlier seed"):
        fit_seeds(config(epochs=1), 2, small_graph(), make_model=lambda: model)


def seeds_of(shape, folder):
    stages, shards = shape
    return fit_seeds(config(stages=stages, shards=shards, out=folder, seed=5), 3, small_graph())


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)])
def test_several_seeds(shape, tmp_path):
    folder = tmp_path / "seeds"
    if shape == (1, 1):
        found = [seeds_of(shape, str(folder))]
    else:
        found = run_ranks(seeds_of, 2, shape, str(folder))
    for one in found:
        assert [r.seed for r in one.results] == [5, 6, 7]
        losses = [r.loss for r in one.results]
        assert len(set(losses)) == 3
        assert one.mean["loss"] == pytest.approx(statistics.mean(losses))
        assert one.deviation["loss"] == pytest.approx(statistics.stdev(losses))
    alone = Trainer(config(seed=6), graph=small_graph()).fit()
    assert found[0].results[1].loss == pytest.approx(alone.loss, rel=1e-9)
    names = {p.name for p in folder.iterdir()}
    assert names == {"seed-5", "seed-6", "seed-7", "summary.json"}
    written = json.loads((folder / "summary.json").read_text())
    assert written["seeds"] == [5, 6, 7]
    assert written["mean"]["loss"] == found[0].mean["loss"]
    with pytest.raises(InputError, match="holds another run"):
        fit_seeds(config(out=str(folder)), 2, small_graph())
    for take in (read_run, lambda path: resumed_config(path, {})):
        with pytest.raises(InputError, match=f"like {folder}/seed-5"):
            take(folder)
    with pytest.raises(InputError, match=f"--resume {folder}/seed-5"):
        fit_seeds(config(out=str(folder)), 2, small_graph())
    with pytest.raises(InputError, match="--seeds 0"):
        fit_seeds(config(), 0)


@pytest.mark.slow
def test_undefined_scores_do_not_end_several_seeds(tmp_path):
    graph = replace(small_graph(), val_mask=np.zeros(60, bool))
    folder = tmp_path / "seeds"
    found = fit_seeds(config(out=str(folder)), 2, graph)
    assert math.isnan(found.mean["val_acc"])
    assert math.isnan(found.deviation["val_acc"])
    # Without a validation metric there is no best epoch to speak of.
    assert "test accuracy" in found.lines()[-1]
    assert not any("best validation" in line for line in found.lines())
    written = json.loads((folder / "summary.json").read_text())
    assert written["mean"]["val_acc"] is None
    assert written["runs"]["0"]["test_acc"] == found.results[0].test_acc
    assert math.isnan(fit_seeds(config(), 1, graph).deviation["loss"])
    for bad in (True, 2.0, "3"):
        with pytest.raises(InputError, match="must be a whole number"):
            fit_seeds(config(), bad, graph)

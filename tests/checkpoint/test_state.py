"""What a checkpoint restores beside weights: generators and the factor of the learning rate."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, small_graph, struck_rows

from gnnpipe import Trainer
from gnnpipe.run.resume import resumed_config

DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.random()),
    "python": random.random,
}


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.parametrize("name", DRAWS)
def test_generators_go_on_where_the_checkpoint_left_them(name, tmp_path):
    """A loss that draws numbers, so little that it still counts as a sum over rows."""

    def noisy(logits, y):
        return F.cross_entropy(logits, y, reduction="sum") * (1 + 1e-5 * DRAWS[name]())

    def losses(epochs, out, resume=None):
        run = quick_config(epochs=epochs, out=str(out), checkpoint_every=2, layers=2, hidden=8)
        if resume is not None:
            run = resumed_config(out, {"epochs": epochs})
        trainer = Trainer(run, small_graph(), loss_fn=noisy, resume=resume)
        return [row.loss for row in trainer.fit().history]

    seed_all(1)
    whole = losses(6, tmp_path / "whole")
    seed_all(1)
    assert losses(4, tmp_path / "run") == whole[:4]
    seed_all(2)
    assert losses(6, tmp_path / "run", resume=str(tmp_path / "run")) == whole


def test_the_lr_factor_of_a_restored_run_is_kept(tmp_path):
    """Halved by a fault, still halved when the run is resumed, and halved again by the next."""
    poisoned = {5: 1, 10: 1}

    def strikes(layer, rows):
        is_due = rows.training and not rows.is_probe and layer == 1
        if not is_due or poisoned.get(rows.epoch, 0) <= 0:
            return False
        poisoned[rows.epoch] -= 1
        return True

    def rates_of(run, **more):
        with struck_rows(strikes):
            return [row.lr for row in Trainer(run, small_graph(), **more).fit().history]

    out = str(tmp_path / "run")
    settings = {"model": "gcnii", "layers": 3, "hidden": 8, "lr": 0.04, "checkpoint_every": 2}
    run = quick_config(epochs=8, out=out, on_nan="restore", **settings)
    rates = rates_of(run)
    assert rates == [0.04] * 4 + [0.02] * 4
    resumed = resumed_config(out, {"epochs": 10})
    rates = rates_of(resumed, resume=out)
    assert rates == [0.04] * 4 + [0.02] * 6
    resumed = resumed_config(out, {"epochs": 12})
    rates = rates_of(resumed, resume=out)
    assert rates == [0.04] * 4 + [0.02] * 6 + [0.01] * 2
    assert poisoned == {5: 0, 10: 0}

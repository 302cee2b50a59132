"""The learning rate of every epoch, against closed forms."""

import math

import pytest
import torch
from helpers import quick_config

from gnnpipe.optim.lr_schedule import LearningRate
from gnnpipe.verification.reference import learning_rate


def rates(config, score_of):
    """The rate after every epoch (from 1); ``score_of``: the metric of an epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = LearningRate(optimizer, config)
    found = [schedule.value]
    for epoch in range(1, config.epochs + 1):
        optimizer.step()
        is_evaluated = epoch % config.eval_every == 0
        schedule.step(score_of(epoch) if is_evaluated else None)
        found.append(schedule.value)
    return found


@pytest.mark.parametrize(
    ("eval_every", "lr_patience", "first"), [(1, 10, 11), (5, 10, 15), (4, 10, 16), (10, 10, 20)]
)
def test_the_patience_of_a_plateau_is_counted_in_epochs(eval_every, lr_patience, first):
    """The best score is that of the first evaluation, and ``first`` the epoch of the first cut."""
    config = quick_config(
        lr=0.4, epochs=30, lr_schedule="plateau", eval_every=eval_every, lr_patience=lr_patience
    )
    found = rates(config, lambda epoch: 1.0)
    assert found[:first] == [0.4] * first
    assert found[first] == 0.2


def test_a_score_that_rises_ends_the_wait():
    config = quick_config(lr=0.4, epochs=30, lr_schedule="plateau", eval_every=2, lr_patience=6)
    assert rates(config, float) == [0.4] * 31


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_closed_forms(schedule, warmup):
    config = quick_config(lr=0.3, epochs=12, lr_schedule=schedule, warmup_epochs=warmup)
    found = rates(config, float)
    for epoch in range(12):
        expected = learning_rate(config, epoch)
        assert found[epoch] == pytest.approx(expected, rel=1e-12)
    if schedule == "cosine":
        assert found[12] == pytest.approx(0.0, abs=1e-12)
        half = warmup + (12 - warmup) // 2
        assert found[half] == pytest.approx(0.3 * (1 + math.cos(math.pi / 2)) / 2)

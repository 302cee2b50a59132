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


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 0.1], total_steps=20)


def in_sequence(optimizer):
    parts = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


@pytest.mark.parametrize("schedule", ["constant", "cosine", "plateau", one_cycle, in_sequence])
@pytest.mark.parametrize("past", [0, 2, 7])
def test_coming_rates_are_those_that_come_and_asking_changes_nothing(schedule, past):
    def made():
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.4, 0.1)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        is_name = isinstance(schedule, str)
        name, warmup = (schedule, 4) if is_name else ("constant", 0)
        config = quick_config(
            lr=0.4, epochs=16, lr_schedule=name, warmup_epochs=warmup, lr_patience=5, eval_every=5
        )
        return optimizer, LearningRate(optimizer, config, None if is_name else schedule)

    def walked(optimizer, learning_rate, epochs):
        found = []
        for _ in range(epochs):
            found.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
            optimizer.step()
            learning_rate.step(None)
        return found

    plain, asked = made(), made()
    expected = walked(*plain, past + 9)
    assert walked(*asked, past) == expected[:past]
    assert asked[1].coming(5) == [[lr for lr, _ in one] for one in expected[past : past + 5]]
    assert walked(*asked, 9) == expected[past:]

"""The learning rate of every epoch, against closed forms."""

import math

import pytest
import torch
from helpers import quick_config

from gnnpipe.errors import InputError
from gnnpipe.optim.lr_schedule import LearningRate
from gnnpipe.setup.inputs import last_epoch_of
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


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_rate_that_is_a_tensor_is_not_changed_by_asking(schedule):
    rate = torch.tensor(0.4)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    learning_rate = LearningRate(optimizer, quick_config(lr=0.4, epochs=8, lr_schedule=schedule))
    held = optimizer.param_groups[0]["lr"]
    first, second = learning_rate.coming(6), learning_rate.coming(6)
    assert first == second
    assert float(held) == first[0][0] == pytest.approx(0.4)
    assert optimizer.param_groups[0]["lr"] is held


def with_steps(steps, factory=None, **settings):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.4, 0.1)]
    optimizer = torch.optim.SGD(groups)
    config = quick_config(lr=0.4, epochs=8, **settings)
    learning_rate = LearningRate(optimizer, config, factory, steps=steps)
    found = []
    for _ in range(8):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        learning_rate.step(None)
    return found


@pytest.mark.parametrize("name", ["auto", "constant", "cosine"])
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_several_steps_an_epoch_take_smaller_rates_that_fall_by_themselves(name, steps):
    found = with_steps(steps, lr_schedule=name)
    is_falling = name == "cosine" or (name == "auto" and steps > 1)
    for epoch, rates_now in enumerate(found):
        factor = (1 + math.cos(math.pi * epoch / 8)) / 2 if is_falling else 1
        expected = [lr * factor / math.sqrt(steps) for lr in (0.4, 0.1)]
        assert rates_now == pytest.approx(expected, rel=1e-12)


def test_rates_of_a_scheduler_are_taken_as_they_are():
    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    assert with_steps(16, halving) == [[0.4 * 0.5**e, 0.1 * 0.5**e] for e in range(8)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 1),
        ({"schedule": "1f1b"}, 1),
        ({"schedule": "1f1b", "steps_every": 3}, 4),
        ({"schedule": "async"}, 12),
        ({"schedule": "async", "steps_every": 6}, 2),
    ],
)
def test_steps_an_epoch_by_the_flags(settings, steps):
    assert quick_config(chunks=12, **settings).steps_per_epoch == steps


def test_a_rate_that_ends_at_0_is_not_trained_further():
    config = quick_config(chunks=4, schedule="async", epochs=5)
    assert last_epoch_of(config, None, 0) == 5
    with pytest.raises(InputError, match="--lr-schedule auto: the learning rate is 0 after"):
        last_epoch_of(config, None, 5)
    assert last_epoch_of(quick_config(epochs=5), None, 5) == 10


@pytest.mark.parametrize(("steps", "factory"), [(1, None), (16, torch.optim.lr_scheduler.StepLR)])
def test_rates_of_several_steps_are_told(steps, factory):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    stepped = factory and (lambda optimizer: factory(optimizer, 3))
    assert LearningRate(optimizer, quick_config(), stepped, steps=steps).steps_text == ""
    told = LearningRate(optimizer, quick_config(), steps=16).steps_text
    assert told == (
        "16 optimizer steps an epoch: learning rate cosine from 0.1, which is 0.4 / sqrt(16)"
    )

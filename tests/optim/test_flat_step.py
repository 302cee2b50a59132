"""The flat step against torch's optimizers, which step weight by weight."""

import copy
import warnings

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from gnnpipe.optim.flat_step import FlatStep, can_be_flat

SHAPES = [(3, 5), (7,), (), (2, 1, 4), (5,)]
KINDS = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd, weight decay": (SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {"lr": 0.1}),
    "adam, fused": (Adam, {"lr": 0.1, "fused": True, "weight_decay": 0.01}),
    "amsgrad": (Adam, {"lr": 0.1, "amsgrad": True}),
    "adamw": (AdamW, {"lr": 0.1, "maximize": True}),
    "rmsprop": (RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5, "weight_decay": 0.01}),
}


def made(kind, seed=0):
    torch.manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    optimizer, settings = KINDS[kind]
    return weights, optimizer([{"params": weights}], **settings)


def gradients(weights, number, without=()):
    generator = torch.Generator().manual_seed(number)
    for place, weight in enumerate(weights):
        grad = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
        weight.grad = None if place in without else grad


def run(flat, weights, numbers, without=()):
    for number in numbers:
        gradients(weights, number, without)
        flat.gather()
        flat.step()


def plain(optimizer, weights, numbers, without=()):
    for number in numbers:
        gradients(weights, number, without)
        optimizer.step()


def assert_equal(found, expected, optimizer, expected_optimizer):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
        state, known = optimizer.state[one], expected_optimizer.state[other]
        assert state.keys() == known.keys()
        for name, value in known.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    state[name].double(), value.double(), rtol=1e-13, atol=1e-15
                )
            else:
                assert state[name] == value


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_steps_weight_by_weight(kind):
    (weights, optimizer), (expected, reference) = made(kind), made(kind)
    run(FlatStep(optimizer), weights, range(5))
    plain(reference, expected, range(5))
    assert_equal(weights, expected, optimizer, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_stored_by_column_stays_so(kind):
    (weights, optimizer), (expected, reference) = made(kind), made(kind)
    weights[0].data = weights[0].data.t().contiguous().t()
    run(FlatStep(optimizer), weights, range(3))
    plain(reference, expected, range(3))
    assert_equal(weights, expected, optimizer, reference)
    assert weights[0].t().is_contiguous()
    assert weights[0].grad.t().is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_without_gradient_is_left_out(kind):
    (weights, optimizer), (expected, reference) = made(kind), made(kind)
    first = weights[3].detach().clone()
    run(FlatStep(optimizer), weights, range(4), without=[3])
    plain(reference, expected, range(4), without=[3])
    assert torch.equal(weights[3], first)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_loaded_goes_on_to_the_bit(kind):
    whole, optimizer = made(kind)
    run(FlatStep(optimizer), whole, range(6))
    begun, first = made(kind)
    run(FlatStep(first), begun, range(3))
    resumed, second = made(kind, seed=1)
    flat = FlatStep(second)
    with torch.no_grad():
        for own, stored in zip(resumed, begun, strict=True):
            own.copy_(stored)
            if first.state[stored]:
                second.state[own] = copy.deepcopy(dict(first.state[stored]))
    flat.adopt()
    run(flat, resumed, range(3, 6))
    assert all(map(torch.equal, resumed, whole))


def test_a_changed_rate_is_taken():
    (weights, optimizer), (expected, reference) = made("adam"), made("adam")
    flat = FlatStep(optimizer)
    for number, rate in enumerate((0.1, 0.01, 0.5)):
        for one in (optimizer, reference):
            one.param_groups[0]["lr"] = rate
        run(flat, weights, [number])
        plain(reference, expected, [number])
    assert_equal(weights, expected, optimizer, reference)


def test_gradients_are_views_of_the_gathered_one_and_may_be_scaled():
    weights, optimizer = made("sgd")
    flat = FlatStep(optimizer)
    gradients(weights, 0)
    expected = [weight.grad.clone() for weight in weights]
    gathered = flat.gather()
    length = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in expected]))
    torch.testing.assert_close(torch.linalg.vector_norm(gathered), length)
    gathered.mul_(0.5)
    for weight, grad in zip(weights, expected, strict=True):
        assert torch.equal(weight.grad, 0.5 * grad)


def test_a_step_without_any_gradient_changes_nothing():
    weights, optimizer = made("adam")
    before = [weight.detach().clone() for weight in weights]
    run(FlatStep(optimizer), weights, range(2), without=range(len(SHAPES)))
    assert all(map(torch.equal, weights, before))
    assert not any(optimizer.state[weight] for weight in weights)


def test_a_scheduler_does_not_warn():
    weights, optimizer = made("adam")
    flat = FlatStep(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(flat, weights, range(2))
        scheduler.step()


def test_which_optimizers_can_be_flat():
    weights, optimizer = made("adam")
    assert can_be_flat(optimizer)
    assert not can_be_flat(Adam([{"params": weights[:2]}, {"params": weights[2:]}]))
    assert not can_be_flat(Adam([*weights, torch.nn.Parameter(torch.zeros(2))]))  # float32
    assert not can_be_flat(Adagrad(weights))
    assert not can_be_flat(type("Mine", (Adam,), {})(weights))
    assert not can_be_flat(Adam([{"params": []}]))

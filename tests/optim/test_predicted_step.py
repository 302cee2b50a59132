"""Predicted steps against the real steps of torch's optimizers (law 6)."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gnnpipe.errors import InputError
from gnnpipe.optim import predicted_step
from gnnpipe.optim.predicted_step import StepPrediction, check_predictable

SGD, ADAM, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop
KINDS = {
    "SGD": (SGD, {}),
    "SGD, decay": (SGD, {"weight_decay": 0.1}),
    "SGD, maximize": (SGD, {"maximize": True}),
    "momentum": (SGD, {"momentum": 0.9}),
    "momentum, dampening": (SGD, {"momentum": 0.7, "dampening": 0.4}),
    "momentum, maximize": (SGD, {"momentum": 0.7, "maximize": True}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (ADAM, {}),
    "Adam, large eps": (ADAM, {"eps": 0.3, "betas": (0.5, 0.7)}),
    "Adam, amsgrad": (ADAM, {"amsgrad": True}),
    "Adam, maximize": (ADAM, {"maximize": True}),
    "Adam, one by one": (ADAM, {"foreach": False}),
    "Adam, fused": (ADAM, {"fused": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "AdamW, decay": (torch.optim.AdamW, {"weight_decay": 0.2}),
    "RMSprop": (RMSPROP, {}),
    "RMSprop, momentum": (RMSPROP, {"momentum": 0.8}),
    "RMSprop, maximize": (RMSPROP, {"maximize": True}),
}
SHAPES = [(3, 4), (4,), ()]


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def step(optimizer, grads, prediction=None):
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None if weight not in grads else grads[weight].clone()
    optimizer.step()
    if prediction is not None:
        prediction.stepped()
    optimizer.zero_grad()


def converge(optimizer, grads):
    """Set the averages to their limit under constant gradients."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state, direction = optimizer.state[weight], grads[weight]
            direction = -direction if group["maximize"] else direction
            if "square_avg" in state:
                state["square_avg"].copy_(direction**2)
                direction = direction / (direction.abs() + group["eps"])
            if state.get("momentum_buffer") is not None:
                limit = (1 - group.get("dampening", 0)) / (1 - group["momentum"])
                state["momentum_buffer"].copy_(direction * limit)


def bits(weights):
    return [weight.detach().clone() for weight in weights]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    steps=st.integers(0, 6),
    before=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_under_a_constant_gradient_the_prediction_equals_real_steps(kind, steps, before, seed):
    make, options = KINDS[kind]
    weights = [nn.Parameter(value) for value in draw(seed)]
    grads = dict(zip(weights, draw(seed + 1000), strict=True))
    # Two groups, whose learning rates change from step to step.
    groups = [{"params": weights[:2], "lr": 0.02}, {"params": weights[2:], "lr": 0.3}]
    optimizer = make(groups, **options)

    def rates(ahead):
        return [0.02 / (1 + ahead), 0.3 * 0.9**ahead]

    prediction = StepPrediction(optimizer, rates)
    for _ in range(before):
        step(optimizer, grads, prediction)
    converge(optimizer, grads)
    real = bits(weights)
    prediction.apply(steps)
    predicted = bits(weights)
    if steps == 0:
        assert all(torch.equal(a, b) for a, b in zip(predicted, real, strict=True))
    for weight, value in zip(weights, real, strict=True):
        weight.data.copy_(value)
    for ahead in range(steps):
        for group, rate in zip(optimizer.param_groups, rates(ahead), strict=True):
            group["lr"] = rate
        step(optimizer, grads)
    for weight, found in zip(weights, predicted, strict=True):
        torch.testing.assert_close(found, weight.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_steps_are_the_identity_and_some_are_not(kind):
    make, options = KINDS[kind]
    weights = [nn.Parameter(value) for value in draw(0)]
    optimizer = make(weights, lr=0.1, **options)
    prediction = StepPrediction(optimizer)
    for seed in range(3):
        step(optimizer, dict(zip(weights, draw(seed + 5), strict=True)), prediction)
    real = bits(weights)
    prediction.apply(0)
    assert all(torch.equal(a, b) for a, b in zip(bits(weights), real, strict=True))
    prediction.apply(1)
    assert not any(torch.equal(a, b) for a, b in zip(bits(weights), real, strict=True))


def test_adam_by_its_formula():
    """In any state, not only under a constant gradient."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = ADAM([weight], lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    m = v = torch.zeros(2, dtype=torch.float64)
    for grad in (torch.tensor([3.0, 1.0]), torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 0.0])):
        step(optimizer, {weight: grad.double()})
        m, v = 0.8 * m + 0.2 * grad, 0.95 * v + 0.05 * grad**2
    direction = (m / (1 - 0.8**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-3)
    expected = weight.detach() - 4 * 0.1 * direction
    StepPrediction(optimizer).apply(4)
    torch.testing.assert_close(weight.detach(), expected)


def test_amsgrad_divides_by_the_largest_average():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = ADAM([weight], lr=0.1, betas=(0.5, 0.5), eps=0.0, amsgrad=True)
    for grad in (8.0, 1.0, 1.0):
        step(optimizer, {weight: torch.tensor([grad], dtype=torch.float64)})
    before = weight.item()
    StepPrediction(optimizer).apply(1)
    mean = 0.5 * (0.25 * 8 + 0.5 * 1 + 1) / (1 - 0.5**3)
    largest = 0.5 * 64 / (1 - 0.5**3)  # after the first step
    assert before - weight.item() == pytest.approx(0.1 * mean / math.sqrt(largest))


def test_centred_rmsprop_with_decay_by_its_formula():
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    options = {"lr": 0.1, "alpha": 0.7, "eps": 1e-3, "centered": True, "weight_decay": 0.5}
    optimizer = RMSPROP([weight], **options)
    prediction = StepPrediction(optimizer)
    square = mean = torch.zeros(2, dtype=torch.float64)
    for grad in (torch.tensor([3.0, 1.0]).double(), torch.tensor([-1.0, 2.0]).double()):
        decayed = grad + 0.5 * weight.detach()
        square, mean = 0.7 * square + 0.3 * decayed**2, 0.7 * mean + 0.3 * decayed
        step(optimizer, {weight: grad}, prediction)
    decayed = grad + 0.5 * weight.detach()
    expected = weight.detach() - 0.2 * decayed / ((square - mean**2).sqrt() + 1e-3)
    prediction.apply(2)
    torch.testing.assert_close(weight.detach(), expected)


def test_decay_of_adam_stands_in_its_averages():
    """Only AdamW's decay shrinks the weights by itself."""
    moved = []
    for decay in (0.0, 0.5):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = ADAM([weight], lr=0.1, weight_decay=decay)
        step(optimizer, {weight: torch.ones(1, dtype=torch.float64)})
        before = weight.item()
        StepPrediction(optimizer).apply(1)
        moved.append(before - weight.item())
    assert moved[0] == pytest.approx(moved[1], rel=1e-7)


@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam", "AdamW, decay", "RMSprop"])
def test_weights_that_were_never_stepped_stay(kind):
    make, options = KINDS[kind]
    moving, still = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make([moving, still], lr=0.1, **options)
    prediction = StepPrediction(optimizer)
    prediction.apply(3)  # before any step
    assert moving.tolist() == still.tolist() == [1, 1]
    step(optimizer, {moving: torch.ones(2)}, prediction)
    prediction.apply(3)
    assert still.tolist() == [1, 1]
    assert moving[0] < 0.9


def test_kept_gradients_are_forgotten_and_replaced():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0)
    prediction = StepPrediction(optimizer)
    step(optimizer, {weight: torch.tensor([1.0])}, prediction)
    step(optimizer, {weight: torch.tensor([4.0])}, prediction)
    prediction.apply(1)
    assert weight.item() == -9
    prediction.forget()
    prediction.apply(1)
    assert weight.item() == -9


def test_a_kept_gradient_is_a_copy():
    """The memory of gradients may be used again."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = SGD([weight], lr=1.0)
    prediction = StepPrediction(optimizer)
    optimizer.step()
    prediction.stepped()
    weight.grad.zero_()
    prediction.apply(1)
    assert weight.item() == -2


class Renamed(torch.optim.AdamW):
    """A subclass with AdamW's step, wrapped by torch for itself."""

    step = torch.optim.Optimizer.profile_hook_step(torch.optim.AdamW.step)


class Halved(torch.optim.SGD):
    """A subclass with a step of its own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.mul_(0.5)


@pytest.mark.parametrize("kind", [SGD, ADAM, torch.optim.AdamW, RMSPROP, Renamed])
def test_known_optimizers(kind):
    check_predictable(kind, "--weights predict")
    StepPrediction(kind([nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adagrad, Halved])
def test_another_optimizer_is_refused_by_name(kind):
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(InputError, match=f"--weights predict: .* {kind.__name__} .*try SGD, Adam"):
        check_predictable(kind, "--weights predict")
    with pytest.raises(ValueError, match=kind.__name__):
        StepPrediction(optimizer)


def test_autograd_does_not_see_the_prediction():
    weight = nn.Parameter(torch.ones(1))
    optimizer = ADAM([weight], lr=0.1)
    step(optimizer, {weight: torch.ones(1)})
    count = weight._version
    StepPrediction(optimizer).apply(2)
    assert weight._version == count
    assert weight.requires_grad
    assert math.isclose(weight.item(), 0.7, rel_tol=1e-5)


@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam, fused", "AdamW, decay", "RMSprop"])
def test_weights_are_predicted_in_pieces(kind, monkeypatch):
    """Large weights are cut along the axis of the longest stride, small ones are put together."""
    make, options = KINDS[kind]
    values = [draw(0)[0].T, torch.randn(10, 3).double(), *draw(1), torch.zeros(0, 3).double()]
    weights, sizes, found = [nn.Parameter(value) for value in values], [], []
    optimizer = make(weights, lr=0.1, **options)
    prediction = StepPrediction(optimizer)
    step(optimizer, {w: torch.randn_like(w).copysign(w) for w in weights}, prediction)
    real, rule = bits(weights), prediction._rule

    def watched(stepped):
        sizes.append([weight.numel() for weight in stepped.weights])
        assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in stepped.weights)
        return rule.direction(stepped)

    for most in (1 << 18, 7):
        monkeypatch.setitem(predicted_step._PIECE_NUMBERS, "cpu", most)
        prediction._rule = replace(rule, direction=watched)
        sizes.clear()
        prediction.apply(2)
        found.append(bits(weights))
        for weight, value in zip(weights, real, strict=True):
            weight.data.copy_(value)
    assert all(sum(piece) < 15 for piece in sizes)
    assert len(sizes) > 4
    assert sum(map(sum, sizes)) == sum(weight.numel() for weight in weights)
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(whole, pieces, rtol=1e-14, atol=0)

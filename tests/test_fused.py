"""Fused row-wise work: the values and gradients of the plain formulas."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from gnnpipe.models.fused import gcnii_mix, norm_relu

ROWS, WIDTH = 7, 5


def norm() -> nn.LayerNorm:
    found = nn.LayerNorm(WIDTH).double()
    nn.init.normal_(found.weight)
    nn.init.normal_(found.bias)
    return found


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


PAIRS = {
    "no weight": lambda: (draw(ROWS, WIDTH), None),
    "one": lambda: (draw(ROWS, 3), draw(WIDTH, 3)),
    "two": lambda: (draw(ROWS, 3), draw(WIDTH, 3), draw(ROWS, 4), draw(WIDTH, 4)),
    "two without weights": lambda: (draw(ROWS, WIDTH), None, draw(ROWS, WIDTH), None),
    "mixed": lambda: (draw(ROWS, WIDTH), None, draw(ROWS, 4), draw(WIDTH, 4)),
}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_norm_relu(name, has_bias):
    torch.manual_seed(0)
    layer, pairs, bias = norm(), PAIRS[name](), draw(WIDTH) if has_bias else None
    total = 0.0 if bias is None else bias
    for x, weight in zip(pairs[::2], pairs[1::2], strict=True):
        total = total + (x if weight is None else x @ weight.T)
    assert torch.allclose(norm_relu(layer, bias, *pairs), torch.relu(layer(total)), atol=1e-12)
    assert gradcheck(lambda b, *p: norm_relu(layer, b, *p), (bias, *pairs))
    plain = torch.autograd.grad(torch.relu(layer(total)).sum(), list(layer.parameters()))
    ours = torch.autograd.grad(norm_relu(layer, bias, *pairs).sum(), list(layer.parameters()))
    for a, b in zip(plain, ours, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_gcnii_mix():
    torch.manual_seed(0)
    layer, received, first, weight = (
        norm(),
        draw(ROWS, WIDTH),
        draw(ROWS, WIDTH),
        draw(WIDTH, WIDTH),
    )
    mixed = 0.9 * received + 0.1 * first
    plain = torch.relu(layer(0.7 * mixed + 0.3 * mixed @ weight.T))
    found = gcnii_mix(received, first, weight, layer, 0.1, 0.3)
    assert torch.allclose(found, plain, atol=1e-12)
    assert gradcheck(lambda *t: gcnii_mix(*t, layer, 0.1, 0.3), (received, first, weight))
    inputs = [received, first, weight, *layer.parameters()]
    for a, b in zip(
        torch.autograd.grad(plain.square().sum(), inputs),
        torch.autograd.grad(found.square().sum(), inputs), strict=True,
    ):  # fmt: skip
        assert torch.allclose(a, b, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient():
    layer, x, weight = norm(), draw(ROWS, 3), draw(WIDTH, 3).detach()
    layer.weight.requires_grad_(False)
    norm_relu(layer, None, x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert layer.weight.grad is None

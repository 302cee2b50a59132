"""A norm's row-wise work in blocks is what its formula is, backward as well."""

import pytest
import torch

from gnnpipe.capture.stage import step_calls
from gnnpipe.capture.stage.step_calls import normalise, squares
from gnnpipe.ops import norm_relu_blocks

C, F = 300, 7


def drawn(seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((C, F), (1, F), (1, F), (F,), (F,))
    x, mean, variance, weight, bias = (
        torch.randn(*s, generator=draw, dtype=torch.float64) for s in shapes
    )
    return [x, mean, variance.square() + 0.1, weight, bias]


def both(function, given):
    """Result and gradients with single rows, and with one for each row, as the formula has it."""
    found = []
    for is_single in (True, False):
        leaves = [None if g is None else g.clone().requires_grad_() for g in given]
        spread = [
            leaf.expand(C, F) if leaf is not None and leaf.dim() == 2 and not is_single else leaf
            for leaf in leaves
        ]
        out = function(*spread)
        weights = torch.arange(C * F, dtype=torch.float64).reshape(C, F).sin()
        (out * weights).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])
    return zip(*found, strict=True)


@pytest.fixture(params=[1 << 20, 1000])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(norm_relu_blocks, "_BLOCK_BYTES", request.param)
    monkeypatch.setattr(norm_relu_blocks, "_MIN_BLOCK_ROWS", 1)


@pytest.mark.parametrize("is_affine", [True, False])
def test_normalise_is_its_formula(is_affine, block_bytes):
    x, mean, variance, weight, bias = drawn()
    variance[0, 2] = -0.3  # as a forecast may have it
    variance[0, 3] = 0.0  # of a column that is the same everywhere
    given = [x, mean, variance, *((weight, bias) if is_affine else (None, None))]
    for mine, plain in both(lambda *a: normalise(*a, 1e-5), given):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)


def test_squares_are_their_formula(block_bytes):
    for mine, plain in both(squares, drawn()[:2]):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)


def test_a_single_row_is_seen_as_one():
    x, mean, variance, *_ = drawn()
    assert step_calls._is_one_row(x, mean, variance)
    assert not step_calls._is_one_row(x, mean.expand(C, F))
    assert not step_calls._is_one_row(x[None], mean)


def test_no_rows():
    x, mean, variance, weight, bias = drawn()
    assert normalise(x[:0], mean, variance, weight, bias, 1e-5).shape == (0, F)
    leaf = x[:0].requires_grad_()
    squares(leaf, mean).sum().backward()
    assert leaf.grad.shape == (0, F)

"""Fused row-wise work: values and gradients equal the plain formulas, for any block size."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from gnnpipe.ops import norm_relu_blocks
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.ops.norm_relu import NormReluOptions, gcnii_mix, norm_relu

ROWS, WIDTH = 7, 5


@pytest.fixture(params=[1, 3, 7, 100], ids="{} rows".format, autouse=True)
def _block(request, monkeypatch):
    """Rows of a block: one, some with a remainder, all, more than there are."""
    monkeypatch.setattr(norm_relu_blocks, "rows_at_once", lambda x, width: request.param)


@pytest.fixture(params=[False, True], ids=["", "dropout"])
def mask(request):
    kept = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.6
    return Mask(kept.to(torch.int8), 1 / 0.6) if request.param else None


def norm() -> nn.LayerNorm:
    found = nn.LayerNorm(WIDTH).double()
    nn.init.normal_(found.weight)
    nn.init.normal_(found.bias)
    return found


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def dropped(x: torch.Tensor, mask: Mask | None) -> torch.Tensor:
    return x if mask is None else x * mask.kept * mask.scale


PAIRS = {
    "no weight": lambda: (draw(ROWS, WIDTH), None),
    "one": lambda: (draw(ROWS, 3), draw(WIDTH, 3)),
    "two": lambda: (draw(ROWS, 3), draw(WIDTH, 3), draw(ROWS, 4), draw(WIDTH, 4)),
    "two without weights": lambda: (draw(ROWS, WIDTH), None, draw(ROWS, WIDTH), None),
    "mixed": lambda: (draw(ROWS, WIDTH), None, draw(ROWS, 4), draw(WIDTH, 4)),
    "mixed the other way": lambda: (draw(ROWS, 4), draw(WIDTH, 4), draw(ROWS, WIDTH), None),
}


def assert_same(plain: torch.Tensor, found: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    assert torch.allclose(found, plain, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(plain.pow(3).sum(), inputs),
        torch.autograd.grad(found.pow(3).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_norm_relu(name, has_bias, mask):
    torch.manual_seed(0)
    layer, pairs, bias = norm(), PAIRS[name](), draw(WIDTH) if has_bias else None
    total = 0.0 if bias is None else bias
    for x, weight in zip(pairs[::2], pairs[1::2], strict=True):
        total = total + (x if weight is None else x @ weight.T)
    inputs = [t for t in (bias, *pairs, *layer.parameters()) if t is not None]
    plain = dropped(torch.relu(layer(total)), mask)
    assert_same(plain, norm_relu(layer, bias, *pairs, options=NormReluOptions(mask=mask)), inputs)
    assert gradcheck(
        lambda b, *p: norm_relu(layer, b, *p, options=NormReluOptions(mask=mask)), (bias, *pairs)
    )


def test_gcnii_mix(mask):
    torch.manual_seed(0)
    layer, received, first = norm(), draw(ROWS, WIDTH), draw(ROWS, WIDTH)
    weight = draw(WIDTH, WIDTH)
    mixed = 0.9 * received + 0.1 * first
    plain = dropped(torch.relu(layer(0.7 * mixed + 0.3 * mixed @ weight.T)), mask)

    def mix(*tensors: torch.Tensor) -> torch.Tensor:
        return gcnii_mix(*tensors, layer, 0.1, 0.3, options=NormReluOptions(mask=mask))

    inputs = [received, first, weight]
    assert_same(plain, mix(*inputs), [*inputs, *layer.parameters()])
    assert gradcheck(mix, inputs)


@pytest.mark.parametrize("frozen", ["weight", "norm", "rows", "first"])
def test_frozen_inputs_get_no_gradient(frozen):
    layer, x, weight = norm(), draw(ROWS, WIDTH), draw(WIDTH, WIDTH)
    first = draw(ROWS, WIDTH)
    inputs = {"weight": weight, "norm": layer.weight, "rows": x, "first": first}
    inputs[frozen].requires_grad_(False)
    norm_relu(layer, None, x, weight, first, None).sum().backward()
    gcnii_mix(x, first, weight, layer, 0.1, 0.3).sum().backward()
    for name, tensor in inputs.items():
        assert (tensor.grad is None) == (name == frozen)


def test_empty_input(mask):
    layer, weight = norm(), draw(WIDTH, WIDTH)
    none, some = draw(0, WIDTH), None if mask is None else Mask(mask.kept[:0], mask.scale)
    for out in (
        norm_relu(layer, draw(WIDTH), none, weight, options=NormReluOptions(mask=some)),
        gcnii_mix(none, none, weight, layer, 0.1, 0.3, options=NormReluOptions(mask=some)),
    ):
        assert out.shape == (0, WIDTH)
        weight.grad = None
        out.sum().backward()
        assert not weight.grad.any()


def test_strided_rows_and_gradients():
    torch.manual_seed(0)
    layer, wide, weight = norm(), draw(ROWS, 2 * WIDTH), draw(WIDTH, WIDTH)
    x = wide[:, ::2]
    plain = torch.relu(layer(x @ weight.T))
    found = norm_relu(layer, None, x, weight)
    # Gradients that are one number, repeated.
    first, second = (torch.autograd.grad(out.sum(), wide)[0] for out in (plain, found))
    assert torch.allclose(first, second, atol=1e-12)


def test_block_size(monkeypatch):
    monkeypatch.undo()
    x = torch.empty(0, 4)
    threads = torch.get_num_threads()
    assert norm_relu_blocks.rows_at_once(x, 128) == threads * 2048
    assert norm_relu_blocks.rows_at_once(x.double(), 128) == threads * 1024
    assert norm_relu_blocks.rows_at_once(x, 10**9) == threads * 512

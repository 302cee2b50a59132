"""Row-wise work between two aggregations, as one step of autograd.

By autograd alone the same work is a chain of steps: each allocates its result and its gradient, and
on the rows of a chunk (a few hundred) the calls cost as much as the numbers. Written out, backward
is a product for the rows, one for the weight, and one pass for norm and activation each, and as
little is kept as can be: what the norm reads and what the activation gave. R rows, F columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnpipe.models.products import product, rounded

__all__ = ["gcnii_mix", "norm_relu"]

_norm_backward = torch.ops.aten.native_layer_norm_backward
_relu_backward = torch.ops.aten.threshold_backward


class _NormRelu(torch.autograd.Function):
    """``relu(norm(sum of x W^T + bias))``; a weight may be missing, and is one then."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, shift: Tensor, eps: float, is_rounded: bool,
                bias: Tensor | None, *pairs: Tensor | None) -> Tensor:  # fmt: skip
        total = bias
        for x, weight in _in_pairs(pairs):
            if weight is None:
                total = x if total is None else total + x
            elif is_rounded or total is None:
                made = rounded(x, is_rounded) @ rounded(weight, is_rounded).t()
                total = made.to(x.dtype) if total is None else total + made
            else:
                total = torch.addmm(total, x, weight.t())
        assert total is not None
        out, mean, rstd = torch.native_layer_norm(total, total.shape[-1:], scale, shift, eps)
        out.relu_()
        # What has no weight is not asked for in backward.
        rows = [x if weight is not None else None for x, weight in _in_pairs(pairs)]
        ctx.save_for_backward(scale, shift, total, mean, rstd, out, *rows, *pairs[1::2])
        ctx.is_rounded = is_rounded
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, shift, total, mean, rstd, out, *saved = ctx.saved_tensors
        weights = saved[len(saved) // 2 :]
        needs = ctx.needs_input_grad
        wants = [True, needs[0], needs[1]]
        rows, to_scale, to_shift = _norm_backward(
            _relu_backward(grad, out, 0), total, total.shape[-1:], mean, rstd, scale, shift, wants
        )
        found: list[Tensor | None] = [to_scale, to_shift, None, None]
        found.append(rows.sum(0) if needs[4] else None)
        has_weights = any(weight is not None for weight in weights)
        low = rounded(rows, ctx.is_rounded and has_weights)
        for i, (x, weight) in enumerate(zip(saved, weights, strict=False)):
            to_x = to_weight = None
            if needs[5 + 2 * i]:
                to_x = rows
                if weight is not None:
                    to_x = (low @ rounded(weight, ctx.is_rounded)).to(rows.dtype)
            if needs[6 + 2 * i]:
                to_weight = (low.t() @ rounded(x, ctx.is_rounded)).to(rows.dtype)
            found += [to_x, to_weight]
        return tuple(found)


def _in_pairs(pairs: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor | None]]:
    for x, weight in zip(pairs[::2], pairs[1::2], strict=True):
        assert x is not None
        yield x, weight


def norm_relu(
    norm: nn.LayerNorm, bias: Tensor | None, *pairs: Tensor | None, is_rounded: bool = False
) -> Tensor:
    """``relu(norm(x_1 W_1^T + x_2 W_2^T + ... + bias))``, [R, F], of ``x_1, W_1, x_2, W_2, ...``.

    x_i [R, F_i] and W_i [F, F_i]; in place of a weight ``None`` for the identity. ``is_rounded``:
    see ``models.products``.
    """
    found: Tensor = _NormRelu.apply(  # type: ignore[no-untyped-call]
        norm.weight, norm.bias, norm.eps, is_rounded, bias, *pairs
    )
    return found


class _GCNIIMix(torch.autograd.Function):
    """GCNII's mix with the first rows, its linear map, norm and ReLU."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, first: Tensor, weight: Tensor, scale: Tensor,
                shift: Tensor, alpha: float, beta: float, eps: float,
                is_rounded: bool) -> Tensor:  # fmt: skip
        mixed = torch.lerp(received, first, alpha)
        total = _mapped(mixed, weight.t(), beta, is_rounded)
        out, mean, rstd = torch.native_layer_norm(total, total.shape[-1:], scale, shift, eps)
        out.relu_()
        ctx.save_for_backward(mixed, weight, scale, shift, total, mean, rstd, out)
        ctx.alpha, ctx.beta, ctx.is_rounded = alpha, beta, is_rounded
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, weight, scale, shift, total, mean, rstd, out = ctx.saved_tensors
        alpha, beta, needs = ctx.alpha, ctx.beta, ctx.needs_input_grad
        rows, to_scale, to_shift = _norm_backward(
            _relu_backward(grad, out, 0), total, total.shape[-1:], mean, rstd, scale, shift,
            [True, needs[3], needs[4]],
        )  # fmt: skip
        to_weight = None
        if needs[2]:
            made = rounded(rows, ctx.is_rounded).t() @ rounded(mixed, ctx.is_rounded)
            to_weight = made.to(rows.dtype).mul_(beta)
        to_mixed = _mapped(rows, weight, beta, ctx.is_rounded)
        to_first = to_mixed * alpha if needs[1] else None
        to_received = to_mixed.mul_(1 - alpha)
        return to_received, to_first, to_weight, to_scale, to_shift, None, None, None, None


def _mapped(x: Tensor, weight: Tensor, beta: float, is_rounded: bool) -> Tensor:
    """``(1 - beta) x + beta x @ weight``."""
    if is_rounded:
        return torch.lerp(x, product(x, weight, is_rounded), beta)
    return torch.addmm(x, x, weight, beta=1 - beta, alpha=beta)


def gcnii_mix(
    received: Tensor, first: Tensor, weight: Tensor, norm: nn.LayerNorm, alpha: float, beta: float,
    is_rounded: bool = False,
) -> Tensor:  # fmt: skip
    """``relu(norm((1 - beta) m + beta m W^T))`` with ``m`` between ``received`` and ``first``.

    ``m = (1 - alpha) received + alpha first``; all [R, F], W [F, F]. ``is_rounded``: see
    ``models.products``.
    """
    found: Tensor = _GCNIIMix.apply(  # type: ignore[no-untyped-call]
        received, first, weight, norm.weight, norm.bias, alpha, beta, norm.eps, is_rounded
    )
    return found

"""Row-wise work between two aggregations, as one step of autograd, a block of rows at a time.

By autograd alone the same work is a chain of steps: each allocates its result and its gradient, and
on the rows of a chunk (a few hundred) the calls cost as much as the numbers. Written out, backward
is a product for the rows, one for the weight, and one pass for all else (``models.tail``), and as
little is kept as can be: what the norm reads and what is left in the end. R rows, F columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnpipe.ops.bf16_matmul import product, rounded
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.ops.norm_relu_blocks import KEPT, Tail, TailBackward, blocks_of, keep, plus
from gnnpipe.ops.output_buffer import OutputBuffer, room_for

__all__ = ["gcnii_mix", "norm_relu"]


class _NormRelu(torch.autograd.Function):
    """``drop(relu(norm(sum of x W^T + bias)))``; a weight may be missing, and is one then."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        is_rounded: bool,
        mask: Mask | None,
        output_buffer: OutputBuffer | None,
        bias: Tensor | None,
        *pairs: Tensor | None,
    ) -> Tensor:
        several = [
            (x, None if weight is None else rounded(weight, is_rounded).t())
            for x, weight in _in_pairs(pairs)
        ]
        first, width = several[0][0], len(scale)
        out = room_for(output_buffer, first, width)
        # A single summand is what the norm reads.
        is_made = bias is not None or len(several) > 1 or several[0][1] is not None
        total = first.new_empty(len(first), width) if is_made else first
        tail, stats = Tail(scale, shift, eps, mask), []
        for block in blocks_of(first, width):
            if is_made:
                _add_up(total[block], bias, [(x[block], w) for x, w in several], is_rounded)
            stats.append(tail.forward(total, out, block))
        # What has no weight is not asked for in backward.
        rows = [x if weight is not None else None for x, weight in several]
        ctx.save_for_backward(*keep(scale, shift, total, out, stats), *rows, *pairs[1::2])
        ctx.is_rounded, ctx.factor = is_rounded, tail.factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        saved, several = ctx.saved_tensors[:KEPT], ctx.saved_tensors[KEPT:]
        tail = TailBackward(saved, ctx.factor, needs[:2])
        half = len(several) // 2
        products = [
            _ProductBackward(x, weight, grad, (needs[7 + 2 * i], needs[8 + 2 * i]), ctx.is_rounded)
            for i, (x, weight) in enumerate(zip(several[:half], several[half:], strict=True))
            if weight is not None
        ]
        # What is added up as it is has the gradient of the sum.
        is_plain = [w is None and needs[7 + 2 * i] for i, w in enumerate(several[half:])]
        blocks = blocks_of(grad, grad.shape[1])
        to_sum = torch.empty_like(grad) if any(is_plain) and len(blocks) > 1 else None
        to_bias: Tensor | None = None
        for block in blocks:
            rows = tail.rows(grad, block, None if to_sum is None else to_sum[block])
            to_bias = plus(to_bias, tail.sum_of(rows)) if needs[6] else None
            low = rounded(rows, ctx.is_rounded and bool(products))
            for one in products:
                one.add(low, block)
        if to_sum is None:
            to_sum = rows  # all of them
        left = iter(products)
        found: list[Tensor | None] = []
        for plain, weight in zip(is_plain, several[half:], strict=True):
            found += [to_sum if plain else None, None] if weight is None else next(left).found
        return (*tail.weights(), *[None] * 4, to_bias, *found)


class _ProductBackward:
    """Gradients of x and W from blocks of that of x W^T."""

    def __init__(
        self, x: Tensor, weight: Tensor, grad: Tensor, wants: tuple[bool, bool], is_rounded: bool
    ) -> None:
        """``wants``: whether the gradients of x and of W are needed."""
        self._x, self._weight = x, rounded(weight, is_rounded)
        self._dtype, self._is_rounded = grad.dtype, is_rounded
        wants_x, self._wants_weight = wants
        to_x = grad.new_empty(len(grad), weight.shape[1]) if wants_x else None
        self.found: list[Tensor | None] = [to_x, None]

    def add(self, rows: Tensor, block: slice) -> None:
        """``rows`` [r, F] of the gradient, as products are made of them."""
        to_x, to_weight = self.found
        if self._wants_weight:
            x = rounded(self._x[block], self._is_rounded)
            self.found[1] = _plus_product(to_weight, rows.t(), x, self._dtype)
        if to_x is not None:
            _multiply(rows, self._weight, to_x[block])


def _in_pairs(pairs: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor | None]]:
    for x, weight in zip(pairs[::2], pairs[1::2], strict=True):
        assert x is not None
        yield x, weight


def _add_up(
    total: Tensor,
    bias: Tensor | None,
    several: Sequence[tuple[Tensor, Tensor | None]],
    is_rounded: bool,
) -> None:
    """Fill ``total`` [r, F] with bias and products x W, W [K, F] or none."""
    for i, (x, weight) in enumerate(several):
        before = total if i else bias
        if weight is None:
            torch.add(x, 0 if before is None else before, out=total)
        elif before is not None and not is_rounded:
            torch.addmm(before, x, weight, out=total)
        elif before is None:
            _multiply(rounded(x, is_rounded), weight, total)
        else:
            torch.add(before, rounded(x, True) @ weight, out=total)


def _multiply(a: Tensor, b: Tensor, into: Tensor) -> None:
    """``a @ b``, which may be in a type of fewer bits."""
    if a.dtype == into.dtype:
        torch.mm(a, b, out=into)
    else:
        into.copy_(a @ b)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``total + a @ b`` in ``dtype``; sums over blocks are made in it."""
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


def norm_relu(
    norm: nn.LayerNorm,
    bias: Tensor | None,
    *pairs: Tensor | None,
    is_rounded: bool = False,
    mask: Mask | None = None,
    output_buffer: OutputBuffer | None = None,
) -> Tensor:
    """``relu(norm(x_1 W_1^T + x_2 W_2^T + ... + bias))``, [R, F], of ``x_1, W_1, x_2, W_2, ...``.

    x_i [R, F_i] and W_i [F, F_i]; in place of a weight ``None`` for the identity. ``is_rounded``:
    see ``models.products``. ``mask`` [R, F]: dropout behind the ReLU. ``output_buffer``: to make
    them in.
    """
    found: Tensor = _NormRelu.apply(  # type: ignore[no-untyped-call]
        norm.weight, norm.bias, norm.eps, is_rounded, mask, output_buffer, bias, *pairs
    )
    return found


class _GCNIIMix(torch.autograd.Function):
    """GCNII's mix with the first rows, its linear map, norm, ReLU and dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        received: Tensor,
        first: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        alpha: float,
        beta: float,
        eps: float,
        is_rounded: bool,
        mask: Mask | None,
        output_buffer: OutputBuffer | None,
        overwrites: bool,
    ) -> Tensor:
        mixed = received.detach() if overwrites else torch.empty_like(received)
        total = torch.empty_like(received)
        out = room_for(output_buffer, received, len(scale))
        tail, stats = Tail(scale, shift, eps, mask), []
        for block in blocks_of(received, len(scale)):
            torch.lerp(received[block], first[block], alpha, out=mixed[block])
            _mapped(mixed[block], weight.t(), beta, is_rounded, total[block])
            stats.append(tail.forward(total, out, block))
        ctx.save_for_backward(*keep(scale, shift, total, out, stats), mixed, weight)
        ctx.alpha, ctx.beta, ctx.is_rounded, ctx.factor = alpha, beta, is_rounded, tail.factor
        ctx.overwrites = overwrites
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mixed, weight = ctx.saved_tensors
        alpha, beta, needs, low = ctx.alpha, ctx.beta, ctx.needs_input_grad, ctx.is_rounded
        tail = TailBackward(saved, ctx.factor, needs[3:5])
        to_weight: Tensor | None = None
        to_received = mixed.detach() if ctx.overwrites else torch.empty_like(mixed)
        to_first = torch.empty_like(mixed) if needs[1] else None
        for block in blocks_of(grad, grad.shape[1]):
            rows, to_mixed = tail.rows(grad, block), to_received[block]
            if needs[2]:
                to_weight = _plus_product(
                    to_weight, rounded(rows, low).t(), rounded(mixed[block], low), rows.dtype
                )
            _mapped(rows, weight, beta, low, to_mixed)
            if to_first is not None:
                torch.mul(to_mixed, alpha, out=to_first[block])
            to_mixed.mul_(1 - alpha)
        to_weight = None if to_weight is None else to_weight.mul_(beta)
        return (to_received, to_first, to_weight, *tail.weights(), *[None] * 7)


def _mapped(x: Tensor, weight: Tensor, beta: float, is_rounded: bool, into: Tensor) -> None:
    """``(1 - beta) x + beta x @ weight``."""
    if is_rounded:
        torch.lerp(x, product(x, weight, is_rounded), beta, out=into)
    else:
        torch.addmm(x, x, weight, beta=1 - beta, alpha=beta, out=into)


def gcnii_mix(
    received: Tensor,
    first: Tensor,
    weight: Tensor,
    norm: nn.LayerNorm,
    alpha: float,
    beta: float,
    is_rounded: bool = False,
    mask: Mask | None = None,
    output_buffer: OutputBuffer | None = None,
    overwrites: bool = False,
) -> Tensor:
    """``relu(norm((1 - beta) m + beta m W^T))`` with ``m`` between ``received`` and ``first``.

    ``m = (1 - alpha) received + alpha first``; all [R, F], W [F, F]. ``is_rounded``: see
    ``models.products``. ``mask`` [R, F]: dropout behind the ReLU. ``output_buffer``: to make them
    in. ``overwrites``: nobody else reads ``received``; m is made there, and in backward, which is
    run once, its gradient.
    """
    found: Tensor = _GCNIIMix.apply(  # type: ignore[no-untyped-call]
        received,
        first,
        weight,
        norm.weight,
        norm.bias,
        alpha,
        beta,
        norm.eps,
        is_rounded,
        mask,
        output_buffer,
        overwrites,
    )
    return found

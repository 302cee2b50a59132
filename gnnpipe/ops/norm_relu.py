"""Fused row-wise work between two aggregations: products, LayerNorm, ReLU and dropout.

Plain autograd would allocate a result and a gradient for each operation, and on the rows of a chunk
(a few hundred) calling the operations costs as much as computing them. Here all are one
``autograd.Function`` that walks through the rows in blocks and saves only the input and the result
of the norm (``norm_relu_blocks``). R rows, r rows of a block, F columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnpipe.ops.bf16_matmul import product, rounded
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.ops.norm_relu_blocks import (
    NUM_SAVED,
    NormReluBackward,
    add_optional,
    blocks_of,
    norm_relu_block,
    to_save,
)
from gnnpipe.ops.output_buffer import OutputBuffer, output_rows


@dataclass(frozen=True, eq=False)
class NormReluOptions:
    """Options of ``norm_relu`` and ``gcnii_mix``."""

    is_rounded: bool = False
    """Products with weights are made in bf16 (``bf16_matmul``)."""
    mask: Mask | None = None
    """Dropout [R, F] after the ReLU."""
    output_buffer: OutputBuffer | None = None
    """Memory for the result [R, F]."""

    @property
    def factor(self) -> float:
        """Factor of the dropout on entries that are kept."""
        return 1.0 if self.mask is None else self.mask.scale


_PLAIN = NormReluOptions()


class NormWeights(NamedTuple):
    """Scale [F], shift [F] and epsilon of a LayerNorm over F columns."""

    weight: Tensor
    bias: Tensor
    eps: float


def norm_relu(
    norm: nn.LayerNorm | NormWeights,
    bias: Tensor | None,
    *pairs: Tensor | None,
    options: NormReluOptions = _PLAIN,
) -> Tensor:
    r"""Return :math:`\mathrm{dropout}(\mathrm{relu}(\mathrm{norm}(\sum_i x_i W_i^T + b)))`.

    Args:
        norm: LayerNorm over F columns.
        bias: b [F].
        pairs: x_1, W_1, x_2, W_2, ... with x_i [R, F_i] and W_i [F, F_i]; ``None`` as a weight is
            the identity.
        options: Rounding, dropout and memory of the result.

    Returns:
        [R, F]
    """
    found: Tensor = _NormRelu.apply(  # type: ignore[no-untyped-call]
        norm.weight, norm.bias, norm.eps, options, bias, *pairs
    )
    return found


class _NormRelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        options: NormReluOptions,
        bias: Tensor | None,
        *pairs: Tensor | None,
    ) -> Tensor:
        is_rounded = options.is_rounded
        summands = [
            (x, None if weight is None else rounded(weight, is_rounded).t())
            for x, weight in _in_pairs(pairs)
        ]
        first, width = summands[0][0], len(scale)
        out = output_rows(options.output_buffer, first, width)
        # A single x without weight and bias is itself the input of the norm.
        is_sum = bias is not None or len(summands) > 1 or summands[0][1] is not None
        total = first.new_empty(len(first), width) if is_sum else first
        stats = []
        for block in blocks_of(first, width):
            if is_sum:
                _fill_sum(total[block], bias, [(x[block], w) for x, w in summands], is_rounded)
            stats.append(norm_relu_block(total, out, block, scale, shift, eps, options.mask))
        # Backward needs no x without a weight.
        rows = [x if weight is not None else None for x, weight in summands]
        ctx.save_for_backward(*to_save(scale, shift, total, out, stats), *rows, *pairs[1::2])
        ctx.is_rounded, ctx.factor = is_rounded, options.factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_scale, needs_shift, _, _, needs_bias, *needs = ctx.needs_input_grad
        saved, pairs = ctx.saved_tensors[:NUM_SAVED], ctx.saved_tensors[NUM_SAVED:]
        norm = NormReluBackward(saved, ctx.factor, (needs_scale, needs_shift))
        half = len(pairs) // 2
        weights = pairs[half:]
        products = [
            _ProductBackward(x, weight, grad, (needs[2 * i], needs[2 * i + 1]), ctx.is_rounded)
            for i, (x, weight) in enumerate(zip(pairs[:half], weights, strict=True))
            if weight is not None
        ]
        # The gradient of an x without a weight is the gradient of the sum.
        is_plain = [weight is None and needs[2 * i] for i, weight in enumerate(weights)]
        blocks = blocks_of(grad, grad.shape[1])
        to_sum = torch.empty_like(grad) if any(is_plain) and len(blocks) > 1 else None
        to_bias: Tensor | None = None
        for block in blocks:
            rows = norm.rows(grad, block, None if to_sum is None else to_sum[block])
            to_bias = add_optional(to_bias, norm.column_sums(rows)) if needs_bias else None
            low = rounded(rows, ctx.is_rounded and bool(products))
            for one in products:
                one.add(low, block)
        if to_sum is None:
            to_sum = rows  # of the only block
        remaining = iter(products)
        grads: list[Tensor | None] = []
        for plain, weight in zip(is_plain, weights, strict=True):
            grads += [to_sum if plain else None, None] if weight is None else next(remaining).grads
        return (*norm.weights(), None, None, to_bias, *grads)


class _ProductBackward:
    """Gradients of x and W, from blocks of the gradient of x W^T."""

    def __init__(
        self, x: Tensor, weight: Tensor, grad: Tensor, wants: tuple[bool, bool], is_rounded: bool
    ) -> None:
        """``wants``: whether the gradients of x and of W are needed."""
        self._x, self._weight = x, rounded(weight, is_rounded)
        self._dtype, self._is_rounded = grad.dtype, is_rounded
        wants_x, self._wants_weight = wants
        to_x = grad.new_empty(len(grad), weight.shape[1]) if wants_x else None
        self.grads: list[Tensor | None] = [to_x, None]

    def add(self, rows: Tensor, block: slice) -> None:
        """Use a block's gradient ``rows`` [r, F], rounded if products are."""
        to_x, to_weight = self.grads
        if self._wants_weight:
            x = rounded(self._x[block], self._is_rounded)
            self.grads[1] = _add_product(to_weight, rows.t(), x, self._dtype)
        if to_x is not None:
            _multiply(rows, self._weight, to_x[block])


def _in_pairs(pairs: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor | None]]:
    for x, weight in zip(pairs[::2], pairs[1::2], strict=True):
        assert x is not None
        yield x, weight


def _fill_sum(
    total: Tensor,
    bias: Tensor | None,
    summands: Sequence[tuple[Tensor, Tensor | None]],
    is_rounded: bool,
) -> None:
    """Fill ``total`` [r, F] with the bias and all products x W; W [K, F], or ``None`` for x."""
    for i, (x, weight) in enumerate(summands):
        before = total if i else bias
        if weight is None:
            torch.add(x, 0 if before is None else before, out=total)
        elif before is not None and not is_rounded:
            torch.addmm(before, x, weight, out=total)
        elif before is None:
            _multiply(rounded(x, is_rounded), weight, total)
        else:
            torch.add(before, rounded(x, True) @ weight, out=total)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Fill ``out`` with ``a @ b``, whose type may have fewer bits."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total + a @ b`` in ``dtype``, computed in ``total``."""
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


def gcnii_mix(
    received: Tensor,
    first: Tensor,
    weight: Tensor,
    norm: nn.LayerNorm | NormWeights,
    alpha: float,
    beta: float,
    options: NormReluOptions = _PLAIN,
    overwrites: bool = False,
) -> Tensor:
    r"""Return the rows of a GCNII layer (arXiv 2007.02133, eq. 5) after norm, ReLU and dropout.

    .. math::
        \mathrm{dropout}(\mathrm{relu}(\mathrm{norm}((1 - \beta) m + \beta m W^T))), \quad
        m = (1 - \alpha) \, \mathrm{received} + \alpha \, \mathrm{first}

    Args:
        received: Aggregated rows [R, F].
        first: Initial residual h0 [R, F].
        weight: W [F, F].
        norm: LayerNorm over F columns.
        alpha: Share of the initial residual.
        beta: Share of the linear map.
        options: Rounding, dropout and memory of the result.
        overwrites: Compute m, and in backward the gradient of ``received``, in the memory of
            ``received``. Nothing else may read ``received``, and backward may run only once.

    Returns:
        [R, F]
    """
    found: Tensor = _GCNIIMix.apply(  # type: ignore[no-untyped-call]
        received, first, weight, norm.weight, norm.bias, norm.eps, alpha, beta, options, overwrites
    )
    return found


class _GCNIIMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        received: Tensor,
        first: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        alpha: float,
        beta: float,
        options: NormReluOptions,
        overwrites: bool,
    ) -> Tensor:
        mixed = received.detach() if overwrites else torch.empty_like(received)
        total = torch.empty_like(received)
        out = output_rows(options.output_buffer, received, len(scale))
        stats = []
        for block in blocks_of(received, len(scale)):
            torch.lerp(received[block], first[block], alpha, out=mixed[block])
            _fill_map(total[block], mixed[block], weight.t(), beta, options.is_rounded)
            stats.append(norm_relu_block(total, out, block, scale, shift, eps, options.mask))
        ctx.save_for_backward(*to_save(scale, shift, total, out, stats), mixed, weight)
        ctx.alpha, ctx.beta, ctx.overwrites = alpha, beta, overwrites
        ctx.is_rounded, ctx.factor = options.is_rounded, options.factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mixed, weight = ctx.saved_tensors
        needs, low = ctx.needs_input_grad, ctx.is_rounded
        norm = NormReluBackward(saved, ctx.factor, needs[3:5])
        to_weight: Tensor | None = None
        to_received = mixed.detach() if ctx.overwrites else torch.empty_like(mixed)
        to_first = torch.empty_like(mixed) if needs[1] else None
        for block in blocks_of(grad, grad.shape[1]):
            rows, to_mixed = norm.rows(grad, block), to_received[block]
            if needs[2]:
                to_weight = _add_product(
                    to_weight, rounded(rows, low).t(), rounded(mixed[block], low), rows.dtype
                )
            _fill_map(to_mixed, rows, weight, ctx.beta, low)
            if to_first is not None:
                torch.mul(to_mixed, ctx.alpha, out=to_first[block])
            to_mixed.mul_(1 - ctx.alpha)
        to_weight = None if to_weight is None else to_weight.mul_(ctx.beta)
        return (to_received, to_first, to_weight, *norm.weights(), *[None] * 5)


def _fill_map(out: Tensor, x: Tensor, weight: Tensor, beta: float, is_rounded: bool) -> None:
    """Fill ``out`` with ``(1 - beta) x + beta x @ weight``."""
    if is_rounded:
        torch.lerp(x, product(x, weight, is_rounded), beta, out=out)
    else:
        torch.addmm(x, x, weight, beta=1 - beta, alpha=beta, out=out)

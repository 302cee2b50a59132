"""Functions of fused calls (``capture.fusion``).

A recording calls the public functions, which have no dropout; the trial runs them on its sample.
A generated step replaces those in ``ROW_WORK`` by functions of a chunk's ``Rows``, which have
dropout and can write their result into the history table. R rows, F columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.capture.markers import recorded
from gnnpipe.capture.stage.step_calls import normalise_relu
from gnnpipe.models.rows import Rows
from gnnpipe.ops.bf16_matmul import linear, product
from gnnpipe.ops.norm_relu import NormReluOptions, NormWeights, gcnii_mix, norm_relu


def summed(*pairs: Any, bias: Any = None, is_rounded: bool = False) -> Any:
    """``sum_i x_i W_i^T + b``, [R, F].

    Args:
        pairs: x_1, W_1, x_2, W_2, ... with x_i [R, F_i] and W_i [F, F_i]; None as a weight is the
            identity.
        bias: b [F].
        is_rounded: Products are computed in bf16.
    """
    total = bias
    # Rows without a weight first, so that each product can be added to a sum.
    for x, weight in sorted(_pairs_of(pairs), key=lambda pair: pair[1] is not None):
        if weight is None:
            total = x if total is None else total + x
        elif is_rounded or total is None:
            made = linear(x, weight, None, is_rounded)
            total = made if total is None else total + made
        else:
            total = torch.addmm(total, x, weight.t())
    return total


def layer_norm_relu(
    *pairs: Any,
    bias: Any,
    norm: Sequence[Any],
    probability: float = 0.0,
    site: int = -1,
    is_rounded: bool = False,
) -> Any:
    """``dropout(relu(LayerNorm(sum_i x_i W_i^T + b)))``, [R, F].

    Args:
        pairs: As in ``summed``.
        bias: b [F] or None.
        norm: Scale [F], shift [F] and epsilon of the LayerNorm.
        probability: Probability of dropout.
        site: Number of the dropout (``markers.drop``); -1 without dropout.
        is_rounded: Products are computed in bf16.
    """
    del probability, site
    options = NormReluOptions(is_rounded)
    return norm_relu(NormWeights(*norm), bias, *pairs, options=options)


@recorded
def mixed_map(
    received: Any, first: Any, weight: Any, *, shares: tuple[float, float], is_rounded: bool = False
) -> Any:
    """``(1 - beta) m + beta m W`` with ``m = (1 - alpha) received + alpha first``, [R, F].

    The map of GCNII (arXiv 2007.02133, eq. 5); ``received`` and ``first`` [R, F], W [F, F];
    ``shares``: alpha and beta.
    """
    alpha, beta = shares
    m = torch.lerp(received, first, alpha)
    return torch.lerp(m, product(m, weight, is_rounded), beta)


def gcnii_norm_relu(
    received: Any,
    first: Any,
    weight: Any,
    *,
    shares: tuple[float, float],
    norm: Sequence[Any],
    probability: float = 0.0,
    site: int = -1,
    is_rounded: bool = False,
) -> Any:
    """``dropout(relu(LayerNorm(mixed_map(...))))``, [R, F].

    See ``mixed_map`` and ``layer_norm_relu``.
    """
    del probability, site
    options = NormReluOptions(is_rounded)
    constants = NormWeights(*norm), *shares
    return gcnii_mix(received, first, weight.t(), *constants, options)


def _gcnii_norm_relu(
    rows: Rows,
    received: Tensor,
    first: Tensor,
    weight: Tensor,
    *,
    shares: tuple[float, float],
    norm: Sequence[Any],
    overwrites: bool = False,
    **settings: Any,
) -> Tensor:
    """``gcnii_norm_relu`` of a chunk's rows.

    ``overwrites``: nothing else reads ``received`` [R, F], so its memory is reused in training.
    ``settings``: arguments of ``_options``.
    """
    options = _options(rows, len(norm[0]), **settings)
    constants = NormWeights(*norm), *shares
    overwrites = overwrites and rows.may_overwrite
    return gcnii_mix(received, first, weight.t(), *constants, options, overwrites)


def batch_norm_relu(*given: Any, probability: float = 0.0, site: int = -1) -> Any:
    """``dropout(relu(normalise(...)))``, [R, F]: a BatchNorm, ReLU and dropout.

    ``given``: the arguments of ``step_calls.normalise``.
    """
    del probability, site
    return normalise_relu(*given, options=NormReluOptions())


def _batch_norm_relu(rows: Rows, *given: Any, **settings: Any) -> Any:
    """``batch_norm_relu`` of a chunk's rows. ``settings``: arguments of ``_options``."""
    options = _options(rows, given[0].shape[1], **settings)
    return normalise_relu(*given, options=options)


def _pairs_of(pairs: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(pairs[::2], pairs[1::2], strict=True))


def _options(
    rows: Rows,
    width: int,
    probability: float,
    is_pushed: bool,
    is_rounded: bool = False,
    site: int = -1,
) -> NormReluOptions:
    """Options of a fused call; ``is_pushed``: the result is the rows that the step pushes."""
    mask = rows.mask(width, probability, site) if probability else None
    return NormReluOptions(is_rounded, mask, rows.output_buffer if is_pushed else None)


def _layer_norm_relu(
    rows: Rows, *pairs: Tensor | None, bias: Tensor | None, norm: Sequence[Any], **settings: Any
) -> Tensor:
    """``layer_norm_relu`` of a chunk's rows. ``settings``: arguments of ``_options``."""
    options = _options(rows, len(norm[0]), **settings)
    return norm_relu(NormWeights(*norm), bias, *pairs, options=options)


ROW_WORK = {
    layer_norm_relu: _layer_norm_relu,
    gcnii_norm_relu: _gcnii_norm_relu,
    batch_norm_relu: _batch_norm_relu,
}
"""Functions on a chunk's rows, which take ``Rows`` as first argument, by recorded function. They
can write their result into the history table (``is_pushed``)."""

PRODUCTS = (summed, mixed_map, layer_norm_relu, gcnii_norm_relu)
"""Recorded functions that can compute products in bf16 (``is_rounded``)."""


def drops_rows(call: fx.Node) -> bool:
    """Whether a fused call ends with a dropout."""
    return call.target in ROW_WORK and float(call.kwargs["probability"]) > 0.0  # type: ignore[arg-type]


def plain_summands(call: fx.Node) -> list[Any]:
    """Rows that a fused call adds without a product."""
    if call.target not in (summed, layer_norm_relu):
        return []
    return [x for x, weight in _pairs_of(call.args) if weight is None]


def multiplies(call: fx.Node) -> bool:
    """Whether a fused call has a product with a weight."""
    if call.target in (mixed_map, gcnii_norm_relu):
        return True
    return call.target in PRODUCTS and any(weight is not None for weight in call.args[1::2])

"""Sums and softmax sums of messages ``relu(x_j + W e_ij + b) + eps``, made block by block.

The message of an edge depends on its features, so it has to be made; but for some edges at a time,
forward and once more backward, and none is kept (``neighbour_rows``).

Shapes: T rows read, C target rows, E edges in the order of ``Incidence``, F columns, K edge
features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnpipe.graph.blocks import Incidence
from gnnpipe.models.neighbour_rows import NeedsMessagesError, add_to, edge_blocks


@dataclass(frozen=True, eq=False)
class EdgeFeatures:
    """Edge features and their linear map."""

    values: Tensor
    """[E, K]; without a map [E, F]."""
    weight: Tensor | None = None
    """[F, K]"""
    bias: Tensor | None = None
    """[F]"""


def message_sum(read: Tensor, features: EdgeFeatures, eps: float, edges: Incidence) -> Tensor:
    """Return the sums [C, F] of ``relu(read_j + W e_ij + b) + eps``; ``read`` [T, F]."""
    given = read, features.values, features.weight, features.bias
    found: Tensor = _MessageSum.apply(*given, eps, edges)  # type: ignore[no-untyped-call]
    return found


def message_softmax(
    read: Tensor,
    features: EdgeFeatures,
    eps: float,
    temperature: Tensor,
    edges: Incidence,
    is_semi: bool = False,
) -> Tensor:
    """Return the sums [C, F] of the messages of ``message_sum`` by their softmax.

    The softmax is over the edges into each target, by column, of ``temperature`` (one number or
    [1, F]) times the message. ``is_semi``: its weights have no gradient. Raises
    ``NeedsMessagesError`` as ``check_totals``.
    """
    given = read, features.values, features.weight, features.bias, temperature
    options = _SoftmaxOptions(edges, eps, is_semi)
    found: Tensor = _MessageSoftmax.apply(*given, options)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, eq=False)
class _SoftmaxOptions:
    """Arguments of ``message_softmax`` that are no tensors."""

    edges: Incidence
    eps: float
    is_semi: bool


_LEAST = 0.6
"""Power of the smallest number of a type below which a softmax's sum is not divided by."""


def check_totals(totals: Tensor, edges: Incidence) -> Tensor:
    """Return a softmax's ``totals`` [C, F], 1 without an edge.

    Raises ``NeedsMessagesError`` if the number type cannot hold a total (its exponents are shifted
    by one number for all targets, and lie far below it), or if a total is NaN.
    """
    is_read = (edges.offsets.diff() > 0)[:, None]
    is_held = totals >= torch.finfo(totals.dtype).tiny ** _LEAST
    if bool((is_read & ~is_held).any()):
        raise NeedsMessagesError
    return torch.where(is_read, totals, torch.ones_like(totals))


def _sums_of(
    read: Tensor,
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    edges: Incidence,
    block: slice,
) -> Tensor:
    """Return ``read_j + W e_ij + b`` for some edges, [e, F]."""
    rows = read.index_select(0, edges.source[block])
    if weight is None:
        rows += values[block]
    else:
        rows.addmm_(values[block], weight.t())
    return rows if bias is None else rows.add_(bias)


class _Gradients:
    """Gradients of rows, edge features and their map, added up over blocks of edges."""

    def __init__(self, ctx: Any, edges: Incidence) -> None:
        self._read, self._values, self._weight, self._bias = ctx.saved_tensors[:4]
        self._edges = edges
        self._needs_values = ctx.needs_input_grad[1]
        self._to_read = torch.zeros_like(self._read)
        self._to_values = torch.empty_like(self._values) if self._needs_values else None
        width = self._read.shape[1]
        mapped = self._weight is not None
        self._to_weight = self._read.new_zeros(self._values.shape[1], width) if mapped else None
        self._to_bias = None if self._bias is None else torch.zeros_like(self._bias)

    def sums(self, block: slice) -> Tensor:
        """Return ``read_j + W e_ij + b`` of a block once more, [e, F]."""
        given = self._read, self._values, self._weight, self._bias
        return _sums_of(*given, self._edges, block)

    def add(self, block: slice, to_message: Tensor, sums: Tensor) -> None:
        """Add the gradients of a block, from that of its messages and their ``sums``, [e, F]."""
        rows = torch.ops.aten.threshold_backward(to_message, sums, 0)
        add_to(self._to_read, self._edges.source[block], rows)
        if self._to_weight is not None:
            self._to_weight += self._values[block].t() @ rows
        if self._to_bias is not None:
            self._to_bias += rows.sum(0)
        if self._to_values is not None:
            self._to_values[block] = rows if self._weight is None else rows @ self._weight

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        """The gradients of read, values, weight and bias."""
        to_weight = None if self._to_weight is None else self._to_weight.t()
        return self._to_read, self._to_values, to_weight, self._to_bias


class _MessageSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        edges: Incidence,
    ) -> Tensor:
        ctx.save_for_backward(read, values, weight, bias)
        ctx.edges = edges
        out = read.new_zeros(len(edges.offsets) - 1, read.shape[1])
        for block in edge_blocks(edges, read.shape[1]):
            rows = _sums_of(read, values, weight, bias, edges, block).clamp_min_(0)
            add_to(out, edges.target[block], rows.add_(eps))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edges: Incidence = ctx.edges
        found = _Gradients(ctx, edges)
        for block in edge_blocks(edges, grad.shape[1]):
            to_message = grad.index_select(0, edges.target[block])
            found.add(block, to_message, found.sums(block))
        return (*found.all, None, None)


class _MessageSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        temperature: Tensor,
        options: _SoftmaxOptions,
    ) -> Tensor:
        edges, eps = options.edges, options.eps
        count, width = len(edges.offsets) - 1, read.shape[1]
        given = read, values, weight, bias, edges
        largest = read.new_full((1, width), -torch.inf)
        for block in edge_blocks(edges, width):
            scaled = _sums_of(*given, block).clamp_min_(0).add_(eps).mul_(temperature)
            torch.maximum(largest, scaled.amax(0, keepdim=True), out=largest)
        sums, totals = read.new_zeros(count, width), read.new_zeros(count, width)
        for block in edge_blocks(edges, width):
            rows = _sums_of(*given, block).clamp_min_(0).add_(eps)
            share = (rows * temperature).sub_(largest).exp_()
            add_to(totals, edges.target[block], share)
            add_to(sums, edges.target[block], share.mul_(rows))
        totals = check_totals(totals, edges)
        out = sums.div_(totals)
        ctx.save_for_backward(read, values, weight, bias, temperature, largest, totals, out)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *_, temperature, largest, totals, out = ctx.saved_tensors
        options: _SoftmaxOptions = ctx.options
        edges = options.edges
        found, scaled = _Gradients(ctx, edges), grad / totals
        to_temperature = torch.zeros_like(largest)
        for block in edge_blocks(edges, grad.shape[1]):
            target = edges.target[block]
            sums = found.sums(block)
            rows = sums.clamp_min(0).add_(options.eps)
            share = (rows * temperature).sub_(largest).exp_()
            share *= scaled.index_select(0, target)
            if not options.is_semi:
                apart = rows - out.index_select(0, target)
                to_temperature += (share * apart).mul_(rows).sum(0, keepdim=True)
                share *= apart.mul_(temperature).add_(1)
            found.add(block, share, sums)
        to_temperature = to_temperature.sum_to_size(temperature.shape)
        return (*found.all, to_temperature, None)

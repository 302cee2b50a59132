"""Functions that generated steps call, on the C rows of a chunk.

They implement the markers, the inputs, linear maps of sparse features or in bf16, and fused
normalisation. F columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.capture.markers import by_mode, drop, in_training, of_vertices, recorded
from gnnpipe.graph.blocks import Block
from gnnpipe.models.rows import Rows
from gnnpipe.models.sparse_input_linear import feature_linear
from gnnpipe.ops.bf16_matmul import linear
from gnnpipe.ops.hashed_dropout import keyed_dropout
from gnnpipe.ops.norm_relu import NormReluOptions
from gnnpipe.ops.norm_relu_blocks import blocks_of
from gnnpipe.ops.output_buffer import output_rows


def edge_data_of(block: Block, name: str) -> Tensor:
    """Edge features or weights of a block [E, ...]."""
    return block.edge_data[name]


def dense_features(rows: Rows) -> Tensor:
    """Features of the rows [C, F]."""
    assert rows.features is not None
    return rows.features.dense()


def aggregated_features(rows: Rows, structure: str) -> Tensor:
    """Returns the aggregated features of the rows [C, F]; ``structure`` names the matrix."""
    return rows.aggregated[structure]


def _drop(rows: Rows, x: Tensor, probability: float, site: int) -> Tensor:
    return rows.dropout(flat(x), probability, site).reshape(x.shape)


def _in_training(rows: Rows, now: Tensor, kept: Tensor) -> Tensor:
    return now if rows.training or rows.is_probe else kept.to(now.dtype).expand_as(now)


def _by_mode(rows: Rows, training: Any, evaluation: Any) -> Any:
    return training if rows.training or rows.is_probe else evaluation


class _RowsOfWeight(torch.autograd.Function):
    """Rows of a weight. The backward of torch would allocate all N rows for every chunk."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.weight, ctx.rows = weight, rows
        return weight.detach()[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.index_add_(0, ctx.rows, grad)
        return None, None


def _of_vertices(rows: Rows, weight: Tensor) -> Tensor:
    assert rows.vertices is not None
    found: Tensor = _RowsOfWeight.apply(weight, rows.vertices)  # type: ignore[no-untyped-call]
    return found


OF_ROWS = {by_mode: _by_mode, drop: _drop, in_training: _in_training, of_vertices: _of_vertices}
"""Implementations of the markers that take the chunk's ``Rows`` as first argument."""


def for_all(mean: Tensor, rows: Rows) -> Tensor:
    """A single row [1, ...] expanded to all rows [C, ...]."""
    return mean.expand(len(rows.keys), *mean.shape[1:])


def flat(x: Tensor) -> Tensor:
    """Rows [C, ...] or [C] as rows [C, F]."""
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows [C, F] in the shape that the model uses, [C, ...]."""
    return x.reshape(len(x), *shape)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_linear(recording: nn.Module, call: fx.Node) -> bool:
    """Whether a call is ``F.linear`` or a Linear of torch or PyG without hooks."""
    if call.op == "call_module":
        module = recording.get_submodule(str(call.target))
        hooks = any(getattr(module, name) for name in HOOKS)
        return isinstance(module, nn.Linear | Linear) and len(call.args) == 1 and not hooks
    return call.target is F.linear


class LinearBy(nn.Module):
    """The user's linear layer, computed by another function than ``F.linear``."""

    def __init__(self, linear: Any, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.function = linear, function

    def forward(self, input: Any) -> Tensor:
        """``function(input, weight, bias)``; the weight may be parametrised."""
        return self.function(input, self.linear.weight, self.linear.bias)


def linear_of_features(
    rows: Rows, weight: Tensor, bias: Tensor | None = None, *, is_rounded: bool
) -> Tensor:
    """``torch.nn.functional.linear`` of the features of ``rows``, which may be sparse."""
    assert rows.features is not None
    if weight.dim() != 2:
        return F.linear(rows.features.dense(), weight, bias)
    return feature_linear(rows.features, weight, bias, is_rounded)


def rounded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` computed in bf16."""
    return linear(input, weight, bias, is_rounded=True)


@recorded
def squares(x: Any, mean: Any) -> Any:
    """``(x - mean)^2`` [C, F]; mean [1, F] or [C, F]."""
    if not _is_one_row(x, mean):
        return (x - mean).square()
    return _Squares.apply(x, mean)  # type: ignore[no-untyped-call]


@recorded
def normalise(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Any:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` [C, F].

    Mean and variance are [1, F] or [C, F]; weight and bias [F], or both None.
    """
    if not _is_one_row(x, mean, variance):
        found = (x - mean) * torch.rsqrt(positive(variance) + eps)
        return found if weight is None else found * weight + bias
    return _Normalise.apply(x, mean, variance, weight, bias, eps, None)  # type: ignore[no-untyped-call]


def normalise_relu(*given: Any, options: NormReluOptions) -> Any:
    """``dropout(relu(normalise(...)))`` [C, F].

    ``given``: the arguments of ``normalise``. ``options``: dropout, and an output buffer, which is
    used only if mean and variance are [1, F].
    """
    if not _is_one_row(*given[:3]):
        return keyed_dropout(torch.relu(normalise(*given)), options.mask)
    return _Normalise.apply(*given, options)  # type: ignore[no-untyped-call]


def positive(variance: Any) -> Any:
    """The variance, at least 0; a forecast of the stale part may be negative."""
    return torch.clamp(variance, min=0.0)


def _is_one_row(x: Tensor, *given: Tensor) -> bool:
    """Whether each tensor is a single row [1, F] for x [C, F]."""
    return x.dim() == 2 and all(one.shape == (1, x.shape[1]) for one in given)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        row, out = mean[0], torch.empty_like(x)
        for block in blocks_of(x, x.shape[1]):
            torch.sub(x[block], row, out=out[block]).square_()
        ctx.save_for_backward(x, row)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, row = ctx.saved_tensors
        to_x, total = torch.empty_like(x), torch.zeros_like(row)
        for block in blocks_of(x, x.shape[1]):
            part = torch.sub(x[block], row, out=to_x[block]).mul_(grad[block]).mul_(2.0)
            total -= part.sum(0)
        return to_x, total[None]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        options: NormReluOptions | None,
    ) -> Tensor:
        """``options``: of the ReLU and the dropout that follow; None without these."""
        row, factor = mean[0], 1.0 if options is None else options.factor
        out = output_rows(None if options is None else options.output_buffer, x, x.shape[1])
        root = torch.rsqrt(positive(variance[0]) + eps)
        # c relu(x) = relu(c x) for the factor c > 0 of the dropout.
        scale = (root if weight is None else root * weight) * factor
        shift = None if bias is None else bias * factor
        for block in blocks_of(x, x.shape[1]):
            rows = torch.sub(x[block], row, out=out[block]).mul_(scale)
            if shift is not None:
                rows.add_(shift)
            if options is not None:
                rows.clamp_min_(0)
                if options.mask is not None:
                    rows.mul_(options.mask.kept[block])
        ctx.save_for_backward(x, row, variance[0], root, weight, None if options is None else out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row, variance, root, weight, out = ctx.saved_tensors
        scale = root if weight is None else root * weight
        to_x, total, with_rows = torch.empty_like(x), torch.zeros_like(row), torch.zeros_like(row)
        for block in blocks_of(x, x.shape[1]):
            part = grad[block]
            if out is not None:  # entries that are dropped or negative are 0
                part = torch.ops.aten.threshold_backward(part, out[block], 0)
            total += part.sum(0)
            with_rows += torch.sub(x[block], row, out=to_x[block]).mul_(part).sum(0)
            torch.mul(part, scale * ctx.factor, out=to_x[block])
        total, with_rows = total * ctx.factor, with_rows * ctx.factor
        # A negative variance is clamped and has no gradient.
        to_variance = with_rows * scale * root * root * -0.5 * (variance >= 0)
        return (
            to_x,
            (-total * scale)[None],
            to_variance[None],
            None if weight is None else with_rows * root,
            None if weight is None else total,
            None,
            None,
        )

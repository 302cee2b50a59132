"""Rules for normalisations over all vertices or edges: means over all vertices and row-wise work.

The mean is an aggregation (``runtime.history.mean``): exact with one chunk or layer by layer,
otherwise partly from the last epoch. The variance is the mean of the squared centred rows, because
``mean(x x) - mean(x)^2`` cancels where the mean is large.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch_geometric import nn as pyg

from gnnpipe.capture.markers import aggregate, in_training
from gnnpipe.capture.rules.convolutions import OtherKindError, Rule
from gnnpipe.capture.stage.step_calls import normalise, positive, squares
from gnnpipe.graph.operators import BY_EDGES, EVERYONE


def _mean(x: Any, path: str = "", what: str = "", structure: str = EVERYONE) -> Any:
    """The mean of x over all vertices or edges, one equal row for each vertex.

    ``what``: running statistic of the module at ``path`` that the mean updates. ``BY_EDGES``: x are
    means over the edges into each vertex.
    """
    return aggregate(x, structure=structure, observed_by=path and f"{path}:{what}")


def batch_norm(module: Any, x: Any, path: str) -> Any:
    """BatchNorm: statistics of all vertices in training, running ones in evaluation."""
    if isinstance(module, pyg.BatchNorm):
        module, path = module.module, f"{path}.module"
    if not module.track_running_stats:
        path = ""
    mean = _mean(x, path, "mean")
    variance = _mean(squares(x, mean), path, "variance")
    if path:
        mean = in_training(mean, module.running_mean)
        variance = in_training(variance, module.running_var)
    return normalise(x, mean, variance, module.weight, module.bias, module.eps)


def frozen_batch_norm(module: Any, x: Any) -> Any:
    """BatchNorm in evaluation mode, row-wise work; None without running statistics."""
    module = module.module if isinstance(module, pyg.BatchNorm) else module
    if not module.track_running_stats:
        return None
    return normalise(
        x, module.running_mean, module.running_var, module.weight, module.bias, module.eps
    )


def layer_norm(module: Any, x: Any, path: str) -> Any:
    """PyG's LayerNorm in mode 'graph': statistics of all entries of all vertices."""
    if module.mode != "graph":
        return None
    centred = x - _mean(x.mean(dim=-1, keepdim=True))
    variance = _mean((centred * centred).mean(dim=-1, keepdim=True))
    out = centred / (torch.sqrt(positive(variance)) + module.eps)
    return out if module.weight is None else out * module.weight + module.bias


def graph_norm(module: Any, x: Any, path: str) -> Any:
    """GraphNorm: subtracts a learned multiple of the mean."""
    centred = x - _mean(x) * module.mean_scale
    variance = positive(_mean(centred * centred))
    return module.weight * centred / torch.sqrt(variance + module.eps) + module.bias


def pair_norm(module: Any, x: Any, path: str) -> Any:
    """PairNorm: centres, then divides by the mean length of the rows, or each row by its own."""
    centred = x - _mean(x)
    if module.scale_individually:
        return module.scale * centred / (module.eps + centred.norm(2, -1, keepdim=True))
    length = _mean((centred * centred).sum(-1, keepdim=True))
    return module.scale * centred / torch.sqrt(module.eps + positive(length))


def mean_subtraction(module: Any, x: Any, path: str) -> Any:
    """MeanSubtractionNorm: subtracts the mean."""
    return x - _mean(x)


NORMS: dict[type[nn.Module], Callable[[Any, Any, str], Any]] = {
    nn.BatchNorm1d: batch_norm,
    pyg.BatchNorm: batch_norm,
    pyg.LayerNorm: layer_norm,
    pyg.GraphNorm: graph_norm,
    pyg.PairNorm: pair_norm,
    pyg.MeanSubtractionNorm: mean_subtraction,
}
"""Maps (module, x, path of the module) to its result, or to None if it is row-wise."""


@torch.no_grad()
def update_running_statistics(module: nn.Module, what: str, now: Tensor, count: int) -> None:
    """Update a BatchNorm's running 'mean' or 'variance' [F] after an epoch, as torch does.

    ``now``: statistic of ``count`` vertices or edges. The mean must be updated first.
    """
    assert isinstance(module, nn.BatchNorm1d)
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    if what == "mean":
        module.num_batches_tracked += 1
    step = module.momentum
    if step is None:
        step = 1.0 / float(module.num_batches_tracked)
    if what == "mean":
        module.running_mean.lerp_(now.to(module.running_mean.dtype), step)
    else:
        unbiased = now * (count / max(count - 1, 1))
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), step)


class _AfterNorm(pyg.MessagePassing):  # type: ignore[misc]
    """The part of EdgeConv behind its norm, for normalised rows [n, F] and [m, F]."""

    def __init__(self, rest: nn.Module, aggr: Any) -> None:
        super().__init__(aggr=aggr)
        self.rest = rest

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """Rows [m, ...]."""
        out: Tensor = self.propagate(edge_index, x=x, size=(len(x[0]), len(x[1])))
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        """Messages [E, ...]."""
        out: Tensor = self.rest(x_i + x_j)
        return out


def _is_one_of(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly one of these classes and has no hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type_before_parametrizations(module) in kinds and not hooks


def _taken_apart(layers: Any) -> tuple[Any, Any, nn.Module]:
    """(first linear map, BatchNorm behind it, others) of EdgeConv's nn, or ``OtherKindError``."""
    if _is_one_of(layers, pyg.MLP):
        dropout = [nn.Dropout(p) for p in layers.dropout]
        lins, norms = list(layers.lins), list(layers.norms)
        if len(norms) != 1 or layers.act_first or not isinstance(layers.act, nn.Module | None):
            raise OtherKindError
        found = [lins[0], norms[0], *([layers.act] if layers.act else []), dropout[0]]
        found += [lins[1], dropout[1]] if layers.plain_last else []
    elif _is_one_of(layers, nn.Sequential):
        found = list(layers)
    else:
        raise OtherKindError
    if len(found) < 2:
        raise OtherKindError
    lin, norm, *rest = found
    norm = norm.module if _is_one_of(norm, pyg.BatchNorm) else norm
    others = [m for layer in rest for m in layer.modules()]
    if (
        not _is_one_of(lin, nn.Linear, pyg.Linear)
        or not _is_one_of(norm, nn.BatchNorm1d)
        or any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in others)
    ):
        raise OtherKindError
    return lin, norm, nn.Sequential(*rest)


def _edge_conv(conv: Any, x: Any, make: Callable[[nn.Module, Any, Any], Any]) -> Any:
    """``aggr rest(norm(a_i + b_j))``, see above."""
    lin, norm, rest = _taken_apart(conv.nn)
    if conv.node_dim != -2 or conv.decomposed_layers != 1 or norm in x.tracer.frozen:
        raise OtherKindError
    path = x.tracer.path_of_module(norm) if norm.track_running_stats else ""
    width = lin.in_features if isinstance(lin, nn.Linear) else lin.in_channels
    of_pair, of_difference = lin.weight[:, : width // 2], lin.weight[:, width // 2 :]
    reading = nn.functional.linear(x, of_pair - of_difference, lin.bias)
    read = nn.functional.linear(x, of_difference)
    # Centring before squaring avoids cancellation; reading + read stays the same.
    middle = _mean(read)
    read, reading = read - middle, reading + middle

    around = aggregate(torch.cat([read, read * read], dim=1), structure="mean")
    near, square = torch.chunk(around, 2, dim=1)

    mean = _mean(reading + near, path, "mean", BY_EDGES)
    centred = reading - mean
    squared = centred * centred + 2.0 * centred * near + square
    variance = _mean(squared, path, "variance", BY_EDGES)
    if path:
        centred = reading - in_training(mean, norm.running_mean)
        variance = in_training(variance, norm.running_var)
    scale = torch.rsqrt(positive(variance) + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    reading = centred * scale + norm.bias if norm.affine else centred * scale
    return make(_AfterNorm(rest, conv.aggr_module), read * scale, reading)


def _norm_at_end(name: str) -> Rule:
    """The rule of a convolution that ends with its module ``name``, which is row-wise work.

    Applies only if the module has a norm with statistics of all vertices.
    """

    def rule(conv: Any, x: Any, make: Callable[..., Any], edge_attr: Any = None) -> Any:
        last = getattr(conv, name)
        has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in last.modules())
        if not has_norm or conv._forward_hooks or conv._forward_pre_hooks:
            raise OtherKindError
        rest = copy.copy(conv)
        rest._modules = {**conv._modules, name: nn.Identity()}
        return last(make(rest, x, None, edge_attr=edge_attr))

    return rule


EDGE_RULES: dict[type[nn.Module], Rule] = {
    pyg.EdgeConv: _edge_conv,
    pyg.GENConv: _norm_at_end("mlp"),
    pyg.GINEConv: _norm_at_end("nn"),
}
"""Rules with one more argument, ``make(convolution, source rows, target rows)``: it records a call
of a convolution made by the rule."""

"""Rule for EdgeConv with a BatchNorm over edges behind the first linear map of its ``nn``.

That map of ``[x_i, x_j - x_i]`` is ``a_i + b_j`` on an edge from j to i, with
``a = x (W_1 - W_2) + bias`` and ``b = x W_2``. Let m_i and q_i be the means of b and of b b over
the edges into i. Over these edges, ``a + b`` then has the mean ``a + m`` and its square the mean
``a a + 2 a m + q``. The statistics of the norm are means of both over all vertices, weighted by
in-degree. So the rule needs one linear aggregation, row-wise work and means over all vertices; the
layers behind the norm run unchanged over the edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch_geometric import nn as pyg

from gnnpipe.capture.markers import aggregate, in_training
from gnnpipe.capture.rules.convolutions import OtherKindError, Rule
from gnnpipe.capture.stage.norm_rows import positive
from gnnpipe.graph.operators import BY_EDGES, EVERYONE


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
    """(first linear map, BatchNorm behind it, remaining layers) of EdgeConv's ``nn``.

    Raises ``OtherKindError`` for other layers.
    """
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
    if conv.node_dim != -2 or conv.decomposed_layers != 1:
        raise OtherKindError
    path = x.tracer.path_of_module(norm) if norm.track_running_stats else ""
    width = lin.in_features if isinstance(lin, nn.Linear) else lin.in_channels
    of_pair, of_difference = lin.weight[:, : width // 2], lin.weight[:, width // 2 :]
    reading = nn.functional.linear(x, of_pair - of_difference, lin.bias)
    read = nn.functional.linear(x, of_difference)
    # Centring before squaring avoids cancellation; reading + read stays the same.
    middle = aggregate(read, structure=EVERYONE)
    read, reading = read - middle, reading + middle

    around = aggregate(torch.cat([read, read * read], dim=1), structure="mean")
    near, square = torch.chunk(around, 2, dim=1)

    def over_edges(rows: Any, what: str) -> Any:
        """The mean over all edges of rows that are means over the edges into each vertex."""
        return aggregate(rows, structure=BY_EDGES, observed_by=path and f"{path}:{what}")

    mean = over_edges(reading + near, "mean")
    centred = reading - mean
    variance = over_edges(centred * centred + 2.0 * centred * near + square, "variance")
    if path:
        centred = reading - in_training(mean, norm.running_mean)
        variance = in_training(variance, norm.running_var)
    scale = torch.rsqrt(positive(variance) + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    reading = centred * scale + norm.bias if norm.affine else centred * scale
    return make(_AfterNorm(rest, conv.aggr_module), read * scale, reading)


EDGE_RULES: dict[type[nn.Module], Rule] = {pyg.EdgeConv: _edge_conv}
"""Rules with one more argument, ``make(convolution, source rows, target rows)``: it records a call
of a convolution made by the rule."""

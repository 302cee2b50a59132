"""EdgeConv with a BatchNorm over edges, taken apart so that no edge of another chunk is needed.

The first linear map of ``nn([x_i, x_j - x_i])`` splits into a part of either end: on an edge from
j to i it gives ``a_i + b_j`` with ``a = x (W_1 - W_2) + bias`` and ``b = x W_2``. With m_i the mean
of b over the edges into i, and q_i that of its square, the means over those edges are ``a + m`` and
``a a + 2 a m + q``, and the means over all edges follow, each vertex counted by its edges: one
linear aggregation, row-wise work and means over all vertices. What follows the norm then runs over
the edges as it stands.
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

__all__ = ["EDGE_RULES"]


class _AfterNorm(pyg.MessagePassing):  # type: ignore[misc]
    """EdgeConv from behind its norm on: [n, F] reads, [m, F] reading, both normed already."""

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
    """Its forward is that of one of these, and nothing else: it will not be called."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type_before_parametrizations(module) in kinds and not hooks


def _taken_apart(layers: Any) -> tuple[Any, Any, nn.Module]:
    """The first linear map, the norm behind it, and the rest; ``OtherKindError`` if it has none."""
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
    """``max relu(norm(a_i + b_j)) W + ...``, or as its ``nn`` has it behind the norm."""
    lin, norm, rest = _taken_apart(conv.nn)
    if conv.node_dim != -2 or conv.decomposed_layers != 1:
        raise OtherKindError
    path = x.tracer.path_of_module(norm) if norm.track_running_stats else ""
    width = lin.in_features if isinstance(lin, nn.Linear) else lin.in_channels
    of_pair, of_difference = lin.weight[:, : width // 2], lin.weight[:, width // 2 :]
    reading = nn.functional.linear(x, of_pair - of_difference, lin.bias)
    read = nn.functional.linear(x, of_difference)
    # Centred before anything is squared; what one end loses the other gains, but for staleness.
    middle = aggregate(read, structure=EVERYONE)
    read, reading = read - middle, reading + middle

    around = aggregate(torch.cat([read, read * read], dim=1), structure="mean")
    near, square = torch.chunk(around, 2, dim=1)

    def over_edges(rows: Any, what: str) -> Any:
        """The mean over all edges, of means over those into each vertex."""
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
"""Beside what other rules take, ``make`` calls a convolution made by the rule on rows to read and
rows that read; the recording then has it."""

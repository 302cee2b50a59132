"""Normalisations over all vertices, taken apart: a mean over all vertices and row-wise work.

The mean is an aggregation like any other (``runtime.mean_history``): exact with one chunk or walked
layer by layer, and otherwise partly of the last epoch. Variances come from the mean of the squares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from gnnpipe.graph.operators import EVERYONE
from gnnpipe.models.bridge.marks import aggregate, in_training

__all__ = ["NORMS", "move_statistics"]


def _means(x: Any, path: str = "") -> tuple[Any, Any]:
    """Means of x and of its squares over all vertices, for every row."""
    both = aggregate(torch.cat([x, x * x], dim=-1), structure=EVERYONE, observed_by=path)
    mean, square = both.chunk(2, dim=-1)
    return mean, square


def _affine(module: Any, x: Any) -> Any:
    return x if module.weight is None else x * module.weight + module.bias


def batch_norm(module: Any, x: Any, path: str) -> Any:
    """Over all vertices in training, with the moving statistics in evaluation."""
    if isinstance(module, pyg.BatchNorm):
        module, path = module.module, f"{path}.module"
    if not module.track_running_stats:
        path = ""
    mean, square = _means(x, path)
    variance = square - mean * mean
    if path:
        mean = in_training(mean, module.running_mean)
        variance = in_training(variance, module.running_var)
    return _affine(module, (x - mean) * torch.rsqrt(variance + module.eps))


def layer_norm(module: Any, x: Any, path: str) -> Any:
    """PyG's, over all entries of all vertices (mode 'graph')."""
    if module.mode != "graph":
        return None
    mean, square = (m.mean(dim=-1, keepdim=True) for m in _means(x))
    deviation = torch.sqrt(torch.clamp(square - mean * mean, min=0.0))
    return _affine(module, (x - mean) / (deviation + module.eps))


def graph_norm(module: Any, x: Any, path: str) -> Any:
    """With a share of the mean that is learned."""
    mean, square = _means(x)
    part = mean * module.mean_scale
    variance = square - 2.0 * part * mean + part * part
    return module.weight * (x - part) / torch.sqrt(variance + module.eps) + module.bias


def pair_norm(module: Any, x: Any, path: str) -> Any:
    """Centred, then scaled by the mean length or each row by its own."""
    mean, square = _means(x)
    centred = x - mean
    if module.scale_individually:
        return module.scale * centred / (module.eps + centred.norm(2, -1, keepdim=True))
    length = (square - mean * mean).sum(-1, keepdim=True)
    return module.scale * centred / torch.sqrt(module.eps + length)


def mean_subtraction(module: Any, x: Any, path: str) -> Any:
    """Centred."""
    return x - aggregate(x, structure=EVERYONE)


NORMS: dict[type[nn.Module], Callable[[Any, Any, str], Any]] = {
    nn.BatchNorm1d: batch_norm,
    pyg.BatchNorm: batch_norm,
    pyg.LayerNorm: layer_norm,
    pyg.GraphNorm: graph_norm,
    pyg.PairNorm: pair_norm,
    pyg.MeanSubtractionNorm: mean_subtraction,
}
"""(module, x, path of the module) to its result; ``None``: it is row-wise already."""


@torch.no_grad()
def move_statistics(module: nn.Module, means: Tensor, count: int) -> None:
    """A BatchNorm's moving statistics after an epoch, as torch moves them.

    ``means`` [2 F]: of the rows and of their squares, over ``count`` vertices.
    """
    assert isinstance(module, nn.BatchNorm1d)
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked += 1
    step = module.momentum
    if step is None:
        step = 1.0 / float(module.num_batches_tracked)
    mean, square = means.chunk(2)
    variance = (square - mean * mean) * (count / max(count - 1, 1))
    for kept, now in ((module.running_mean, mean), (module.running_var, variance)):
        kept.lerp_(now.to(kept.dtype), step)

"""Normalisations over all vertices, taken apart: a mean over all vertices and row-wise work.

The mean is an aggregation like any other (``runtime.mean_history``): exact with one chunk or walked
layer by layer, and otherwise partly of the last epoch. A variance is a second one, of the squares
of what was centred: the mean of the squares alone would cancel where the mean is large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from gnnpipe.capture.markers import aggregate, in_training
from gnnpipe.capture.stage.norm_rows import normalise, positive, squares
from gnnpipe.graph.operators import EVERYONE

__all__ = ["NORMS", "move_statistics"]


def _mean(x: Any, path: str = "", what: str = "") -> Any:
    """The mean of x over all vertices, for every row; the module at ``path`` keeps ``what``."""
    return aggregate(x, structure=EVERYONE, observed_by=path and f"{path}:{what}")


def _square(x: Any) -> Any:
    return x * x


def _affine(module: Any, x: Any) -> Any:
    return x if module.weight is None else x * module.weight + module.bias


def batch_norm(module: Any, x: Any, path: str) -> Any:
    """Over all vertices in training, with the moving statistics in evaluation."""
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


def layer_norm(module: Any, x: Any, path: str) -> Any:
    """PyG's, over all entries of all vertices (mode 'graph')."""
    if module.mode != "graph":
        return None
    centred = x - _mean(x.mean(dim=-1, keepdim=True))
    variance = _mean(_square(centred).mean(dim=-1, keepdim=True))
    return _affine(module, centred / (torch.sqrt(positive(variance)) + module.eps))


def graph_norm(module: Any, x: Any, path: str) -> Any:
    """With a share of the mean that is learned."""
    centred = x - _mean(x) * module.mean_scale
    variance = positive(_mean(_square(centred)))
    return module.weight * centred / torch.sqrt(variance + module.eps) + module.bias


def pair_norm(module: Any, x: Any, path: str) -> Any:
    """Centred, then scaled by the mean length or each row by its own."""
    centred = x - _mean(x)
    if module.scale_individually:
        return module.scale * centred / (module.eps + centred.norm(2, -1, keepdim=True))
    length = _mean(_square(centred).sum(-1, keepdim=True))
    return module.scale * centred / torch.sqrt(module.eps + positive(length))


def mean_subtraction(module: Any, x: Any, path: str) -> Any:
    """Centred."""
    return x - _mean(x)


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
def move_statistics(module: nn.Module, what: str, now: Tensor, count: int) -> None:
    """A BatchNorm's moving 'mean' or 'variance' [F] after an epoch, as torch moves them.

    ``now``: over ``count`` vertices, or edges. The mean comes first.
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

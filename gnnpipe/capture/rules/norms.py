"""Rules for normalisations over all vertices: means over all vertices and row-wise work.

The mean is an aggregation (``runtime.history.mean``): exact with one chunk or layer by layer,
otherwise partly from the last epoch. The variance is the mean of the squared centred rows, because
``mean(x x) - mean(x)^2`` cancels where the mean is large.
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


def _mean(x: Any, path: str = "", what: str = "") -> Any:
    """The mean of x over all vertices, one equal row for each vertex.

    ``what``: running statistic of the module at ``path`` that the mean updates.
    """
    return aggregate(x, structure=EVERYONE, observed_by=path and f"{path}:{what}")


def _square(x: Any) -> Any:
    return x * x


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


def layer_norm(module: Any, x: Any, path: str) -> Any:
    """PyG's LayerNorm in mode 'graph': statistics of all entries of all vertices."""
    if module.mode != "graph":
        return None
    centred = x - _mean(x.mean(dim=-1, keepdim=True))
    variance = _mean(_square(centred).mean(dim=-1, keepdim=True))
    out = centred / (torch.sqrt(positive(variance)) + module.eps)
    return out if module.weight is None else out * module.weight + module.bias


def graph_norm(module: Any, x: Any, path: str) -> Any:
    """GraphNorm: subtracts a learned multiple of the mean."""
    centred = x - _mean(x) * module.mean_scale
    variance = positive(_mean(_square(centred)))
    return module.weight * centred / torch.sqrt(variance + module.eps) + module.bias


def pair_norm(module: Any, x: Any, path: str) -> Any:
    """PairNorm: centres, then divides by the mean length of the rows, or each row by its own."""
    centred = x - _mean(x)
    if module.scale_individually:
        return module.scale * centred / (module.eps + centred.norm(2, -1, keepdim=True))
    length = _mean(_square(centred).sum(-1, keepdim=True))
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

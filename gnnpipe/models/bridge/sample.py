"""A small random graph on which a recording is tried out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gnnpipe.graph.graph import Graph

__all__ = ["Sample", "make_sample"]


@dataclass(frozen=True, eq=False)
class Sample:
    """Its number of vertices is no width of the model, so that rows can be told from columns."""

    x: Tensor
    """[n, F] float64."""
    edge_index: Tensor
    """[2, E], by target and then by source."""
    graph: Graph
    """The same edges."""

    @property
    def num_rows(self) -> int:
        """Vertices n."""
        return len(self.x)

    @property
    def num_edges(self) -> int:
        """E; more than n."""
        return int(self.edge_index.shape[1])

    @property
    def halves(self) -> tuple[slice, slice]:
        """Two parts of the vertices, of different size."""
        n = self.num_rows
        return slice(0, n // 2), slice(n // 2, n)


def make_sample(model: nn.Module, num_features: int) -> Sample:
    """For a model of that many input features. Directed; vertex 0 is isolated, vertex 1 a hub."""
    sizes = {num_features} | {size for p in model.parameters() for size in _sizes(p)}
    n = next(n for n in itertools.count(23, 2) if not sizes & {n, n // 2, n - n // 2})
    rng = np.random.default_rng(0)
    dense = rng.random((n, n)) < 4 / n
    dense[1, 2:] = True
    np.fill_diagonal(dense, False)
    dense[0] = dense[:, 0] = False
    target, source = np.nonzero(dense)
    x = rng.standard_normal((n, num_features))
    mask = np.ones(n, dtype=bool)
    graph = Graph(
        "sample", np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(np.int64),
        source.astype(np.int32), x.astype(np.float32), np.zeros(n, dtype=np.int64),
        mask, mask, mask, 1,
    )  # fmt: skip
    return Sample(torch.from_numpy(x), torch.from_numpy(np.stack([source, target])), graph)


def _sizes(parameter: Tensor) -> tuple[int, ...]:
    return () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)

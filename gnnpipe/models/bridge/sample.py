"""A small random graph on which a recording is tried out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnpipe.graph.graph import Graph
from gnnpipe.models.bridge.recording import EDGES, FEATURES

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
    edge_data: Mapping[str, Tensor]
    """[E, ...] what the edges carry, by the field of ``Graph``, float64 or int64."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the recording is called with, by name."""
        return {FEATURES: self.x, EDGES: self.edge_index, **self.edge_data}

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

    @property
    def edge_halves(self) -> tuple[slice, slice]:
        """The edges into either half."""
        split = int(self.graph.indptr[self.num_rows // 2])
        return slice(0, split), slice(split, self.num_edges)


def make_sample(model: nn.Module, of: Graph) -> Sample:
    """For a model to be trained on the graph ``of``, with as many features and like edges.

    Directed; vertex 0 is isolated, vertex 1 a hub.
    """
    num_features = of.num_features
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
    carried: dict[str, Any] = {k: _like(v, len(source), rng) for k, v in of.edge_data.items()}
    graph = Graph(
        "sample", np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(np.int64),
        source.astype(np.int32), x.astype(np.float32), np.zeros(n, dtype=np.int64),
        mask, mask, mask, 1, **carried,
    )  # fmt: skip
    data = {k: torch.from_numpy(v) for k, v in graph.edge_data.items()}
    return Sample(
        torch.from_numpy(x), torch.from_numpy(np.stack([source, target])), graph,
        {k: v.double() if v.is_floating_point() else v for k, v in data.items()},
    )  # fmt: skip


def _like(values: npt.NDArray[Any], count: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """As many rows of the same kind: types of the same range, or positive numbers."""
    if values.dtype.kind in "iu":
        return rng.integers(0, int(values.max(initial=0)) + 1, count)
    return rng.uniform(0.5, 1.5, (count, *values.shape[1:])).astype(np.float32)


def _sizes(parameter: Tensor) -> tuple[int, ...]:
    return () if nn.parameter.is_lazy(parameter) else tuple(parameter.shape)

"""The rows of a chunk, of pilots, or of the whole graph, as a piece of the model gets them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gnnpipe.models import Rows
from gnnpipe.models.dropout import row_keys
from gnnpipe.models.feature_linear import feature_rows
from gnnpipe.train.prepare import Prepared

__all__ = ["ChunkRows"]


class ChunkRows:
    """Makes ``Rows`` of runs of rows of the renumbered graph."""

    def __init__(self, prepared: Prepared, reads_features: bool, device: torch.device) -> None:
        self._prepared, self._reads_features, self._device = prepared, reads_features, device
        # Within its type, the number of every row.
        self._number = np.empty(prepared.graph.num_vertices, dtype=np.int64)
        for chosen in prepared.graph.row_types.values():
            self._number[chosen] = np.arange(chosen.sum())

    def of(self, part: npt.NDArray[np.int64]) -> Rows:
        """Of these rows, of every type a part of its own if there are several."""
        graph = self._prepared.graph
        if graph.types is None:
            return self._of_type(part, "")
        parts = {
            name: self._of_type(part[is_of[part]], name) for name, is_of in graph.row_types.items()
        }
        return Rows(parts[graph.target].keys, None, seed=self._prepared.config.seed, parts=parts)

    def _of_type(self, part: npt.NDArray[np.int64], vertex_type: str) -> Rows:
        prepared, device = self._prepared, self._device
        graph = prepared.graph
        original = prepared.chunking.perm[part]
        within = original if graph.types is None else graph.types.number[part]
        features = None
        if self._reads_features and (graph.types is None or vertex_type in graph.types.features):
            x = graph.features(vertex_type)[self._number[part]]
            features = feature_rows(x, prepared.dtype, device)
        return Rows(
            keys=row_keys(torch.from_numpy(original)).to(device),
            vertices=torch.from_numpy(within).to(device),
            features=features,
            seed=prepared.config.seed,
        )

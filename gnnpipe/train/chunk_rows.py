"""The rows of the chunks, of pilots, or of the whole graph, as a piece of the model gets them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gnnpipe.graph.layout import ShardLayout
from gnnpipe.models import Rows
from gnnpipe.ops.hashed_dropout import KeptMasks, row_keys
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.setup.prepare import Prepared

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
        types = self._prepared.graph.row_types
        return self._cut({name: part[is_of[part]] for name, is_of in types.items()}, None)[0]

    def chunks(self, layouts: Mapping[str, ShardLayout]) -> list[Rows]:
        """Of every chunk of a shard; features and dropout masks are those of the whole shard."""
        types = self._prepared.graph.row_types
        own = {name: layouts[name].own for name in types}
        return self._cut(own, {name: layouts[name].own_ptr for name in types})

    def _cut(
        self,
        own: Mapping[str, npt.NDArray[np.int64]],
        pointers: Mapping[str, npt.NDArray[np.int64]] | None,
    ) -> list[Rows]:
        """Rows by type, cut where ``pointers`` say, or not at all."""
        graph = self._prepared.graph
        by_type = {
            name: self._of_type(rows, name, None if pointers is None else pointers[name])
            for name, rows in own.items()
        }
        if graph.types is None:
            return next(iter(by_type.values()))
        seed = self._prepared.config.seed
        return [
            Rows(own.keys, None, seed=seed, parts={k: v[c] for k, v in by_type.items()})
            for c, own in enumerate(by_type[graph.target])
        ]

    def _of_type(
        self, part: npt.NDArray[np.int64], vertex_type: str, pointer: npt.NDArray[np.int64] | None
    ) -> list[Rows]:
        prepared, device = self._prepared, self._device
        graph = prepared.graph
        original = prepared.chunking.perm[part]
        within = original if graph.types is None else graph.types.number[part]
        table = None
        if self._reads_features and (graph.types is None or vertex_type in graph.types.features):
            x = graph.features(vertex_type)[self._number[part]]
            table = FeatureTable(x, prepared.dtype, device)
        keys = row_keys(torch.from_numpy(original)).to(device)
        vertices = torch.from_numpy(within).to(device)
        ends = [0, len(part)] if pointer is None else pointer.tolist()
        # Kept masks take a byte for each number that is dropped; made again, they are the same.
        is_kept = pointer is not None and not prepared.config.recompute
        masks = KeptMasks(keys) if is_kept else None
        return [
            Rows(
                keys=keys[start:stop],
                vertices=vertices[start:stop],
                features=None if table is None else table.rows(start, stop),
                seed=prepared.config.seed,
                masks=masks,
                start=start,
            )
            for start, stop in pairwise(ends)
        ]

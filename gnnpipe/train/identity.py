"""Which graph it is: the same on every rank, and the same when a run is gone on with."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["agreed_digest"]

_SAMPLED = 10_000
"""Rows of features that are looked at."""


def agreed_digest(graph: Graph, mesh: Mesh) -> str:
    """A short digest of the graph, of whose features a sample is looked at.

    ``InputError`` if the ranks have made different graphs.
    """
    digest = _digest(graph)
    if len(set(mesh.gather(digest))) > 1:
        raise InputError(
            "graph: is another on every rank; make it in the same way, and seed what draws "
            "(RandomLinkSplit and other transforms: torch_geometric.seed_everything(0) before)"
        )
    return digest


def _digest(graph: Graph) -> str:
    arrays: list[Any] = [graph.indptr, graph.indices, graph.y, graph.train_mask, graph.val_mask]
    arrays += [graph.test_mask, *graph.edge_data.values()]
    if graph.pairs is not None:
        arrays += [graph.pairs.ends, graph.pairs.label, graph.pairs.part]
    for name in graph.row_types if graph.types is None else graph.types.features:
        x = graph.features(name)
        rows = x[:: max(1, graph.num_vertices // _SAMPLED)]
        arrays.append(rows.data if sp.issparse(rows) else rows)
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    return f"{found:08x}"

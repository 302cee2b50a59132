"""Rows that shards read from one another, for many numbers of shards, from a single partition.

The graph is cut into the most parts once. Coarser partitions come from merging the two parts that
read the most rows from each other, so that the edges are passed once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.graph import Graph


def halo_by_shards(graph: Graph, part: npt.NDArray[np.int32]) -> Mapping[int, float]:
    """Return M / N, the rows of other shards that are read per vertex, by the number of shards.

    Args:
        graph: The graph.
        part: [N], the part of each vertex, of G parts.

    Returns:
        M / N for G, G / 2, G / 4, ... and 1 shards.
    """
    count, n = int(part.max()) + 1, graph.num_vertices
    reading = np.repeat(part.astype(np.int64), graph.degrees)
    crosses = reading != part[graph.indices]
    # Each pair (reading part, vertex read) once.
    pairs = np.unique(reading[crosses] * n + graph.indices[crosses])
    readers, read, owner = pairs // n, pairs % n, part.astype(np.int64)
    found = {count: len(pairs) / n}
    while count > 1:
        merged = _merged(readers, owner[read], count)
        readers, owner, count = merged[readers], merged[owner], int(merged.max()) + 1
        outside = readers != owner[read]
        pairs = np.unique(readers[outside] * n + read[outside])
        readers, read = pairs // n, pairs % n
        found[count] = len(pairs) / n
    return found


def _merged(
    readers: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """Return the new number of each of ``count`` parts, [G], which are merged in pairs."""
    rows = np.bincount(readers * count + owners, minlength=count * count).reshape(count, count)
    rows = np.triu(rows + rows.T, 1)
    found = np.full(count, -1, dtype=np.int64)
    number = 0
    for place in np.argsort(-rows, axis=None, kind="stable"):
        a, b = divmod(int(place), count)
        if a < b and found[a] < 0 and found[b] < 0:
            found[[a, b]] = number
            number += 1
            if 2 * number >= count - 1:
                break
    left = np.flatnonzero(found < 0)
    found[left] = number + np.arange(len(left))
    return found


def halo_at(found: Mapping[int, float], shards: int) -> float:
    """Return M / N for any number of shards, interpolated between the counted ones."""
    counts = sorted(found)
    return float(np.interp(np.log2(shards), np.log2(counts), [found[count] for count in counts]))

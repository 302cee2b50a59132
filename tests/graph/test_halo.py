"""Rows that shards read from one another, counted by hand on a ring."""

from itertools import pairwise

import numpy as np
import pytest
from helpers import small_graph

from gnnpipe.graph.graph import Graph
from gnnpipe.graph.halo import halo_at, halo_by_shards


def ring(n):
    """Every vertex reads its two neighbours on a ring."""
    left, right = (np.arange(n) - 1) % n, (np.arange(n) + 1) % n
    indices = np.sort(np.stack([left, right], 1), 1).ravel().astype(np.int32)
    none = np.zeros(n, dtype=bool)
    x = np.zeros((n, 1), dtype=np.float32)
    labels = np.zeros(n, dtype=np.int64)
    return Graph("ring", np.arange(0, 2 * n + 1, 2), indices, x, labels, ~none, none, none, 2)


def test_arcs_of_a_ring_read_two_rows_each():
    part = np.repeat(np.arange(8, dtype=np.int32), 4)
    found = halo_by_shards(ring(32), part)
    # Every arc reads one row at each end; merged arcs lie side by side.
    assert found == {8: 16 / 32, 4: 8 / 32, 2: 4 / 32, 1: 0}
    assert halo_at(found, 4) == 8 / 32
    assert found[4] < halo_at(found, 6) < found[8]


@pytest.mark.parametrize("count", [3, 5, 8])
def test_counts_are_those_of_the_pairs(count):
    graph = small_graph()
    part = np.random.default_rng(0).integers(0, count, graph.num_vertices).astype(np.int32)
    part[:count] = np.arange(count)
    found = halo_by_shards(graph, part)
    pairs = {
        (part[reader], vertex)
        for reader in range(graph.num_vertices)
        for vertex in graph.indices[graph.indptr[reader] : graph.indptr[reader + 1]]
        if part[reader] != part[vertex]
    }
    assert found[count] == pytest.approx(len(pairs) / graph.num_vertices)
    assert found[1] == 0
    sizes = sorted(found)
    assert all(found[a] <= found[b] for a, b in pairwise(sizes))

"""Which rows are read stale: against what the definition says, edge by edge."""

import numpy as np
import pytest
import torch

from gnnpipe.data.load import load_graph
from gnnpipe.graph.blocks import Blocks
from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.graph.layout import shard_layout
from gnnpipe.graph.operators import LinearOperator, weighted_rows
from gnnpipe.graph.stale_rows import StaleRows, choose_drift_rows, choose_probe_vertices

CHUNKS, SHARDS = 5, 2


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("kind", ["gcn", "sum", "loops"])
def test_rows_that_an_earlier_chunk_reads(kind, shard):
    given = load_graph("synthetic:rmat:n=120,degree=6,features=4")
    chunking = make_chunking(
        given, chunks=CHUNKS, shards=SHARDS, partitioner="random", seed=0, cache_dir="off"
    )
    graph = renumber(given, chunking)
    layout = shard_layout(graph, chunking, shard)
    rows = weighted_rows(graph, kind)
    if kind == "loops":
        keys = torch.zeros(layout.num_rows, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        structure = Blocks.build(rows, layout, layout, keys, {})
    else:
        structure = LinearOperator.build(rows, layout, layout, torch.float32, torch.device("cpu"))
    stale = StaleRows(structure, layout)
    table = np.concatenate([layout.own, layout.halo])
    chunk = chunking.chunk_of_row()
    rng = np.random.default_rng(0)
    earlier = np.triu(np.ones((CHUNKS, CHUNKS), dtype=bool), 1)
    for order in (np.arange(CHUNKS), rng.permutation(CHUNKS), rng.permutation(CHUNKS)):
        position = np.argsort(order)
        mine = rows[layout.own].tocoo()
        readers, read = layout.own[mine.row], mine.col
        late = position[chunk[readers]] < position[chunk[read]]
        expected = np.flatnonzero(np.isin(table, read[late]))
        assert 0 < len(expected) < len(table)
        assert stale.in_order(order.tolist(), earlier).tolist() == expected.tolist()


def test_rows_that_always_count():
    graph = load_graph("karate")
    chunking = make_chunking(
        graph, chunks=1, shards=1, partitioner="range", seed=0, cache_dir="off"
    )
    layout = shard_layout(graph, chunking, 0)
    rows = weighted_rows(graph, "gcn")
    structure = LinearOperator.build(rows, layout, layout, torch.float32, torch.device("cpu"))
    always = torch.tensor([3, 7])
    assert StaleRows(structure, layout, always).in_order(
        [0], np.zeros((1, 1), dtype=bool)
    ).tolist() == [3, 7]


def samples(graph, chunks, shards, partitioner):
    """Probe vertices and vertices of the drift, by their numbers in the graph as it was given."""
    chunking = make_chunking(
        graph, chunks=chunks, shards=shards, partitioner=partitioner, seed=0, cache_dir="off"
    )
    types = {"": np.ones(graph.num_vertices, dtype=bool)}
    rows = (
        choose_probe_vertices(chunking, {"": 40}, types, seed=3),
        choose_drift_rows(chunking, seed=3),
    )
    assert all(np.all(np.diff(found) > 0) for found in rows)
    return [np.sort(chunking.perm[found]).tolist() for found in rows]


def test_samples_do_not_depend_on_the_partition():
    graph = load_graph("synthetic:rmat:n=1200,degree=6,features=4")
    probes, drift = samples(graph, 1, 1, "range")
    assert (len(probes), len(drift)) == (40, 256)
    for cut in ((5, 1, "random"), (3, 2, "random"), (4, 1, "range"), (6, 1, "metis")):
        assert samples(graph, *cut) == [probes, drift]
    for found in (probes, drift):
        # Drawn from the whole graph, and not in a run.
        assert found[0] < 120
        assert found[-1] >= 1080
        assert max(np.diff(found)) > 1


def test_probe_vertices_of_every_type_do_not_depend_on_the_partition():
    graph = load_graph("synthetic:rmat:n=300,degree=6,features=4")
    is_first = np.arange(300) % 3 == 0
    found = []
    for partitioner in ("range", "random"):
        chunking = make_chunking(
            graph, chunks=4, shards=1, partitioner=partitioner, seed=0, cache_dir="off"
        )
        by_row = is_first[chunking.perm]
        types = {"a": by_row, "b": ~by_row}
        rows = choose_probe_vertices(chunking, {"a": 10, "b": 20}, types, seed=3)
        found.append(np.sort(chunking.perm[rows]).tolist())
        assert int(by_row[rows].sum()) == 10
    assert found[0] == found[1]

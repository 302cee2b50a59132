"""Which rows are read stale: against what the definition says, edge by edge."""

import numpy as np
import pytest
import torch

from gnnpipe.data.load import load_graph
from gnnpipe.graph.blocks import Blocks
from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.graph.layout import shard_layout
from gnnpipe.graph.operators import LinearOperator, weighted_rows
from gnnpipe.graph.stale_rows import StaleRows

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

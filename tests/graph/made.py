"""Small graphs made from a list of edges, and a hypothesis strategy of them."""

import numpy as np
import scipy.sparse as sp
from hypothesis import strategies as st

from gnnpipe.graph.graph import Graph


def graph_of(n, edges):
    """A graph of the edges (reading vertex, vertex read); duplicates and loops are dropped."""
    a = sp.csr_array((n, n), dtype=np.int8)
    pairs = sorted({(i, j) for i, j in edges if i != j})
    if pairs:
        row, col = np.array(pairs).T
        a = sp.csr_array((np.ones(len(pairs), np.int8), (row, col)), shape=(n, n))
    a.sort_indices()
    return Graph(
        name="test",
        indptr=a.indptr.astype(np.int64),
        indices=a.indices,
        x=np.arange(n, dtype=np.float32)[:, None],
        y=np.arange(n, dtype=np.int64),
        train_mask=np.arange(n) % 3 == 0,
        val_mask=np.arange(n) % 3 == 1,
        test_mask=np.arange(n) % 3 == 2,
        num_classes=n,
    )


@st.composite
def graphs(draw, least=1, most=40):
    n = draw(st.integers(least, most))
    vertex = st.integers(0, n - 1)
    return graph_of(n, draw(st.lists(st.tuples(vertex, vertex), max_size=4 * n)))

"""What edges carry stays with its edge, from the reader to the renumbered graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import small_graph
from torch_geometric.data import Data

from gnnpipe import Graph
from gnnpipe.data.load import load_graph
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.graph.operators import weighted_rows

N = 5
EDGES = np.array([[0, 3, 1, 1, 2, 4], [1, 0, 1, 4, 1, 1]])
"""One self-loop, at place 2."""


SPLIT = ("train", "val", "test")


def data(**changes):
    fields = {
        "x": torch.rand(N, 2),
        "y": torch.tensor([0, 1, 0, 1, 0]),
        "edge_index": torch.from_numpy(EDGES),
        **{f"{part}_mask": torch.arange(N) % 3 == i for i, part in enumerate(SPLIT)},
    }
    return Data(**(fields | changes))


def triples(graph, field):
    source, target = graph.edge_index
    values = getattr(graph, field).tolist()
    return sorted(zip(source.tolist(), target.tolist(), map(str, values), strict=True))


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
def test_every_edge_keeps_its_own():
    weight = torch.arange(6.0)
    attributes = torch.stack([weight, -weight], dim=1)
    g = Graph.from_pyg(data(edge_weight=weight, edge_attr=attributes, edge_type=weight.long()))
    expected = sorted((*EDGES[:, i].tolist(), str(float(i))) for i in range(6))
    assert triples(g, "edge_weight") == expected
    assert g.edge_attr[:, 0].tolist() == g.edge_weight.tolist() == (-g.edge_attr[:, 1]).tolist()
    assert g.edge_type.tolist() == g.edge_weight.tolist()
    assert (g.edge_weight.dtype, g.edge_type.dtype) == (np.float32, np.int64)
    assert list(g.edge_data) == ["edge_weight", "edge_attr", "edge_type"]
    assert list(g.reduced_to(["edge_type"]).edge_data) == ["edge_type"]


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
def test_edges_without_their_data_are_as_many():
    twice = torch.from_numpy(np.repeat(EDGES, 2, axis=1))
    g = Graph.from_pyg(data(edge_index=twice, edge_type=torch.arange(12) % 2))
    assert g.num_edges == 12
    assert g.reduced_to(["edge_type"]) is g
    assert (
        g.reduced_to([]).edge_index.tolist()
        == Graph.from_pyg(data(edge_index=twice)).edge_index.tolist()
    )
    assert len(g.parallel_edges) == 0  # of different types
    assert len(g.reduced_to([]).parallel_edges) == 6


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
def test_a_column_of_weights_and_a_row_of_attributes():
    g = Graph.from_pyg(data(edge_weight=torch.ones(6, 1), edge_attr=torch.arange(6.0)))
    assert g.edge_weight.shape == (6,)
    assert g.edge_attr.shape == (6,)


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_stay_whole_numbers(kind):
    assert Graph.from_pyg(data(edge_attr=torch.ones(6, 2, dtype=kind))).edge_attr.dtype == np.int64
    assert Graph.from_pyg(data(edge_attr=torch.ones(6, 2).double())).edge_attr.dtype == np.float32


def test_parallel_edges_stay_in_order():
    twice = torch.from_numpy(np.concatenate([EDGES, EDGES[:, :1]], axis=1))
    g = Graph.from_pyg(data(edge_index=twice, edge_attr=torch.arange(7)))
    assert g.num_edges == 7
    assert g.edge_attr[g.indptr[1] : g.indptr[2]].tolist() == [0, 6, 2, 4, 5]
    assert g.without_parallel_edges().edge_attr.tolist() == [1, 0, 2, 4, 5, 3]


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
def test_reverse_edges_carry_the_same_where_none_leads_back():
    g = Graph.from_pyg(data(edge_type=torch.arange(6)), symmetrize=True)
    assert triples(g, "edge_type") == sorted(
        [
            (0, 1, "0"),
            (1, 0, "0"),
            (3, 0, "1"),
            (0, 3, "1"),
            (1, 4, "3"),
            (4, 1, "5"),
            (2, 1, "4"),
            (1, 2, "4"),
            (1, 1, "2"),
        ]
    )


def test_renumbering_moves_it_along():
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 30, (2, 200))
    edges = np.concatenate([edges, edges[:, :60]], axis=1)
    number = np.arange(edges.shape[1])
    label = (edges[0] * 100 + edges[1]) * 1000 + number
    g = Graph.from_pyg(
        Data(
            x=torch.rand(30, 2),
            y=torch.arange(30) % 3,
            edge_index=torch.from_numpy(edges),
            edge_attr=torch.from_numpy(label),
            **{f"{part}_mask": torch.arange(30) % 3 == i for i, part in enumerate(SPLIT)},
        )
    )
    chunking = make_chunking(g, chunks=4, shards=2, partitioner="random", seed=0, cache_dir="off")
    moved = renumber(g, chunking)
    source, target = chunking.perm[moved.edge_index]
    assert (source * 100 + target == moved.edge_attr // 1000).all()
    assert sorted(moved.edge_attr) == sorted(g.edge_attr)
    again = moved.parallel_edges
    assert len(again) > 50
    assert (moved.edge_attr[again] > moved.edge_attr[again - 1]).all(), "in the given order"


def test_files_may_hold_it(tmp_path):
    ends = {"edge_index": EDGES, "edge_weight": np.arange(6.0)}
    np.savez(
        tmp_path / "g.npz",
        **ends,
        x=np.eye(N),
        y=np.arange(N) % 2,
        **{f"{part}_mask": np.arange(N) % 3 == i for i, part in enumerate(SPLIT)},
    )
    g = load_graph(str(tmp_path / "g.npz"))
    assert sorted(g.edge_weight) == [0, 1, 2, 3, 4, 5]
    g = load_graph(str(tmp_path / "g.npz"), remove_self_loops=True)
    assert sorted(g.edge_weight) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_weight": torch.ones(5)}, r"edge_weight has shape \[5\] for 6 edges"),
        ({"edge_attr": torch.ones(6, 2, 2)}, r"edge_attr has shape \[6, 2, 2\].*\[E, D\]"),
        ({"edge_weight": torch.ones(6, 2)}, r"edge_weight has shape \[6, 2\]"),
        (
            {"edge_attr": torch.ones(6, 2), "edge_index": torch.zeros(6, 2, dtype=torch.long)},
            r"edge_index has shape \[6, 2\]; try: \[2, E\]",
        ),
        ({"edge_type": torch.ones(6)}, "edge_type is of type float32"),
        ({"edge_type": torch.arange(6) - 1}, "has numbers below 0"),
        ({"edge_weight": torch.tensor([1, 1, 1, 1, 1, torch.nan])}, r"edge_weight\[5\] = nan"),
        ({"edge_attr": torch.full((6, 2), torch.inf)}, r"edge_attr\[0\] = \[inf, inf\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        Graph.from_pyg(data(**changes))


def test_weights_below_zero_are_refused_where_a_root_is_taken_of_their_sum():
    graph = replace(small_graph(), edge_weight=np.full(small_graph().num_edges, -2.0, np.float32))
    assert weighted_rows(graph, "sum-weighted").sum() < 0
    with pytest.raises(InputError, match=r"edge_weight: adds up to -.*try weights from 0"):
        weighted_rows(graph, "gcn-weighted")

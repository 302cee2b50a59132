"""The order inside a chunk: where vertices stand, and that nothing else depends on it."""

import numpy as np
import pytest
import torch
from helpers import assert_all_within, differences_of_shapes, quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.data.load import load_graph
from gnnpipe.graph import chunking, order
from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare


@pytest.fixture(scope="module")
def shuffled():
    """Communities whose vertices stand in no order."""
    return load_graph("synthetic:planted:n=4000,degree=12,classes=64,features=4,homophily=0.9")


def make(graph, **change):
    settings = {"chunks": 4, "shards": 2, "partitioner": "metis", "seed": 0, **change}
    return make_chunking(graph, cache_dir="off", **settings)


def gap(graph):
    """Mean distance in memory of rows that one vertex reads one after the other."""
    same = np.repeat(np.arange(graph.num_vertices), graph.degrees)
    step = np.abs(np.diff(graph.indices.astype(np.int64)))
    return float(step[np.diff(same) == 0].mean())


@pytest.mark.parametrize(("chunks", "shards"), [(1, 1), (4, 1), (4, 2)])
def test_neighbours_stand_together_and_cells_hold_the_same_vertices(
    shuffled, chunks, shards, monkeypatch
):
    monkeypatch.setattr(order, "_PART_VERTICES", 64)
    as_given = make(shuffled, chunks=chunks, shards=shards, order="given")
    ordered = make(shuffled, chunks=chunks, shards=shards, order="metis")
    assert (as_given.ptr == ordered.ptr).all()
    for c in range(chunks):
        for g in range(shards):
            cell = slice(*ordered.rows(c, g))
            assert sorted(ordered.perm[cell]) == as_given.perm[cell].tolist()
    assert gap(renumber(shuffled, ordered)) < 0.9 * gap(renumber(shuffled, as_given))


def test_hubs_come_first(shuffled):
    graph = renumber(shuffled, make(shuffled, chunks=1, shards=1, order="metis"))
    # One run of falling degrees for each of the N / 512 parts.
    assert (np.diff(graph.degrees) > 0).sum() < 4000 // 512


def test_auto_goes_by_size_and_by_who_cuts(monkeypatch):
    assert order.resolve_order("auto", "metis", 1 << 14) == "metis"
    assert order.resolve_order("auto", "metis", (1 << 14) - 1) == "given"
    assert order.resolve_order("auto", "range", 1 << 20) == "given"
    assert order.resolve_order("metis", "range", 10) == "metis"


@pytest.mark.parametrize(
    ("settings", "is_ordered"),
    [
        ({"epochs": 20}, False),
        ({"epochs": 2000}, True),
        ({"epochs": 20, "hidden": 600}, True),
        ({"epochs": 20, "hidden": 600, "layers": 1}, False),
        ({"epochs": 20, "hidden": 600, "layers": 2}, False),
        ({"epochs": 20, "chunks": 2}, True),
        ({"epochs": 20, "order": "metis"}, True),
        ({"epochs": 20, "hidden": 1200, "shards": 2}, True),
        ({"epochs": 20, "hidden": 600, "shards": 2}, False),
    ],
    ids=str,
)
def test_one_chunk_is_ordered_if_the_run_is_long_enough(settings, is_ordered, monkeypatch):
    """The first layer aggregates features, once; the last, 3 columns; others, hidden rows.

    10,000 numbers per edge pay back.
    """
    monkeypatch.setattr(order, "_SMALL_GRAPH", 0)
    monkeypatch.setattr(order, "_PART_VERTICES", 8)
    seen = []
    real = chunking.locality_rank

    def watched(adjacency, work, order, seed):
        seen.append(order)
        return real(adjacency, work, order, seed)

    monkeypatch.setattr(chunking, "locality_rank", watched)
    run = quick_config(**{"model": "gcn", "layers": 3, "hidden": 64} | settings)
    prepare(run, World.alone(), small_graph())
    assert seen in ([], ["given"], ["metis"])
    assert (seen == ["metis"]) == is_ordered


def parts_of(name, rank, chunks):
    return small_graph(directed=True), None, {"model": name}


def difference(shapes):
    return differences_of_shapes(shapes, ["gcnii", "gat"], 3, parts_of, order="metis")


def test_parity_in_another_order():
    assert_all_within(difference([(1, 1, 1), (1, 1, 6)]))
    assert_all_within(run_ranks(difference, 2, [(2, 1, 6), (1, 2, 4)])[0])


def test_results_come_back_in_the_users_order(monkeypatch):
    monkeypatch.setattr(order, "_PART_VERTICES", 8)
    predicted, losses = [], []
    for chosen in ("given", "metis"):
        run = quick_config(order=chosen, epochs=4, dropout=0.3)
        trainer = Trainer(run, graph=small_graph(directed=True))
        losses.append([row.loss for row in trainer.fit().history])
        predicted.append(trainer.predict())
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    torch.testing.assert_close(predicted[0], predicted[1], rtol=1e-8, atol=1e-9)

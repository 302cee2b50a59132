import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import quick_config, small_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe import Trainer
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.partition import (
    PARTITIONERS,
    Objective,
    PartitionTask,
    symmetric_pattern,
    vertex_work,
)
from tests.graph.made import graph_of, graphs


@given(graphs())
@settings(max_examples=50, deadline=None)
def test_structure_is_symmetric_without_loops_and_has_every_edge(graph):
    a = symmetric_pattern(graph).toarray() != 0
    assert (a == a.T).all()
    assert not a.diagonal().any()
    n = graph.num_vertices
    given_edges = np.zeros((n, n), dtype=bool)
    given_edges[np.repeat(np.arange(n), graph.degrees), graph.indices] = True
    assert (a == (given_edges | given_edges.T)).all()


def test_structure_drops_loops_that_a_hand_made_graph_has():
    graph = graph_of(3, [(0, 1), (1, 0), (1, 2)])
    looped = Graph(
        **{**graph.__dict__, "indptr": np.array([0, 2, 4, 4]), "indices": np.array([0, 1, 0, 2])}
    )
    assert symmetric_pattern(looped).toarray().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def test_work_counts_reads_and_readers():
    graph = graph_of(3, [(0, 1), (0, 2), (1, 2)])  # 0 reads two, 2 is read by two
    assert vertex_work(graph).tolist() == [102, 102, 102]
    hub = graph_of(4, [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)])
    assert vertex_work(hub).tolist() == [2 * 53, 2 * 51, 2 * 51, 2 * 51]


@pytest.mark.parametrize("name", list(PARTITIONERS))
@given(graph=graphs(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_part_has_its_least_number_and_the_cut_is_repeatable(name, graph, data):
    n = graph.num_vertices
    parts = data.draw(st.integers(1, n))
    least = data.draw(st.integers(1, n // parts))
    weights = data.draw(st.lists(st.integers(1, 9), min_size=parts, max_size=parts))
    shares = tuple(w / sum(weights) for w in weights)
    task = PartitionTask(
        symmetric_pattern(graph),
        vertex_work(graph),
        parts,
        data.draw(st.sampled_from([None, shares])),
        least=least,
        seed=data.draw(st.integers(0, 2**40)),
        objective=data.draw(st.sampled_from(Objective)),
    )
    part, again = PARTITIONERS[name](task), PARTITIONERS[name](task)
    assert part.dtype == np.int32
    assert part.shape == (n,)
    assert (np.bincount(part, minlength=parts) >= least).all()
    assert part.max() < parts
    assert (part == again).all()


def task_of(graph, parts, **settings):
    return PartitionTask(symmetric_pattern(graph), vertex_work(graph), parts, **settings)


def two_cliques(size=30):
    edges = [(i, j) for i in range(2 * size) for j in range(2 * size) if i % 2 == j % 2]
    return graph_of(2 * size, [*edges, (0, 1), (1, 0)])


def test_metis_finds_the_two_cliques():
    graph = two_cliques()
    for objective in Objective:
        part = PARTITIONERS["metis"](task_of(graph, 2, objective=objective))
        assert len(set(part[::2])) == 1
        assert len(set(part[1::2])) == 1
        assert part[0] != part[1]


@pytest.mark.parametrize("name", ["range", "random"])
def test_balance_is_by_work_and_not_by_number(name):
    n = 1000
    work = np.where(np.arange(n) < 100, 1000, 100)
    nothing = sp.csr_array((n, n), dtype=np.int8)
    part = PARTITIONERS[name](PartitionTask(nothing, work, 4, seed=3))
    total = np.bincount(part, work)
    assert total.max() / total.mean() < 1.02


@pytest.mark.parametrize("name", list(PARTITIONERS))
def test_parts_follow_the_shares(name):
    ring = graph_of(3000, [(v, (v + s) % 3000) for v in range(3000) for s in (-2, -1, 1, 2)])
    shares = (0.5, 0.2, 0.3)
    for objective in Objective:
        part = PARTITIONERS[name](task_of(ring, 3, shares=shares, objective=objective))
        np.testing.assert_allclose(np.bincount(part) / 3000, shares, rtol=0.07)


def test_range_keeps_the_order_and_random_follows_the_seed():
    work, nothing = np.full(50, 7), sp.csr_array((50, 50), dtype=np.int8)

    def cut(name, seed):
        part = PARTITIONERS[name](PartitionTask(nothing, work, 5, seed=seed))
        return part.tolist()

    assert cut("range", 0) == np.repeat(np.arange(5), 10).tolist()
    assert cut("random", 0) != cut("random", 1)


def test_metis_follows_the_seed():
    rng = np.random.default_rng(0)
    graph = graph_of(400, rng.integers(0, 400, (3000, 2)).tolist())
    first, *others = [PARTITIONERS["metis"](task_of(graph, 4, seed=s)) for s in range(4)]
    assert all((first != other).any() for other in others)  # 0 and 1 too: see the + 1


def test_a_hub_does_not_leave_a_part_empty():
    graph = graph_of(200, [e for i in range(1, 200) for e in ((0, i), (i, 0))])
    part = PARTITIONERS["metis"](task_of(graph, 16, least=4, objective=Objective.ROWS))
    assert np.bincount(part, minlength=16).min() >= 4


def test_unknown_partitioner_names_the_nearest():
    with pytest.raises(InputError, match=r"--partitioner 'meits': .*'metis'"):
        PARTITIONERS["meits"]


def test_without_a_metis_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    monkeypatch.setitem(sys.modules, "metis", None)
    graph = two_cliques()
    with pytest.raises(InputError, match="pip install pymetis"):
        PARTITIONERS["metis"](task_of(graph, 2))


def test_without_pymetis_the_wrapper_is_called(monkeypatch):
    ctypes = pytest.importorskip("ctypes")
    seen = {}

    def part_graph(graph, parts, **options):
        seen.update(graph=graph, parts=parts, options=options)
        return 0, [i % 2 for i in range(graph[0].value)]

    wrapper = SimpleNamespace(
        idx_t=ctypes.c_int64, METIS_Graph=lambda *fields: fields, part_graph=part_graph
    )
    monkeypatch.setitem(sys.modules, "pymetis", None)
    monkeypatch.setitem(sys.modules, "metis", wrapper)
    graph = two_cliques()
    task = task_of(graph, 2, shares=(0.75, 0.25), objective=Objective.ROWS)
    adjacency, work = task.adjacency, task.work
    part = PARTITIONERS["metis"](task)
    assert part.tolist() == [0, 1] * 30
    assert seen["options"] == {"objtype": "vol", "tpwgts": [0.75, 0.25]}
    assert list(seen["graph"][2]) == adjacency.indptr.tolist()
    assert list(seen["graph"][3]) == adjacency.indices.tolist()
    assert list(seen["graph"][4]) == work.tolist()


def test_a_partitioner_of_the_users_own_is_trained_with(monkeypatch):
    """One function and one registration; --partitioner takes its name."""
    monkeypatch.setattr(PARTITIONERS, "_things", dict(PARTITIONERS._things))

    def striped(task):
        return (np.arange(len(task.work)) % task.parts).astype(np.int32)

    PARTITIONERS.add("striped", striped)
    config = quick_config(partitioner="striped", chunks=4, epochs=2)
    trainer = Trainer(config, graph=small_graph())
    assert len(trainer.fit().history) == 2
    rows = trainer._prepared.chunking.cell_sizes.sum(axis=1)
    assert rows.max() - rows.min() <= 1


def cut_task(graph, parts, **more):
    return PartitionTask(symmetric_pattern(graph), vertex_work(graph), parts, **more)


def test_mixed_draws_two_parts_of_metis_for_each_chunk():
    graph = small_graph(n=300)
    mixed = PARTITIONERS["mixed"](cut_task(graph, 4, seed=3))
    fine = PARTITIONERS["metis"](cut_task(graph, 8, seed=3))
    together = set(zip(fine.tolist(), mixed.tolist(), strict=True))
    assert len(together) == 8  # every part lies in one chunk
    assert sorted(np.bincount([chunk for _, chunk in together])) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("parts", "more"),
    [
        (4, {"objective": Objective.ROWS}),
        (4, {"shares": (0.4, 0.2, 0.2, 0.2)}),
        (30, {}),  # 60 parts of 5 vertices
    ],
    ids=["shards", "shares", "few vertices"],
)
def test_mixed_is_metis_for_shards_and_few_vertices(parts, more):
    graph = small_graph(n=300)
    task = cut_task(graph, parts, **more)
    assert np.array_equal(PARTITIONERS["mixed"](task), PARTITIONERS["metis"](task))

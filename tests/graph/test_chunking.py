import re
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from helpers import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.errors import InputError
from gnnpipe.graph import chunking
from gnnpipe.graph.chunking import Chunking, ShardShares, _match_runs, make_chunking, renumber
from gnnpipe.graph.partition import PARTITIONERS, symmetric_pattern
from gnnpipe.graph.quality import cut_quality
from gnnpipe.plan import ShardSplit
from tests.graph.made import graph_of, graphs

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def make(graph, chunks, shards, partitioner="metis", seed=0, shares=None):
    given = None if shares is None else ShardShares(shares)
    settings = {"partitioner": partitioner, "seed": seed, "shares": given, "cache_dir": "off"}
    return make_chunking(graph, chunks=chunks, shards=shards, **settings)


@st.composite
def cuts(draw):
    graph = draw(graphs(least=1, most=60))
    chunks = draw(st.integers(1, graph.num_vertices))
    shards = draw(st.integers(1, min(16, graph.num_vertices // chunks)))
    return graph, chunks, shards, draw(st.sampled_from(list(PARTITIONERS))), draw(st.integers(0, 9))


@given(cuts())
@settings(max_examples=150, deadline=None)
def test_cells_cover_the_rows_and_the_numbers_fit_together(case):
    graph, chunks, shards, _, _ = case
    made = make(*case)
    n = graph.num_vertices
    assert sorted(made.perm.tolist()) == list(range(n))
    assert (made.perm[made.inverse] == np.arange(n)).all()
    assert (made.chunks, made.shards, made.num_vertices) == (chunks, shards, n)
    at = 0
    for c in range(chunks):
        for g in range(shards):
            start, stop = made.rows(c, g)
            assert start == at
            assert stop > start
            assert stop - start == made.cell_sizes[c, g]
            assert (made.chunk_of_row()[start:stop] == c).all()
            assert (made.shard_of_row()[start:stop] == g).all()
            assert (np.diff(made.perm[start:stop]) > 0).all()
            at = stop
    assert at == n
    assert made.chunk_of_row().dtype == made.shard_of_row().dtype == np.int32
    assert made.perm.dtype == made.ptr.dtype == np.int64


@given(cuts())
@settings(max_examples=100, deadline=None)
def test_chunks_do_not_depend_on_shards_and_all_is_repeatable(case):
    graph, chunks, _, partitioner, seed = case
    made = make(*case)
    alone = make(graph, chunks, 1, partitioner, seed)
    assert (made.chunk_of_row()[made.inverse] == alone.chunk_of_row()[alone.inverse]).all()
    again = make(*case)
    assert (made.perm == again.perm).all()
    assert (made.ptr == again.ptr).all()


@given(cuts())
@settings(max_examples=60, deadline=None)
def test_renumber_keeps_the_graph(case):
    graph = case[0]
    made = make(*case)
    new = renumber(graph, made)
    n = graph.num_vertices
    row = np.repeat(np.arange(n), new.degrees)
    edges = set(zip(made.perm[row].tolist(), made.perm[new.indices].tolist(), strict=True))
    row = np.repeat(np.arange(n), graph.degrees)
    assert edges == set(zip(row.tolist(), graph.indices.tolist(), strict=True))
    assert new.num_edges == graph.num_edges
    for v in range(n):
        assert (np.diff(new.indices[new.indptr[v] : new.indptr[v + 1]]) > 0).all()
    assert (new.y == made.perm).all()  # y and x hold the vertex's own number
    assert (new.x[:, 0] == made.perm).all()
    assert (new.train_mask == (made.perm % 3 == 0)).all()
    assert (new.val_mask == (made.perm % 3 == 1)).all()
    assert (new.test_mask == (made.perm % 3 == 2)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_renumber_keeps_sparse_features_and_the_width_of_indices(dtype):
    graph = graph_of(5, [(0, 1), (1, 2), (3, 4), (4, 0)])
    x = sp.csr_array(np.diag(np.arange(1, 6)).astype(np.float32))
    graph = type(graph)(**{**graph.__dict__, "x": x, "indices": graph.indices.astype(dtype)})
    made = Chunking(np.array([3, 1, 0, 4, 2]), np.array([[0, 2], [2, 5]]))
    new = renumber(graph, made)
    assert new.x.toarray().tolist() == x.toarray()[made.perm].tolist()
    assert new.indices.dtype == dtype
    assert new.indptr.dtype == np.int64


def test_renumber_refuses_the_chunking_of_another_graph():
    with pytest.raises(ValueError, match="3 vertices does not fit a graph of 2"):
        renumber(graph_of(2, []), Chunking(np.arange(3), np.array([[0, 3]])))


@given(cuts())
@settings(max_examples=100, deadline=None)
def test_quality_against_counting_one_by_one(case):
    graph, chunks, shards, _, _ = case
    made = make(*case)
    quality = cut_quality(graph, made)
    chunk = made.chunk_of_row()[made.inverse]
    shard = made.shard_of_row()[made.inverse]
    pairs, halo, chunk_cut, shard_cut = set(), set(), 0, 0
    cost = np.full(graph.num_vertices, 50.0)
    for v in range(graph.num_vertices):
        for u in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]:
            cost[[u, v]] += 0.5
            if shard[u] != shard[v]:
                shard_cut += 1
                pairs.add((u, shard[v]))
            if chunk[u] != chunk[v]:
                chunk_cut += 1
                halo.add((u, chunk[v]))
    assert quality.crossings == len(pairs)
    assert quality.crossings_per_vertex == pytest.approx(len(pairs) / graph.num_vertices)
    assert quality.chunk_cut_edges == chunk_cut
    assert quality.shard_cut_edges == shard_cut
    assert quality.chunk_cut_share == pytest.approx(chunk_cut / max(graph.num_edges, 1))
    shares = [sum(c == d for _, d in halo) / (chunk == c).sum() for c in range(chunks)]
    assert quality.halo_share == pytest.approx(np.mean(shares))
    cells = [cost[(chunk == c) & (shard == g)].sum() for c in range(chunks) for g in range(shards)]
    assert quality.cell_balance == pytest.approx(max(cells) / np.mean(cells))
    per_chunk = np.reshape(cells, (chunks, shards)).sum(axis=1)
    assert quality.chunk_balance == pytest.approx(per_chunk.max() / per_chunk.mean())
    assert len(quality.lines()) == max((chunks > 1) + (shards > 1), 1)


def test_parts_of_chunks_are_matched_so_that_few_rows_cross():
    # part p of chunk 0 is joined to part p + 1 of chunk 1, and that to part p + 2 of chunk 2
    chunk, part = np.divmod(np.arange(12, dtype=np.int32).repeat(5), 4)
    edges = [
        (i, j)
        for i in range(60)
        for j in range(60)
        if (part[i] - chunk[i]) % 4 == (part[j] - chunk[j]) % 4
    ]
    shard = _match_runs(symmetric_pattern(graph_of(60, edges)), chunk, part, [0] * 4)
    assert len({*zip(shard.tolist(), ((part - chunk) % 4).tolist(), strict=True)}) == 4
    for c in range(3):
        assert set(shard[chunk == c]) == {0, 1, 2, 3}


@pytest.mark.parametrize("partitioner", list(PARTITIONERS))
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("shares", [(0.67, 0.33), (0.2, 0.4, 0.4)])
def test_shards_follow_their_shares_in_every_chunk(partitioner, chunks, shares):
    ring = graph_of(4000, [(v, (v + s) % 4000) for v in range(4000) for s in (-2, -1, 1, 2)])
    made = make(ring, chunks, len(shares), partitioner, shares=shares)
    expected = made.cell_sizes.sum(axis=1, keepdims=True) * np.array(shares)
    np.testing.assert_allclose(made.cell_sizes, expected, rtol=0.07)
    alone = make(ring, chunks, 1, partitioner)
    assert (made.chunk_of_row()[made.inverse] == alone.chunk_of_row()[alone.inverse]).all()


@pytest.mark.parametrize("chunks", [1, 3])
def test_coarser_shards_are_cut_first(chunks):
    """Shards of two stages: halves, and a third and two thirds of the work."""
    side = 40
    grid = [
        (v, w)
        for v in range(side**2)
        for w in (v + 1, v + side)
        if w < side**2 and (w % side or w != v + 1)
    ]
    graph = graph_of(side**2, grid + [(w, v) for v, w in grid])
    split = ShardSplit.of([(0.5, 0.5), (1 / 3, 2 / 3)])
    settings = {"partitioner": "metis", "seed": 0, "cache_dir": "off"}
    shares = ShardShares(split.shares, split.levels[:-1])
    made = make_chunking(graph, chunks=chunks, shards=split.num_parts, shares=shares, **settings)
    for bounds, shares in zip(split.bounds, [(0.5, 0.5), (1 / 3, 2 / 3)], strict=True):
        merged = made.merged(bounds)
        expected = made.cell_sizes.sum(axis=1, keepdims=True) * np.array(shares)
        np.testing.assert_allclose(merged.cell_sizes, expected, rtol=0.08)
        alone = make(graph, chunks, 2, shares=shares)
        crossings = cut_quality(graph, merged).crossings
        assert crossings <= 1.5 * cut_quality(graph, alone).crossings


@given(cuts())
@settings(max_examples=30, deadline=None)
def test_equal_shares_are_none(case):
    made, shared = make(*case), make(*case, shares=(1 / case[2],) * case[2])
    assert (made.perm == shared.perm).all()
    assert (made.ptr == shared.ptr).all()


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.4), (1.2, -0.2), (1.0, 0.0)])
def test_shares_that_are_no_shares_are_refused(shares):
    with pytest.raises(ValueError, match="are not 2 positive numbers that sum to 1"):
        make(graph_of(6, [(0, 5)]), 1, 2, shares=shares)


def test_one_chunk_and_one_shard_leave_the_order_alone():
    graph = graph_of(6, [(0, 5), (5, 0)])
    made = make(graph, 1, 1)
    assert made.perm.tolist() == list(range(6))
    assert renumber(graph, made) is graph
    assert cut_quality(graph, made).lines() == ["one chunk, one shard: nothing is cut"]


@pytest.mark.parametrize(
    ("chunks", "shards", "message"),
    [
        (40, 1, "--chunks 40: more chunks than vertices (34); try --chunks 34 or fewer"),
        (1, 35, "--shards 35: more shards than vertices (34); try --shards 34 or fewer"),
        (
            12,
            3,
            "--chunks 12 --shards 3: more parts (36) than vertices (34); try --chunks 11 or fewer",
        ),
        (0, 1, "--chunks 0: must be at least 1"),
    ],
)
@pytest.mark.parametrize("partitioner", list(PARTITIONERS))
def test_too_many_parts_name_the_flag_and_what_to_try(chunks, shards, message, partitioner):
    with pytest.raises(InputError, match=re.escape(message)):
        make(graph_of(34, [(0, 1), (1, 0)]), chunks, shards, partitioner)


def test_a_chunk_with_too_few_vertices_for_the_shards_is_an_error_and_not_another_chunk():
    hub = graph_of(2000, [e for i in range(1, 2000) for e in ((0, i), (i, 0))])
    assert make(hub, 50, 16).shards == 16  # every chunk has room for 16, however heavy its hub
    with pytest.raises(InputError, match=r"--shards 39: chunk \d+ has only \d+ vertices; try"):
        make(hub, 50, 39)


@pytest.mark.parametrize(
    ("perm", "ptr", "message"),
    [
        ([0, 1, 1], [[0, 3]], "not a permutation"),
        ([0, 1, 3], [[0, 3]], "out of range"),
        ([0, 1, 2], [[0, 3, 3]], "empty"),
        ([0, 1, 2], [[0, 2]], "cover"),
        ([0, 1, 2], [[0, 1], [2, 3]], "cover"),
        ([0, 1, 2], [0, 3], "shape"),
        ([], [[0, 0]], "shape"),
    ],
)
def test_a_chunking_that_does_not_hold_is_refused(perm, ptr, message):
    with pytest.raises(ValueError, match=message):
        Chunking(np.array(perm, dtype=np.int64), np.array(ptr))


def shared_graph(name):
    path = DATA / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with np.load(path) as file:
        source, target = file["edge_index"].astype(np.int64)
        n = int(file["x_shape"][0]) if "x_shape" in file else len(file["x"])
    keep = source != target
    row, col = (np.concatenate(p)[np.tile(keep, 2)] for p in ((source, target), (target, source)))
    a = sp.csr_array((np.ones(len(row), np.int8), (row, col)), shape=(n, n))
    a.sum_duplicates()
    none = np.zeros(n, dtype=bool)
    return type(graph_of(1, []))(
        name=name,
        indptr=a.indptr.astype(np.int64),
        indices=a.indices,
        x=np.zeros((n, 1), np.float32),
        y=np.zeros(n, np.int64),
        train_mask=none,
        val_mask=none,
        test_mask=none,
        num_classes=1,
    )


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("squirrel", 2.0, 2.55), pytest.param("coauthor_physics", 0.9, 1.05, marks=pytest.mark.slow)],
)
def test_eight_shards_read_about_as_many_rows_as_in_the_paper(name, low, high):
    graph = shared_graph(name)
    quality = cut_quality(graph, make(graph, 1, 8))
    assert low < quality.crossings_per_vertex < high
    assert quality.cell_balance < 1.1


@pytest.mark.slow
def test_a_graph_with_a_heavy_hub_is_balanced():
    graph = shared_graph("debian_deps")
    quality = cut_quality(graph, make(graph, 32, 4))
    assert quality.chunk_balance < 1.1
    assert quality.cell_balance < 1.1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda task: np.zeros(len(task.work), np.int32), "no vertex in part 1 of 3"),
        (lambda task: np.zeros(3, np.int32), r"int32 \[3\]"),
        (lambda task: np.zeros(len(task.work)), "float64"),
        (lambda task: np.arange(len(task.work)), "0 to 29, not 0 to 2"),
    ],
)
def test_a_partitioner_that_answers_wrongly_is_named(wrong, words, monkeypatch):
    graph = graph_of(30, [(i, i + 1) for i in range(29)])

    def own_partitioner(task):
        return wrong(task)

    monkeypatch.setitem(PARTITIONERS._things, "own", own_partitioner)
    with pytest.raises(InputError, match=f"own_partitioner returned.*{words}"):
        make(graph, 3, 1, "own")


COARSER = ShardShares((0.25,) * 4, ((0, 2, 4),))


@pytest.mark.parametrize(
    "change",
    [{}, {"shards": 2}, {"chunks": 1, "order": "metis"}, {"shards": 4, "shares": COARSER}],
    ids=["chunks", "shards", "order", "levels"],
)
def test_what_metis_has_to_do_is_reported(change, monkeypatch):
    reported = []

    def report(*share, **left):
        reported.append((share, left))

    monkeypatch.setattr(chunking, "report_progress", report)
    wanted = {"chunks": 3, "shards": 1, "partitioner": "metis", "seed": 0, "cache_dir": "off"}
    make_chunking(small_graph(), **wanted | change)
    ((none, left), *others) = reported
    assert none == ()
    assert left["left_s"] > 0
    shares = [share for (share,), _ in others]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1

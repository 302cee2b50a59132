"""Forecast and measured staleness, against the one-device reference; runs repeat bit by bit."""

import csv
import math

import numpy as np
import pytest
import torch
from helpers import run_ranks, small_graph

from gnnpipe import TrainConfig, Trainer
from gnnpipe.data.load import load_graph
from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.graph.quality import chunk_edges, stale_share
from gnnpipe.runtime.staleness.affine_map import fit_affine, moments

EPOCHS = 4


def config(**settings):
    return TrainConfig(
        **{
            "model": "gcnii",
            "layers": 4,
            "hidden": 8,
            "chunks": 6,
            "epochs": EPOCHS,
            "lr": 0.05,
            "dtype": "float64",
            "cache_dir": "off",
            "out": "off",
            "quiet": True,
        }
        | settings
    )


def measured(shape, **settings):
    stages, shards = shape
    result = Trainer(config(stages=stages, shards=shards, **settings), graph=small_graph()).fit()
    return [row.staleness for row in result.history]


def truth(**settings):
    """Drift by epoch and layer, from the tables of the one-device reference."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import reference_of

    prepared = prepare(config(**settings), Mesh.alone(), small_graph())
    reference = reference_of(small_graph(), prepared)
    seen, walk = [], reference.walk._walk

    def noting(epoch):
        seen.append([t.clone() for t in reference.walk.tables.values()])
        return walk(epoch)

    reference.walk._walk = noting
    found = []
    for epoch in range(EPOCHS):
        reference.train_epoch(epoch, is_exact=epoch < prepared.exact_epochs)
        tables = reference.walk.tables.values()
        before = seen[-1] if seen and seen[-1] else [torch.zeros_like(t) for t in tables]
        pairs = zip(before, tables, strict=True)
        found.append([relative_change(before, now) for before, now in pairs])
    return found


def relative_change(before, now):
    return float((now - before).norm() / now.norm())


SETTINGS = [
    {},
    {"staleness": "paper", "snapshot_every": 2},
    {"staleness": "none", "model": "gat", "model_args": "heads=2"},
    {"staleness": "none", "dropout": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_drift_is_the_error_of_the_stale_rows(settings):
    assert small_graph().num_vertices <= 256, "then every row is in the sample"
    found = measured((1, 1), **settings)
    for row, drift in zip(found, truth(**settings), strict=True):
        assert len(row.drift) == 4
        if row.stale_reads:
            assert row.drift == pytest.approx(drift, rel=1e-9)
        else:
            assert all(map(math.isnan, row.drift))
    assert found[-1].stale_reads > 0


def test_measured_staleness_does_not_depend_on_the_shape():
    alone = measured((1, 1))
    for per_rank in run_ranks(measured, 4, (2, 2)):
        for row, other in zip(alone, per_rank, strict=True):
            assert other.stale_reads == row.stale_reads
            for name in ("drift", "moved", "missed"):
                mine = pytest.approx(getattr(row, name), rel=1e-6, nan_ok=True)
                assert getattr(other, name) == mine


def distance_to_exact(**settings):
    """By layer, how far the rows that stale readers see are from a forward pass with the same
    weights, on rows that are no probes, in the last of some epochs."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import reference_of

    graph = load_graph("synthetic:planted:n=2000,features=16")
    # A small learning rate: the two runs must be near each other in all but the stale rows.
    run = config(dropout=0.0, epochs=6, lr=0.01, **settings)
    prepared = prepare(run, Mesh.alone(), graph)
    reference = reference_of(graph, prepared)
    for epoch in range(5):
        reference.train_epoch(epoch, is_exact=epoch < prepared.exact_epochs)
    if len(prepared.probes):
        reference.walk.forecast(5)
    seen = [t.clone() for t in reference.walk.tables.values()]
    with torch.no_grad():
        reference.walk.walk_exact(5)
    others = np.ones(graph.num_vertices, dtype=bool)
    others[prepared.chunking.perm[prepared.probes]] = False
    rows = torch.from_numpy(np.flatnonzero(others))
    pairs = zip(seen, reference.walk.tables.values(), strict=True)
    return [float((a[rows] - b[rows]).norm() / b[rows].norm()) for a, b in pairs]


def test_forecast_brings_stale_rows_closer_to_exact():
    forecast = distance_to_exact(staleness="auto")
    plain = distance_to_exact(staleness="none", shuffle_chunks=True, exact_epochs=1)
    assert max(forecast) < 0.75 * max(plain)
    assert all(a < b for a, b in zip(forecast, plain, strict=True))


def test_missed_estimates_the_error_on_other_rows():
    """Pure noise cannot be forecast, so a fit to few rows must not report a small error."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(120, 32, generator=generator)
    new = old + 0.1 * torch.randn(120, 32, generator=generator)
    found = fit_affine(moments(old, new), 120, 32, torch.float32)
    fresh = torch.randn(4000, 32, generator=generator)
    moved = fresh + 0.1 * torch.randn(4000, 32, generator=generator)
    truth = float((found.apply(fresh) - moved).norm() / moved.norm())
    assert found.missed == pytest.approx(truth, rel=0.1)
    assert truth > found.moved
    whole = fit_affine(moments(old, new), 120, 32, torch.float32, is_whole=True)
    error = float((whole.apply(old) - new).norm() / new.norm())
    assert whole.missed == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("rank", [5, 24])
def test_a_map_has_a_low_rank(rank):
    """A change of rank 5 is found; of one of rank 24 the map keeps 16 directions."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4000, 40, generator=generator, dtype=torch.float64)
    left, right = torch.randn(2, 40, rank, generator=generator, dtype=torch.float64)
    change = 0.01 * old @ left @ right.T
    found = fit_affine(moments(old, old + change), 4000, 40, torch.float64, is_whole=True)
    assert found.left.shape == (40, 16)
    error = float((found.apply(old) - old - change).norm() / change.norm())
    # The ridge leaves 1/21 of a change.
    assert (0.04 < error < 0.06) if rank == 5 else (0.1 < error < 0.5)
    assert found.missed == pytest.approx(error * found.moved, rel=0.01)


WIDE = {"hidden": 24, "probes": 40}
"""Rows of 24 columns, of whose map 16 directions are kept; 40 of the vertices are probes."""


def measured_wide(shape):
    return measured(shape, **WIDE)


def test_wide_rows_are_forecast_as_by_the_reference():
    expected = truth(**WIDE)
    for rows in [measured_wide((1, 1)), *run_ranks(measured_wide, 4, (2, 2))]:
        for row, drift in list(zip(rows, expected, strict=True))[1:]:
            assert list(row.drift) == pytest.approx(drift, rel=1e-9)


def test_no_measurement_if_nothing_can_be_stale():
    assert measured((1, 1), chunks=1) == [None] * EPOCHS
    assert measured((1, 1), staleness="exact") == [None] * EPOCHS


def test_stale_share_is_counted_edge_by_edge():
    graph = small_graph(directed=True)
    chunking = make_chunking(
        graph, chunks=5, shards=2, seed=0, partitioner="random", cache_dir="off"
    )
    graph = renumber(graph, chunking)
    order = [3, 0, 4, 1, 2]
    chunk = chunking.chunk_of_row()
    target = np.repeat(np.arange(graph.num_vertices), graph.degrees)
    stale = sum(
        order.index(chunk[u]) > order.index(chunk[v])
        for u, v in zip(graph.indices, target, strict=True)
    )
    assert stale_share(chunk_edges(graph, chunking), order) == stale / graph.num_edges


def written(folders, shape):
    stages, shards = shape
    for folder in folders:
        settings = config(
            stages=stages, shards=shards, dropout=0.5, dtype="float32", eval_every=2, out=folder
        )
        Trainer(settings, graph=small_graph()).fit()


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_same_seed_and_shape_give_the_same_bits(shape, tmp_path):
    tables = []
    folders = [str(tmp_path / name) for name in ("one", "two")]
    if shape == (1, 1):
        written(folders, shape)
    else:
        run_ranks(written, 4, folders, shape)
    for name in ("one", "two"):
        with open(tmp_path / name / "metrics.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        tables.append([{k: v for k, v in r.items() if not k.endswith("_time_s")} for r in rows])
        weights = torch.load(tmp_path / name / "model.pt")
        tables[-1].append({k: v.numpy().tobytes() for k, v in weights.items()})
    assert tables[0] == tables[1]
    assert {"stale_reads", "drift_0", "moved_3", "missed_3"} <= set(tables[0][0])

"""Laws 1 and 2: every shape gives the losses and gradients of one autograd graph."""

import pytest
from helpers import one_way_graph, run_ranks, small_graph, two_islands

from gnnpipe.config import TrainConfig
from gnnpipe.ops import norm_relu_blocks
from gnnpipe.plan import buckets

MODELS = ("gcn", "sage", "gcnii", "resgcn", "gat")
TOLERANCE = {"float64": 1e-11, "float32": 1e-5}


def compare(
    shapes, dtype="float32", graph=None, epochs=3, models=MODELS, make=small_graph, **settings
):
    """(largest difference, what) of every shape and model; runs on every rank.

    The gradients of every step are summed in a bucket of their own.
    """
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    buckets.BUCKET_BYTES = 1
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for model in models:
            config = TrainConfig(
                model=model,
                layers=4,
                hidden=8,
                stages=stages,
                shards=shards,
                chunks=chunks,
                dtype=dtype,
                epochs=epochs,
                cache_dir="off",
                **settings,
            )
            given = make(**(graph or {}))
            prepared = prepare(config, mesh, given)
            worst = max(compare_epochs(given, prepared, mesh, epochs), key=lambda c: c.largest)
            found.append((worst.largest, f"{model} ({stages},{shards},{chunks}) {worst}"))
    return found


def assert_equal(found, dtype):
    largest = max(found)
    assert largest[0] <= TOLERANCE[dtype], largest[1]


QUICK_CASES = [
    (1, {}),
    (5, {"staleness": "exact", "epochs": 2}),
    (5, {"epochs": 5}),
    (5, {"staleness": "paper", "snapshot_every": 2, "scale_live_gradients": 3.0}),
    (5, {"recompute": True, "epochs": 5}),
    (20, {"partitioner": "range", "models": ("gcnii", "gat"), "epochs": 2}),
]
OTHER_CASES = [
    (5, {"staleness": "paper"}),
    (5, {"staleness": "none", "epochs": 2}),
    (5, {"exact_epochs": 0, "scale_live_gradients": 1.5, "probes": 36}),
    (5, {"shuffle_chunks": True, "staleness": "none"}),
    (5, {"partitioner": "random", "dropout": 0.3}),
    (1, {"recompute": True}),
    (5, {"recompute": True, "staleness": "exact", "epochs": 2}),
]
FLOAT32 = pytest.param("float32", marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", ["float64", FLOAT32])
@pytest.mark.parametrize(
    ("chunks", "settings"),
    [*QUICK_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)],
)
def test_one_process(chunks, settings, dtype):
    graph = {"directed": True, "sparse": True}
    assert_equal(compare([(1, 1, chunks)], dtype, graph, **settings), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("chunks", "settings"), [*QUICK_CASES, *OTHER_CASES])
def test_one_process_without_direction(chunks, settings, dtype):
    """With dense features; some cases are in ``test_dense_features``, too."""
    assert_equal(compare([(1, 1, chunks)], dtype, **settings), dtype)


@pytest.mark.parametrize("recompute", [False, True])
def test_dense_features(recompute):
    assert_equal(compare([(1, 1, 1), (1, 1, 5)], "float64", recompute=recompute), "float64")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_chunk_of_several_blocks_of_rows(recompute, monkeypatch):
    """As a large graph has them; the reference walks all of its rows in one."""
    monkeypatch.setattr(
        norm_relu_blocks, "rows_at_once", lambda x, width: 60 if len(x) == 60 else 7
    )
    found = compare([(1, 1, 3)], "float64", recompute=recompute)
    assert_equal(found, "float64")


def test_two_ranks():
    shapes = [(1, 2, 1), (2, 1, 1), (2, 1, 8), (1, 2, 8)]
    assert_equal(run_ranks(compare, 2, shapes)[0], "float32")


def test_four_ranks():
    shapes = [(1, 4, 1), (4, 1, 1), (2, 2, 1), (4, 1, 8), (2, 2, 8)]
    assert_equal(run_ranks(compare, 4, shapes)[0], "float32")


def empty_halos():
    return [
        found
        for make in (one_way_graph, two_islands)
        for found in compare(
            [(1, 2, 1), (2, 1, 3), (1, 2, 3)],
            "float64",
            epochs=2,
            models=("gcnii", "gat"),
            make=make,
            partitioner="range",
        )
    ]


def test_shards_without_halo_rows():
    assert_equal(run_ranks(empty_halos, 2)[0], "float64")


def directed_and_exact():
    shapes = [(2, 2, 6), (1, 4, 6)]
    directed = {"directed": True, "sparse": True}
    return compare(shapes, "float64", directed, epochs=2) + compare(
        shapes, "float64", directed, epochs=2, staleness="exact"
    )


def test_four_ranks_on_a_directed_graph_and_exact():
    assert_equal(run_ranks(directed_and_exact, 4)[0], "float64")

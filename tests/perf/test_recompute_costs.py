"""Steps and aggregations that backward repeats, counted in a real epoch and in the simulator."""

from collections import Counter

import pytest
from helpers import quick_config, small_graph

from gnnpipe import TrainConfig, simulate
from gnnpipe.plan import Segments
from gnnpipe.profiling.scenario import GraphShape
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epoch

LAYERS = 24


def repeated(every, monkeypatch):
    """By step, how often an epoch computes and aggregates it beyond forward."""
    config = quick_config(
        model="gcn", layers=LAYERS, hidden=8, recompute=True, recompute_every=every
    )
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph())
    runtime = build_rank(prepared, mesh)
    computed, received = Counter(), Counter()
    compute, receive = Stage._compute, Stage._received

    def count_computed(self, chunk, step, *args, **more):
        computed[step] += 1
        return compute(self, chunk, step, *args, **more)

    def count_received(self, chunk, step, kept=None):
        found = receive(self, chunk, step, kept)
        received[step] += any(name not in (kept or {}) for name in found)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Stage, "_compute", count_computed)
        patched.setattr(Stage, "_received", count_received)
        train_epoch(runtime, mesh, prepared.program_of(0), prepared.chunk_order(0), 0)
    steps = range(1, len(computed))
    return [computed[s] - 1 for s in steps], [received[s] - 1 for s in steps]


@pytest.mark.parametrize("every", [1, 2, 4, 5, 9])
def test_counts_of_a_real_epoch(every, monkeypatch):
    computed, received = repeated(every, monkeypatch)
    segments = Segments(len(computed) + 1, every)
    steps = range(1, segments.num_steps)
    assert computed == [segments.times_again(step) for step in steps]
    assert received == [segments.aggregations_again(step) for step in steps]


def test_segments_by_hand():
    # 18 steps, 2 at a time; forward keeps the inputs of 0, 6 and 12.
    again = [Segments(18, 2).times_again(step) for step in range(18)]
    assert again == [2, 2, 2, 2, 1, 1] * 3
    again = [Segments(18, 2).aggregations_again(step) for step in range(18)]
    assert again == [0, 2, 1, 2, 1, 1] * 3


def predicted(every, chunks=1):
    config = TrainConfig(
        dataset="karate", layers=LAYERS, hidden=16, out="off", cache_dir="off", staleness="exact",
        recompute=True, recompute_every=every, chunks=chunks,
    )  # fmt: skip
    shape = GraphShape(2_000_000, 200_000_000, 16, 4)
    return simulate(config, hardware="h100:10gbe", shape=shape).predicted_epoch_time_s


@pytest.mark.slow
def test_the_simulator_counts_the_further_passes():
    step_by_step, once, twice = predicted(1), predicted(5), predicted(2)
    assert 1.2 * step_by_step < once < twice
    # With a table, nothing is aggregated again.
    assert predicted(5, chunks=2) == pytest.approx(predicted(1, chunks=2))
    assert predicted(2, chunks=2) > predicted(1, chunks=2)

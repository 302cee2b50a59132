"""The profile for a plan tells how much faster ranks are with fewer others on their machine."""

from dataclasses import fields

import pytest
from helpers import quick_config, run_ranks
from profiles import prepared_of

from gnnpipe.perf.profile import OpTimes
from gnnpipe.plan import Placement
from gnnpipe.profiling import devices
from gnnpipe.profiling.devices import times_of_fewer
from gnnpipe.profiling.profile import take_planning_profile
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare

SETTINGS = {"dataset": "karate", "layers": 2, "hidden": 8, "staleness": "exact"}


def measured(seconds):
    """Ratios of fewer ranks, and the profile, on three ranks; ``seconds``: of an epoch by the
    number of ranks that run one at once."""
    mesh = Mesh.of(World.meet(3), Placement.grid(1, 3))
    config = quick_config(**SETTINGS)

    def time_s(mesh, run_epoch):
        at_once = sum(mesh.gather(run_epoch is not None))
        return seconds[at_once] if run_epoch is not None else 0.0

    class Stated:
        def __init__(self, plan):
            self.given = plan

        def num_ranks(self, shape):
            return 3

        def plan(self, request):
            return self.given

    def prepared_with(plan):
        return prepare(config, mesh, planner=Stated(plan))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(devices, "_epoch_time_s", time_s)
        alone = prepared_of(layers=2)
        ratios, num_ops = times_of_fewer(alone, mesh), alone.model_graph.num_ops
        profile = take_planning_profile(config, mesh, 34, num_ops, prepared_with, [0, 1, 2])
    return ratios, profile


def test_fewer_ranks_at_once_are_faster():
    (ratios, profile), *others = run_ranks(measured, 3, {1: 0.2, 2: 0.3, 3: 0.4})
    assert all(found == ratios for found, _ in others)
    assert ratios == {1: pytest.approx(0.5), 2: pytest.approx(0.75)}
    assert [times.ranks for times in profile.compute] == [1, 2, 3]
    alone, two, every = profile.compute
    for kind, times in every.ops.items():
        for name in (f.name for f in fields(OpTimes) if f.name != "relative_error"):
            rows = getattr(times, name).time_s(1e6, 1e6, 1e6)
            assert getattr(alone.ops[kind], name).time_s(1e6, 1e6, 1e6) == pytest.approx(rows / 2)
            assert getattr(two.ops[kind], name).time_s(1e6, 1e6, 1e6) == pytest.approx(0.75 * rows)
    assert alone.update.time_s(1e6) == pytest.approx(every.update.time_s(1e6) / 2)
    assert alone.boundary_per_number_s == pytest.approx(every.boundary_per_number_s / 2)


def test_a_disturbed_measurement_does_not_make_fewer_ranks_slower():
    ratios, _ = run_ranks(measured, 3, {1: 0.3, 2: 0.2, 3: 0.4})[0]
    assert ratios == {1: pytest.approx(0.5), 2: pytest.approx(0.5)}
    ratios, _ = run_ranks(measured, 3, {1: 0.5, 2: 0.6, 3: 0.4})[0]
    assert ratios == {1: 1.0, 2: 1.0}

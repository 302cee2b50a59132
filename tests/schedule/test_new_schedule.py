"""A schedule that is registered here, as a user's own file would: training equals the reference."""

from dataclasses import replace

import pytest
from helpers import run_ranks, small_graph
from stage_dags import chain

from gnnpipe.config import TrainConfig
from gnnpipe.plan import Plan
from gnnpipe.planner import GivenPlan
from gnnpipe.schedule import SCHEDULES, Action, Consistency, Schedule, check, training_program
from gnnpipe.schedule.check import ProgramError
from gnnpipe.schedule.program import ActionKind


class TwoSweeps(Schedule):
    """Runs the chunks at even positions first, then those at odd positions."""

    consistency = Consistency(max_stale_epochs=1)

    def forward(self, stage, num_steps, chunks):
        positions = [*range(0, chunks, 2), *range(1, chunks, 2)]
        return [Action(ActionKind.FORWARD, stage, p, (0, num_steps)) for p in positions]


SCHEDULES.add("two-sweeps", TwoSweeps())


def test_its_program_is_proved():
    program = training_program(chain(1, 3, "two-sweeps"))
    assert program.text() == "stage 0: 0F0 0F2 0F1 0B1 0B2 0B0 0STEP\n"
    assert (program.live_reads, program.stale_reads) == (6, 6)
    assert program.stale_pairs(0).tolist() == [
        [False, True, True],
        [False] * 3,
        [False, True, False],
    ]


def test_a_promise_that_is_not_kept_is_refused():
    program = training_program(chain(1, 3, "two-sweeps"))
    with pytest.raises(ProgramError, match="promises exact reads, but 6 of its reads are stale"):
        check(replace(program, consistency=Consistency()))
    twice = replace(program, stages=((*program.stages[0], program.stages[0][-1]),))
    with pytest.raises(ProgramError, match="must end with STEP"):
        check(twice)
    early = (*program.stages[0][:3], Action(ActionKind.STEP, 0), *program.stages[0][3:])
    any_steps = Consistency(max_stale_epochs=1, optimizer_steps=None)
    with pytest.raises(ProgramError, match="1 optimizer steps newer than at the chunk's F"):
        check(replace(program, stages=(early,), consistency=any_steps))
    check(replace(program, stages=(early,), consistency=replace(any_steps, max_versions_behind=1)))


def largest_difference(stages, shards, staleness):
    """Of losses and gradients to one autograd graph; runs on every rank."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh = Mesh.join(stages, shards)
    config = TrainConfig(
        model="gcn",
        layers=4,
        hidden=8,
        stages=stages,
        shards=shards,
        chunks=5,
        staleness=staleness,
        dtype="float64",
        epochs=4,
        cache_dir="off",
    )
    plan = prepare(config, mesh, small_graph()).plan
    plan = Plan.from_json(replace(plan, schedule="two-sweeps").to_json())
    prepared = prepare(config, mesh, small_graph(), planner=GivenPlan(plan))
    assert "0F2" in prepared.program.text().split("F1")[0]
    return max(c.largest for c in compare_epochs(small_graph(), prepared, mesh, 4))


@pytest.mark.parametrize("staleness", ["none", "auto"])
def test_training_equals_one_autograd_graph(staleness):
    assert largest_difference(1, 1, staleness) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "shards"), [(2, 1), (1, 2)])
def test_training_on_two_ranks_equals_one_autograd_graph(stages, shards):
    assert max(run_ranks(largest_difference, 2, stages, shards, "auto")) < 1e-11

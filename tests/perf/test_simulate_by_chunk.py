"""Law 4 for schedules with steps by chunk: closed forms of 1F1B, and its small bubble."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_dags import chain, dags
from stated_costs import StatedCosts

from gnnpipe.config import TrainConfig
from gnnpipe.config.settings import BY_CHUNK
from gnnpipe.perf import simulate
from gnnpipe.perf.simulate import TaskKind
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.profiling.scenario import GraphShape
from gnnpipe.profiling.simulate import simulate as simulate_command
from gnnpipe.schedule import training_program


def simulated(dag, epochs=1, steps_every=None, passes_ahead=1, **costs):
    program = training_program(
        dag, epochs=epochs, steps_every=steps_every, passes_ahead=passes_ahead
    )
    costs = StatedCosts(**costs, shards=dag.plan.most_shards)
    return program, simulate(program_tasks(program, costs))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunks", [4, 32])
def test_closed_form_of_a_uniform_chain(stages, chunks):
    """Passes of f and b on free links: (passes + S - 1) (f + b), as of a fill-drain pipeline."""
    steps = 3  # of each stage
    f, b = 1.0 * steps, 2.0 * steps
    for schedule, epochs in (("1f1b", 1), ("async", 1), ("async", 5)):
        _, timeline = simulated(chain(stages, chunks, schedule), epochs)
        expected = (epochs * chunks + stages - 1) * (f + b)
        assert timeline.makespan_s == pytest.approx(expected, rel=1e-12)


def test_the_bubble_between_flushes_is_small():
    """At most 2 % with S = 4, K = 32 and 10 epochs; 8.6 % if each epoch is drained."""

    def bubble(schedule, epochs, **costs):
        program, timeline = simulated(chain(4, 32, schedule), epochs, **costs)
        assert program.epochs == epochs
        return max(timeline.bubble_s()[:4]) / timeline.makespan_s

    assert bubble("async", 10) <= 0.02
    assert bubble("async", 10, update_time_s=0.1, link_time_s=0.02, sync_time_s=0.5) <= 0.02
    assert bubble("fill-drain", 1) == pytest.approx(3 / 35)
    assert bubble("async", 1) == pytest.approx(3 / 35)


@pytest.mark.parametrize("stages", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_more_passes_ahead_hide_messages(stages):
    """A message of (a - 1) / 2 of a pass costs its fill and drain alone; a longer one does not."""
    steps, one_pass = 3, 9.0  # of each stage; forward 1 and backward 2 per step

    def makespan(message_s, ahead):
        dag = chain(stages, 32, "async")
        _, timeline = simulated(dag, epochs=10, passes_ahead=ahead, link_time_s=message_s)
        return timeline.makespan_s

    assert simulated(chain(stages, 32, "async"))[0].num_steps == (steps,) * stages
    free = makespan(0.0, 1)
    for message_s, ahead in ((one_pass / 18, 2), (one_pass / 2, 2), (one_pass, 3)):
        assert makespan(0.0, ahead) == pytest.approx(free)
        fill = 2 * (stages - 1) * message_s
        assert makespan(message_s, ahead) <= free + fill + 1e-9
        assert makespan(message_s, ahead - 1) > free + 4 * fill


def test_stages_step_alone_and_wait_at_the_flush_only():
    _, timeline = simulated(chain(2, 4, "async"), epochs=2, update_time_s=1.0, sync_time_s=7.0)
    what = timeline.tasks.what
    assert sum(task.kind is TaskKind.SYNC for task in what) == 1
    assert sum(task.kind is TaskKind.STEP for task in what) == 2 * 8
    sync = next(i for i, task in enumerate(what) if task.kind is TaskKind.SYNC)
    assert timeline.end_s[sync] == timeline.makespan_s
    _, drained = simulated(chain(2, 4, "1f1b"), steps_every=2, sync_time_s=7.0)
    assert sum(task.kind is TaskKind.SYNC for task in drained.tasks.what) == 3


def test_forward_of_later_passes_overlaps_backward_of_earlier_ones():
    """Stage 0 is in forward of a later pass while the last is in backward of an earlier one."""
    _, timeline = simulated(chain(4, 8, "async"), epochs=2, link_time_s=0.02)
    spans = [
        (task, timeline.start_s[i], timeline.end_s[i])
        for i, task in enumerate(timeline.tasks.what)
        if task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    ]
    first = [s for s in spans if s[0].stage == 0 and s[0].kind is TaskKind.FORWARD]
    last = [s for s in spans if s[0].stage == 3 and s[0].kind is TaskKind.BACKWARD]
    overlaps = [
        (f[0].position, b[0].position)
        for f in first
        for b in last
        if max(f[1], b[1]) < min(f[2], b[2])
    ]
    assert overlaps
    assert all(f > b for f, b in overlaps)


@settings(deadline=None, max_examples=40)
@given(dags(), st.sampled_from(sorted(BY_CHUNK)), st.floats(0, 3), st.floats(0, 2))
def test_no_resource_is_busier_than_the_makespan(dag, schedule, link_s, exchange_s):
    dag = replace(dag, plan=replace(dag.plan, schedule=schedule))
    program, timeline = simulated(
        dag, link_time_s=link_s, exchange_time_s=exchange_s, reduce_time_s=0.5, update_time_s=0.25
    )
    tasks = timeline.tasks
    assert max(timeline.busy_s()) <= timeline.makespan_s + 1e-9
    path = timeline.critical_path()
    length = sum(tasks.duration_s[task] for task, _ in path)
    assert length == pytest.approx(timeline.makespan_s, rel=1e-9)
    passes = sum(task.kind is TaskKind.STEP for task in tasks.what)
    steps = program.consistency.optimizer_steps
    assert passes == steps * program.placement.num_ranks


@pytest.mark.slow
def test_the_simulate_command_counts_seconds_of_one_epoch():
    """A large graph on fast links: fill-drain's bubble is 3 / 35, and async nearly has none."""
    shape = GraphShape(vertices=1_000_000, edges=10_000_000, features=128, classes=40)

    def bubble(schedule, staleness="none"):
        config = TrainConfig(
            layers=32, hidden=128, stages=4, chunks=32, schedule=schedule, staleness=staleness,
            out="off", cache_dir="off",
        )  # fmt: skip
        found = simulate_command(config, shape=shape, hardware="a100:nvlink3")
        shares = found.predicted_time_shares
        assert shares[0].epoch_s == pytest.approx(found.predicted_epoch_time_s, rel=1e-6)
        assert max(found.what_if_s.values()) < 3 * found.predicted_epoch_time_s
        compute = sum(share.compute_s for share in shares)
        return found, 1 - compute / sum(share.epoch_s for share in shares)

    plain, drained = bubble("fill-drain")
    flowing, idle = bubble("async")
    assert idle < drained / 2
    assert flowing.predicted_epoch_time_s < plain.predicted_epoch_time_s
    assert sum(flowing.memory_bytes) < sum(plain.memory_bytes)

"""Laws 3 and 6 for 1F1B with steps by chunk: order, version gaps and chunks in flight, any DAG."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_dags import chain, dags

from gnnpipe.config.settings import BY_CHUNK
from gnnpipe.plan import StageDag, Transfer
from gnnpipe.schedule import Action, ActionKind, check, training_program
from gnnpipe.schedule.check import ProgramError
from gnnpipe.setup.prepared import chunk_order, epochs_to_flush


def with_schedule(dag, schedule):
    return replace(dag, plan=replace(dag.plan, schedule=schedule))


def test_text_form():
    assert training_program(chain(2, 3, "1f1b")).text().splitlines() == [
        "stage 0: 0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0B0 0RECV_B1<1 0F2 0SEND_F2>1 "
        "0RECV_B2<1 0B1 0B2 0STEP2",
        "stage 1: 1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1RECV_F2<0 1B1 1SEND_B1>0 1F2 1B2 "
        "1SEND_B2>0 1STEP2",
    ]
    found = training_program(chain(2, 2, "async"), epochs=2).text().splitlines()[0]
    passes = [word for word in found.split() if "_" not in word][2:]
    assert " ".join(passes) == "0F0 0F1 0B0 0STEP0 0F2 0B1 0STEP1 0F3 0B2 0STEP2 0B3 0STEP3"


@pytest.mark.parametrize("name", sorted(BY_CHUNK))
def test_the_settings_say_which_schedules_step_by_chunk(name, monkeypatch):
    assert training_program(chain(2, 3, name)).steps_by_chunk
    monkeypatch.delitem(BY_CHUNK, name)
    with pytest.raises(ProgramError, match=f"schedule '{name}': "):
        training_program(chain(2, 3, name))


def test_gaps_and_chunks_in_flight_of_a_chain():
    program = training_program(chain(4, 8, "async"), epochs=2)
    assert program.in_flight == (4, 3, 2, 1)
    # The first passes are computed before any step; then stage s is 3 - s steps behind.
    assert [gaps[:5] for gaps in program.version_gaps] == [
        (0, 1, 2, 3, 3),
        (0, 1, 2, 2, 2),
        (0, 1, 1, 1, 1),
        (0, 0, 0, 0, 0),
    ]
    assert program.largest_gap == 3
    assert not program.is_exact
    text = program.reads_text()
    assert "at most 4, 3, 2, 1 chunks in flight" in text
    assert "3, 2, 1, 0 steps between" in text
    fewer = training_program(chain(4, 8, "async"), epochs=2, steps_every=4)
    assert [max(gaps) for gaps in fewer.version_gaps] == [1, 1, 1, 0]
    drained = training_program(chain(4, 8, "1f1b"), steps_every=2)
    assert drained.largest_gap == 0
    assert drained.in_flight == (2, 2, 2, 1)
    assert training_program(chain(4, 8, "1f1b")).in_flight == (4, 3, 2, 1)


def test_passes_ahead_multiply_gaps_and_chunks_in_flight():
    program = training_program(chain(3, 8, "async"), epochs=2, passes_ahead=3)
    assert program.in_flight == (7, 4, 1)
    assert [max(gaps) for gaps in program.version_gaps] == [6, 3, 0]
    drained = training_program(chain(3, 8, "1f1b"), steps_every=4, passes_ahead=2)
    assert drained.in_flight == (4, 3, 1)
    assert drained.largest_gap == 0
    # The receive for a pass comes two passes of either kind before it.
    words = training_program(chain(2, 4, "async"), passes_ahead=2).text().splitlines()[1].split()
    assert words.index("1RECV_F2<0") < words.index("1F1") < words.index("1B1") < words.index("1F2")
    with pytest.raises(ProgramError, match="stage 0 works on 7 chunks at once"):
        training_program(chain(4, 6, "async"), epochs=2, passes_ahead=2)


def test_exact_only_with_one_chunk_and_no_gap():
    assert training_program(chain(3, 1, "1f1b")).is_exact
    assert training_program(chain(1, 1, "async"), epochs=5).is_exact
    assert not training_program(chain(1, 2, "1f1b")).is_exact
    # Without aggregations chunks do not read each other, but steps by chunk see one of two.
    row_wise = replace(chain(2, 2, "1f1b"), steps=(1, 1))
    assert training_program(row_wise).is_exact
    assert not training_program(row_wise, steps_every=1).is_exact
    assert not training_program(with_schedule(row_wise, "async"), steps_every=2, epochs=2).is_exact


def longest_path_behind(dag, stage):
    """Brute force over all paths of transfers."""
    return max(
        (1 + longest_path_behind(dag, t.target) for t in dag.transfers if t.source == stage),
        default=0,
    )


@settings(deadline=None, max_examples=80)
@given(dags(), st.sampled_from(sorted(BY_CHUNK)), st.integers(1, 3), st.integers(1, 3), st.data())
def test_programs_are_proved_for_any_stage_dag(dag, schedule, epochs, ahead, data):
    dag = with_schedule(dag, schedule)
    chunks, is_async = dag.plan.chunks, schedule == "async"
    every = data.draw(st.sampled_from([n for n in range(1, chunks + 1) if chunks % n == 0]))
    epochs = epochs if is_async else 1
    buckets = [tuple(range(0, n, 2)) for n in dag.steps]
    distances = [longest_path_behind(dag, stage) for stage in range(len(dag.steps))]
    window = epochs * chunks if is_async else every
    expected = tuple(min(ahead * d + 1, window) for d in distances)
    if epochs > 1 and max(expected) > chunks:
        with pytest.raises(ProgramError, match="chunks at once"):
            training_program(dag, buckets, epochs=epochs, steps_every=every, passes_ahead=ahead)
        return
    program = training_program(dag, buckets, epochs=epochs, steps_every=every, passes_ahead=ahead)
    assert program.in_flight == expected
    pairs = sum(n - 1 for n in dag.steps) * chunks * (chunks - 1) * epochs
    assert program.live_reads == program.stale_reads == pairs // 2
    starts = range(0, epochs * chunks, every)
    together = [list(range(start, start + every)) for start in starts for _ in range(every)]
    assert [list(program.step_passes(p)) for p in range(epochs * chunks)] == together
    for actions, gaps in zip(program.stages, program.version_gaps, strict=True):
        steps = [a.position for a in actions if a.kind is ActionKind.STEP]
        assert steps == list(range(every - 1, epochs * chunks, every))
        # Counted here from the text of the program alone.
        order = [(a.kind, a.position) for a in actions]
        for p, gap in enumerate(gaps):
            first, last = order.index(("F", p)), len(order) - 1 - order[::-1].index(("B", p))
            assert gap == sum(kind is ActionKind.STEP for kind, _ in order[first:last])
        assert is_async or not any(gaps)


def changed(program, stage, change):
    actions = list(program.stages)
    actions[stage] = tuple(change(list(actions[stage])))
    return replace(program, stages=tuple(actions))


def moved(kind, position, by):
    """The action of this kind and position, moved by some places."""

    def move(actions):
        at = next(i for i, a in enumerate(actions) if (a.kind, a.position) == (kind, position))
        action = actions.pop(at)
        return [*actions[: at + by], action, *actions[at + by :]]

    return move


FAULTS = {
    "does not mirror": lambda a: [
        replace(x, kind={"F": ActionKind.BACKWARD, "B": ActionKind.FORWARD}[x.kind])
        if x.kind in "FB" and x.position == 1
        else x
        for x in a
    ],
    "must end with STEP": lambda a: [*a, a[-1]],
    "STEP0 comes after .F1": moved("STEP", 0, 1),
    "STEP1 comes after .B0": lambda a: [
        replace(x, position=1 - x.position) if x.kind == "STEP" and x.position < 2 else x for x in a
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    # One stage alone, whose actions may be moved without a message being wrong first.
    program = training_program(chain(1, 4, "async"), epochs=2)
    with pytest.raises(ProgramError, match=fault):
        check(changed(program, 0, FAULTS[fault]))


def test_forward_passes_must_be_in_order():
    program = training_program(chain(2, 4, "async"), epochs=2)

    def swap(actions):
        return [
            replace(x, position=1 - x.position) if x.kind == "F" and x.position < 2 else x
            for x in actions
        ]

    with pytest.raises(ProgramError, match="F actions are not in the order of the passes"):
        check(changed(program, 0, swap))


def test_a_missing_gradient_sum_is_refused():
    program = training_program(chain(1, 4, "async", shards=2), epochs=2)
    assert program.text().count("REDUCE_GRAD") == 8
    with pytest.raises(ProgramError, match="must sum the gradients of every step once"):
        check(changed(program, 0, lambda a: [x for i, x in enumerate(a) if i != 2]))
    with pytest.raises(ProgramError, match="before its gradients are complete"):
        check(changed(program, 0, lambda a: [a[0], a[2], a[1], *a[3:]]))


def test_more_versions_than_promised_are_refused():
    program = training_program(chain(3, 6, "async"))
    tight = replace(program.consistency, max_versions_behind=1)
    with pytest.raises(ProgramError, match="2 optimizer steps newer than at the chunk's F"):
        check(replace(program, consistency=tight))
    check(replace(program, consistency=replace(tight, max_versions_behind=2)))


def test_each_stage_must_step_after_the_same_passes():
    program = training_program(chain(2, 4, "1f1b"), steps_every=2)
    last = program.stages[0][-1]
    assert last == Action(ActionKind.STEP, 0, 3)
    with pytest.raises(ProgramError, match="must be that of pass 1"):
        check(
            changed(
                program, 0, lambda a: [replace(x, position=3) if x.kind == "STEP" else x for x in a]
            )
        )


def test_skips_do_not_stall():
    """Stage 0 also sends to the last stage: its values wait there for those of the longer way."""
    plan = chain(4, 6, "async").plan
    ways = [(0, 1), (1, 2), (2, 3), (0, 3)]
    dag = StageDag(plan, (2,) * 4, tuple(Transfer(*way, {"x": 4}) for way in ways))
    assert dag.distances == (3, 2, 1, 0)
    program = training_program(dag, epochs=3)
    assert program.in_flight == (4, 3, 2, 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_orders_keep_their_distance(chunks, in_flight, seed):
    in_flight = min(in_flight, chunks)
    orders = [chunk_order(chunks, seed, epoch, in_flight) for epoch in range(4)]
    assert all(sorted(order) == list(range(chunks)) for order in orders)
    passes = [chunk for order in orders for chunk in order]
    for p, chunk in enumerate(passes):
        assert chunk not in passes[p + 1 : p + in_flight]
    if in_flight == 1 < chunks:
        assert orders == [chunk_order(chunks, seed, epoch) for epoch in range(4)]


def test_orders_are_drawn_anew_in_every_epoch():
    orders = {tuple(chunk_order(32, 0, epoch, 4)) for epoch in range(6)}
    assert len(orders) == 6
    starts = {chunk_order(32, 0, epoch, 4)[0] for epoch in range(40)}
    assert 8 < len(starts) <= 16  # all of the first of two groups


class Periods:
    """The settings that flushes depend on."""

    def __init__(self, eval_every, checkpoint_every):
        self.eval_every, self.checkpoint_every = eval_every, checkpoint_every


@pytest.mark.parametrize(
    ("chunks", "eval_every", "checkpoint_every", "flushes"),
    [
        (32, 0, None, [10, 20, 25]),
        (32, 10, 0, [10, 20, 25]),
        (8, 4, None, [4, 8, 10, 12, 16, 20, 24, 25]),
        (8, 0, 7, [7, 10, 14, 20, 21, 25]),
        (8, 1, None, list(range(1, 26))),
        (64, 0, None, [5, 10, 15, 20, 25]),
        (1000, 0, None, list(range(1, 26))),
    ],
)
def test_flushes_depend_on_the_settings_alone(chunks, eval_every, checkpoint_every, flushes):
    config = Periods(eval_every, checkpoint_every)
    found, epoch = [], 0
    while epoch < 25:
        epoch += epochs_to_flush(config, chunks, epoch, 25)
        found.append(epoch)
    assert found == flushes
    # From any epoch on, the next flush is the same.
    for epoch in range(25):
        due = epoch + epochs_to_flush(config, chunks, epoch, 25)
        assert due == next(f for f in flushes if f > epoch)

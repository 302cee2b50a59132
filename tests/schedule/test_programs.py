"""Law 3: programs are right for any stage DAG, and wrong ones are refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from stage_dags import chain, dags, plan_of_runs

from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.schedule import (
    Action,
    ActionKind,
    Consistency,
    check,
    evaluation_program,
    training_program,
    with_forecast,
)
from gnnpipe.schedule.check import ProgramError


def forecast_program(dag):
    return with_forecast(dag, training_program(dag))


@settings(deadline=None, max_examples=80)
@given(dags())
def test_programs_are_proved_for_any_stage_dag(dag):
    program, plan = training_program(dag), dag.plan
    k = plan.chunks
    row_wise = max(dag.steps) == 1
    assert program.is_exact == (plan.schedule == "layer-sync" or k == 1 or row_wise)
    pairs = sum(n - 1 for n in dag.steps) * k * (k - 1)
    assert program.live_reads + program.stale_reads == pairs
    if not program.is_exact:
        assert program.live_reads == program.stale_reads == pairs // 2
    assert evaluation_program(dag).is_exact
    counts = program.live_reads, program.stale_reads
    forecast = with_forecast(dag, program)
    assert (forecast.live_reads, forecast.stale_reads) == counts
    # Any buckets: here one begins with every second step.
    buckets = [tuple(range(0, n, 2)) for n in dag.steps]
    bucketed = with_forecast(dag, training_program(dag, buckets))
    assert (bucketed.live_reads, bucketed.stale_reads) == counts
    for actions, begins in zip(bucketed.stages, buckets, strict=True):
        sums = [a.steps[0] for a in actions if a.kind == "REDUCE_GRAD"]
        assert sums == (list(reversed(begins)) if plan.most_shards > 1 else [])
    assert Plan.from_json(plan.to_json()) == plan


def test_text_form():
    text = training_program(chain(2, 2)).text()
    assert text.splitlines()[1] == (
        "stage 1: 1RECV_F0<0 1RECV_F1<0 1F0 1F1 1B1 1SEND_B1>0 1B0 1SEND_B0>0 1STEP"
    )
    assert "0F1[1:2]" in training_program(chain(1, 2, "layer-sync")).text()


def changed(program, stage, change):
    actions = list(program.stages)
    actions[stage] = tuple(change(list(actions[stage])))
    return replace(program, stages=tuple(actions))


def drained_forward(actions):
    """The drain in the order of the fill: the fault that loses gradients silently."""
    last = max(a.position for a in actions)
    return [
        replace(a, position=last - a.position) if a.kind in ("B", "SEND_B", "RECV_B") else a
        for a in actions
    ]


def test_a_drain_in_forward_order_is_refused():
    with pytest.raises(ProgramError, match="exactly the reverse order"):
        check(changed(training_program(chain(1, 3)), 0, drained_forward))


FAULTS = {
    "runs twice": lambda a: [*a[:1], *a],
    "never runs": lambda a: [x for x in a if (x.kind, x.position) != ("F", 1)],
    "B1 step 0 never runs": lambda a: [x for x in a if (x.kind, x.position) != ("B", 1)],
    "stages 0 and 1 do not exchange": lambda a: [
        x for x in a if (x.kind, x.position) != ("SEND_F", 1)
    ],
    "must end with STEP after": lambda a: [a[-1], *a[:-1]],
    "has nothing": lambda a: a[:-1],
    "before its value is computed": lambda a: sorted(a, key=lambda x: x.kind != "SEND_F"),
    "outside": lambda a: [Action(ActionKind.FORWARD, 0, 9, (0, 3)), *a],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    with pytest.raises(ProgramError, match=fault):
        check(changed(training_program(chain(2, 3)), 0, FAULTS[fault]))


def test_shards_must_add_their_gradients():
    program = training_program(chain(1, 2, shards=2))
    assert program.text().endswith("0REDUCE_GRAD 0STEP\n")
    with pytest.raises(ProgramError, match="every step once over its shards, sums those of steps"):
        check(changed(program, 0, lambda a: [x for x in a if x.kind != "REDUCE_GRAD"]))


def test_gradients_are_summed_in_buckets_under_backward():
    program = training_program(chain(1, 1, shards=2), buckets=[(0, 2)])
    assert program.text() == (
        "stage 0: 0F0 0B0[2:3] 0REDUCE_GRAD[2:3] 0B0[0:2] 0REDUCE_GRAD[0:2] 0STEP\n"
    )
    exact = training_program(chain(1, 2, "layer-sync", shards=2), buckets=[(0, 1, 2)])
    assert exact.text().endswith(
        "0B1[2:3] 0B0[2:3] 0REDUCE_GRAD[2:3] 0B1[1:2] 0B0[1:2] 0REDUCE_GRAD[1:2] "
        "0B1[0:1] 0B0[0:1] 0REDUCE_GRAD[0:1] 0STEP\n"
    )

    def early(actions):
        """The first sum in front of the backward of its steps."""
        first = next(a for a in actions if a.kind == "REDUCE_GRAD")
        others = [a for a in actions if a != first]
        at = next(i for i, a in enumerate(others) if a.kind == "B")
        return [*others[:at], first, *others[at:]]

    with pytest.raises(ProgramError, match="before its gradients are complete"):
        check(changed(program, 0, early))
    again = changed(program, 0, lambda a: [*a[:-1], a[-2], a[-1]])
    with pytest.raises(ProgramError, match="every step once"):
        check(again)


def test_wrong_order_of_messages_and_stalls_are_refused():
    program = training_program(chain(2, 3))

    def swap(actions):
        first, second = (i for i, a in enumerate(actions) if a.kind == "SEND_F" and a.position < 2)
        actions[first], actions[second] = actions[second], actions[first]
        return actions

    with pytest.raises(
        ProgramError, match="stages 0 and 1 do not exchange the same messages in the same order"
    ):
        check(changed(program, 0, swap))

    def late(actions):
        """Send the values of the last chunk only after its gradient has come back."""
        at = next(i for i, a in enumerate(actions) if (a.kind, a.position) == ("SEND_F", 2))
        return [*actions[:at], *actions[at + 1 :], actions[at]]

    with pytest.raises(ProgramError, match="waits for ever"):
        check(changed(program, 0, late))

    def unposted(actions):
        kinds = [(a.kind, a.position) for a in actions]
        late = actions.pop(kinds.index(("RECV_F", 2)))
        return [*actions[: kinds.index(("F", 2))], late, *actions[kinds.index(("F", 2)) :]]

    with pytest.raises(ProgramError, match="before its receive is posted"):
        check(changed(program, 1, unposted))


BAD_PLANS = [
    ("{", "not JSON"),
    ("[]", "not a JSON object"),
    ('{"version": 9}', "version 9: another gnnpipe"),
    ('{"version": 3, "stages": [[0, 2]]}', "version 3: another gnnpipe"),
    ('{"version": 6, "stages": [[0, 2]]}', "chunks is missing"),
    (chain(2, 2).plan.to_json().replace('"chunks": 2', '"chunks": 0'), "at least 1"),
    (chain(2, 2).plan.to_json().replace("1.0", "0.5"), "stages.0.: shares .* sum to 1"),
    (
        chain(2, 2).plan.to_json().replace('"ranks": [\n    1\n', '"ranks": [\n    0\n'),
        "rank 0 is in stages.0., too",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_PLANS)
def test_bad_plans_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        Plan.from_json(text)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(InputError, match="plan: schedule 'zigzag'"):
        training_program(chain(2, 2, "zigzag"))


def test_every_layer_is_in_exactly_one_stage():
    for runs in (((0, 2), (3, 4)), ((0, 2), (1, 4))):
        with pytest.raises(InputError, match=r"is in no stage|is in stages.0."):
            plan_of_runs(runs, 1, 1)


def test_forecast_comes_first_and_the_tables_move_after_the_send():
    program = forecast_program(chain(3, 2))
    assert (
        program.text()
        .splitlines()[1]
        .startswith("stage 1: 1RECV_FP<0 1FORECAST 1SEND_FP>2 1CARRY 1RECV_F0<0")
    )
    check(program)


@pytest.mark.parametrize("schedule", ["fill-drain", "layer-sync"])
def test_only_programs_with_stale_reads_have_a_forecast(schedule):
    program = training_program(chain(3, 4, schedule))
    forecast = forecast_program(chain(3, 4, schedule))
    kinds = [[a.kind for a in actions] for actions in forecast.stages]
    assert all(("FORECAST" in k) == (schedule == "fill-drain") for k in kinds)
    assert (forecast == program) == program.is_exact


FORECAST_FAULTS = {
    "twice": lambda a: [a[0], a[1], *a[1:]],
    "missing": lambda a: [x for x in a if x.kind not in ("FORECAST", "CARRY")],
    "never carried": lambda a: [x for x in a if x.kind != "CARRY"],
    "late": lambda a: [x for x in a if x.kind != "CARRY"] + [x for x in a if x.kind == "CARRY"],
    "elsewhere": lambda a: [replace(x, position=0) if x.kind == "CARRY" else x for x in a],
}


def test_a_forecast_needs_a_single_step():
    program = forecast_program(chain(1, 2))
    step = [a for a in program.stages[0] if a.kind is ActionKind.STEP]
    twice = replace(
        changed(program, 0, lambda a: [*a, *step]), consistency=Consistency(1, optimizer_steps=None)
    )
    with pytest.raises(ProgramError, match="a forecast needs one STEP"):
        check(twice)


@pytest.mark.parametrize("fault", FORECAST_FAULTS)
def test_wrong_forecasts_are_refused(fault):
    program = forecast_program(chain(2, 2))
    with pytest.raises(ProgramError, match="stage 1: must run FORECAST and then CARRY"):
        check(changed(program, 1, FORECAST_FAULTS[fault]))

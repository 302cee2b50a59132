"""Law 4: timelines. Closed forms, what is true of every timeline, and the executor beside it."""

from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from helpers import quick_config, run_ranks, small_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_ranks import EVERY, NAP_S, slow_rank
from stage_dags import chain, dags
from stated_costs import DrawnCosts, StatedCosts

from gnnpipe.perf import simulate, time_shares
from gnnpipe.perf.predicted import simulated_epochs
from gnnpipe.perf.simulate import Task, TaskKind, Tasks
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.perf.what_if import critical_shares
from gnnpipe.plan import Placement, Plan, StagePlan, Transfer, buckets
from gnnpipe.schedule import evaluation_program, training_program, with_forecast
from gnnpipe.setup.chunk_sizes import chunk_sizes


def timeline_of(plan, costs, **settings):
    return simulate(program_tasks(training_program(plan), costs, **settings))


def shares_of(timeline, placement):
    notes = simulated_epochs(timeline, placement)
    return time_shares(notes, placement, [float("inf")] * len(notes))


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (1, 8), (2, 8), (4, 4), (4, 32), (7, 3)])
def test_a_uniform_pipeline_with_free_links(stages, chunks):
    timeline = timeline_of(chain(stages, chunks), StatedCosts(forward_s=1.0, backward_s=2.0))
    forward, backward = 3 * 1.0, 3 * 2.0
    assert timeline.makespan_s == (chunks + stages - 1) * (forward + backward)
    bubble = (stages - 1) / (chunks + stages - 1)
    for idle in timeline.bubble_s()[:stages]:
        assert idle / timeline.makespan_s == pytest.approx(bubble, abs=1e-15)
    for share in shares_of(timeline, Placement.grid(stages, 1)):
        assert share.bubble_s / timeline.makespan_s == pytest.approx(bubble, abs=1e-15)
        assert share.exposed_pipeline_s == 0


BRANCHES = {
    2: [(0, 2), (1, 2)],
    3: [(0, 1), (2, 3), (4, 5), (1, 6), (3, 6), (5, 6)],
    4: [(0, 1), (0, 2), (1, 4), (2, 3), (3, 4)],
}
"""Transfers of stage DAGs, by depth."""


@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("depth", BRANCHES)
def test_branches_fill_and_drain_as_deep_as_the_longest_path(depth, chunks):
    ends = BRANCHES[depth]
    stages = max(max(pair) for pair in ends) + 1
    dag = replace(
        chain(stages, chunks), transfers=tuple(Transfer(*pair, {"x": 4}) for pair in ends)
    )
    assert dag.depth == depth
    timeline = timeline_of(dag, StatedCosts(forward_s=1.0, backward_s=2.0))
    assert timeline.makespan_s == (chunks + depth - 1) * 9.0
    bubble = (depth - 1) / (chunks + depth - 1)
    for idle in timeline.bubble_s()[:stages]:
        assert idle / timeline.makespan_s == pytest.approx(bubble, abs=1e-15)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 8), (4, 6)])
def test_links_that_keep_up_are_seen_while_the_pipeline_fills_and_drains(stages, chunks):
    f, b, link = 6.0, 9.0, 5.0
    costs = StatedCosts(forward_s=f / 3, backward_s=b / 3, link_time_s=link)
    timeline = timeline_of(chain(stages, chunks), costs)
    full = (chunks + stages - 1) * (f + b) + 2 * (stages - 1) * link
    assert timeline.makespan_s == full
    waits = 2 * link * (chunks - 1)
    blocking = timeline_of(chain(2, chunks), costs, overlap=False)
    assert blocking.makespan_s == (chunks + 1) * (f + b) + 2 * link + waits


def test_a_message_waits_until_there_is_room_for_it():
    costs = StatedCosts(
        1.0, 1.0, link_time_s=4.0, scale=lambda stage, shard, chunk: [0.5, 5.0][stage]
    )
    timeline = timeline_of(chain(2, 4, layers_each=1), costs)
    at = {(t.kind, t.stage, t.position): i for i, t in enumerate(timeline.tasks.what)}
    for position in (2, 3):
        # Posted one action ahead: once the one before that is over.
        room = timeline.end_s[at["F", 1, position - 2]]
        assert timeline.end_s[at["F", 0, position]] < room
        assert timeline.start_s[at["SEND_F", 0, position]] == room
        message = simulated_epochs(timeline, Placement.grid(2, 1))[1].messages[position]
        assert message.posted_s == room
        assert message.wait_end_s == message.wait_start_s == room + 10.0


@pytest.mark.parametrize("pilot", [1.0, 3.0, 5.0])
def test_pilot_rows_go_ahead_of_the_chunks(pilot):
    stages, chunks, f, b = 4, 6, 3.0, 6.0
    program = with_forecast(chain(stages, chunks), training_program(chain(stages, chunks)))
    timeline = simulate(program_tasks(program, StatedCosts(pilot_time_s=pilot)))
    # The last stage begins with its chunks when it has carried its tables, or the first chunk
    # has come.
    begins = max((stages + 1) * pilot, 2 * pilot + (stages - 1) * f)
    assert timeline.makespan_s == begins + chunks * f + (chunks + stages - 1) * b


@pytest.mark.parametrize("own_share", [0.0, 0.25, 0.75])
def test_one_chunk_on_shards_shows_its_exchanges(own_share):
    f, b, steps, wire = 2.0, 8.0, 5, 3.0
    costs = StatedCosts(
        f,
        b,
        own_share=own_share,
        exchange_time_s=wire,
        reduce_time_s=7.0,
        update_time_s=1.0,
        begin_time_s=0.5,
    )
    timeline = timeline_of(chain(1, 1, layers_each=steps - 1, shards=3), costs)
    back = max(own_share * b, wire) + (1 - own_share) * b
    expected = 0.5 + steps * f + (steps - 1) * (wire + back) + b + 7.0 + 1.0
    assert timeline.makespan_s == expected
    for share in shares_of(timeline, Placement.grid(1, 3)):
        late = (steps - 1) * (wire + max(wire - own_share * b, 0.0))
        assert share.exposed_graph_s == late + 7.0
        assert share.compute_s == expected - late - 7.0


@pytest.mark.parametrize("chunks", [2, 5])
def test_layer_by_layer_exchanges_pass_under_the_next_chunk(chunks):
    f, b, steps, wire = 3.0, 8.0, 4, 2.0
    plan = chain(1, chunks, "layer-sync", layers_each=steps - 1, shards=2)
    timeline = timeline_of(plan, StatedCosts(f, b, exchange_time_s=wire))
    # Of each step that pushes, both ways, one chunk's exchange has nothing to pass under.
    assert timeline.makespan_s == steps * chunks * (f + b) + 2 * (steps - 1) * wire
    share = shares_of(timeline, Placement.grid(1, 2))[0]
    assert share.hidden_graph_s > 0
    assert share.exposed_graph_s == 2 * (steps - 1) * wire
    blocking = timeline_of(plan, StatedCosts(f, b, exchange_time_s=wire), overlap=False)
    assert blocking.makespan_s == steps * chunks * (f + b) + 2 * (steps - 1) * chunks * wire


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_unequal_chunks_make_a_bubble_of_the_longest(order):
    costs = StatedCosts(1.0, 2.0, scale=lambda stage, shard, chunk: [1.0, 4.0, 2.0][chunk])
    timeline = timeline_of(chain(3, 3), costs, order=order)
    assert timeline.makespan_s == (7.0 + 2 * 4.0) * 3 * (1.0 + 2.0)
    of_rank_0 = [t for t in timeline.tasks.what if t.kind == "F" and t.stage == 0]
    assert [(t.position, t.chunk) for t in of_rank_0] == list(enumerate(order))


@pytest.mark.parametrize(("order", "expected"), [([0, 1], 24.0), ([1, 0], 42.0)])
def test_the_order_of_chunks_decides(order, expected):
    # Two machines and two jobs: first the one that the first machine is quickly done with
    # (Johnson's rule), and back the other way round.
    times = {(0, 0): 1.0, (1, 0): 10.0, (0, 1): 10.0, (1, 1): 1.0}
    costs = StatedCosts(0.5, 0.5, scale=lambda stage, shard, chunk: times[stage, chunk])
    assert timeline_of(chain(2, 2, layers_each=1), costs, order=order).makespan_s == expected


def test_a_slow_shard_is_waited_for():
    costs = StatedCosts(scale=lambda stage, shard, chunk: 3.0 if shard == 1 else 1.0)
    timeline = timeline_of(chain(1, 1, shards=2), costs)
    fast, slow = shares_of(timeline, Placement.grid(1, 2))
    assert timeline.makespan_s == slow.compute_s == 3 * fast.compute_s
    assert fast.imbalance_s == timeline.makespan_s - fast.compute_s


def test_the_critical_path_in_words():
    costs = StatedCosts(
        forward_s=1.0,
        backward_s=1.0,
        link_time_s=50.0,
        scale=lambda stage, shard, chunk: 25.0 if stage == 1 else 0.0,
    )
    timeline = timeline_of(chain(3, 1, layers_each=1), costs)
    shares = critical_shares(timeline)
    assert list(shares) == [
        "compute of stage 1",
        "transfer 0 to 1",
        "transfer 1 to 2",
        "transfer 2 to 1",
        "transfer 1 to 0",
    ]
    assert sum(shares.values()) == pytest.approx(1)
    assert next(iter(shares.values())) == pytest.approx(1 / 3, abs=0.01)


def test_a_wire_serves_first_come_first_served_and_a_device_keeps_its_order():
    tasks = Tasks()
    slow, fast = tasks.open("slow", in_order=True), tasks.open("fast", in_order=True)
    wire = tasks.open("wire", in_order=False)
    a = tasks.add(Task(TaskKind.FORWARD, 0), slow, 5.0)
    b = tasks.add(Task(TaskKind.FORWARD, 1), fast, 1.0)
    late = tasks.add(Task(TaskKind.SEND_FORWARD, 0, peer=2), wire, 4.0, (a,))
    early = tasks.add(Task(TaskKind.SEND_FORWARD, 1, peer=2), wire, 6.0, (b,))
    behind = tasks.add(Task(TaskKind.BACKWARD, 0), fast, 1.0, (late,))
    free = tasks.add(Task(TaskKind.BACKWARD, 1), fast, 1.0)
    timeline = simulate(tasks)
    assert timeline.start_s[early] == 1.0
    assert timeline.start_s[late] == 7.0
    assert timeline.start_s[behind] == 11.0
    assert timeline.start_s[free] == 12.0
    assert [step.reason for step in timeline.critical_path()] == [
        "start",
        "dependency",
        "resource",
        "dependency",
        "resource",
    ]


def test_messages_and_exchanges_of_a_rank_share_its_ports():
    """Two stages of two shards: a chunk arrives while rows of the one before are exchanged."""
    costs = StatedCosts(0.0, 0.0, link_time_s=3.0, exchange_time_s=2.0, shards=2)
    plan, chunks = chain(2, 4, layers_each=2, shards=2), 4
    apart = timeline_of(plan, costs)
    # Bytes fill a port for all of a message's time, and for half of an exchange's.
    costs = replace(costs, message_size=12, exchanged_size=4, port_bytes_per_s=4.0)
    shared = timeline_of(plan, costs)
    assert_it_is_a_timeline(shared)
    tasks = shared.tasks
    into = next(i for i, one in enumerate(tasks.resources) if one.name == "into rank 2")
    through = [t for t in range(len(tasks)) if into in tasks.ports[t]]
    # Of a chunk: a message, and an exchange of each of the stage's two layers, each way.
    filled = {"SEND_F": [3.0], "EXCHANGE_F": [1.0] * 2, "EXCHANGE_B": [1.0] * 2}
    for kind, filled_s in filled.items():
        found = [tasks.port_s[t] for t in through if tasks.what[t].kind == kind]
        assert found == filled_s * chunks
    assert shared.makespan_s > apart.makespan_s


def test_a_port_serves_others_until_all_that_a_task_needs_is_free():
    tasks = Tasks()
    link, other, out, into = (tasks.open(name, in_order=False) for name in "abcd")
    exchange = Task(TaskKind.EXCHANGE_FORWARD, 0)
    message = Task(TaskKind.SEND_FORWARD, 0)
    # Two exchanges of 2 s fill the port for 1 s each; a message of 1 s fits between them.
    exchanges = [tasks.add(exchange, link, 2.0, (), (out,), 1.0) for _ in range(2)]
    between = tasks.add(message, other, 1.0, (), (out,), 1.0)
    timeline = simulate(tasks)
    assert [timeline.start_s[task] for task in (*exchanges, between)] == [0.0, 2.0, 1.0]
    # A message waits until 10 s for the port of its target; an exchange does not wait for it.
    tasks.add(message, tasks.open("e", in_order=False), 12.0, (), (into,), 12.0)
    late = tasks.add(message, tasks.open("f", in_order=False), 1.0, (), (out, into), 1.0)
    timeline = simulate(tasks)
    assert [timeline.start_s[task] for task in (*exchanges, between)] == [0.0, 2.0, 1.0]
    assert timeline.start_s[late] == 12.0
    assert timeline.busy_s() == [4.0, 1.0, 4.0, 13.0, 12.0, 1.0]


def test_a_task_is_critical_until_it_leaves_the_port_that_the_next_one_waits_for():
    tasks = Tasks()
    out = tasks.open("out", in_order=False)
    exchange = Task(TaskKind.EXCHANGE_FORWARD, 0)
    message = Task(TaskKind.SEND_FORWARD, 0, peer=1)
    tasks.add(exchange, tasks.open("shards", in_order=False), 3.0, (), (out,), 1.0)
    tasks.add(message, tasks.open("link", in_order=False), 4.0, (), (out,), 4.0)
    timeline = simulate(tasks)
    assert timeline.makespan_s == 5.0
    assert timeline.critical_s() == [1.0, 4.0]
    assert critical_shares(timeline) == {"transfer 0 to 1": 0.8, "exchange in stage 0": 0.2}


def test_what_waits_for_ever_is_named():
    tasks = Tasks()
    on = tasks.open("rank 0", in_order=True)
    tasks.add(Task(TaskKind.FORWARD, 0), on, 1.0, (1,))
    tasks.add(Task(TaskKind.BACKWARD, 0), on, 1.0)
    with pytest.raises(ValueError, match=r"task 0 waits for ever: Task\(kind=<TaskKind"):
        simulate(tasks)


def test_nothing_to_do_takes_no_time():
    timeline = simulate(Tasks())
    assert timeline.makespan_s == 0
    assert timeline.critical_path() == []


@st.composite
def any_tasks(draw):
    tasks = Tasks()
    count = draw(st.integers(1, 4))
    on = [tasks.open(str(i), in_order=draw(st.booleans())) for i in range(count)]
    for task in range(draw(st.integers(1, 25))):
        earlier = draw(st.sets(st.integers(0, task - 1), max_size=3)) if task else ()
        duration = float(draw(st.integers(0, 9)))
        first, filled_s = (
            draw(st.sampled_from(on)),
            draw(st.sampled_from([0.0, 0.5, 1.0])) * duration,
        )
        links = [r for r in on if r != first and not tasks.resources[r].in_order]
        ports = draw(st.sets(st.sampled_from(links))) if links else ()
        what = Task(TaskKind.FORWARD, 0)
        tasks.add(what, first, duration, tuple(earlier), tuple(ports), filled_s)
    return tasks


def longest(tasks, more=()):
    """The longest path through the dependencies, and ``more`` of them as pairs."""
    before = {task: set(found) for task, found in enumerate(tasks.before)}
    for first, second in more:
        before[second].add(first)
    end = {}
    for task in TopologicalSorter(before).static_order():
        end[task] = max((end[b] for b in before[task]), default=0.0) + tasks.duration_s[task]
    return max(end.values())


def turns(timeline):
    """Pairs of tasks that follow each other on a resource."""
    for resource in range(len(timeline.tasks.resources)):
        on = [t for t, r in enumerate(timeline.tasks.resource) if r == resource]
        if not timeline.tasks.resources[resource].in_order:
            # Where tasks take no time, their ends tell the order.
            on.sort(key=lambda t: (timeline.start_s[t], timeline.end_s[t]))
        yield from pairwise(on)


def held(tasks, task):
    """The resources that a task occupies."""
    return {tasks.resource[task], *tasks.ports[task]}


def left_s(timeline, task):
    """When a task leaves its ports."""
    return timeline.start_s[task] + timeline.tasks.port_s[task]


def assert_it_is_a_timeline(timeline):
    tasks = timeline.tasks
    for port in {port for ports in tasks.ports for port in ports}:
        spans = []
        for task, end_s in enumerate(timeline.end_s):
            if port in held(tasks, task):
                until_s = end_s if port == tasks.resource[task] else left_s(timeline, task)
                spans.append((timeline.start_s[task], until_s))
        assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(sorted(spans)))
    for task, before in enumerate(tasks.before):
        start = timeline.start_s[task]
        assert start >= max((timeline.end_s[b] for b in before), default=0.0)
        assert timeline.end_s[task] == start + tasks.duration_s[task]
    for first, second in turns(timeline):
        assert timeline.start_s[second] >= timeline.end_s[first]
    path = timeline.critical_path()
    assert path[0].reason == "start"
    assert timeline.start_s[path[0].task] == 0.0
    for a, b in pairwise(path):
        assert timeline.start_s[b.task] in (timeline.end_s[a.task], left_s(timeline, a.task))
        is_needed = a.task in tasks.before[b.task]
        assert is_needed or b.reason == "resource"
        assert is_needed or held(tasks, a.task) & held(tasks, b.task)
    assert sum(timeline.critical_s()) == timeline.makespan_s >= longest(tasks)
    assert timeline.makespan_s >= max(timeline.busy_s())
    assert min(timeline.bubble_s()) >= 0


def test_no_rank_steps_before_all_have_come():
    costs = StatedCosts(1.0, 2.0, update_time_s=0.5)
    at_once = timeline_of(chain(3, 4), costs)
    met = timeline_of(chain(3, 4), replace(costs, sync_time_s=0.25))
    assert met.makespan_s == at_once.makespan_s + 2 * 0.25
    last = max(at_once.end_s[t] for t, w in enumerate(at_once.tasks.what) if w.kind == "B")
    steps = [t for t, w in enumerate(met.tasks.what) if w.kind == "STEP"]
    assert [met.start_s[task] for task in steps] == [last + 0.25] * 3
    assert "SYNC" not in {w.kind for w in timeline_of(chain(1, 4), costs).tasks.what}


@settings(deadline=None, max_examples=150)
@given(any_tasks())
def test_what_is_true_of_every_timeline(tasks):
    assert_it_is_a_timeline(simulate(tasks))


LINKS = [{}, {"is_one_wire": True}, {"port_bytes_per_s": 2.0}]


@settings(deadline=None, max_examples=90)
@given(
    dags(), st.integers(0, 99), st.booleans(), st.sampled_from(LINKS), st.booleans(), st.randoms()
)
def test_every_program_is_simulated_without_a_stall(dag, seed, forecast, links, overlap, chance):
    program, plan = training_program(dag), dag.plan
    if forecast:
        program = with_forecast(dag, program)
    order = list(range(plan.chunks))
    chance.shuffle(order)
    costs = DrawnCosts(seed, shards=plan.most_shards, **links)
    timeline = simulate(program_tasks(program, costs, order, overlap))
    assert_it_is_a_timeline(timeline)
    assert_it_is_a_timeline(simulate(program_tasks(evaluation_program(dag), costs, order)))
    what = timeline.tasks.what
    # What a rank does in an all-reduce, once all are there, counts as its own work.
    met_s = 2 * costs.sync_s() if plan.num_ranks > 1 else 0.0
    for rank, share in enumerate(shares_of(timeline, plan.placement)):
        assert share.epoch_s == pytest.approx(timeline.makespan_s)
        assert share.compute_s == pytest.approx(timeline.busy_s()[rank] + met_s)
        stage, shard = divmod(rank, plan.most_shards)
        steps, chunks = dag.steps[stage], plan.chunks
        done = sum(
            costs.step_s(way, stage, shard, chunk, step)
            for way in "FB"
            for chunk in range(chunks)
            for step in range(steps)
        )
        mine = [
            timeline.tasks.duration_s[task]
            for task, on in enumerate(timeline.tasks.resource)
            if on == rank and what[task].kind in ("F", "B", "PULL")
        ]
        assert sum(mine) == done + costs.finish_s(stage, shard)
    sent = sum(t.size_bytes for t in what if t.kind.startswith("SEND_") and t.chunk >= 0)
    assert sent == sum(
        costs.message_bytes(way, *ends, (shard, shard), chunk)
        for t in dag.transfers
        for way, ends in (("F", (t.source, t.target)), ("B", (t.target, t.source)))
        for shard in range(plan.most_shards)
        for chunk in range(plan.chunks)
    )


@settings(deadline=None, max_examples=80)
@given(dags(), st.integers(0, 99), st.data())
def test_what_is_not_critical_may_be_twice_as_fast(dag, seed, data):
    """Exact where every wire belongs to two ranks: then nothing changes places."""
    tasks = program_tasks(training_program(dag), DrawnCosts(seed, shards=dag.plan.most_shards))
    timeline = simulate(tasks)
    assert timeline.makespan_s == longest(tasks, turns(timeline))
    path = [step.task for step in timeline.critical_path()]
    critical = {tasks.resource[task] for task in path}
    on = data.draw(st.integers(0, len(tasks.resources) - 1))
    halved = [
        d / 2 if r == on else d for r, d in zip(tasks.resource, tasks.duration_s, strict=True)
    ]
    faster = simulate(replace(tasks, duration_s=halved)).makespan_s
    assert faster <= timeline.makespan_s
    if on not in critical:
        assert faster == timeline.makespan_s
    gained = sum(
        tasks.duration_s[s.task] for s in timeline.critical_path() if tasks.resource[s.task] == on
    )
    assert faster >= timeline.makespan_s - gained / 2


@pytest.mark.slow
def test_a_thousand_ranks():
    stages, chunks = 1024, 128
    timeline = timeline_of(chain(stages, chunks, layers_each=1), StatedCosts(0.5, 1.0))
    # F and B of each chunk, its messages both ways, per rank one begin and one step; 2 all-reduces.
    compute, messages = 2 * stages * chunks, 2 * (stages - 1) * chunks
    assert len(timeline.tasks) == compute + messages + 2 * stages + 2
    assert timeline.makespan_s == (chunks + stages - 1) * 3.0


@pytest.mark.slow
def test_a_thousand_shards_in_stages():
    plan = chain(32, 128, layers_each=1, shards=32)
    timeline = timeline_of(plan, StatedCosts(0.5, 1.0, shards=32))
    ranks, chunks, steps = 1024, 128, 2
    pulls = exchanges = 1
    compute = ranks * chunks * (2 * steps + pulls) + 2 * ranks
    wire = 2 * 31 * 32 * chunks + 32 * chunks * 2 * exchanges + 2 * 32
    assert len(timeline.tasks) == compute + wire + 2
    assert timeline.makespan_s == (chunks + 31) * 3.0


UNLIKE = Plan(
    (StagePlan.even(tuple(range(4)), (0,)), StagePlan(tuple(range(4, 9)), (1, 2), (0.6, 0.4))),
    3,
    "fill-drain",
)


def notes_of_plan(plan):
    """As ``notes_of``, for a plan of stages with unlike shards."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.world import World

    world = World.meet(plan.num_ranks, "cpu")
    config = quick_config(layers=4, staleness="none", eval_every=0)
    trainer = Trainer(config, graph=small_graph(), world=world, plan=plan)
    result = trainer.fit()
    mesh, prepared = trainer._setup()
    sizes = chunk_sizes(prepared)
    assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form
    costs = StatedCosts()
    costs.message_pairs = sizes.split.overlaps
    simulated = simulate(program_tasks(prepared.program, costs))
    made = simulated_epochs(simulated, prepared.plan.placement)[mesh.rank]
    return [
        ([m.key for m in notes.messages], list(notes.send_times_s), len(notes.collectives))
        for notes in (mesh.recorder.epochs[-1], made)
    ]


@pytest.mark.slow
def test_executor_and_simulator_wait_for_the_same_parts_of_messages():
    for real, made in run_ranks(notes_of_plan, 3, UNLIKE):
        assert real == made


def notes_of(shape, bucket_bytes):
    """What a real rank noted in its last epoch, and what its program makes of stated costs."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.mesh import Mesh

    stages, shards, chunks = shape
    buckets.BUCKET_BYTES = bucket_bytes
    mesh = Mesh.join(stages, shards)
    config = quick_config(
        stages=stages, shards=shards, chunks=chunks, layers=4, staleness="none", eval_every=0
    )
    trainer = Trainer(config, graph=small_graph(), world=mesh)
    trainer.fit()
    found = mesh.recorder.epochs[-1]
    program = trainer._setup()[1].program
    simulated = simulated_epochs(
        simulate(program_tasks(program, StatedCosts(shards=shards))), mesh.placement
    )
    made = simulated[mesh.rank]
    return [
        ([m.key for m in notes.messages], list(notes.send_times_s), len(notes.collectives))
        for notes in (found, made)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 18])
@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 2, 3), (2, 2, 2)])
def test_executor_and_simulator_wait_for_the_same_things_in_the_same_order(shape, bucket_bytes):
    for real, made in run_ranks(notes_of, shape[0] * shape[1], shape, bucket_bytes):
        assert real == made


@pytest.mark.slow
def test_an_epoch_of_naps_takes_what_the_simulator_says():
    stages, chunks, layers = 2, 3, 4
    naps = StatedCosts(forward_s=NAP_S / 3, backward_s=NAP_S)
    predicted = timeline_of(chain(stages, chunks, layers_each=layers // stages), naps).makespan_s
    for _, times in run_ranks(slow_rank, 2, (stages, 1, chunks), EVERY):
        assert 0.99 < min(times) / predicted < 1.3

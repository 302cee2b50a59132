"""The measured timeline: made notes with a known critical path, and real ranks of real runs."""

import random
import time

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe.perf import Collective, EpochSpans, Message, Span, measured_spans
from gnnpipe.plan import Placement
from gnnpipe.schedule import Action, ActionKind

NAP_S = 0.2


def notes_of_two_stages():
    """Two chunks: rank 0 takes 2 s for each forward, rank 1 takes 1 s, then both go back.

    rank 0: F0 0-2, F1 2-4,                 B1 waits 6-6.5 (sent at 6.2)
    rank 1: F0 waits 0-2, works 2-3, F1 waits 3-4.5 (0.5 s on the wire), works 4.5-5.5, B1 5.5-6.2
    """

    def act(kind, stage, position, start, end, steps=(0, 1), peer=-1):
        return Action(ActionKind(kind), stage, position, steps, peer), start, end

    first = EpochSpans(
        10.0,
        18.0,
        18.0,
        messages=[Message(("B", 1, 1), 100, 10, 16.0, 16.5)],
        send_times_s={("F", 1, 0): 12.0, ("F", 1, 1): 14.0},
        actions=[
            act("F", 0, 0, 10, 12),
            act("SEND_F", 0, 0, 12, 12.01, peer=1),
            act("F", 0, 1, 12.01, 14),
            act("SEND_F", 0, 1, 14, 14.01, peer=1),
            act("B", 0, 1, 16, 18),
        ],
        order=(0, 1),
    )
    second = EpochSpans(
        10.0,
        18.0,
        16.25,
        messages=[Message(("F", 0, 0), 100, 10, 10, 12.0), Message(("F", 0, 1), 100, 10, 13, 14.5)],
        send_times_s={("B", 0, 1): 16.2},
        actions=[
            act("F", 1, 0, 10, 13),
            act("F", 1, 1, 13, 15.5),
            act("B", 1, 1, 15.5, 16.2),
            act("SEND_B", 1, 1, 16.2, 16.25, peer=0),
        ],
        order=(0, 1),
    )
    return [first, second]


def test_spans_begin_at_zero_and_say_what_they_are():
    spans = measured_spans(notes_of_two_stages(), Placement.grid(2, 1))
    assert spans[0] == Span(0, "F", 0.0, 2.0, 0, 0, (0, 1), is_critical=True)
    send = next(s for s in spans if s.kind == "SEND_F")
    assert (send.peer, send.size_bytes, send.chunk) == (1, 100, 0)
    waits = [(s.rank, s.start_s, s.end_s) for s in spans if s.kind == "WAIT"]
    assert waits == [(0, 6, 6.5), (1, 0, 2), (1, 3, 4.5), (1, 6.25, 8)]
    for rank in (0, 1):
        starts = [s.start_s for s in spans if s.rank == rank]
        assert starts == sorted(starts)


def test_the_critical_path_goes_back_over_the_ranks_that_were_waited_for():
    spans = measured_spans(notes_of_two_stages(), Placement.grid(2, 1))
    on = {(s.rank, s.name) for s in spans if s.is_critical and s.kind in "FB"}
    # Rank 1's first chunk is not on it: its second one had to wait for rank 0 anyway.
    assert on == {(0, "F 0"), (0, "F 1"), (1, "F 1"), (1, "B 1"), (0, "B 1")}
    # Of rank 0's last wait most was on the wire, of rank 1's for chunk 1 a third.
    assert [s.is_critical for s in spans if s.kind == "WAIT"] == [True, False, False, False]


def test_the_last_shard_to_come_is_on_the_path():
    step = Action(ActionKind.STEP, 0)
    notes = [
        EpochSpans(
            0,
            6,
            6,
            collectives=[Collective(begun, begun, 5)],
            actions=[(step, 0, 5.5), (step, 5.5, 6)],
        )
        for begun in (1, 4)
    ]
    spans = measured_spans(notes, Placement.grid(1, 2))
    first = [[s.is_critical for s in spans if s.rank == r and s.kind == "STEP"] for r in (0, 1)]
    # Shard 0 goes on last, but until 4 s it was shard 1 that both waited for.
    assert first == [[False, True], [True, False]]


SHARDS = 2


def random_notes(rng, stages=2, actions=14):
    """Notes of a grid of ranks; all times are whole seconds, so that sums of them are exact."""
    num_ranks, order = stages * SHARDS, rng.sample(range(actions), actions)
    notes = [EpochSpans(rng.randrange(5), order=order) for _ in range(num_ranks)]
    # Every rank of a stage has the same collectives.
    collective_at = [set(rng.sample(range(actions), 3)) for _ in range(stages)]
    for rank, epoch in enumerate(notes):
        now_s, stage = epoch.start_s, rank // SHARDS
        for position in range(actions):
            start_s, wait_s = now_s, now_s + rng.randrange(4)
            end_s = wait_s + rng.choice([0, 1, 2, 9])
            kind, peer = rng.choice(["F", "B"]), -1
            if position in collective_at[stage]:
                epoch.collectives.append(Collective(start_s, wait_s, end_s))
            elif rng.random() < 0.6:
                source = rng.choice([r for r in range(num_ranks) if r // SHARDS != stage])
                size = rng.randrange(1000)
                message = Message((kind, source, position), size, start_s, wait_s, end_s)
                epoch.messages.append(message)
                notes[source].send_times_s[kind, rank, position] = wait_s + rng.randrange(-9, 12)
            else:
                kind, peer = f"SEND_{kind}", rng.choice([s for s in range(stages) if s != stage])
            now_s = end_s + rng.randrange(5)
            epoch.actions.append(
                (Action(ActionKind(kind), stage, position, (0, 1), peer), start_s, now_s)
            )
        epoch.actions_end_s = epoch.end_s = now_s
    if rng.random() < 0.5:
        last_s = max(epoch.end_s for epoch in notes)
        for epoch in notes:
            epoch.step_sync = Collective(epoch.end_s, epoch.end_s, last_s)
            epoch.end_s = last_s + 1
            epoch.actions_end_s = epoch.end_s - rng.randrange(2)
    return notes


def plain_waits(notes, rank):
    """All waits of a rank: start, end, the rank that ended it, and when that rank did so."""
    epoch, stage = notes[rank], rank // SHARDS
    group = range(stage * SHARDS, (stage + 1) * SHARDS)
    found = []
    for m in epoch.messages:
        way, source, position = m.key
        sent_s = notes[source].send_times_s[way, rank, position]
        found.append((m.wait_start_s, m.wait_end_s, source, sent_s))
    for i, c in enumerate(epoch.collectives):
        last = max(group, key=lambda r: notes[r].collectives[i].start_s)
        found.append((c.wait_start_s, c.wait_end_s, last, notes[last].collectives[i].start_s))
    if epoch.step_sync is not None:
        last = max(range(len(notes)), key=lambda r: notes[r].step_sync.wait_start_s)
        sync = epoch.step_sync
        found.append((sync.wait_start_s, sync.wait_end_s, last, notes[last].step_sync.wait_start_s))
    return [wait for wait in found if wait[1] > wait[0]]


def plain_path(notes):
    """The critical path: (rank, is work, start, end), searching all waits at every turn."""
    rank = max(range(len(notes)), key=lambda r: notes[r].actions_end_s)
    now_s, path, used = notes[rank].actions_end_s, [], set()
    while before := [
        w for w in plain_waits(notes, rank) if w[1] <= now_s and (rank, w) not in used
    ]:
        wait = [w for w in before if w[1] == max(w[1] for w in before)][-1]
        start_s, end_s, cause, cause_s = wait
        used.add((rank, wait))
        path.append((rank, True, end_s, now_s))
        now_s = min(max(start_s, cause_s), end_s)
        path.append((rank, False, now_s, end_s))
        rank = cause if cause_s > start_s else rank
    return [*path, (rank, True, notes[rank].start_s, now_s)]


def plain_spans(notes):
    """The spans in plain loops over everything."""
    path, zero_s, found = plain_path(notes), min(e.start_s for e in notes), []

    def overlap_s(intervals, start_s, end_s):
        return sum(max(min(end_s, b) - max(start_s, a), 0) for a, b in intervals)

    for rank, epoch in enumerate(notes):
        spans = []
        work = [p[2:] for p in path if p[0] == rank and p[1]]
        link = [p[2:] for p in path if p[0] == rank and not p[1]]
        waits = [w[:2] for w in plain_waits(notes, rank)]
        for action, a, b in epoch.actions:
            peer, size = -1, 0
            if action.peer >= 0:
                peer = action.peer * SHARDS + rank % SHARDS
                key = action.kind[-1], rank, action.position
                size = sum(
                    m.size_bytes
                    for other, e in enumerate(notes)
                    for m in e.messages
                    if m.key == key and other // SHARDS == action.peer
                )
            is_critical = overlap_s(work, a, b) > (b - a - overlap_s(waits, a, b)) / 2
            chunk = epoch.order[action.position]
            spans.append(
                (rank, str(action.kind), a - zero_s, b - zero_s, chunk, peer, size, is_critical)
            )
        of_message = {
            (m.wait_start_s, m.wait_end_s): (epoch.order[m.key[2]], m.key[1], m.size_bytes)
            for m in epoch.messages
        }
        if epoch.end_s > epoch.actions_end_s:
            waits.append((epoch.actions_end_s, epoch.end_s))
        for a, b in waits:
            chunk, peer, size = of_message.get((a, b), (-1, -1, 0))
            is_critical = overlap_s(link, a, b) > (b - a) / 2
            spans.append((rank, "WAIT", a - zero_s, b - zero_s, chunk, peer, size, is_critical))
        found += sorted(spans)
    return found


@pytest.mark.parametrize("seed", range(25))
def test_spans_equal_those_of_plain_loops(seed):
    notes = random_notes(random.Random(seed))
    spans = measured_spans(notes, Placement.grid(2, SHARDS))
    fields = "rank", "kind", "start_s", "end_s", "chunk", "peer", "size_bytes", "is_critical"
    found = [tuple(getattr(span, name) for name in fields) for span in spans]
    assert sorted(found) == plain_spans(notes)
    starts = [(s.rank, s.start_s, -s.end_s) for s in spans]
    assert starts == sorted(starts)


def timeline_of(shape, slow):
    """The timeline of a run in which one rank naps in every forward action."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.runtime.stage import Stage

    stages, shards, chunks = shape
    mesh = Mesh.join(stages, shards)
    forward = Stage.forward

    def napping(self, chunk, steps):
        if slow == mesh.rank and self._training:
            time.sleep(NAP_S)
        return forward(self, chunk, steps)

    Stage.forward = napping
    config = quick_config(stages=stages, shards=shards, chunks=chunks, layers=4, eval_every=0)
    try:
        trainer = Trainer(config, graph=small_graph(), world=mesh)
        result = trainer.fit()
    finally:
        Stage.forward = forward
    program = trainer._prepared.program_of(config.epochs - 1)
    return result.timeline, program, result.time_shares


@pytest.mark.parametrize(
    ("shape", "slow"), [((2, 1, 2), 0), ((2, 1, 2), 1), ((1, 2, 2), 1), ((2, 2, 2), 3)]
)
def test_the_timeline_of_a_real_run(shape, slow):
    stages, shards, chunks = shape
    found = run_ranks(timeline_of, stages * shards, shape, slow)
    spans, program, shares = found[0]
    assert not any(timeline for timeline, _, _ in found[1:]), "rank 0 alone has the spans"
    for rank in range(stages * shards):
        mine = [s for s in spans if s.rank == rank]
        done = [(s.kind, s.steps) for s in mine if s.kind != "WAIT"]
        assert done == [(a.kind, a.steps) for a in program.stages[rank // shards]]
        ends = [s.end_s for s in mine if s.kind != "WAIT"]
        begins = [s.start_s for s in mine if s.kind != "WAIT"]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
        walked = [s.chunk for s in mine if s.kind == "F" and s.steps[0] == 0]
        assert sorted(walked) == list(range(chunks))
    # The rank that naps is what everyone waits for.
    naps = [s for s in spans if s.rank == slow and s.kind == "F"]
    assert all(s.is_critical for s in naps)
    assert sum(s.end_s - s.start_s for s in naps) >= chunks * NAP_S
    critical = sum(s.end_s - s.start_s for s in spans if s.is_critical and s.kind != "WAIT")
    assert critical > 0.5 * max(share.epoch_s for share in shares)


@pytest.mark.slow
def test_an_epoch_of_one_rank_is_all_critical():
    spans, _, _ = run_ranks(timeline_of, 1, (1, 1, 1), -1)[0]
    assert all(s.is_critical for s in spans if s.kind != "WAIT")
    assert [s.kind for s in spans if s.kind != "WAIT"] == ["F", "B", "STEP"]

"""Where an epoch's time goes: the rules on made notes, and real ranks that are really slow."""

import pytest
from helpers import run_ranks
from slow_ranks import EVERY, NAP_S, slow_rank

from gnnpipe.perf import Collective, EpochSpans, Message, time_shares
from gnnpipe.plan import Placement


def of_message(sent, posted, asked, taken, size_bytes=100, speed=1000.0):
    """Shares of rank 1, which got one message of rank 0 in an epoch of ten seconds."""
    key = ("F", 0, 0)
    notes = [
        EpochSpans(0.0, 10.0, 10.0, send_times_s={("F", 1, 0): sent}),
        EpochSpans(0.0, 10.0, 10.0, messages=[Message(key, size_bytes, posted, asked, taken)]),
    ]
    return time_shares(notes, Placement.grid(2, 1), [speed, speed])[1]


@pytest.mark.parametrize(
    ("times", "bubble", "exposed", "hidden"),
    [
        # Sent before it was asked for: whatever was waited is the wire.
        ({"sent": 1, "posted": 0, "asked": 3, "taken": 3.5}, 0, 0.5, 0.1),
        # Sent after: the stage before was late, then the wire.
        ({"sent": 4, "posted": 0, "asked": 3, "taken": 4.5}, 1, 0.5, 0),
        # No room before 2.95: it could not start earlier.
        ({"sent": 1, "posted": 2.95, "asked": 3, "taken": 3}, 0, 0, 0.05),
        # Clocks that are a little apart must not give negative times.
        ({"sent": 3.6, "posted": 0, "asked": 3, "taken": 3.5}, 0.5, 0, 0),
    ],
)
def test_a_wait_for_a_message_is_split_where_it_was_sent(times, bubble, exposed, hidden):
    found = of_message(**times)
    assert found.bubble_s == pytest.approx(bubble)
    assert found.exposed_pipeline_s == pytest.approx(exposed)
    assert found.hidden_pipeline_s == pytest.approx(hidden)
    assert found.compute_s == pytest.approx(10 - bubble - exposed)
    assert found.epoch_s == pytest.approx(10)


def test_waits_among_shards_and_at_the_end():
    # Stage 0 has ranks 0 and 1, stage 1 has ranks 2 and 3.
    ends = [(6, Collective(2, 2, 5)), (7, Collective(4, 4, 5)), (9, None), (9, None)]
    notes = [
        EpochSpans(0.0, 10.0, done, collectives=[c] if c else [], send_times_s={})
        for done, c in ends
    ]
    found = time_shares(notes, Placement.grid(2, 2), [float("inf")] * 4)
    # Rank 0 came two seconds before rank 1, and was done one second before it.
    assert found[0].imbalance_s == pytest.approx(2 + 1)
    assert found[0].exposed_graph_s == pytest.approx(1)
    assert found[0].bubble_s == pytest.approx(2)
    assert found[1].imbalance_s == pytest.approx(0)
    assert found[1].bubble_s == pytest.approx(2)
    assert found[2].bubble_s == 0
    assert all(share.epoch_s == pytest.approx(10) for share in found)


def test_an_exchange_under_compute_is_hidden():
    notes = [
        EpochSpans(0.0, 10.0, 10.0, collectives=[Collective(1, 4, 4.5)]),
        EpochSpans(0.0, 10.0, 10.0, collectives=[Collective(2, 3, 4.5)]),
    ]
    found = time_shares(notes, Placement.grid(1, 2), [float("inf")] * 2)
    assert [share.hidden_graph_s for share in found] == pytest.approx([2, 1])
    assert [share.exposed_graph_s for share in found] == pytest.approx([0.5, 1.5])


@pytest.mark.slow
def test_a_slow_stage_is_bubble_elsewhere():
    for shares, times in run_ranks(slow_rank, 2, (2, 1, 2), 0):
        assert shares[0].compute_s > 2 * NAP_S * 0.9
        assert shares[1].bubble_s > 2 * NAP_S * 0.9
        assert shares[1].compute_s < NAP_S
        assert shares[0].imbalance_s == shares[1].imbalance_s == 0
        assert min(times) * 0.8 < shares[0].epoch_s < max(times) * 1.1


@pytest.mark.slow
def test_a_slow_shard_is_imbalance_elsewhere():
    for shares, _ in run_ranks(slow_rank, 2, (1, 2, 1), 1):
        assert shares[1].compute_s > NAP_S * 0.9
        assert shares[0].imbalance_s > NAP_S * 0.7
        assert shares[0].compute_s < NAP_S
        assert shares[0].bubble_s == shares[0].exposed_pipeline_s == 0


@pytest.mark.slow
def test_boundary_rows_travel_while_the_next_chunk_is_computed():
    chunks, steps = 3, 5
    for shares, _ in run_ranks(slow_rank, 2, (1, 2, chunks), EVERY, "exact"):
        # Of every step but the last, which pushes nothing, all chunks but the last (on the way
        # back but the first); both ways.
        assert shares[0].hidden_graph_s > 2 * (chunks - 1) * (steps - 1) * NAP_S * 0.9
        assert shares[0].exposed_graph_s < shares[0].hidden_graph_s / 2


@pytest.mark.slow
def test_one_rank_computes_all_the_time():
    ((shares, _),) = run_ranks(slow_rank, 1, (1, 1, 1), -1)
    assert shares[0].compute_s == pytest.approx(shares[0].epoch_s, rel=0.05)


def test_waiting_before_the_step_is_no_work():
    # All meet before the step: rank 0 at 6, its stage's other shard at 7, the other stage at 8.
    there = [6, 7, 8, 8]
    notes = [EpochSpans(0.0, 10.0, 9.5, step_sync=Collective(at, at, 8.5)) for at in there]
    found = time_shares(notes, Placement.grid(2, 2), [float("inf")] * 4)
    assert [s.imbalance_s for s in found] == pytest.approx([1, 0, 0, 0])
    assert [s.bubble_s for s in found] == pytest.approx([1, 1, 0, 0])
    assert [s.compute_s for s in found] == pytest.approx([8, 9, 10, 10])

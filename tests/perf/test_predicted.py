"""A simulated epoch as spans for trace.json."""

from itertools import pairwise

import pytest
from stage_dags import chain
from stated_costs import StatedCosts

from gnnpipe.perf import Trace, read_trace, simulate, write_trace
from gnnpipe.perf.predicted import predicted_spans
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.schedule import training_program


def spans_of(plan, **costs):
    timeline = simulate(
        program_tasks(training_program(plan), StatedCosts(**costs, shards=plan.plan.most_shards))
    )
    return timeline, predicted_spans(timeline, plan.steps, plan.plan.placement)


@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 2, 2), (2, 2, 2), (3, 1, 1)])
def test_every_rank_is_told_of_from_beginning_to_end(shape, tmp_path):
    stages, shards, chunks = shape
    plan = chain(stages, chunks, shards=shards)
    timeline, spans = spans_of(
        plan, link_time_s=0.5, exchange_time_s=0.25, reduce_time_s=1.0, update_time_s=0.5
    )
    for rank in range(stages * shards):
        own = [s for s in spans if s.rank == rank and not s.lane]
        assert own[0].start_s == 0
        assert own[-1].end_s == timeline.makespan_s
        assert all(a.end_s == b.start_s for a, b in pairwise(own))
        worked = sum(s.end_s - s.start_s for s in own if s.kind != "WAIT")
        assert worked == timeline.busy_s()[rank]
        done = {(s.kind, s.chunk, step) for s in own for step in range(*s.steps)}
        assert done == {(way, c, step) for way in "FB" for c in range(chunks) for step in range(3)}
    critical = [s for s in spans if s.is_critical]
    times = {(s.start_s, s.end_s) for s in critical}  # an exchange is on the path of all shards
    assert sum(end - start for start, end in times) == timeline.makespan_s
    lanes = {s.lane for s in spans}
    assert ("shards" in lanes) == (shards > 1)
    assert any(lane.startswith("to ") for lane in lanes) == (stages > 1)
    path = tmp_path / "trace.json"
    write_trace(path, Trace(predicted=spans))
    found = read_trace(path).predicted
    assert [(s.rank, s.kind, s.lane) for s in found] == [(s.rank, s.kind, s.lane) for s in spans]


def test_a_message_stands_with_the_rank_that_sends_it():
    _, spans = spans_of(chain(2, 1, shards=2), link_time_s=0.5)
    sent = {(s.kind, s.rank, s.peer, s.lane, s.size_bytes) for s in spans if "SEND" in s.kind}
    assert sent == {
        ("SEND_F", 0, 2, "to 2", 8),
        ("SEND_F", 1, 3, "to 3", 8),
        ("SEND_B", 2, 0, "to 0", 8),
        ("SEND_B", 3, 1, "to 1", 8),
    }

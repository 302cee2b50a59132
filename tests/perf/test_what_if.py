"""What if: closed forms for changed devices and links."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from stage_dags import chain, dags
from stated_costs import DrawnCosts, StatedCosts

from gnnpipe.perf import simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.perf.what_if import what_ifs
from gnnpipe.schedule import training_program


@dataclass
class AffineLinks(StatedCosts):
    """A second for each message and exchange, and one for each byte."""

    def message_s(self, source, target, size_bytes):
        return 1.0 + size_bytes

    def exchange_s(self, stage, sizes_bytes):
        return 1.0 + max(sizes_bytes)

    def shard_sum_s(self, stage, size_bytes):
        return 1.0 + size_bytes


def answers(program, costs):
    return what_ifs(simulate(program_tasks(program, costs)), program, costs)


def test_a_pipeline():
    stages, chunks, f, b, size = 3, 5, 20.0, 30.0, 8
    program = training_program(chain(stages, chunks, layers_each=1))
    full = (chunks + stages - 1) * (f + b)
    fill = 2 * (stages - 1)
    rest = (chunks - 1) * (f + b)  # of a rank that all chunks pass
    assert answers(program, AffineLinks(f / 2, b / 2, message_size=size)) == {
        "twice the bandwidth between stages": full + fill * (1 + size / 2),
        "rank 0 half as fast": full + fill * (1 + size) + (f + b) + rest,
        # The others are as slow as they were.
        "rank 0 twice as fast": full + fill * (1 + size) - (f + b) / 2,
        "nothing overlapped": full + fill * (1 + size) + 2 * (chunks - 1) * (1 + size),
    }


def test_shards():
    steps, f, b, size = 4, 2.0, 6.0, 10
    program = training_program(chain(1, 1, layers_each=steps - 1, shards=2))
    costs = AffineLinks(f, b, exchanged_size=size)
    found = answers(program, costs)
    compute, exchanges, weights = steps * (f + b), 2 * (steps - 1), 16
    wire = exchanges * (1 + size) + 1 + weights
    assert simulate(program_tasks(program, costs)).makespan_s == compute + wire
    assert found["nothing overlapped"] == compute + wire
    half = exchanges * (1 + size / 2) + 1 + weights / 2
    assert found["twice the bandwidth among shards"] == compute + half
    # The other shard waits at every exchange.
    assert found["rank 0 half as fast"] == 2 * compute + wire
    assert found["rank 0 twice as fast"] == compute + wire


def test_one_device_has_no_links():
    program = training_program(chain(1, 2))
    found = answers(program, StatedCosts())
    assert list(found) == ["rank 0 half as fast", "rank 0 twice as fast"]
    as_it_is = simulate(program_tasks(program, StatedCosts())).makespan_s
    assert found["rank 0 half as fast"] == 2 * as_it_is == 4 * found["rank 0 twice as fast"]


@settings(deadline=None, max_examples=40)
@given(dags(), st.integers(0, 99))
def test_a_faster_rank_never_delays_the_epoch(plan, seed):
    program, costs = training_program(plan), DrawnCosts(seed, shards=plan.plan.most_shards)
    tasks = program_tasks(program, costs)
    found = answers(program, costs)
    slower = next(s for words, s in found.items() if words.endswith("half as fast"))
    faster = next(s for words, s in found.items() if words.endswith("twice as fast"))
    assert faster <= simulate(tasks).makespan_s <= slower

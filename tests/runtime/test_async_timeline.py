"""Passes of an asynchronous run overlap on real ranks, and the bubble is small.

That two actions run at once is proved without a clock: each waits inside for the other to begin.
"""

import time
from pathlib import Path

import pytest
import slow_ranks
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage

STAGES, CHUNKS = 4, 8
LEAD = STAGES - 1
"""Passes by which stage 0 is ahead of the last stage."""


class Meeting:
    """Waits in F of pass n + LEAD on stage 0, and in B of pass n on the last stage, for the other.

    A pass of a stage is one action each way, because there are no shards.
    """

    def __init__(self, folder, passes, limit_s):
        self.folder, self.passes, self.limit_s = Path(folder), passes, limit_s
        self.met = []
        """By wait, whether the other action began while this one was running."""
        self.counts = {"F": 0, "B": 0}

    def begin(self, kind):
        number = self.counts[kind]
        self.counts[kind] += 1
        other = f"B{number - LEAD}" if kind == "F" else f"F{number + LEAD}"
        if not 0 <= int(other[1:]) < self.passes:
            return
        (self.folder / f"{kind}{number}").touch()
        end_s = time.monotonic() + self.limit_s
        while not (is_there := (self.folder / other).exists()) and time.monotonic() < end_s:
            time.sleep(0.002)
        self.met.append(is_there)


def meetings(schedule, folder, limit_s):
    """Whether the actions met, in the order of the rank's waits; empty on stages in between."""
    mesh, epochs = Mesh.join(STAGES, 1), 2
    meeting = Meeting(folder, epochs * CHUNKS, limit_s)
    forward, backward = Stage.forward, Stage.backward

    def waiting_forward(self, chunk, steps):
        if self._training and mesh.rank == 0:
            meeting.begin("F")
        return forward(self, chunk, steps)

    def waiting_backward(self, chunk, steps, following=None):
        if mesh.rank == LEAD:
            meeting.begin("B")
        return backward(self, chunk, steps, following)

    config = quick_config(
        stages=STAGES, chunks=CHUNKS, layers=STAGES, schedule=schedule, eval_every=0, epochs=epochs,
        predict=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "forward", waiting_forward)
        patch.setattr(Stage, "backward", waiting_backward)
        Trainer(config, small_graph(), world=mesh).fit()
    return meeting.met


@pytest.mark.slow
def test_stage_0_is_in_forward_while_the_last_stage_is_in_backward_of_an_earlier_pass(tmp_path):
    found = run_ranks(meetings, STAGES, "async", str(tmp_path), 60.0)
    assert found[0] == found[LEAD] == [True] * (2 * CHUNKS - LEAD)


@pytest.mark.slow
def test_with_a_drain_passes_of_two_epochs_do_not_meet(tmp_path):
    found = run_ranks(meetings, STAGES, "1f1b", str(tmp_path), 5.0)
    # Stage 0 begins the next epoch when all of this one is over, and the last stage has given up.
    assert found[LEAD] == [*[True] * (CHUNKS - LEAD), *[False] * LEAD, *[True] * (CHUNKS - LEAD)]


def timeline(schedule):
    """Spans and time shares of a run whose ranks sleep in every action."""
    mesh = Mesh.join(STAGES, 1)
    slow_ranks.NAP_S = 0.05
    config = quick_config(layers=STAGES, staleness="none", eval_every=0, epochs=10)
    # One aggregation a stage, so that stages have equally many steps, and naps.
    runs = ((0, 1), (2, 3), (4, 5), (6, 7, 8))
    stages = tuple(StagePlan.even(ops, (rank,)) for rank, ops in enumerate(runs))
    plan = Plan(stages, CHUNKS, schedule)
    with slow_ranks.napping(mesh, slow_ranks.EVERY):
        result = Trainer(config, small_graph(), world=mesh, plan=plan).fit()
    return result.timeline, result.time_shares, result.epoch_time_s


def passes_of(spans, rank, kind):
    """Start and end of the passes of a rank in order; without shards each is one action."""
    found = [(s.start_s, s.end_s) for s in spans if s.rank == rank and s.kind == kind]
    return sorted(found)


def idle_share(shares):
    """Part of the time in which stages wait."""
    return sum(share.bubble_s for share in shares) / sum(share.epoch_s for share in shares)


@pytest.mark.slow
def test_the_measured_bubble_is_half_of_fill_drains_at_most():
    """Other programs of the machine only add time of waiting, so the best of three runs counts."""
    before = idle_share(run_ranks(timeline, STAGES, "fill-drain")[0][1])
    for _ in range(3):
        spans, flowing, epoch_s = run_ranks(timeline, STAGES, "async")[0]
        first, last = passes_of(spans, 0, "F"), passes_of(spans, LEAD, "B")
        assert len(first) == len(last) == 10 * CHUNKS
        at_once = [
            (f, b)
            for f, one in enumerate(first)
            for b, other in enumerate(last)
            if max(one[0], other[0]) < min(one[1], other[1])
        ]
        # Stage 0 is in forward of a later pass, also across epochs, and at most S - 1 passes ahead.
        assert all(0 < f - b <= STAGES for f, b in at_once)
        assert any(f // CHUNKS > b // CHUNKS for f, b in at_once)
        # Shares are of one epoch, as the epoch time.
        assert flowing[0].epoch_s == pytest.approx(epoch_s, rel=0.2)
        if idle_share(flowing) < before / 2:
            return
    raise AssertionError(f"{idle_share(flowing):.3f} of the time is idle, {before:.3f} before")

"""The measured timeline of an asynchronous run: passes overlap, and the bubble is small."""

import pytest
import slow_ranks
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh

STAGES, CHUNKS = 4, 8


def timeline(schedule):
    """Spans and time shares of a run whose ranks sleep in every action."""
    mesh = Mesh.join(STAGES, 1)
    slow_ranks.NAP_S = 0.02
    config = quick_config(
        stages=STAGES, chunks=CHUNKS, layers=STAGES, schedule=schedule, staleness="none",
        eval_every=0, epochs=10,
    )  # fmt: skip
    with slow_ranks.napping(mesh, slow_ranks.EVERY):
        result = Trainer(config, small_graph(), world=mesh).fit()
    return result.timeline, result.time_shares, result.epoch_time_s


def passes_of(spans, rank, kind):
    """Start and end of the passes of a rank in order; without shards each is one action."""
    found = [(s.start_s, s.end_s) for s in spans if s.rank == rank and s.kind == kind]
    return sorted(found)


@pytest.mark.slow
def test_passes_overlap_and_the_bubble_is_small():
    spans, flowing, epoch_s = run_ranks(timeline, STAGES, "async")[0]
    first, last = passes_of(spans, 0, "F"), passes_of(spans, STAGES - 1, "B")
    assert len(first) == len(last) == 10 * CHUNKS
    overlaps = [
        (f, b)
        for f, one in enumerate(first)
        for b, other in enumerate(last)
        if max(one[0], other[0]) < min(one[1], other[1])
    ]
    # Stage 0 is in forward of a later pass, also across epochs, and at most S - 1 passes ahead.
    assert len(overlaps) > 10 * CHUNKS / 2
    assert all(0 < f - b <= STAGES for f, b in overlaps)
    assert any(f // CHUNKS > b // CHUNKS for f, b in overlaps)
    # Shares are of one epoch, as the epoch time.
    assert flowing[0].epoch_s == pytest.approx(epoch_s, rel=0.2)
    _, drained, _ = run_ranks(timeline, STAGES, "fill-drain")[0]
    idle, before = (
        sum(share.bubble_s for share in shares) / sum(share.epoch_s for share in shares)
        for shares in (flowing, drained)
    )
    assert idle < before / 2

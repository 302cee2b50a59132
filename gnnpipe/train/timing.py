"""Where the time of an epoch went, rank by rank: gathered at the end of a run."""

from __future__ import annotations

from dataclasses import asdict

from gnnpipe.perf import TimeShares, time_shares
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.runtime.probe import clock_offset

__all__ = ["gather_time_shares", "time_lines"]


def gather_time_shares(mesh: Mesh, link_bytes_per_s: float, counted: int) -> list[TimeShares]:
    """By rank, of the epoch of median length among the last ones; empty on a GPU.

    ``link_bytes_per_s``: how fast this rank receives; ``counted``: epochs at the end that are no
    warm-up. On every rank.
    """
    offset = clock_offset(mesh)
    mine = [spans.shifted(offset) for spans in list(mesh.recorder.epochs)[-counted:]]
    both = mesh.gather((mine, link_bytes_per_s))
    epochs = list(zip(*(spans for spans, _ in both), strict=True))
    if not epochs:
        return []
    by_length = sorted(epochs, key=lambda ranks: ranks[0].end_s - ranks[0].start_s)
    return time_shares(by_length[len(epochs) // 2], mesh.shards, [speed for _, speed in both])


def time_lines(shares: list[TimeShares]) -> list[str]:
    """A line for every rank."""
    names = {
        "compute": "compute_s", "exposed pipeline": "exposed_pipeline_s",
        "exposed graph": "exposed_graph_s", "bubble": "bubble_s", "imbalance": "imbalance_s",
    }  # fmt: skip
    lines = []
    for rank, share in enumerate(shares):
        values = asdict(share)
        parts = [f"{name} {values[key] / share.epoch_s:.0%}" for name, key in names.items()]
        hidden = share.hidden_pipeline_s + share.hidden_graph_s
        lines.append(
            f"  rank {rank}: {share.epoch_s:.3f} s = {', '.join(parts)}; "
            f"{hidden:.3f} s of communication hidden"
        )
    return ["time of an epoch:", *lines] if lines else []

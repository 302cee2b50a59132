"""Where the time of an epoch went, rank by rank: gathered at the end of a run."""

from __future__ import annotations

import os
from dataclasses import asdict

from gnnpipe.perf import EpochSpans, TimeShares
from gnnpipe.profile.comm_times import clock_offset
from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["gather_epoch", "prediction_line", "time_lines"]

MUCH = 0.25
"""A prediction that is as far off wants a reason."""


def gather_epoch(mesh: Mesh, counted: int) -> list[EpochSpans]:
    """Notes by rank, on one clock, of the epoch of median length among the last ones.

    ``counted``: epochs at the end that are no warm-up. An exact one among others is not theirs. On
    every rank; empty on a GPU.
    """
    offset = clock_offset(mesh)
    epochs = list(mesh.recorder.epochs)[-counted:]
    epochs = [epoch for epoch in epochs if not epoch.is_exact] or epochs
    by_length = sorted(range(len(epochs)), key=lambda i: epochs[i].end_s - epochs[i].start_s)
    # Rank 0 chooses; only that epoch travels.
    chosen = mesh.share(by_length[len(by_length) // 2] if by_length else None)
    if chosen is None:
        return []
    return mesh.gather(epochs[chosen].shifted(offset))


def time_lines(shares: list[TimeShares]) -> list[str]:
    """A line for every rank."""
    names = {
        "compute": "compute_s",
        "exposed pipeline": "exposed_pipeline_s",
        "exposed graph": "exposed_graph_s",
        "bubble": "bubble_s",
        "imbalance": "imbalance_s",
    }
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


def prediction_line(
    predicted_s: float, measured_s: float, predicted: list[TimeShares], measured: list[TimeShares]
) -> str:
    """Predicted beside measured; of the shares, by rank, the means."""
    off = predicted_s / measured_s - 1
    text = (
        f"predicted {predicted_s:.3g} s an epoch, measured {measured_s:.3g} "
        f"(prediction off by {off:+.0%}{_busy_words(off)})"
    )
    names = {
        "compute": ("compute_s",),
        "communication": ("exposed_pipeline_s", "exposed_graph_s"),
        "bubble": ("bubble_s", "imbalance_s"),
    }
    parts = []
    for name, keys in names.items() if measured else ():
        both = (
            sum(asdict(share)[key] for share in shares for key in keys) / len(shares)
            for shares in (predicted, measured)
        )
        parts.append(f"{name} {next(both):.3g} and {next(both):.3g}")
    if not parts:
        return text
    noted = f"the one epoch whose actions were noted ({measured[0].epoch_s:.3g} s)"
    return f"{text}; in the prediction and in {noted}: {', '.join(parts)}"


def _busy_words(off: float) -> str:
    """Why, where it is plain: a prediction is for a machine that does nothing else."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if off > -MUCH or load < cores + 1:
        return ""
    return f"; the machine is busy, with a load of {load:.1f} on {cores} cores"

"""Times of an epoch by rank and kind, measured and predicted, and their text."""

from __future__ import annotations

import os
from dataclasses import asdict

from gnnpipe.perf import EpochSpans, TimeShares
from gnnpipe.profiling.links import clock_offset
from gnnpipe.runtime.comm.mesh import Mesh

UNEXPECTED = 0.25
"""Relative error above which the text of a prediction names a possible reason."""


def gather_epoch(mesh: Mesh, counted: int) -> list[EpochSpans]:
    """Return the spans of every rank, on one clock, for the median of the last epochs.

    ``counted``: number of last epochs that are not warm-up. Exact epochs are skipped unless there
    are no others. Of epochs without a flush between them, the spans are those of the most in a row.
    Empty on a GPU.
    """
    offset = clock_offset(mesh)
    epochs = list(mesh.recorder.epochs)[-counted:]
    epochs = [epoch for epoch in epochs if not epoch.is_exact] or epochs
    most = max((epoch.count for epoch in epochs), default=1)
    epochs = [epoch for epoch in epochs if epoch.count == most]
    by_length = sorted(range(len(epochs)), key=lambda i: epochs[i].end_s - epochs[i].start_s)
    # Rank 0 chooses; only the spans of this epoch are sent.
    chosen = mesh.share(by_length[len(by_length) // 2] if by_length else None)
    if chosen is None:
        return []
    return mesh.gather(epochs[chosen].shifted(offset))


def time_lines(shares: list[TimeShares]) -> list[str]:
    """Return a line for every rank with the shares of an epoch."""
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
    """Return the line that compares the predicted with the measured epoch time.

    ``predicted`` and ``measured``: shares of an epoch by rank; the line shows their means.
    """
    off = predicted_s / measured_s - 1
    text = (
        f"predicted {predicted_s:.3g} s per epoch, measured {measured_s:.3g} "
        f"(prediction off by {off:+.0%}{_load_text(off)})"
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
    epoch = f"the median measured epoch ({measured[0].epoch_s:.3g} s)"
    return f"{text}; in the prediction and in {epoch}: {', '.join(parts)}"


def _load_text(off: float) -> str:
    """Return the load of this machine if it may explain the error of a prediction.

    The load slows down the run, or before it the profile, so that too much time is predicted.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if abs(off) < UNEXPECTED or load < cores + 1:
        return ""
    return f"; the machine is busy, with a load of {load:.1f} on {cores} cores"

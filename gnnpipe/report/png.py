"""PNG files of the curves and the timeline, drawn by matplotlib (extra ``plots``)."""

from __future__ import annotations

import colorsys
import io
from typing import TYPE_CHECKING

from gnnpipe.errors import InputError
from gnnpipe.perf import Span
from gnnpipe.report.gantt import HUE_STEP, shown
from gnnpipe.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
WIDTH_IN = 7.0
"""Figure width in inches: the text width of most single-column papers."""


def pictures(run: Run) -> dict[str, bytes]:
    """Return PNG files by name: ``curves`` and, if the run has one, ``timeline``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "--png: needs matplotlib; try `pip install 'gnnpipe[plots]'`, or leave --png out"
        ) from None
    if not run.epochs:
        raise InputError("--png: no epoch has been trained yet; try later, or leave --png out")
    figure = Figure(figsize=(WIDTH_IN, 2.6), layout="constrained")
    _curves(run, figure.subplots(1, 2))
    found = {"curves": _png(figure)}
    timelines = {"predicted": run.trace.predicted, "measured": run.trace.measured}
    drawn = {name: shown(spans) for name, spans in timelines.items() if spans}
    if drawn:
        rows = [len({(s.rank, s.lane) for s in spans}) for spans in drawn.values()]
        height_in = min(0.7 * len(drawn) + 0.28 * sum(rows), 20)
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=rows)
        for (name, spans), axis in zip(drawn.items(), axes[:, 0], strict=True):
            _timeline(axis, name, spans)
        axes[-1, 0].set_xlabel("seconds")
        found["timeline"] = _png(figure)
    return found


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()


def _curves(run: Run, axes: list[Axes]) -> None:
    epochs = run.metrics["epoch"]
    loss, score = axes
    loss.set(xlabel="epoch", ylabel="training loss")
    for axis, name in [(loss, "loss")] + [(score, f"{p}_metric") for p in ("train", "val", "test")]:
        both = zip(epochs, run.metrics.get(name, ()), strict=False)
        points = [(x, y) for x, y in both if x is not None and y is not None]
        if points:
            axis.plot(*map(list, zip(*points, strict=True)), label=name.removesuffix("_metric"))
    if score.lines:
        score.legend(frameon=False)
    metric = run.result.text("metric") if run.result else "metric"
    score.set(xlabel="epoch", ylabel=metric)


def _timeline(axis: Axes, name: str, spans: list[Span]) -> None:
    rows = sorted({(s.rank, s.lane) for s in spans})
    for place, (rank, lane) in enumerate(rows):
        for is_wait in (False, True):  # waits are drawn over their actions
            mine = [s for s in spans if (s.rank, s.lane, s.kind == "WAIT") == (rank, lane, is_wait)]
            axis.broken_barh(
                [(s.start_s, s.end_s - s.start_s) for s in mine],
                (place - 0.4, 0.8),
                facecolors=[_colour(s) for s in mine],
                edgecolors=["crimson" if s.is_critical else "none" for s in mine],
                linewidth=0.6,
            )
    axis.set_yticks(range(len(rows)), [lane or f"rank {r}" for r, lane in rows])
    axis.set_title(name, loc="left", fontsize="medium")
    axis.invert_yaxis()


def _colour(span: Span) -> tuple[float, float, float]:
    if span.kind == "WAIT":
        return (0.88, 0.88, 0.88)
    if span.chunk < 0:
        return (0.45, 0.45, 0.45)
    light = 0.42 if span.kind.endswith("B") else 0.66
    return colorsys.hls_to_rgb(span.chunk * HUE_STEP % 360 / 360, light, 0.6)

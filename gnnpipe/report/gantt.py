"""Gantt chart of the predicted and the measured timeline of an epoch, as SVG.

Every rank has a row for its actions and a row for each background lane. Each chunk has a colour,
light for forward and dark for backward; waits are pale and the critical path is outlined. Positions
are percentages of the width, so that the slider of the page changes the width of the bars but not
the size of rows and text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from gnnpipe.perf import Span, Trace
from gnnpipe.report.svg import escape, ticks

ROW, GAP, AXIS = 22, 4, 20
"""Heights in pixels."""
MOST_SPANS = 6_000
"""Limit of spans in one timeline; the page says when the shortest of each row are left out."""
WORDS = {
    "F": "forward of",
    "B": "backward of",
    "WAIT": "on the wire to",
    "STEP": "optimizer of",
    "FORECAST": "forecast of",
    "CARRY": "forecast of",
    "REDUCE_FIT": "forecast of",
    "SEND_F": "transfer from",
    "SEND_B": "transfer from",
    "REDUCE_GRAD": "gradient sum of",
    "EXCHANGE_F": "exchange in",
    "EXCHANGE_B": "exchange in",
    "REDUCE_MEAN": "exchange in",
}
"""Text for a kind of action on the critical path, followed by the stage."""
HUE_STEP = 137.5
"""Degrees between the hues of consecutive chunks (the golden angle: no two of a hundred agree)."""


def seconds(value: float) -> str:
    """Format a time with a suitable unit.

    >>> seconds(0.00123)
    '1.23 ms'
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def shown(spans: Sequence[Span]) -> list[Span]:
    """Return the spans to draw, in order: all, or the longest of every row."""
    if len(spans) <= MOST_SPANS:
        return list(spans)
    rows: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start_s - spans[i].end_s):
        rows[spans[i].rank, spans[i].lane].append(i)
    share = max(MOST_SPANS // len(rows), 1)
    return [spans[i] for i in sorted(i for row in rows.values() for i in row[:share])]


def gantt(trace: Trace) -> str:
    """Return the chart, or '' if there is no timeline."""
    found = {"predicted": shown(trace.predicted), "measured": shown(trace.measured)}
    every = [s for spans in found.values() for s in spans]
    if not every:
        return ""
    end_s = max(s.end_s for s in every) or 1.0
    labels, bars = [], []
    top = 0
    for name, spans in found.items():
        if not spans:
            continue
        labels.append(f'<div class="head">{name}</div>')
        top += ROW
        for rank, lane in sorted({(s.rank, s.lane) for s in spans}):
            words = lane or f"rank {rank}"
            kind = ' class="lane"' if lane else ""
            labels.append(f'<div{kind} title="{escape(words)}">{escape(words)}</div>')
            of_row = [s for s in spans if (s.rank, s.lane) == (rank, lane)]
            bars += [_bar(s, top, name, end_s) for s in of_row]
            top += ROW
    height = top + AXIS
    axis = [
        f'<line class="grid" x1="{t / end_s:.3%}" x2="{t / end_s:.3%}" y1="0" y2="{top}"/>'
        f'<text x="{t / end_s:.3%}" y="{top + 14}">{escape(seconds(t) if t else "0")}</text>'
        for t in ticks(0.0, end_s * 0.97)
    ]
    return (
        f'<div class="gantt"><div class="ranks">{"".join(labels)}</div><div class="scroll">'
        f'<svg id="gantt" width="100%" height="{height}" role="img" aria-label="timeline">'
        f"{''.join(axis)}{''.join(bars)}</svg></div></div>"
    )


def _bar(span: Span, top: int, timeline: str, end_s: float) -> str:
    start, length = span.start_s / end_s, max(span.end_s - span.start_s, 0.0) / end_s
    place = f'x="{start:.4%}" y="{top + GAP // 2}" width="{length:.4%}" height="{ROW - GAP}"'
    classes = "span"
    colour, tone = "", " light"
    if span.kind == "WAIT":
        classes += " wait"
    elif span.chunk >= 0:
        lightness, tone = (42, " light") if span.kind.endswith("B") else (66, "")
        colour = f' fill="hsl({span.chunk * HUE_STEP % 360:.0f} 60% {lightness}%)"'
    if span.is_critical:
        classes += " critical"
    out = f'<rect class="{classes}"{colour} {place} data-tip="{escape(_tip(span, timeline))}"/>'
    if length > 0.015 and span.kind != "WAIT":
        # A nested <svg> clips the text at the end of the bar.
        out += (
            f'<svg class="word{tone}" {place}><text x="3" y="13">{escape(span.name)}</text></svg>'
        )
    return out


def _tip(span: Span, timeline: str) -> str:
    lines = [f"{span.name} ({timeline})", f"rank {span.rank}"]
    if span.stage >= 0:
        lines[1] += f", stage {span.stage}"
    if span.chunk >= 0:
        lines.append(f"chunk {span.chunk}")
    if span.steps != (0, 0):
        first, last = span.steps[0], span.steps[1] - 1
        lines.append(f"step {first}" if first == last else f"steps {first} to {last}")
    if span.peer >= 0:
        lines.append(f"{'from' if span.kind == 'WAIT' else 'with'} rank {span.peer}")
    if span.size_bytes:
        lines.append(f"{span.size_bytes:,} bytes")
    lines.append(f"start {seconds(span.start_s)}")
    lines.append(f"duration {seconds(span.end_s - span.start_s)}")
    if span.is_critical:
        lines.append("on the critical path")
    return "\n".join(lines)


def critical_words(spans: Sequence[Span]) -> str:
    """Return the shares of stages and kinds in the critical path, largest first; '' if none.

    Waits inside an action are subtracted from the action. A collective of several ranks, which
    has a span in a lane of each rank, counts once.
    """
    totals: Counter[tuple[int, str]] = Counter()
    seen: set[tuple[int, str, str, float, float]] = set()
    around: dict[tuple[int, str], Span] = {}
    for s in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        length_ns = round((s.end_s - s.start_s) * 1e9)
        together = (s.stage, s.kind, s.lane, s.start_s, s.end_s)
        if s.is_critical and not (s.lane and together in seen):
            totals[s.stage, _doing(s)] += length_ns
            seen.add(together)
        if s.kind != "WAIT":
            around[s.rank, s.lane] = s
            continue
        action = around.get((s.rank, s.lane))
        if action is not None and action.is_critical and s.end_s <= action.end_s:
            totals[action.stage, _doing(action)] -= length_ns
    whole = sum(totals.values())
    if not whole:
        return ""
    parts = [
        f"{size / whole:.0%} {words} stage {stage}"
        for (stage, words), size in totals.most_common(5)
    ]
    return ", ".join(parts)


def _doing(span: Span) -> str:
    return WORDS.get(span.kind, f"{span.kind} of")

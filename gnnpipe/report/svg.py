"""Line charts and bar charts as SVG text; all texts in them are escaped here.

A line chart has a fixed view box that the browser scales. Bars have widths in per cent, so that
their text keeps its size on a phone. page.js shows ``data-tip`` when an element is pointed at or
tapped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnnpipe.report.run import Column

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 10, 34
MOST_POINTS = 400
"""Limit of points in one line; more would overlap."""
FEW_POINTS = 30
"""Lines with up to this many points have markers."""
COLOURS = 8
"""Number of colour classes c0, c1, ... in the style sheet."""


def escape(value: object) -> str:
    """Return text that is safe between tags and inside quotes."""
    return html.escape(str(value), quote=True)


@dataclass(frozen=True)
class Line:
    """A curve and its name."""

    name: str
    values: Column


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next((size * m for m in (1, 2, 5) if size * m >= raw * 0.999), size * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def line_chart(title: str, epochs: Column, lines: Sequence[Line]) -> str:
    """Return a chart with a curve for each line; ``epochs`` are the x values."""
    drawn = [_points(epochs, line.values) for line in lines]
    every = [point for points in drawn for point in points]
    if not every:
        return ""
    # The x range is that of all epochs, so that all charts of a run have the same.
    places = [x for x in epochs if x is not None]
    x_low, x_high = min(places), max(places)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    y_low, y_high = _span([y for _, y in every])
    x_scale = (WIDTH - LEFT - RIGHT) / (x_high - x_low)
    y_scale = (HEIGHT - TOP - BOTTOM) / (y_high - y_low)

    def place(x: float, y: float) -> tuple[str, str]:
        return (f"{LEFT + (x - x_low) * x_scale:.1f}", f"{TOP + (y_high - y) * y_scale:.1f}")

    out = [
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">'
    ]
    for y in ticks(y_low, y_high):
        _, at = place(x_low, y)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        out.append(f'<text class="end" x="{LEFT - 5}" y="{at}" dy=".35em">{y:g}</text>')
    for x in ticks(x_low, x_high):
        if x == int(x):
            at, _ = place(x, y_low)
            out.append(f'<text class="middle" x="{at}" y="{HEIGHT - 18}">{x:g}</text>')
    out.append(f'<text class="middle" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}">epoch</text>')
    for i, (line, points) in enumerate(zip(lines, drawn, strict=True)):
        path = " ".join(",".join(place(x, y)) for x, y in points)
        out.append(f'<polyline class="curve c{i % COLOURS}" points="{path}"/>')
        few = " few" if len(points) <= FEW_POINTS else ""
        for x, y in points:
            at, over = place(x, y)
            tip = escape(f"{line.name}\nepoch {x:g}\n{y:.5g}")
            out.append(
                f'<circle class="dot{few} c{i % COLOURS}" cx="{at}" cy="{over}" r="3" '
                f'data-tip="{tip}"/>'
            )
    out.append(f"</svg>{legend([line.name for line in lines])}</figure>")
    return "".join(out)


def _points(epochs: Column, values: Column) -> list[tuple[float, float]]:
    both = [(x, y) for x, y in zip(epochs, values, strict=True) if x is not None and y is not None]
    every = math.ceil(len(both) / MOST_POINTS)
    # Counted from the end, so that the last epoch is always drawn.
    return both[::-1][::every][::-1] if both else []


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > max(1e-9 * max(abs(low), abs(high)), 1e-290):
        return low, high
    wide = max(abs(low) / 2, 0.5)
    return low - wide, high + wide


def legend(names: Sequence[str]) -> str:
    """Return the legend of the colours."""
    parts = [
        f'<li><svg width="12" height="12"><rect class="fill c{i % COLOURS}" width="12" '
        f'height="12"/></svg>{escape(name)}</li>'
        for i, name in enumerate(names)
    ]
    return f'<ul class="legend">{"".join(parts)}</ul>'


def bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    words: Callable[[float], str],
) -> str:
    """Return stacked bars on one scale.

    ``rows``: label and parts (name, size) of every bar; a name has one colour. ``words`` formats a
    size.
    """
    most = max((sum(size for _, size in parts) for _, parts in rows), default=0.0) or 1.0
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    out = [f"<figure><figcaption>{escape(title)}</figcaption>"]
    for label, parts in rows:
        whole = sum(size for _, size in parts)
        out.append(f'<div class="bar"><span>{escape(label)}</span><b>{escape(words(whole))}</b>')
        out.append(f'<svg width="100%" height="16" role="img" aria-label="{escape(label)}">')
        at = 0.0
        for name, size in parts:
            share = max(size, 0.0) / most * 100
            colour = names.index(name) % COLOURS
            tip = escape(f"{label}\n{name}\n{words(size)}")
            out.append(
                f'<rect class="fill c{colour}" x="{at:.3f}%" width="{share:.3f}%" '
                f'height="16" data-tip="{tip}"/>'
            )
            at += share
        out.append("</svg></div>")
    out.append(legend(names) if len(names) > 1 else "")
    return "".join(out) + "</figure>"

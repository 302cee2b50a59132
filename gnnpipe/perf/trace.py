"""Reads and writes the timelines of one epoch as Chrome trace events, for Perfetto and the report.

One JSON object. ``traceEvents`` has a complete event (``ph`` X, ``ts`` and ``dur`` in microseconds)
for every span: process 1 is measured, process 2 predicted; ``cat`` is the span's kind and ``args``
has the other fields of a ``Span``. Viewers treat process 0 and thread 0 as idle, so both count from
1: thread rank + 1 is the rank's own work. Transfers are in lanes, each a separate thread, because
viewers nest the spans of one thread.

Source: the Trace Event Format (Chromium project), complete and metadata events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnpipe.errors import InputError
from gnnpipe.schedule import SpecialPosition

VERSION = 2
TIMELINES = ("measured", "predicted")
LANE_STRIDE = 1_000_000
"""Thread numbers of lane n start at n times this."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action, wait or transfer of a rank; seconds from the start of the epoch."""

    rank: int
    kind: str
    """F, B, SEND_F and so on, as in a program; WAIT for a wait inside an action."""
    start_s: float
    end_s: float
    chunk: int = -1
    """The chunk itself, not its position in the order; or a ``SpecialPosition``."""
    stage: int = -1
    steps: tuple[int, int] = (0, 0)
    """F and B: first step, one past the last."""
    peer: int = -1
    """The other rank of a transfer or a wait."""
    size_bytes: int = 0
    is_critical: bool = False
    """Whether it is on the critical path."""
    lane: str = ""
    """'' for the rank's own work; a name like 'to 1' for transfers."""

    @property
    def name(self) -> str:
        """Label of the span: ``F 3``, ``STEP``, ``SEND_F probes``."""
        special = {SpecialPosition.NO_CHUNK: "", SpecialPosition.PROBE: " probes"}
        known = special.get(SpecialPosition(self.chunk)) if self.chunk < 0 else None
        return self.kind + (f" {self.chunk}" if known is None else known)


@dataclass(frozen=True)
class Trace:
    """Timelines of one epoch; either may be empty."""

    measured: tuple[Span, ...] = ()
    predicted: tuple[Span, ...] = ()


def write_trace(path: Path, trace: Trace) -> None:
    """Write ``trace``; ``read_trace`` restores it to a nanosecond."""
    lanes = sorted({s.lane for s in (*trace.measured, *trace.predicted)} - {""})
    first_thread = {"": 1} | {lane: LANE_STRIDE * (i + 1) for i, lane in enumerate(lanes)}
    lines: list[str] = []
    for process, (name, spans) in enumerate(
        zip(TIMELINES, (trace.measured, trace.predicted), strict=True), start=1
    ):
        lines += [json.dumps(e) for e in _names(process, name, spans, first_thread)]
        lines += [json.dumps(_event(process, s, first_thread[s.lane] + s.rank)) for s in spans]
    head = json.dumps({"version": VERSION, "writer": "gnnpipe"})
    events = ",\n".join(lines)
    text = f'{{"displayTimeUnit": "ms", "otherData": {head}, "traceEvents": [\n{events}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def _names(
    process: int, name: str, spans: Iterable[Span], first_thread: dict[str, int]
) -> list[dict[str, Any]]:
    """Metadata events: labels of processes and threads and their order."""
    used = sorted({(s.rank, first_thread[s.lane], s.lane) for s in spans})
    if not used:
        return []
    events: list[tuple[int, str, dict[str, Any]]] = [
        (0, "process_name", {"name": name}),
        (0, "process_sort_index", {"sort_index": -process}),  # predicted above measured
    ]
    for index, (rank, first, lane) in enumerate(used):
        label = f"rank {rank}" + (f" {lane}" if lane else "")
        events.append((first + rank, "thread_name", {"name": label}))
        events.append((first + rank, "thread_sort_index", {"sort_index": index}))
    return [
        {
            "ph": "M",
            "pid": process,
            "tid": thread or used[0][1] + used[0][0],
            "name": what,
            "args": args,
        }
        for thread, what, args in events
    ]


def _event(process: int, span: Span, thread: int) -> dict[str, Any]:
    # Both ends are rounded to nanoseconds, so that nested spans stay nested.
    start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": span.name,
        "cat": span.kind,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {
            "rank": span.rank,
            "chunk": span.chunk,
            "stage": span.stage,
            "steps": list(span.steps),
            "peer": span.peer,
            "bytes": span.size_bytes,
            "critical": span.is_critical,
            "lane": span.lane,
        },
    }


def read_trace(path: Path) -> Trace:
    """Read the timelines of a file; ``InputError`` names the event and its fault."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a trace ({error}); make the run again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); try another run") from None
    other = data.get("otherData") if isinstance(data, dict) else None
    version = other.get("version") if isinstance(other, dict) else None
    if version != VERSION:
        raise InputError(
            f"{path}: trace version {version!r}; expected {VERSION}, written by this gnnpipe"
        )
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise InputError(f"{path}: traceEvents is no list; make the run again")
    found: tuple[list[Span], list[Span]] = ([], [])
    for index, event in enumerate(events):
        where = f"{path}: event {index}"
        if not isinstance(event, dict):
            raise InputError(f"{where}: is no object; make the run again")
        if event.get("ph") == "M":
            continue
        process = event.get("pid")
        if event.get("ph") != "X" or process not in (1, 2):
            raise InputError(f"{where}: no span of process 1 or 2; make the run again")
        found[process - 1].append(_span(event, where))
    return Trace(*(tuple(spans) for spans in found))


def _span(event: dict[str, Any], where: str) -> Span:
    args = event.get("args")
    if not isinstance(args, dict):
        raise InputError(f"{where}: args is no object; make the run again")
    start_us, duration_us = _number(event, "ts", where), _number(event, "dur", where)
    steps = args.get("steps")
    if not isinstance(steps, list) or len(steps) != 2:
        raise InputError(f"{where}: steps {steps!r}; give two whole numbers")
    first, last = (_whole({"steps": step}, "steps", where, 0) for step in steps)
    return Span(
        rank=_whole(args, "rank", where, 0),
        kind=_text(event, "cat", where),
        start_s=start_us / 1e6,
        end_s=(start_us + duration_us) / 1e6,
        chunk=_whole(args, "chunk", where, min(SpecialPosition)),
        stage=_whole(args, "stage", where, -1),
        steps=(first, last),
        peer=_whole(args, "peer", where, -1),
        size_bytes=_whole(args, "bytes", where, 0),
        is_critical=args.get("critical") is True,
        lane=_text(args, "lane", where),
    )


def _number(values: dict[str, Any], name: str, where: str) -> float:
    value = values.get(name)
    # Also refuses NaN and absurdly long times.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise InputError(f"{where}: {name} {value!r}; give microseconds, 0 or more")
    return float(value)


def _whole(values: dict[str, Any], name: str, where: str, least: int) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{where}: {name} {value!r}; give a whole number, at least {least}")
    return value


def _text(values: dict[str, Any], name: str, where: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} {value!r}; give text")
    return value

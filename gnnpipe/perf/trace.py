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
from gnnpipe.files import Fields
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

    def event(thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}

    first_used = used[0][1] + used[0][0]
    events = [
        event(first_used, "process_name", {"name": name}),
        event(first_used, "process_sort_index", {"sort_index": -process}),  # predicted first
    ]
    for index, (rank, first, lane) in enumerate(used):
        label = f"rank {rank}" + (f" {lane}" if lane else "")
        events.append(event(first + rank, "thread_name", {"name": label}))
        events.append(event(first + rank, "thread_sort_index", {"sort_index": index}))
    return events


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
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a trace ({error}); make the run again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); try another run") from None
    data = Fields(values, str(path))
    version = data.fields("otherData").whole("version")
    if version != VERSION:
        raise InputError(
            f"{path}: trace version {version!r}; expected {VERSION}, written by this gnnpipe"
        )
    found: tuple[list[Span], list[Span]] = ([], [])
    for event in data.list_of_fields("traceEvents"):
        kind = event.text("ph")
        if kind == "M":
            continue
        if kind != "X":
            raise InputError(f"{event.where}: ph {kind!r} is not X or M; make the run again")
        found[event.whole("pid", 1, 2) - 1].append(_span(event))
    return Trace(*(tuple(spans) for spans in found))


def _span(event: Fields) -> Span:
    args = event.fields("args")
    start_us, duration_us = event.number("ts", 0), event.number("dur", 0)
    first, last = args.wholes("steps", 2)
    return Span(
        rank=args.whole("rank"),
        kind=event.text("cat"),
        start_s=start_us / 1e6,
        end_s=(start_us + duration_us) / 1e6,
        chunk=args.whole("chunk", min(SpecialPosition)),
        stage=args.whole("stage", -1),
        steps=(first, last),
        peer=args.whole("peer", -1),
        size_bytes=args.whole("bytes"),
        is_critical=args.flag("critical"),
        lane=args.text("lane"),
    )

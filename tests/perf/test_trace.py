"""trace.json: what is written comes back, viewers can draw it, and another's file is refused."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnpipe.errors import InputError
from gnnpipe.perf import Span, Trace, read_trace, write_trace

SPANS = (
    Span(0, "F", 0.0, 0.25, 3, 0, (0, 2)),
    Span(0, "SEND_F", 0.25, 0.5, 3, 0, peer=1, size_bytes=4096, is_critical=True, lane="to 1"),
    Span(1, "WAIT", 0.0, 0.4, 3, 1, peer=0),
    Span(1, "FORECAST", 0.5, 0.75, -2, 1),
    Span(1, "STEP", 0.75, 1.0, -1, 1),
)


def written(folder, trace):
    write_trace(folder / "trace.json", trace)
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def test_what_is_written_comes_back(tmp_path):
    trace = Trace(SPANS, SPANS[:2])
    write_trace(tmp_path / "trace.json", trace)
    assert read_trace(tmp_path / "trace.json") == trace


def test_an_empty_trace_comes_back(tmp_path):
    written(tmp_path, Trace())
    assert read_trace(tmp_path / "trace.json") == Trace()


def test_names_as_a_reader_is_shown_them():
    assert [s.name for s in SPANS] == ["F 3", "SEND_F 3", "WAIT 3", "FORECAST probes", "STEP"]


def test_a_viewer_can_draw_it(tmp_path):
    """Perfetto: no process or thread 0; every one named; a thread of its own for every lane."""
    data = written(tmp_path, Trace(SPANS, SPANS))
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {1, 2}
    assert all(e["tid"] > 0 for e in data["traceEvents"])
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in data["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert {(e["pid"], e["tid"]) for e in spans} == set(named)
    assert set(named.values()) == {"rank 0", "rank 0 to 1", "rank 1"}
    processes = {
        e["pid"]: e["args"]["name"] for e in data["traceEvents"] if "process_n" in e["name"]
    }
    assert processes == {1: "measured", 2: "predicted"}
    assert spans[0]["ts"] == 0
    assert spans[0]["dur"] == 250_000  # microseconds


@given(st.lists(st.floats(0, 1e4), min_size=4, max_size=4).map(sorted))
def test_rounding_keeps_a_span_inside_another(tmp_path_factory, times):
    outer = Span(0, "F", times[0], times[3])
    inner = Span(0, "WAIT", times[1], times[2])
    data = written(tmp_path_factory.mktemp("trace"), Trace((outer, inner)))
    a, b = (e for e in data["traceEvents"] if e["ph"] == "X")
    ends = [round((e["ts"] + e["dur"]) * 1000) for e in (a, b)]
    assert a["ts"] <= b["ts"]
    assert ends[1] <= ends[0]


WRONG = {
    "no JSON": lambda d: "{",
    "deep": lambda d: "[" * 100_000,
    "a list": lambda d: [],
    "another version": lambda d: d["otherData"].update(version=1),
    "no head": lambda d: d.pop("otherData"),
    "no events": lambda d: d.pop("traceEvents"),
    "an event that is text": lambda d: d["traceEvents"].append("F 3"),
    "another process": lambda d: d["traceEvents"][-1].update(pid=3),
    "a process that is a list": lambda d: d["traceEvents"][-1].update(pid=[1]),
    "another phase": lambda d: d["traceEvents"][-1].update(ph="B"),
    "no args": lambda d: d["traceEvents"][-1].pop("args"),
    "a time in words": lambda d: d["traceEvents"][-1].update(ts="soon"),
    "no time": lambda d: d["traceEvents"][-1].update(dur=float("nan")),
    "a time past all": lambda d: d["traceEvents"][-1].update(ts=10**400),
    "a time before the beginning": lambda d: d["traceEvents"][-1].update(dur=-1),
    "a rank that is true": lambda d: d["traceEvents"][-1]["args"].update(rank=True),
    "a rank below 0": lambda d: d["traceEvents"][-1]["args"].update(rank=-1),
    "no steps": lambda d: d["traceEvents"][-1]["args"].update(steps=[1]),
    "half a step": lambda d: d["traceEvents"][-1]["args"].update(steps=[0, 0.5]),
    "a kind that is a number": lambda d: d["traceEvents"][-1].update(cat=1),
    "a lane that is null": lambda d: d["traceEvents"][-1]["args"].update(lane=None),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_another_file_is_refused(tmp_path, spoil):
    data = written(tmp_path, Trace(SPANS))
    spoilt = copy.deepcopy(data)
    made = spoil(spoilt)
    text = made if isinstance(made, str) and made[0] in "{[" else None
    path = tmp_path / "other.json"
    path.write_text(text or json.dumps(made if made == [] else spoilt), encoding="utf-8")
    with pytest.raises(InputError, match=r"other\.json: "):
        read_trace(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read"):
        read_trace(tmp_path / "none.json")

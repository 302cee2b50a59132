"""Predicted costs of a plan, and the split of a measured epoch's time."""

from gnnpipe.perf.memory import MemoryEstimate, MemorySettings, ShardSizes, estimate_memory
from gnnpipe.perf.parts import ChunkSizes, PlanSizes
from gnnpipe.perf.profile import Profile
from gnnpipe.perf.simulate import simulate
from gnnpipe.perf.spans import (
    ActionTimes,
    Collective,
    EpochSpans,
    Message,
    TimeShares,
    measured_spans,
    time_shares,
)
from gnnpipe.perf.trace import Span, Trace, read_trace, write_trace
from gnnpipe.perf.volume import CommVolume, ShardRows, closed_form_volume, row_way_bytes

__all__ = [
    "ActionTimes",
    "ChunkSizes",
    "Collective",
    "CommVolume",
    "EpochSpans",
    "MemoryEstimate",
    "MemorySettings",
    "Message",
    "PlanSizes",
    "Profile",
    "ShardRows",
    "ShardSizes",
    "Span",
    "TimeShares",
    "Trace",
    "closed_form_volume",
    "estimate_memory",
    "measured_spans",
    "read_trace",
    "row_way_bytes",
    "simulate",
    "time_shares",
    "write_trace",
]

"""The critical path in words: what would have to be faster for the epoch to be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from gnnpipe.perf.simulate import Timeline
from gnnpipe.perf.tasks import Task

__all__ = ["critical_shares", "critical_text", "kind_of", "place_of"]

_OF_A_STAGE = {
    "F": "compute of",
    "B": "compute of",
    "PULL": "compute of",
    "BEGIN": "begin of",
    "FORECAST": "forecast of",
    "CARRY": "forecast of",
    "RECALL": "forecast of",
    "STEP": "optimizer of",
    "EXCHANGE_F": "exchange in",
    "EXCHANGE_B": "exchange in",
    "REDUCE_FIT": "forecast of",
    "REDUCE_MEAN": "exchange in",
    "REDUCE_GRAD": "gradient sum of",
}


_OF_ALL = {
    "compute of": "all compute",
    "begin of": "all beginnings",
    "forecast of": "all forecasts",
    "optimizer of": "all optimizers",
    "exchange in": "all exchanges",
    "gradient sum of": "all gradient sums",
}


def critical_shares(
    timeline: Timeline, name: Callable[[Task], str] | None = None
) -> dict[str, float]:
    """Share of the makespan by ``name``, the largest first; they add up to 1.

    By default by ``place_of``. What has a share of 0.2 and gets 1 % faster makes the epoch 0.2 %
    shorter, or less where another path is about as long.
    """
    name = name or place_of
    time_s: dict[str, float] = defaultdict(float)
    for task, _ in timeline.critical_path():
        time_s[name(timeline.tasks.what[task])] += timeline.tasks.duration_s[task]
    total_s = sum(time_s.values())
    shares = {place: spent / total_s for place, spent in time_s.items() if spent > 0}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def critical_text(
    timeline: Timeline, names: Sequence[str] | None = None, least: float = 0.01
) -> str:
    """As in "64 % compute of stage 2, 21 % transfer 2 to 3"; those under ``least`` are other."""
    shares = critical_shares(timeline, lambda what: place_of(what, names))
    parts = {place: share for place, share in shares.items() if share >= least}
    rest = 1 - sum(parts.values())
    if shares and rest >= least:
        parts["other"] = rest
    return ", ".join(f"{100 * share:.0f} % {place}" for place, share in parts.items())


def kind_of(what: Task) -> str:
    """What a task is, wherever."""
    if what.kind.startswith("SEND_"):
        return "all transfers"
    of_a_stage = _OF_A_STAGE.get(what.kind)
    return place_of(what) if of_a_stage is None else _OF_ALL[of_a_stage]


def place_of(what: Task, names: Sequence[str] | None = None) -> str:
    """What a task is and where; ``names`` of the stages ("stage 2" by default)."""
    if what.kind.startswith("SEND_"):
        return f"transfer {what.stage} to {what.peer}"
    if what.kind == "SYNC":
        return "all-reduce of all ranks"
    if what.kind in ("READ", "COPY"):
        return "input"
    return f"{_OF_A_STAGE[what.kind]} {names[what.stage] if names else f'stage {what.stage}'}"

"""Cuts a chain of ops into stages for devices of any speed, by dynamic programming.

The epoch of a pipeline of K chunks takes (K - 1) x the slowest stage or message + the sum of all
stages and messages. So cuts are found in two passes: the least possible time of the slowest one,
and, of all cuts whose slowest one is not much slower, those with the smallest sum. Messages pass
while stages compute. Where they take longer than the stages, many cuts are equally good; of these
the one is taken whose slowest stage is the fastest together with its message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

SLACKS = (1.0, 1.05, 1.2)
"""Allowed times of the slowest stage, relative to the least possible one."""

LEAST_GAIN = 1e-3
"""Part of the time that a cut into stages of less equal times must save."""

MOST_CUTS = 256
"""More cuts are thinned out: one for each part of the work of about this size."""


def cut_chain(
    prefixes: Sequence[Seconds], cuts: Sequence[int], hops: Sequence[float], chunks: int
) -> tuple[tuple[int, int], ...]:
    """Split the ops into one non-empty run for each stage.

    Args:
        prefixes: For each stage the prefix sums of the ops' times for a chunk on the devices of
            that stage, [ops + 1].
        cuts: Ops at which a run may begin, ascending; at least ``len(prefixes) - 1``.
        hops: Time of sending the values that cross each cut, there and back.
        chunks: K; 1 also for schedules whose stages do not overlap.

    Returns:
        First op and one past the last op of each run.

    >>> prefix = np.array([0.0, 1.0, 2.0, 3.0, 6.0])
    >>> cut_chain([prefix, prefix], [1, 2, 3], [0.0, 0.0, 0.0], 8)
    ((0, 3), (3, 4))
    """
    chosen = _thinned(prefixes[0], cuts, hops, len(prefixes))
    points = [0, *(cuts[i] for i in chosen), len(prefixes[0]) - 1]
    arrives = np.array([0.0, *(hops[i] for i in chosen), 0.0])
    stages_s = _for_each(prefixes, lambda prefix: _run_times(prefix[points]))
    sums = _for_each(stages_s, lambda stage_s: stage_s + arrives[:, None])
    longest = _for_each(stages_s, lambda stage_s: np.maximum(stage_s, arrives[:, None]))
    if chunks == 1:
        found = [_cheapest(sums, sums, np.inf)]
    else:
        # Sums of rounded times differ by rounding errors.
        found = [
            _cheapest(sums, limited, _least_slowest(limited) * slack * (1 + 1e-9))
            for limited in (sums, longest)
            for slack in SLACKS
        ]

    def time_s(ends: Sequence[int]) -> float:
        times = [cost[run] for cost, run in zip(stages_s, pairwise(ends), strict=True)]
        return pipeline_time_s(times, arrives[[*ends[1:-1]]], chunks)

    best = found[0]
    for ends in found[1:]:
        if time_s(ends) < (1 - LEAST_GAIN) * time_s(best):
            best = ends
    return tuple((points[a], points[b]) for a, b in pairwise(best))


def _thinned(
    prefix: Seconds, cuts: Sequence[int], hops: Sequence[float], stages: int
) -> Sequence[int]:
    """Return the indices of the cuts that are tried: of every part of the work the narrowest."""
    most = max(MOST_CUTS, stages - 1)
    if len(cuts) <= most:
        return range(len(cuts))
    parts = np.array_split(np.arange(len(cuts)), most)
    return [int(min(part, key=lambda i: (hops[i], prefix[cuts[i]]))) for part in parts]


def _run_times(ends: Seconds) -> Seconds:
    """Return the time of the run between any two points, without its message; inf: no run."""
    stage_s: Seconds = ends[None, :] - ends[:, None]
    stage_s[np.tril_indices(len(ends))] = np.inf
    return stage_s


def _least_slowest(costs: Sequence[Seconds]) -> float:
    band = _band(costs)
    best = costs[0][0, 1 : band + 1]
    for stage, cost in enumerate(costs[1:], 1):
        runs = cost[stage : stage + band, stage + 1 : stage + band + 1]
        best = np.maximum(best[:, None], runs).min(0)
    return float(best[-1])


def _cheapest(costs: Sequence[Seconds], limited: Sequence[Seconds], limit: float) -> list[int]:
    """Return the points between the runs with the smallest sum of ``costs``.

    No run's ``limited`` exceeds ``limit``.
    """
    band = _band(costs)
    other = {id(cost): limits for cost, limits in zip(costs, limited, strict=True)}
    allowed = _for_each(costs, lambda cost: np.where(other[id(cost)] <= limit, cost, np.inf))
    best, previous = allowed[0][0, 1 : band + 1], []
    for stage, cost in enumerate(allowed[1:], 1):
        runs = cost[stage : stage + band, stage + 1 : stage + band + 1]
        sums = best[:, None] + runs
        previous.append(sums.argmin(0))
        best = sums.min(0)
    place = band - 1
    ends = [len(costs[0]) - 1]
    for stage, begins in reversed(list(enumerate(previous, 1))):
        place = int(begins[place])
        ends.append(stage + place)
    return [0, *reversed(ends)]


def pipeline_time_s(stages_s: Sequence[float], sent_s: Iterable[float], chunks: int) -> float:
    """Return the time of an epoch whose messages pass while the stages compute.

    ``stages_s`` and ``sent_s``: time of a chunk in each stage, and of the messages between two.
    """
    both = [*stages_s, *sent_s]
    return float((chunks - 1) * max(both) + sum(both))


def _for_each(stages: Sequence[Seconds], make: Callable[[Seconds], Seconds]) -> list[Seconds]:
    """Return what is made of the array of each stage; equal devices have the same array."""
    made = {id(stage): make(stage) for stage in {id(stage): stage for stage in stages}.values()}
    return [made[id(stage)] for stage in stages]


def _band(costs: Sequence[Seconds]) -> int:
    """Return the number of points at which a stage may begin: every run needs a point.

    Stage s begins at points s to s + band - 1, and ends one point later at least.
    """
    return len(costs[0]) - len(costs)

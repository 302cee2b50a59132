"""From measured times to costs: least squares in which no cost is below 0.

Every sample is the time of one step, and the sum of the parts that lie in it. Relative errors are
what counts, so that a small chunk weighs as much as a large one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from gnnpipe.perf.profile import Affine, LinkTimes

__all__ = ["Fitted", "Sample", "Work", "fit_costs", "fit_link"]


@dataclass(frozen=True)
class Work:
    """What one part has to do in a step."""

    rows: float
    edges: float = 0.0
    entries: float = 0.0
    times: float = 1.0
    """How often its base is paid."""

    def __add__(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(
            self.rows + other.rows,
            self.edges + other.edges,
            self.entries + other.entries,
            self.times + other.times,
        )

    def columns(self) -> tuple[float, float, float, float]:
        """What the four numbers of an ``Affine`` are multiplied by."""
        return self.times, self.rows, self.edges, self.entries


@dataclass(frozen=True)
class Sample:
    """A measured time, and the parts that it was taken by."""

    time_s: float
    parts: Mapping[Hashable, Work]
    weight: float = 1.0
    """How much it counts beside others."""


@dataclass(frozen=True)
class Fitted:
    """Costs by part, and how far they are off."""

    costs: Mapping[Hashable, Affine]
    errors: Mapping[Hashable, float]
    """By part: mean |fitted - measured| over mean measured, of the samples that it is in."""


def fit_costs(samples: Sequence[Sample]) -> Fitted:
    """One ``Affine`` for every part, so that each sample is the sum of its parts."""
    parts = list(dict.fromkeys(part for sample in samples for part in sample.parts))
    place = {part: i for i, part in enumerate(parts)}
    matrix = np.zeros((len(samples), 4 * len(parts)))
    for i, sample in enumerate(samples):
        for part, work in sample.parts.items():
            matrix[i, 4 * place[part] : 4 * place[part] + 4] += work.columns()
    times = np.array([max(sample.time_s, 1e-9) for sample in samples])
    weights = np.array([sample.weight for sample in samples]) / times
    found = _non_negative(matrix * weights[:, None], times * weights)
    apart = np.abs(matrix @ found - times)
    off: dict[Hashable, float] = defaultdict(float)
    total: dict[Hashable, float] = defaultdict(float)
    for i, sample in enumerate(samples):
        for part in sample.parts:
            off[part] += float(apart[i])
            total[part] += float(times[i])
    costs = {part: Affine(*found[4 * i : 4 * i + 4].tolist()) for part, i in place.items()}
    return Fitted(costs, {part: off[part] / total[part] for part in parts})


def fit_link(sizes_bytes: Sequence[int], times_s: Sequence[float], messages: int = 1) -> LinkTimes:
    """Latency of each of ``messages`` and bandwidth from the times of these sizes, ascending.

    Through the first and the last: what a switch lets pass at once makes short messages seem fast,
    and a fit to all of them finds many times the bandwidth that long ones have.
    """
    first, last = max(times_s[0], 1e-9), max(times_s[-1], 1e-9)
    per_byte = max((last - first) / (sizes_bytes[-1] - sizes_bytes[0]), 1e-15)
    latency = max(first - per_byte * sizes_bytes[0], 0.0) / messages
    fitted = [messages * latency + per_byte * size for size in sizes_bytes]
    off = sum(abs(f - max(t, 1e-9)) for f, t in zip(fitted, times_s, strict=True))
    return LinkTimes(latency, 1.0 / per_byte, off / sum(max(t, 1e-9) for t in times_s))


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with no unknown below 0; columns of zeros get 0."""
    # Seconds a row and seconds a call are many orders apart.
    sizes = np.linalg.norm(matrix, axis=0)
    scale = np.where(sizes > 0, sizes, 1.0)
    found: np.ndarray = nnls(matrix / scale, target, maxiter=100 * matrix.shape[1])[0] / scale
    return found

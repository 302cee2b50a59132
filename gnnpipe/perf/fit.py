"""Fits costs to measured times by non-negative least squares.

A sample is the time of one step, which is the sum of the times of its parts. The fit minimises
relative errors, so that a small chunk weighs as much as a large chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from scipy.optimize import nnls

from gnnpipe.perf.profile import Affine, LinkTimes


@dataclass(frozen=True)
class Work:
    """Work of one part in a step."""

    rows: float
    edges: float = 0.0
    entries: float = 0.0
    times: float = 1.0
    """Number of calls: how often the base time of the part counts."""

    def __add__(self, other: Work) -> Work:
        """Return the sum of two amounts of work."""
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def columns(self) -> tuple[float, float, float, float]:
        """Return the factors of the four numbers of an ``Affine``."""
        return self.times, self.rows, self.edges, self.entries


@dataclass(frozen=True)
class Sample:
    """A measured time and the work of the parts in it."""

    time_s: float
    parts: Mapping[Hashable, Work]
    weight: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """Fitted costs by part."""

    costs: Mapping[Hashable, Affine]
    errors: Mapping[Hashable, float]
    """By part, mean |fitted - measured| over mean measured, of the samples with the part."""


def fit_costs(samples: Sequence[Sample]) -> Fitted:
    """Fit one ``Affine`` to every part, so that a sample is about the sum of its parts."""
    parts = list(dict.fromkeys(part for sample in samples for part in sample.parts))
    number = {part: i for i, part in enumerate(parts)}
    matrix = np.zeros((len(samples), 4 * len(parts)))
    for i, sample in enumerate(samples):
        for part, work in sample.parts.items():
            matrix[i, 4 * number[part] : 4 * number[part] + 4] += work.columns()
    times = np.array([max(sample.time_s, 1e-9) for sample in samples])
    weights = np.array([sample.weight for sample in samples]) / times
    found = _non_negative(matrix * weights[:, None], times * weights)
    errors_s = np.abs(matrix @ found - times)
    error: dict[Hashable, float] = defaultdict(float)
    total: dict[Hashable, float] = defaultdict(float)
    for i, sample in enumerate(samples):
        for part in sample.parts:
            error[part] += float(errors_s[i])
            total[part] += float(times[i])
    costs = {part: Affine(*found[4 * i : 4 * i + 4].tolist()) for part, i in number.items()}
    return Fitted(costs, {part: error[part] / total[part] for part in parts})


def fit_link(
    sizes_bytes: Sequence[float], times_s: Sequence[float], messages: int = 1
) -> LinkTimes:
    """Fit a link's bandwidth and the latency of each of ``messages`` to times by ascending size.

    The fit is the line through the first and the last time: buffers of a switch make medium
    messages seem fast, and a fit to all times would overestimate the bandwidth of long messages
    many times.
    """
    first, last = max(times_s[0], 1e-9), max(times_s[-1], 1e-9)
    per_byte = max((last - first) / (sizes_bytes[-1] - sizes_bytes[0]), 1e-15)
    latency = max(first - per_byte * sizes_bytes[0], 0.0) / messages
    fitted = [messages * latency + per_byte * size for size in sizes_bytes]
    error_s = sum(abs(f - max(t, 1e-9)) for f, t in zip(fitted, times_s, strict=True))
    return LinkTimes(latency, 1.0 / per_byte, error_s / sum(max(t, 1e-9) for t in times_s))


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the non-negative least-squares solution; columns of zeros get 0."""
    # Seconds per row and seconds per call differ by many orders of magnitude.
    sizes = np.linalg.norm(matrix, axis=0)
    scale = np.where(sizes > 0, sizes, 1.0)
    found: np.ndarray = nnls(matrix / scale, target, maxiter=100 * matrix.shape[1])[0] / scale
    return found

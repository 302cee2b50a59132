"""Finds ranks that compute longer than planned, from the compute time of every rank and epoch.

The compute time of a rank is an epoch without its waits for other ranks. It is divided by the time
that the plan expects of the rank: the predicted one if there is a prediction, otherwise its share
of the stage, and then only ranks of one stage are compared. A rank is a straggler if this quotient
exceeds that of the other ranks (their median) by ``LEAST`` and by ``DEVIATIONS`` standard errors of
the mean, and if shares by the measured speeds would shorten an epoch by ``LEAST_SAVING``. So noise
raises the threshold, and a slow rank that the plan knows of is none.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gnnpipe.plan import Placement
from gnnpipe.profiling.predict import Predictor
from gnnpipe.setup.prepared import Prepared

Floats = npt.NDArray[np.float64]

LEAST = 1.25
"""Factor over the planned time that may be an error of the prediction."""

DEVIATIONS = 5.0
"""Standard errors above which a difference is no noise; the errors are known from few epochs."""

LEAST_SAVING = 0.05
"""Share of an epoch that planning anew must save."""

WARM_UP, FEWEST, WINDOW = 1, 3, 20
"""Epochs that do not count, fewest epochs to compare, and most of them, the last ones."""


@dataclass(frozen=True)
class Straggler:
    """A rank that computes longer than planned."""

    rank: int
    epoch: int
    """Epochs done when the rank was named."""
    slowdown: float
    """Quotient of measured and planned compute time, over that of the other ranks."""
    gain: float
    """Epoch time over the estimated epoch time with work by the measured speeds."""

    def line(self, placement: Placement, path: Path | None) -> str:
        """Return the line for the log."""
        stage, shard = placement.place(self.rank)
        how = "start a run with --plan auto" if path is None else f"--resume {path} --plan auto"
        return (
            f"epoch {self.epoch}: rank {self.rank} (stage {stage}, shard {shard}) is slow: it "
            f"computes {self.slowdown:.2f} times as long as planned, relative to the other ranks; "
            f"with work by speed an epoch would be about {self.gain:.2f} times as fast ({how})"
        )


@dataclass
class StragglerWatch:
    """Compares the ranks after every epoch; each rank is named once."""

    groups: Sequence[Sequence[int]]
    """Ranks that are compared with one another."""
    work: Sequence[float]
    """Planned compute time by rank on a device of speed 1, in any unit."""
    speeds: Sequence[float]
    """Speed of each rank that the plan has assumed."""
    found: list[Straggler] = field(default_factory=list)
    """The ranks that were named."""

    def __post_init__(self) -> None:
        self._seen = 0
        self._times: deque[tuple[Sequence[float], float]] = deque(maxlen=WINDOW)

    def see(self, epoch: int, compute_s: Sequence[float], epoch_s: float) -> list[Straggler]:
        """Return the ranks to name after an epoch.

        ``compute_s``: by rank; zeros if not recorded. ``epoch_s``: time of the epoch.
        """
        self._seen += 1
        if self._seen <= WARM_UP or min(compute_s) <= 0:
            return []
        self._times.append((compute_s, epoch_s))
        if len(self._times) < FEWEST:
            return []
        named = {one.rank for one in self.found}
        new = []
        for group in self.groups:
            gain = self._gain(group) if len(group) > 1 else 1.0
            if gain > 1 / (1 - LEAST_SAVING):
                slow = zip(group, self._slowdowns(group), strict=True)
                new += [Straggler(r, epoch, s, gain) for r, s in slow if s and r not in named]
        self.found += new
        return new

    def _times_and_work(self, group: Sequence[int]) -> tuple[Floats, Floats]:
        """Return the compute times of a group, [epochs, ranks], and its planned work, [ranks]."""
        times_s = np.array([[times[rank] for rank in group] for times, _ in self._times])
        return times_s, np.array([self.work[rank] for rank in group])

    def _slowdowns(self, group: Sequence[int]) -> list[float]:
        """Return the factor by which each rank is slower than the others; 0 if it may be noise."""
        times_s, work = self._times_and_work(group)
        over = np.log(times_s * np.array([self.speeds[rank] for rank in group]) / work)
        excess = over - _median_of_others(over)
        mean = excess.mean(0)
        # The largest spread of the group: that of one rank may be small by chance.
        error = excess.std(0, ddof=1).max() / math.sqrt(len(excess))
        is_slow = mean > math.log(LEAST) + DEVIATIONS * error
        return [float(factor) for factor in np.where(is_slow, np.exp(mean), 0.0)]

    def _gain(self, group: Sequence[int]) -> float:
        """Return the epoch time over that with equal compute times in the group."""
        times_s, work = self._times_and_work(group)
        epoch_s = statistics.median(epoch_s for _, epoch_s in self._times)
        usual_s = np.median(times_s, axis=0)
        even_s = work.sum() / (work / usual_s).sum()
        return float(epoch_s / max(epoch_s - (usual_s.max() - even_s), even_s))


def _median_of_others(values: Floats) -> Floats:
    """Return for each column the median of the other columns, by row.

    >>> _median_of_others(np.array([[1.0, 2.0, 4.0]]))
    array([[3. , 2.5, 1.5]])
    """
    place = values.argsort(axis=1).argsort(axis=1)
    ascending, others = np.sort(values, axis=1), values.shape[1] - 1
    ends = [
        np.take_along_axis(ascending, i + (place <= i), axis=1)
        for i in ((others - 1) // 2, others // 2)
    ]
    middle: Floats = (ends[0] + ends[1]) / 2
    return middle


def straggler_watch(prepared: Prepared, predictor: Predictor | None) -> StragglerWatch:
    """Return the watch of a run; call it on every rank, with the same result."""
    placement, stages = prepared.plan.placement, prepared.plan.stages
    if predictor is not None:
        shares, speeds = predictor.usual.time_shares, predictor.speeds
        work = [share.compute_s * s for share, s in zip(shares, speeds, strict=True)]
        if min(work) > 0:
            return StragglerWatch([range(placement.num_ranks)], work, speeds)
    work = [stages[stage].shares[shard] for stage, shard in placement]
    return StragglerWatch(placement.stages, work, [1.0] * len(work))

"""Compares the test scores of two runs, or of two sets of runs with several seeds.

Runs with the same seed have the same initial weights, split and dropout, so the differences are
averaged over pairs of the same seed. The mean difference is shown with its standard error, because
two seeds of one configuration may differ by more than two configurations do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gnnpipe.errors import InputError
from gnnpipe.files import seed_runs
from gnnpipe.report.run import Run, read_run

TAIL = 20
"""Largest number of last epochs whose mean score is compared: it varies less than the last one."""

CONFIDENCE = 0.95
"""Confidence level of Student's t test on the differences."""

LAST, LATE, BEST = "last epoch", f"last epochs, at most {TAIL}", "best validation"

Score = float | None


@dataclass(frozen=True)
class _Ended:
    """Scores of a run that has ended, and what must agree between compared runs."""

    dataset: str
    metric: str
    split: str
    scores: Mapping[str, Score]
    """Test scores by LAST, LATE and BEST; ``None`` if the run has no such score."""


def compare_lines(first: Path, second: Path) -> list[str]:
    """Return a table of the test scores of A and B and the differences B - A.

    ``first`` and ``second``: folders of a run, or of the runs of several seeds.
    """
    a, b = _runs(first), _runs(second)
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise InputError(
            f"{str(second)!r}: has no seed in common with {str(first)!r} "
            f"({_seeds_text(b)}; {_seeds_text(a)}); train both with the same --seed and --seeds"
        )
    for what in ("dataset", "metric", "split"):
        of_a, of_b = getattr(a[seeds[0]], what), getattr(b[seeds[0]], what)
        if of_a != of_b:
            raise InputError(
                f"{str(second)!r}: its {what} is {of_b}, that of {str(first)!r} is {of_a}; compare "
                "runs with the same dataset, split and metric"
            )
    one = a[seeds[0]]
    lines = [
        f"test {one.metric} on {one.dataset}, split {one.split}; A: {first}, B: {second}",
        f"{'':32}{'A':>9}{'B':>9}{'B - A':>9}",
    ]
    for seed in seeds:
        lines.append(_row(f"seed {seed}, {LAST}", a[seed].scores[LAST], b[seed].scores[LAST]))
    for what in (LAST, LATE, BEST):
        lines += _mean_lines(what, [(a[s].scores[what], b[s].scores[what]) for s in seeds])
    left = sorted(a.keys() ^ b.keys())
    if left:
        lines.append(f"left out, because only A or B has them: seeds {', '.join(map(str, left))}")
    if len(seeds) == 1:
        lines.append("one seed says little: two seeds may differ as much; train with --seeds 3")
    return lines


def _mean_lines(what: str, pairs: list[tuple[Score, Score]]) -> list[str]:
    """Return a line with the means and the mean difference, or none if a score is missing."""
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len(known) < len(pairs):
        return []
    means = [statistics.fmean(side) for side in zip(*known, strict=True)]
    row = _row(f"{len(known)} seed{'s' * (len(known) > 1)}, {what}", means[0], means[1])
    if len(known) == 1:
        return [row]
    from scipy.special import stdtrit  # a slow import that only this line needs

    error = statistics.stdev(y - x for x, y in known) / math.sqrt(len(known))
    quantile = float(stdtrit(len(known) - 1, (1 + CONFIDENCE) / 2))
    is_significant = abs(means[1] - means[0]) > error * quantile
    verdict = "significant" if is_significant else "not significant"
    return [f"{row} ± {error:.4f}: {verdict} (paired t-test, {CONFIDENCE:.0%})"]


def _row(what: str, a: Score, b: Score) -> str:
    shown = ["-" if x is None else f"{x:.4f}" for x in (a, b)]
    difference = "-" if a is None or b is None else f"{b - a:+.4f}"
    return f"{what:32}{shown[0]:>9}{shown[1]:>9}{difference:>9}"


def _seeds_text(runs: Mapping[int, _Ended]) -> str:
    return f"seed{'s' * (len(runs) > 1)} {', '.join(map(str, sorted(runs)))}"


def _runs(path: Path) -> dict[int, _Ended]:
    """Return the runs in ``path`` by seed; ``InputError`` if there is none or one has not ended."""
    folders = [path] if (path / "config.toml").exists() else seed_runs(path)
    found = [read_run(folder) for folder in folders or [path]]
    return {_seed(run): _ended(run) for run in found}


def _seed(run: Run) -> int:
    seed = run.config.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"{run.path / 'config.toml'}: seed {seed!r}; must be a whole number")
    return seed


def _ended(run: Run) -> _Ended:
    if run.result is None:
        raise InputError(
            f"{str(run.path)!r}: has no result.json, so the run has not ended; wait for its end, "
            f"or continue it with --resume {run.path}"
        )
    result = run.result
    late = [score for score in run.metrics.get("test_metric", ())[-TAIL:] if score is not None]
    has_best = result.optional_number("best_val_metric") is not None
    return _Ended(
        result.text("dataset"),
        result.text("metric"),
        str(run.config.get("split", "?")),
        {
            LAST: result.optional_number("test_metric"),
            # A single score would be that of the last epoch again.
            LATE: statistics.fmean(late) if len(late) > 1 else None,
            BEST: result.optional_number("test_metric_at_best_val") if has_best else None,
        },
    )

"""``gnnpipe compare A B``: whether two ways to train end alike, or it is the seed that differs.

A and B are runs, or folders of several seeds. Runs of the same seed have the same first weights,
split and dropout, so it is their difference that is averaged. On a graph that a model hardly learns
two seeds differ by more than two policies do, so a difference stands beside its standard error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gnnpipe.errors import InputError
from gnnpipe.files import seed_runs
from gnnpipe.report.run import Run, read_run

__all__ = ["add_compare_flags", "compare"]

TAIL = 20
"""Last epochs that a mean is taken of: it moves less than the last one."""

SURE = 0.95
"""Of a difference that the seeds alone would make less often than once in twenty (Student's t)."""

LAST, LATE, BEST = "last epoch", f"last {TAIL} epochs", "best validation"

Score = float | None


@dataclass(frozen=True)
class _Ended:
    """What is compared of a run."""

    dataset: str
    metric: str
    split: str
    scores: Mapping[str, Score]
    """Of the test part, by LAST, LATE and BEST; None where it has no such score."""


def add_compare_flags(command: argparse.ArgumentParser) -> None:
    """The words that ``gnnpipe compare`` takes."""
    for name in ("A", "B"):
        command.add_argument(
            name.lower(), metavar=name, help="folder of a run, or of several seeds"
        )


def compare(options: argparse.Namespace) -> int:
    """Print the test scores side by side, and the difference B - A."""
    print("\n".join(_lines(Path(options.a), Path(options.b))))
    return 0


def _lines(first: Path, second: Path) -> list[str]:
    a, b = _runs(first), _runs(second)
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise InputError(
            f"{str(second)!r}: has no seed that {str(first)!r} has "
            f"({_words(b)}; {_words(a)}); train both with the same --seed and --seeds"
        )
    for what in ("dataset", "metric", "split"):
        of_a, of_b = getattr(a[seeds[0]], what), getattr(b[seeds[0]], what)
        if of_a != of_b:
            raise InputError(
                f"{str(second)!r}: its {what} is {of_b}, that of {str(first)!r} is {of_a}; compare "
                "runs of one graph, split and metric"
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
        lines.append(f"in one of the two alone, and left out: seeds {', '.join(map(str, left))}")
    if len(seeds) == 1:
        lines.append("one seed says little: two seeds of one setting may differ as much; --seeds 3")
    return lines


def _mean_lines(what: str, pairs: list[tuple[Score, Score]]) -> list[str]:
    """Mean of both and of the difference; nothing where a run has no such score."""
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len(known) < len(pairs):
        return []
    means = [statistics.fmean(side) for side in zip(*known, strict=True)]
    row = _row(f"{len(known)} seed{'s' * (len(known) > 1)}, {what}", means[0], means[1])
    if len(known) == 1:
        return [row]
    from scipy.special import stdtrit  # here, for every command would wait for it

    error = statistics.stdev(y - x for x, y in known) / math.sqrt(len(known))
    apart = abs(means[1] - means[0]) > error * float(stdtrit(len(known) - 1, (1 + SURE) / 2))
    verdict = "more than the seeds make" if apart else "no more than the seeds make"
    return [f"{row} ± {error:.4f}: {verdict}"]


def _row(what: str, a: Score, b: Score) -> str:
    shown = ["-" if x is None else f"{x:.4f}" for x in (a, b)]
    difference = "-" if a is None or b is None else f"{b - a:+.4f}"
    return f"{what:32}{shown[0]:>9}{shown[1]:>9}{difference:>9}"


def _words(runs: Mapping[int, _Ended]) -> str:
    return f"seed{'s' * (len(runs) > 1)} {', '.join(map(str, sorted(runs)))}"


def _runs(path: Path) -> dict[int, _Ended]:
    """By seed; ``InputError`` if there is none, or one that has not ended."""
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
            f"{str(run.path)!r}: has no result.json, so it has not ended; let it end, or go on "
            f"with it by --resume {run.path}"
        )
    result = run.result
    late = [score for score in run.metrics.get("test_metric", ())[-TAIL:] if score is not None]
    return _Ended(
        result.text("dataset"),
        result.text("metric"),
        str(run.config.get("split", "?")),
        {
            LAST: result.perhaps("test_metric"),
            # One of them is the last epoch again.
            LATE: statistics.fmean(late) if len(late) > 1 else None,
            BEST: result.perhaps("test_metric_at_best_val")
            if result.perhaps("best_val_metric") is not None
            else None,
        },
    )

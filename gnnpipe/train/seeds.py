"""The same run with several seeds: mean and deviation in place of a lucky number."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.train.record import claim_folder, plain
from gnnpipe.train.result import RunResult
from gnnpipe.train.trainer import Trainer

__all__ = ["SeedsResult", "fit_seeds"]

SUMMARY = (
    "loss", "train_acc", "val_acc", "test_acc", "best_val_acc", "test_acc_at_best_val",
    "best_epoch", "train_metric", "val_metric", "test_metric", "best_val_metric",
    "test_metric_at_best_val", "epoch_time_s",
)  # fmt: skip
"""Fields of a result that are averaged."""


@dataclass(frozen=True)
class SeedsResult:
    """The runs, and by field the mean and the sample deviation (n - 1; 0 for a single run)."""

    results: tuple[RunResult, ...]
    mean: dict[str, float]
    deviation: dict[str, float]
    path: Path | None = None
    """The folder that holds seed-<n>/ of every run and summary.json."""

    def lines(self) -> list[str]:
        """For a person: the metric of every seed, then mean and deviation."""
        metric = self.results[0].metric
        out = [
            f"seed {r.seed}: test {metric} {r.test_metric:.4f}, at best validation "
            f"{r.test_metric_at_best_val:.4f} (epoch {r.best_epoch})"
            for r in self.results
        ]
        for name, words in (
            ("test_metric", "last epoch"), ("test_metric_at_best_val", "at best validation"),
        ):  # fmt: skip
            out.append(
                f"{len(self.results)} seeds, {words}: test {metric} {self.mean[name]:.4f} "
                f"± {self.deviation[name]:.4f}"
            )
        return out


def fit_seeds(
    config: TrainConfig, count: int, graph: Graph | None = None, mesh: Mesh | None = None
) -> SeedsResult:
    """Train ``count`` times, with seeds ``config.seed``, ``config.seed`` + 1 and so on.

    A seed decides weights, dropout, chunk order and a split by percentages. Every run has its own
    folder below ``config.out``, whose summary.json holds what is returned.

    Raises:
        InputError: ``count`` < 1, and all that ``Trainer`` raises.
    """
    if count < 1:
        raise InputError(f"--seeds {count}: must be at least 1")
    mesh = mesh or Mesh.join(config.stages, config.shards, config.device, config.timeout_s)
    folder = claim_folder(config, mesh)
    results: list[RunResult] = []
    for seed in range(config.seed, config.seed + count):
        if mesh.rank == 0 and not config.quiet:
            print(f"seed {seed} ({len(results) + 1} of {count})", flush=True)
        # Only rank 0 writes, so only it needs the path.
        out = str(folder.path / f"seed-{seed}") if folder else "off"
        results.append(Trainer(replace(config, seed=seed, out=out), graph=graph, mesh=mesh).fit())
    mean, deviation = {}, {}
    for name in SUMMARY:
        values = [float(getattr(r, name)) for r in results]
        mean[name] = statistics.fmean(values)
        deviation[name] = statistics.stdev(values) if count > 1 else 0.0
    found = SeedsResult(tuple(results), mean, deviation, folder.path if folder else None)
    if folder is not None:
        summary = {"seeds": [r.seed for r in results], "mean": mean, "deviation": deviation}
        text = json.dumps(plain(summary), indent=1, allow_nan=False)
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "summary.json").write_text(text + "\n", encoding="utf-8")
    return found

"""Trains the same run with several seeds; reports mean and standard deviation."""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.output import say
from gnnpipe.plan import Plan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import AUTO
from gnnpipe.run.folder import claim_folder, plain
from gnnpipe.run.result import RunResult
from gnnpipe.run.summary import score
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.inputs import passed_graph
from gnnpipe.setup.prepare import join_world
from gnnpipe.tasks.loss import LossFn
from gnnpipe.train.trainer import Trainer

SUMMARY = (
    "loss",
    "train_acc",
    "val_acc",
    "test_acc",
    "best_val_acc",
    "test_acc_at_best_val",
    "best_epoch",
    "train_metric",
    "val_metric",
    "test_metric",
    "best_val_metric",
    "test_metric_at_best_val",
    "exact_epochs",
    "epoch_time_s",
)
"""Fields of a result that are averaged."""


@dataclass(frozen=True)
class SeedsResult:
    """The runs, and mean and sample standard deviation (n - 1) of each field.

    NaN if a run has no value for the field; the deviation of a single run is NaN.
    """

    results: tuple[RunResult, ...]
    mean: dict[str, float]
    deviation: dict[str, float]
    path: Path | None = None
    """The folder that holds seed-<n>/ of every run and summary.json."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of summary.json: mean, deviation and the values of each run."""
        return {
            "seeds": [r.seed for r in self.results],
            "metric": self.results[0].metric,
            "mean": self.mean,
            "deviation": self.deviation,
            "runs": {str(r.seed): {n: getattr(r, n) for n in SUMMARY} for r in self.results},
        }

    def lines(self) -> list[str]:
        """Returns the printed lines: the metric of every seed, then mean and deviation."""
        metric = self.results[0].metric
        out = []
        for r in self.results:
            out.append(f"seed {r.seed}: test {metric} {score(r.test_metric)}")
            if not math.isnan(r.best_val_metric):
                found = score(r.test_metric_at_best_val)
                out[-1] += f", at best validation {found} (epoch {r.best_epoch})"
        shown = [("test_metric", "last epoch")]
        # Without validation vertices there is no best epoch.
        if not any(math.isnan(r.best_val_metric) for r in self.results):
            shown.append(("test_metric_at_best_val", "at best validation"))
        for name, words in shown:
            out.append(
                f"{len(self.results)} seeds, {words}: test {metric} {score(self.mean[name])} "
                f"± {score(self.deviation[name])}"
            )
        return out


def fit_seeds(
    config: TrainConfig,
    count: int,
    graph: Graph | None = None,
    world: World | None = None,
    make_model: Callable[[], nn.Module] | None = None,
    loss_fn: LossFn | None = None,
    cluster: Cluster | None = None,
) -> SeedsResult:
    """Trains ``count`` times, with seeds ``config.seed``, ``config.seed`` + 1 and so on.

    The seed decides weights, dropout, chunk order, splits by percentages, link splits, and which of
    several given splits is used. Every run has a folder of its own below ``config.out``, which also
    holds the result as summary.json. ``make_model`` returns a new model for every run and is called
    with torch seeded; ``loss_fn`` and ``cluster`` as for ``Trainer``.

    Raises:
        InputError: ``count`` < 1, a model that was trained before, or an error of ``Trainer``.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise InputError(f"--seeds {count!r}: must be a whole number")
    if count < 1:
        raise InputError(f"--seeds {count}: must be at least 1")
    if config.seed + count > 2**32:
        raise InputError(f"--seeds {count}: --seed {config.seed} is too near to 2^32 for so many")
    met = world or join_world(config)
    met.agree_on({"--seeds": count})
    graph = passed_graph(graph)
    folder, _ = claim_folder(config, met, graph, make_model)
    results: list[RunResult] = []
    plan: Plan | None = None
    made: list[nn.Parameter] = []
    for seed in range(config.seed, config.seed + count):
        if met.rank == 0:
            say(f"seed {seed} ({len(results) + 1} of {count})", config.quiet)
        # Only rank 0 writes, so only it needs the path.
        out = str(folder.path / f"seed-{seed}") if folder else "off"
        model = None if make_model is None else _new_model(make_model, seed, made)
        run = replace(config, seed=seed, out=out)
        trainer = Trainer(run, graph, model, plan, met, loss_fn, cluster=cluster)
        results.append(trainer.fit())
        if config.plan == AUTO:
            # Searched once; the plan may use fewer ranks.
            plan, met, cluster = trainer.plan, trainer.world, None
        del trainer
        gc.collect()  # frees the tables, which are in a reference cycle, before the next run
        found = _summary(results, folder.path if folder else None)
        if found.path is not None:
            # After every run, so that a failing run does not lose earlier results.
            found.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(plain(found.to_dict()), indent=1, allow_nan=False)
            (found.path / "summary.json").write_text(text + "\n", encoding="utf-8")
    if world is None:
        met.leave()
    return found


def _new_model(
    make_model: Callable[[], nn.Module], seed: int, made: list[nn.Parameter]
) -> nn.Module:
    """Returns a model made with torch seeded; adds its weights to those that were ``made``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_model()
    if any(p is q for p in model.parameters() for q in made):
        raise InputError(
            f"make_model: returned the weights of an earlier seed for seed {seed}, already "
            "trained; return a new model from every call"
        )
    made += model.parameters()
    return model


def _summary(results: list[RunResult], path: Path | None) -> SeedsResult:
    mean, deviation = {}, {}
    for name in SUMMARY:
        values = [float(getattr(r, name)) for r in results]
        mean[name] = statistics.fmean(values)
        # A part of the split without vertices has neither score nor deviation.
        is_known = len(values) > 1 and all(map(math.isfinite, values))
        deviation[name] = statistics.stdev(values) if is_known else math.nan
    return SeedsResult(tuple(results), mean, deviation, path)

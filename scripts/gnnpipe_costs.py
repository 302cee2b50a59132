"""Costs of GNNPipe's own runs, from its authors' logs, for the simulator (arXiv 2308.10087).

Used by gnnpipe_figures.py. 8 GPUs, 32 layers; one case is a graph, a model and a method.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from gnnpipe.plan import Placement, Plan, StageDag, StagePlan, Transfer  # noqa: E402
from gnnpipe.planner.uniform import split_evenly  # noqa: E402

LOGS = ROOT.parent / "shared" / "gnnpipe_measured.csv"

LAYERS, GPUS = 32, 8
SHAPES = {"graph": (1, 8, 1), "pipeline": (8, 1, 32), "hybrid": (4, 2, 16)}
"""S, G, K = 4 S; one chunk where there are no stages."""
CHUNK_SPREAD = 1.21
"""Longest to shortest time of a chunk, as the authors' code states for Reddit."""
FORWARD_SHARE = 1 / 3
GIB, GBIT = 2.0**30, 1e9 / 8


@dataclass(frozen=True)
class Dataset:
    """Sizes; ``crossings`` is M / N of METIS for 8 shards."""

    vertices: int
    features: int
    classes: int
    hidden: int
    crossings: float


DATASETS = {
    "squirrel": Dataset(5_201, 2_089, 5, 1000, 2.22),
    "flickr": Dataset(89_250, 500, 7, 100, 2.15),
    "reddit": Dataset(232_965, 602, 41, 100, 2.61),
    "physics": Dataset(34_493, 8_415, 5, 100, 0.99),
}
MODELS = ("gcn", "graphsage", "gcnii", "resgcn")


@cache
def logs() -> dict[tuple[str, str, str], dict[str, float]]:
    """By graph, model and method; NaN where the logs have nothing."""
    with LOGS.open(encoding="utf-8", newline="") as file:
        return {
            (row.pop("graph"), row.pop("model"), row.pop("method")): {
                name: float(value) for name, value in row.items()
            }
            for row in csv.DictReader(file)
        }


def num_weights(data: Dataset, model: str) -> int:
    """An encoder and 32 layers; SAGE has two matrices each, ResGCN+ two in a layer."""
    encoder, layers = data.features * data.hidden, LAYERS * data.hidden**2
    if model == "graphsage":
        return 2 * (encoder + layers)
    return encoder + (2 if model == "resgcn" else 1) * layers


def passed_bytes(shards: int, size_bytes: float) -> float:
    """By a rank, to add up gradients of that size."""
    return 2 * (shards - 1) / shards * size_bytes


@dataclass(frozen=True)
class Fit:
    """The numbers that were fitted, for all cases together."""

    encoder_s: float
    """Of one entry of the features, forward and backward."""
    update_s: tuple[float, float]
    """Of the optimizer, and more for each weight."""
    reduce_s: tuple[float, float]
    """Of the gradient sum, and more for each byte that passes."""


class LoggedCosts:
    """Costs of one case. All shards of a stage are alike."""

    def __init__(self, graph: str, model: str, method: str, fit: Fit, per_case: bool) -> None:
        """``per_case``: with the throughputs of the case itself, not the median of all cases."""
        self.data, self.model, self.fit = DATASETS[graph], model, fit
        self.stages, self.shards, self.chunks = SHAPES[method]
        row = logs()[graph, model, method]
        self.total_s = row["Compute"] / 1e3 * GPUS
        # The first layer has the encoder; stages are cut so that the slowest is least.
        each = fit.encoder_s * self.data.vertices * self.data.features
        each = min(each, 0.9 * self.total_s)
        of_layers = [(self.total_s - each) / LAYERS] * LAYERS
        of_layers[0] += each
        cuts = range(1, LAYERS)
        self.runs = split_evenly(of_layers, self.stages, cuts, [1] * len(cuts))
        self.stage_s = [sum(of_layers[first:last]) / self.shards for first, last in self.runs]
        self.steps = [last - first + 1 for first, last in self.runs]
        sizes = [1 + (CHUNK_SPREAD - 1) * c / max(self.chunks - 1, 1) for c in range(self.chunks)]
        random.Random(0).shuffle(sizes)
        self.chunk_share = [size / sum(sizes) for size in sizes]
        self.exchange_bytes_per_s = throughput("Graph", graph, model, method, per_case)
        self.link_bytes_per_s = throughput("Layer", graph, model, method, per_case)
        crossings = self.data.crossings
        if method == "hybrid":
            sent = 2 * LAYERS * 4 * self.data.hidden * self.data.vertices
            crossings = row["vol:Graph-level"] * GIB / sent
        self.crossings = crossings * self.data.vertices

    def dag(self) -> StageDag:
        """Return the stages of the case as a plan of gnnpipe."""
        stages = range(self.stages)
        links = tuple(Transfer(a, b, {"x": self.data.hidden}) for a, b in pairwise(stages))
        stages = tuple(
            StagePlan.even(tuple(range(*run)), ranks)
            for run, ranks in zip(
                self.runs, Placement.grid(self.stages, self.shards).stages, strict=True
            )
        )
        return StageDag(Plan(stages, self.chunks, "fill-drain"), tuple(self.steps), links)

    def begin_s(self, stage: int, shard: int) -> float:
        return 0.0

    def step_s(self, way: str, stage: int, shard: int, chunk: int, step: int) -> float:
        share = FORWARD_SHARE if way == "F" else 1 - FORWARD_SHARE
        return share * self.stage_s[stage] * self.chunk_share[chunk] / self.steps[stage]

    def finish_s(self, stage: int, shard: int) -> float:
        return 0.0

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        return 0.0

    def probe_s(self, kind: str, stage: int, shard: int) -> float:
        return 0.0

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """GNNPipe forecasts nothing."""
        return ()

    def update_s(self, stage: int, shard: int) -> float:
        start_s, each_s = self.fit.update_s
        return start_s + each_s * num_weights(self.data, self.model) / self.stages

    def message_pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        return [(shard, shard) for shard in range(self.shards)]

    def message_bytes(
        self, way: str, source: int, target: int, pair: tuple[int, int], chunk: int
    ) -> int:
        values = 2 if self.model == "gcnii" else 1  # h0 travels along.
        rows = self.data.vertices * self.chunk_share[chunk] / self.shards
        return int(values * rows * self.data.hidden * 4)

    def has_columns(self, stage: int, step: int) -> bool:
        """No rows travel by columns."""
        del stage, step
        return False

    def has_exchange(self, way: str, stage: int, step: int) -> bool:
        """None of its models takes a mean over all vertices."""
        return True

    def exchange_bytes(self, way: str, stage: int, shard: int, chunk: int, step: int) -> int:
        rows = self.crossings * self.chunk_share[chunk] / self.shards
        return int(rows * self.data.hidden * 4)

    def mean_bytes(self, stage: int, step: int) -> Sequence[int]:
        """None."""
        return ()

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        return 4 * num_weights(self.data, self.model) // self.stages

    def message_s(self, source: int, target: int, size_bytes: int) -> float:
        return size_bytes / self.link_bytes_per_s

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        return max(sizes_bytes) / self.exchange_bytes_per_s

    def shard_sum_s(self, stage: int, size_bytes: int) -> float:
        start_s, each_s = self.fit.reduce_s
        return start_s + each_s * passed_bytes(self.shards, size_bytes)

    def shard_sum_bytes(self, stage: int, size_bytes: int) -> int:
        return 2 * (self.shards - 1) * size_bytes

    def shard_sum_phases(self) -> int:
        return 2

    def sync_s(self) -> float:
        return 0.0

    def link(self, source: int, target: int) -> str:
        return f"link {source} to {target}"

    def group(self, stage: int) -> str:
        return f"shards of stage {stage}"

    def port_s(self, _: float) -> float:
        return 0.0


def throughput(kind: str, graph: str, model: str, method: str, per_case: bool) -> float:
    """Bytes a second that a rank sends: of the case, or the median over the cases of a method."""
    name = f"{kind}-Level_Communication_Throughput"
    cases = [(graph, model)] if per_case else [(g, m) for g in DATASETS for m in MODELS]
    found = [logs()[g, m, method][name] * GBIT for g, m in cases]
    found = [value for value in found if value > 0]
    return statistics.median(found) if found else math.inf

"""Writes docs/benchmarks/auto_search_time.md: processor time of the search of --plan auto.

Models of 64 layers, one of them with a jumping connection, and one of 4 branches of 8 layers; 64
and 1,024 devices of data sheets. Counted are the description of the model and the search.
"""

from __future__ import annotations

import platform
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from branched_models import Branches
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, JumpingKnowledge

from gnnpipe.config import TrainConfig
from gnnpipe.planner import find_plan
from gnnpipe.planner.found_plan import FoundPlan
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.profiling.scenario import GraphShape, model_on_shape
from gnnpipe.profiling.search import search_space, workload_of_shape

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "auto_search_time.md"
SHAPE = GraphShape(233_000, 114_600_000, 602, 41, halo=1.5)
CONFIG = TrainConfig(layers=64, hidden=128)
REPEATS = 5


class Jumping(nn.Module):
    """GCN layers whose results are all read by the last linear layer."""

    def __init__(self, layers: int) -> None:
        """``layers``: number of layers."""
        super().__init__()
        widths = [SHAPE.features, *[CONFIG.hidden] * layers]
        self.convs = nn.ModuleList(GCNConv(*ends) for ends in pairwise(widths))
        self.jump = JumpingKnowledge("cat")
        self.end = nn.Linear(CONFIG.hidden * layers, SHAPE.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns the logits [N, C]."""
        rows = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            rows.append(x)
        return self.end(self.jump(rows))


def _models() -> dict[str, tuple[TrainConfig, nn.Module | None]]:
    """Returns the settings and the module, if it is no built-in model, by name."""
    branches = Branches(SHAPE.features, CONFIG.hidden, SHAPE.classes, 4, 8)
    return {
        "gcn, 64 layers": (CONFIG, None),
        "gcnii, 64 layers": (replace(CONFIG, model="gcnii"), None),
        "GCN, 16 layers, JumpingKnowledge": (CONFIG, Jumping(16)),
        "GCN, 64 layers, JumpingKnowledge": (CONFIG, Jumping(64)),
        "4 branches of 8 GCN layers": (CONFIG, branches),
    }


def _measure(
    config: TrainConfig, module: nn.Module | None, devices: int
) -> tuple[float, float, FoundPlan]:
    """Returns the seconds of processor of description and search, and the plan."""
    begin_s = time.process_time()
    hardware = Hardware(sheets="a100:100gbe", devices=devices)
    model = model_on_shape(config, SHAPE, module)
    described_s = time.process_time() - begin_s
    space = search_space(config, workload_of_shape(config, SHAPE, model, hardware), hardware)
    found = find_plan(space)
    return described_s, time.process_time() - begin_s - described_s, found


def _row(name: str, config: TrainConfig, module: nn.Module | None, devices: int) -> str:
    measured = [_measure(config, module, devices) for _ in range(REPEATS)]
    described, searched = zip(*((d, s) for d, s, _ in measured), strict=True)
    totals = [d + s for d, s, _ in measured]
    found = measured[0][2]
    return (
        f"| {name} | {devices:,} | {found.best.name} | {found.num_candidates} "
        f"| {median(described):.2f} | {median(searched):.2f} "
        f"| {median(totals):.2f} ({min(totals):.2f} to {max(totals):.2f}) |"
    )


def main() -> None:
    """Measure all models and write the page."""
    for module in (None, Jumping(2)):  # torch loads what it needs once
        model_on_shape(replace(CONFIG, layers=2), SHAPE, module)
    rows = []
    for name, (config, module) in _models().items():
        for devices in (64, 1024):
            rows.append(_row(name, config, module, devices))
            print(rows[-1], flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    text = [
        "# Time of the search of --plan auto",
        "",
        "This page shows how long the search of a plan takes, in seconds of processor.",
        "",
        f"Written by `python scripts/auto_search_time.py` on {time.strftime('%d %B %Y')}, commit "
        f"{commit}, {platform.processor() or platform.machine()}, one thread. "
        f"Median of {REPEATS} repeats (least to most).",
        "",
        "| model | devices | plan (S x G x K) | candidates | description, s | search, s "
        "| total, s |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    PAGE.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

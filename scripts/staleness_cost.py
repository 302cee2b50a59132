"""What measuring and forecasting staleness cost, as shares of an epoch, in one run.

python scripts/staleness_cost.py    # writes docs/benchmarks/staleness_cost.md
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import Cell  # noqa: E402

from gnnpipe.config import TrainConfig  # noqa: E402
from gnnpipe.run.metrics_csv import measure_staleness  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.runtime.history.base import Drift  # noqa: E402
from gnnpipe.runtime.staleness.forecast import Forecaster  # noqa: E402
from gnnpipe.setup.build import build_rank  # noqa: E402
from gnnpipe.setup.prepare import prepare  # noqa: E402
from gnnpipe.train.evaluate import train_epoch  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "staleness_cost.md"
CELLS = [
    Cell(graph, model, layers)
    for graph in ("squirrel+symmetrized", "pubmed", "debian")
    for model, layers in (("gcn", 4), ("gcnii", 16))
]
EPOCHS = 7

spent = {"drift": 0.0, "forecast": 0.0}


def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: Any, **names: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*words, **names)
        finally:
            spent[kind] += time.perf_counter() - start

    return call


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("before", "after"):
        setattr(Drift, name, timed("drift", getattr(Drift, name)))
    for name in ("run", "remember"):
        setattr(Forecaster, name, timed("forecast", getattr(Forecaster, name)))
    measure = timed("drift", measure_staleness)
    lines = [
        "# What measuring and forecasting staleness cost",
        "",
        f"Made by `scripts/staleness_cost.py` at commit {commit()}, "
        f"{time.strftime('%Y-%m-%d')}; one process, one thread,"
        f" K = 32, hidden 64; shares of the epoch's time, median and range of {EPOCHS} epochs."
        " SpMM: edges that the probe rows read, of those that the epoch reads forward and backward."
        " Rows: what the probe vertices add to the values that cross a stage boundary.",
        "",
        "| graph | model | epoch | measuring | forecast | SpMM | rows sent |",
        "|---|---|---|---|---|---|---|",
    ]
    mesh = Mesh.join(1, 1)
    for cell in CELLS:
        config = TrainConfig(**cell.settings())
        prepared = prepare(config, mesh)
        rank_runtime = build_rank(prepared, mesh)
        shares: dict[str, list[float]] = {"drift": [], "forecast": []}
        times = []
        for epoch in range(EPOCHS + 2):
            spent.update(drift=0.0, forecast=0.0)
            start = time.perf_counter()
            order = prepared.chunk_order(epoch)
            train_epoch(rank_runtime, mesh, prepared.program_of(epoch), order, epoch)
            measure(prepared, rank_runtime, mesh, order, epoch)
            if epoch >= 2:
                times.append(time.perf_counter() - start)
                for kind, seconds in spent.items():
                    shares[kind].append(seconds / times[-1])
        graph = prepared.graph
        edges = int(graph.degrees[prepared.probes].sum()) / (2 * graph.num_edges)
        rows = len(prepared.probes) / graph.num_vertices
        words = [f"{statistics.median(v):.1%} ({min(v):.1%}-{max(v):.1%})" for v in shares.values()]
        lines.append(
            f"| {cell.dataset} | {cell.model} {cell.layers} | {statistics.median(times):.2f} s | "
            f"{' | '.join(words)} | {edges:.1%} | {rows:.1%} |"
        )
        print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

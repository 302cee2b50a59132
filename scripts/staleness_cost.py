"""What 32 chunks cost over one, and what of it is the forecast: time and memory in turns.

python scripts/staleness_cost.py    # some 10 minutes; writes docs/benchmarks/staleness_cost.md

Two processes take turns, an epoch each (``compare_commits.in_turns``). Graphs that are not there
are left out (``peers.SHARED``).
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from compare_commits import GRAPHS, Cell, has_graph, in_turns  # noqa: E402
from fidelity import commit  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "staleness_cost.md"
MODELS = (("gcn", "3"), ("gcnii", "16"))
CHUNKS = "32"


def beside(graph: str, model: str, layers: str, one: list[str], other: list[str]) -> Cell:
    """Epochs of two settings (chunks, staleness) in turns."""
    words = [[graph, model, layers, *settings] for settings in (one, other)]
    return in_turns(f"{graph} {model}", [ROOT, ROOT], words)


def ratio(cell: Cell) -> str:
    """The second setting's time over the first's."""
    low, _, high = statistics.quantiles(cell.ratios, n=4, method="inclusive")
    return f"{cell.time:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measure all cells and write the page."""
    lines = [
        f"# What {CHUNKS} chunks and the forecast cost",
        "",
        f"Made by `scripts/staleness_cost.py` at commit {commit()}, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} cores ({platform.machine()}); one process, one thread, width 128, "
        "dropout 0.5. Processor time of epochs in turns: medians, and the median (quartiles) of "
        f"the ratios. *Chunks*: K = {CHUNKS} over K = 1, `--staleness auto`. *Forecast*: with K = "
        f"{CHUNKS}, `auto` over `none`. *Memory*: peak of the process, K = {CHUNKS} over K = 1.",
        "",
        f"| graph | model | K = 1, ms | K = {CHUNKS}, ms | chunks | forecast | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for graph in filter(has_graph, GRAPHS):
        for model, layers in MODELS:
            chunks = beside(graph, model, layers, ["1", "auto"], [CHUNKS, "auto"])
            forecast = beside(graph, model, layers, [CHUNKS, "none"], [CHUNKS, "auto"])
            times = (f"{1e3 * statistics.median(s):.1f}" for s in (chunks.before_s, chunks.after_s))
            lines.append(
                f"| {graph} | {model} {layers} | {' | '.join(times)} | {ratio(chunks)} | "
                f"{ratio(forecast)} | {chunks.memory:.2f} |"
            )
            print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How much memory ranks take beside the estimate: GCN, SAGE, GCNII on four shapes.

    python scripts/memory_growth.py [--graph debian]

Growth of each rank's resident memory over a run of 6 epochs (its peak, less what it held before
training), over what ``gnnpipe info`` says. With the settings of the heap and without (adr 0018).
Writes docs/benchmarks/memory_growth.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity import commit  # noqa: E402
from predicted_speed import GRAPHS, MODELS, SHAPES  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "memory_growth.md"
HEAPS = {"settings of the heap": None, "without": "glibc.malloc.arena_max=8"}
"""GLIBC_TUNABLES; any that stand are left alone, and this one changes nothing here."""


def grown(graph: str, model: str, shape: tuple[int, int, int], heap: str | None) -> list[float]:
    """By rank, growth over estimate."""
    stages, shards, chunks = shape
    ranks = stages * shards
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {} if heap is None else {"GLIBC_TUNABLES": heap}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m"]
        if ranks > 1:
            command += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
        command += ["gnnpipe", "train", *GRAPHS[graph], "--model", model, "--layers", "4"]
        command += ["--hidden", "64", "--epochs", "6", "--eval-every", "0", "--device", "cpu"]
        command += ["--stages", str(stages), "--shards", str(shards), "--chunks", str(chunks)]
        command += ["--out", f"{place}/run", "--quiet", "--no-predict"]
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
        result = json.loads(Path(place, "run", "result.json").read_text(encoding="utf-8"))
    names = ("peak_memory_bytes", "memory_before_bytes", "memory_estimate_bytes")
    return [
        (peak - before) / sum(estimate.values())
        for peak, before, estimate in zip(*(result[name] for name in names), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graph", choices=list(GRAPHS), default="coauthor_physics")
    graph = parser.parse_args().graph
    lines = [
        "# Memory beside its estimate", "",
        f"`scripts/memory_growth.py`, {time.strftime('%d %B %Y')}, commit {commit()}. {graph}, 4 "
        "layers of 64, 6 epochs on CPUs, one run a cell: growth of each rank over its estimate, "
        "with the settings of glibc's heap (adr 0018) and without.", "",
        f"| model | S, G, K | {' | '.join(HEAPS)} |", "|---|---|---|---|",
    ]  # fmt: skip
    for model in MODELS:
        for shape in SHAPES:
            cells = [
                ", ".join(f"{x:.2f}" for x in grown(graph, model, shape, heap))
                for heap in HEAPS.values()
            ]
            lines.append(f"| {model} | {', '.join(map(str, shape))} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How much memory a rank takes with 1, 2 and 4 stages.

    python scripts/memory_stages.py [--graphs G ...] [--repeats 3] [--report]

GCN and GCNII, 32 layers of 128, 32 chunks, 3 epochs on CPUs; the ranks share this machine. Growth
of each rank's resident memory: its peak over what it held before its part was allocated, so graph
structure and features are counted, the interpreter is not. Writes docs/benchmarks/memory_stages.md,
.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import bars, write_csv  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import SHARED  # noqa: E402

DATA = ROOT / "docs" / "benchmarks" / "memory_stages.csv"
PAGE = ROOT / "docs" / "benchmarks" / "memory_stages.md"
GRAPHS = {
    "coauthor_physics": ["--dataset", str(SHARED / "coauthor_physics.npz"), "--split", "60/20/20"],
    "squirrel": ["--dataset", str(SHARED / "squirrel.npz"), "--split", "60/20/20"],
    "debian": ["--dataset", "debian"],
}
MODELS, STAGES = ("gcn", "gcnii"), (1, 2, 4)
LAYERS, HIDDEN, CHUNKS = 32, 128, 32
BOUND = 0.25 * 1.15
"""Of what one process takes, at four stages."""


def grown(graph: str, model: str, stages: int) -> tuple[list[float], list[float]]:
    """Growth and estimate of each rank in MiB."""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m"]
        if stages > 1:
            command += ["torch.distributed.run", "--nproc-per-node", str(stages), "-m"]
        command += ["gnnpipe", "train", *GRAPHS[graph], "--model", model, "--out", f"{place}/run"]
        command += ["--layers", str(LAYERS), "--hidden", str(HIDDEN), "--chunks", str(CHUNKS)]
        command += ["--stages", str(stages), "--epochs", "3", "--eval-every", "0", "--quiet"]
        command += ["--device", "cpu", "--no-predict", "--checkpoint-every", "0"]
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
        result = json.loads(Path(place, "run", "result.json").read_text(encoding="utf-8"))
    before = result["memory_before_bytes"]
    took = [(p - b) / 2**20 for p, b in zip(result["peak_memory_bytes"], before, strict=True)]
    return took, [sum(e.values()) / 2**20 for e in result["memory_estimate_bytes"]]


def report() -> None:
    """The page and the picture of what the csv holds."""
    with DATA.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    repeats, commits = (sorted({row[key] for row in rows}) for key in ("repeats", "commit"))
    lines = [
        "# Memory of a rank, by the number of stages",
        "",
        f"`scripts/memory_stages.py`, {rows[-1]['date']}, commit {', '.join(commits)}. {LAYERS} "
        f"layers of {HIDDEN}, K = {CHUNKS}, on CPUs. MiB that the largest rank grew by, from "
        "before its part was allocated to its peak: structure, features, tables, activations, "
        "weights. "
        f"Median (least to most) of {', '.join(repeats)} runs; behind it the estimate of `gnnpipe "
        "info` for that rank. *S = 4 over 1*: of the medians; the aim is at most "
        f"{BOUND:.4f}, a quarter and 15 % of it.",
        "",
        f"| graph | model | {' | '.join(f'S = {s}' for s in STAGES)} | S = 4 over 1 |",
        f"|---|---|{'---|' * len(STAGES)}---|",
    ]
    shares: dict[str, dict[str, float]] = {}
    for graph, model in dict.fromkeys((row["graph"], row["model"]) for row in rows):
        of = [row for row in rows if (row["graph"], row["model"]) == (graph, model)]
        medians = [float(row["median_mib"]) for row in of]
        cells = [
            f"{row['median_mib']} ({row['least_mib']}-{row['most_mib']}), {row['estimate_mib']}"
            for row in of
        ]
        lines.append(
            f"| {graph} | {model} | {' | '.join(cells)} | {medians[-1] / medians[0]:.3f} |"
        )
        shares[f"{graph} {model}"] = {
            f"S = {row['stages']}": float(row["median_mib"]) / medians[0] for row in of
        }
    picture = bars("memory_stages", shares, "largest rank over one process", aim=BOUND)
    PAGE.write_text("\n".join([*lines, "", picture]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="only write the page anew")
    args = parser.parse_args()
    table: list[dict[str, str | int]] = []
    for graph in [] if args.report else args.graphs:
        for model in MODELS:
            for stages in STAGES:
                runs = [grown(graph, model, stages) for _ in range(args.repeats)]
                most = [max(took) for took, _ in runs]
                table.append(
                    {
                        "graph": graph,
                        "model": model,
                        "stages": stages,
                        "median_mib": round(statistics.median(most)),
                        "least_mib": round(min(most)),
                        "most_mib": round(max(most)),
                        "estimate_mib": round(max(runs[0][1])),
                        "repeats": args.repeats,
                        "commit": commit(),
                        "date": time.strftime("%d %B %Y"),
                    }
                )
                print(table[-1], flush=True)
            # Of what is done so far: all of it takes a quarter of an hour.
            write_csv("memory_stages", table)
            report()
    if args.report:
        report()


if __name__ == "__main__":
    main()

"""Time and memory of two commits in turns: are runs slower, or larger, than they were?

    python scripts/compare_commits.py b8d01c6 HEAD --repeats 5 [--mbit 200]

Trains the same cells (models, graphs, shapes) with both commits, one after the other, so that
whatever else the machine does meets both alike. For each cell the median epoch time and the peak
memory per rank, and the ratio of the second commit to the first with its spread. Writes
docs/benchmarks/compare_commits.md (or ``--page``). Threads are pinned (OMP_NUM_THREADS=1 per
rank). Graphs of ``--data`` (a folder of npz files) that are not there are left out. With ``--mbit``
the last cells run on two hosts with links of that rate (``namespaces.py``; needs root).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

from namespaces import Hosts  # noqa: E402

MODELS = {
    "gcn": ["--layers", "16", "--hidden", "128"],
    "sage": ["--layers", "3", "--hidden", "128"],
    "gcnii": ["--layers", "8", "--hidden", "64"],
    "gat": ["--layers", "3", "--hidden", "64"],
}
GRAPHS = ("squirrel", "coauthor_physics", "debian")
SHAPES = [
    ("gcnii", "debian", ["--stages", "2", "--chunks", "8"]),
    ("gcnii", "debian", ["--shards", "2"]),
]
EPOCHS, PORT = 8, 29611


def train(tree: Path, flags: list[str], ranks: int, mbit: float = 0.0) -> tuple[float, float]:
    """Median seconds of an epoch and peak MiB of the largest rank.

    ``mbit``: rate of the links between the ranks, each on a host of its own; 0: one machine.
    """
    launch = [sys.executable, "-m", "gnnpipe"]
    if ranks > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(ranks), "-m", "gnnpipe"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        common = ["--epochs", str(EPOCHS), "--eval-every", "0", "--no-predict", "--quiet"]
        words = ["train", *flags, *common, "--out", str(run)]
        given = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        if mbit:
            rank = [sys.executable, "-m", "gnnpipe", *words]
            with Hosts(ranks, mbit) as hosts, open(Path(folder) / "errors", "w") as errors:
                every = [hosts.start(i, rank, given, PORT, errors) for i in range(ranks)]
                for process in every:
                    process.communicate()
                assert not any(process.returncode for process in every), "a rank has failed"
        else:
            subprocess.run(
                [*launch, *words],
                check=True,
                cwd=folder,
                env=os.environ | given,
                stdout=subprocess.DEVNULL,
            )
        result = json.loads((run / "result.json").read_text())
    return result["epoch_time_s"], max(result["peak_memory_bytes"]) / 2**20


def cells(data: Path, mbit: float) -> list[tuple[str, list[str], int, float]]:
    """Name, flags, number of ranks and rate of the links of every cell."""
    found = []
    for model, settings in MODELS.items():
        for graph in GRAPHS:
            flags = ["--model", model, *settings]
            found.append((f"{model} {graph} (1,1,1)", flags, graph, 1, 0.0))
    for model, graph, shape in SHAPES:
        for rate in (0.0, mbit) if mbit else (0.0,):
            name = f"{model} {graph} {' '.join(shape)}" + (f", {rate:g} Mbit/s" if rate else "")
            found.append((name, ["--model", model, *MODELS[model], *shape], graph, 2, rate))
    known = []
    for name, flags, graph, ranks, rate in found:
        path = data / f"{graph}.npz"
        if graph == "debian":
            known.append((name, ["--dataset", "debian", *flags], ranks, rate))
        elif path.exists():
            known.append((name, ["--dataset", str(path), *flags], ranks, rate))
    return known


def row_of(name: str, first: list[tuple[float, float]], second: list[tuple[float, float]]) -> dict:
    """Medians of a cell, and the ratios of the second commit to the first."""
    ratios = [b[0] / a[0] for a, b in zip(first, second, strict=True)]
    return {
        "cell": name,
        "before_ms": statistics.median(t for t, _ in first) * 1e3,
        "after_ms": statistics.median(t for t, _ in second) * 1e3,
        "time": statistics.median(ratios),
        "spread": (min(ratios), max(ratios)),
        "before_mib": statistics.median(m for _, m in first),
        "after_mib": statistics.median(m for _, m in second),
    }


def page(rows: list[dict], commits: tuple[str, str], repeats: int) -> str:
    """The benchmark page."""
    mean = statistics.geometric_mean([row["time"] for row in rows])
    memory = statistics.geometric_mean([row["after_mib"] / row["before_mib"] for row in rows])
    head = ["cell", "before, ms", "after, ms", "time, after / before"]
    head += ["before, MiB", "after, MiB", "memory"]
    lines = [
        "# Two commits in turns",
        "",
        f"Time and memory of {commits[1]} beside {commits[0]}, measured by "
        f"`scripts/compare_commits.py {' '.join(commits)} --repeats {repeats} ...` on "
        f"{os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}. "
        f"Runs of {EPOCHS} epochs take turns; one thread per rank; medians over the "
        "repeats, and the ratio of each pair of runs with the "
        "smallest and the largest. Memory is the peak of the largest rank.",
        "",
        f"Geometric mean of the ratios: time {mean:.3f}, memory {memory:.3f}.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for row in rows:
        low, high = row["spread"]
        lines.append(
            f"| {row['cell']} | {row['before_ms']:.1f} | {row['after_ms']:.1f} | "
            f"{row['time']:.3f} ({low:.2f} to {high:.2f}) | {row['before_mib']:.0f} | "
            f"{row['after_mib']:.0f} | {row['after_mib'] / row['before_mib']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--mbit", type=float, default=0.0, help="also cells on slow links")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    parser.add_argument("--page", default="compare_commits", help="name of the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees, names = [], []
        for commit in (options.before, options.after):
            name = subprocess.check_output(
                ["git", "rev-parse", "--short", commit], cwd=ROOT, text=True
            ).strip()
            tree = Path(folder) / name
            subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
            subprocess.run(["git", "checkout", "-q", name], cwd=tree, check=True)
            trees.append(tree)
            names.append(name)
        rows = []
        for name, flags, ranks, mbit in cells(options.data, options.mbit):
            if options.only not in name:
                continue
            runs: tuple[list, list] = ([], [])
            for _ in range(options.repeats):
                for tree, found in zip(trees, runs, strict=True):
                    found.append(train(tree, flags, ranks, mbit))
            rows.append(row_of(name, *runs))
            print(rows[-1], flush=True)
    target = ROOT / "docs" / "benchmarks" / f"{options.page}.md"
    target.write_text(page(rows, (names[0], names[1]), options.repeats), encoding="utf-8")


if __name__ == "__main__":
    main()

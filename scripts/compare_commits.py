"""Time and memory of two commits in turns: are runs slower, or larger, than they were?

    python scripts/compare_commits.py b8d01c6 HEAD [--chunks 32] [--only gcn] [--page NAME]
    python scripts/compare_commits.py b8d01c6 HEAD --ranks --repeats 5 [--mbit 200]

One process: for each model, graph and depth one process of each commit (``epochs_on_request.py``)
trains an epoch in turns, so that whatever else the machine does meets both alike; processor time of
an epoch. With ``--ranks``: whole runs of two ranks in turns; the median time of their epochs. For
each cell the medians, the median of the ratios of the second commit to the first with their
quartiles, and the peak memory per rank. Writes docs/benchmarks/compare_commits.md (or ``--page``).
Threads are pinned (OMP_NUM_THREADS=1 per rank). Graphs that are not there are left out
(``peers.SHARED``). With ``--mbit`` the runs are on two hosts with links of that rate
(``namespaces.py``; needs root).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

from namespaces import Hosts  # noqa: E402

MODELS = ("gcn", "sage", "gcnii", "resgcn", "gat")
GRAPHS = ("squirrel", "coauthor_physics", "debian", "ego_twitter")
DEPTHS = (3, 16)
ON_RANKS = [
    ("gcnii debian --stages 2 --chunks 8", ["--stages", "2", "--chunks", "8"]),
    ("gcnii debian --shards 2", ["--shards", "2"]),
]
EPOCHS, PORT = 8, 29611
LEAST, MOST, CELL_S = 6, 14, 40.0
"""Epochs of each commit in a cell; as many as fit into ``CELL_S``."""
UNTIMED = 2
"""First epochs, which are not counted."""


@dataclass(frozen=True)
class Cell:
    """What was measured in a cell: seconds of an epoch in each turn, and peak MiB."""

    name: str
    before_s: list[float]
    after_s: list[float]
    before_mib: float
    after_mib: float

    @property
    def ratios(self) -> list[float]:
        """The second commit over the first, by turn."""
        return [b / a for a, b in zip(self.before_s, self.after_s, strict=True)]

    @property
    def time(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    @property
    def memory(self) -> float:
        """The second commit's peak over the first's."""
        return self.after_mib / self.before_mib

    def row(self) -> str:
        """The line of the table."""
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        before, after = (statistics.median(s) * 1e3 for s in (self.before_s, self.after_s))
        return (
            f"| {self.name} | {before:.1f} | {after:.1f} | {self.time:.3f} ({low:.2f} to "
            f"{high:.2f}) | {len(self.ratios)} | {self.before_mib:.0f} | {self.after_mib:.0f} | "
            f"{self.memory:.2f} |"
        )


def in_turns(name: str, trees: Sequence[Path], words: Sequence[list[str]]) -> Cell:
    """Epochs of two processes in turns, with gnnpipe of each tree and the words of each."""
    script = [sys.executable, str(ROOT / "scripts" / "epochs_on_request.py")]
    processes = [
        subprocess.Popen(
            [*script, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )
        for tree, own in zip(trees, words, strict=True)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), f"{name}: set-up failed"
    times: tuple[list[float], list[float]] = ([], [])
    start_s = time.monotonic()
    while len(times[0]) < UNTIMED + LEAST or (
        len(times[0]) < UNTIMED + MOST and time.monotonic() - start_s < CELL_S
    ):
        for process, found in zip(processes, times, strict=True):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            found.append(float(process.stdout.readline()))
    peaks = [float(process.communicate()[0]) for process in processes]
    return Cell(name, times[0][UNTIMED:], times[1][UNTIMED:], *peaks)


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


def of_ranks(name: str, trees: list[Path], flags: list[str], repeats: int, mbit: float) -> Cell:
    """Whole runs of two ranks in turns."""
    runs: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for _ in range(repeats):
        for tree, found in zip(trees, runs, strict=True):
            found.append(train(tree, flags, 2, mbit))
    times = ([seconds for seconds, _ in found] for found in runs)
    peaks = (statistics.median(peak for _, peak in found) for found in runs)
    return Cell(name, *times, *peaks)


def has_graph(name: str) -> bool:
    """Whether ``peers.load`` can read a graph."""
    import peers

    return name == "debian" or (peers.SHARED / f"{name}.npz").exists()


def page(cells: list[Cell], commits: list[str], words: str) -> str:
    """The benchmark page."""
    time_mean = statistics.geometric_mean([cell.time for cell in cells])
    memory = statistics.geometric_mean([cell.memory for cell in cells])
    slowest = max(cells, key=lambda cell: cell.time)
    largest = max(cells, key=lambda cell: cell.memory)
    head = ["cell", "before, ms", "after, ms", "time, after / before (quartiles)", "turns"]
    head += ["before, MiB", "after, MiB", "memory"]
    lines = [
        "# Two commits in turns",
        "",
        f"Time and memory of {commits[1]} beside {commits[0]}, measured by "
        f"`scripts/compare_commits.py {words}` on {os.cpu_count()} cores "
        f"({platform.machine()}), {time.strftime('%Y-%m-%d')}; one thread per rank. A cell of one "
        "process is processor time of epochs in turns, width 128, dropout 0.5; a cell of ranks is "
        f"whole runs of {EPOCHS} epochs in turns, the median time of their epochs. Medians over "
        "the turns. Memory is the peak of the process, or of the largest rank.",
        "",
        f"Geometric mean of the ratios: time {time_mean:.3f}, memory {memory:.3f}. Slowest: "
        f"{slowest.name}, {slowest.time:.3f}. Largest: {largest.name}, {largest.memory:.2f}. "
        f"{sum(cell.time > 1.05 for cell in cells)} of {len(cells)} cells take more than 1.05 "
        "times as long.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(cell.row() for cell in cells),
    ]
    return "\n".join(lines) + "\n"


def measured(trees: list[Path], options: argparse.Namespace) -> list[Cell]:
    """Every cell whose name contains ``--only``."""
    found = []
    if options.ranks:
        flags = ["--model", "gcnii", "--layers", "8", "--dataset", "debian"]
        named = [(name, [*flags, *shape]) for name, shape in ON_RANKS if options.only in name]
        for name, words in named:
            found.append(of_ranks(name, trees, words, options.repeats, options.mbit))
            print(found[-1].row(), flush=True)
        return found
    for layers in DEPTHS:
        for graph in filter(has_graph, GRAPHS):
            for model in MODELS:
                name = f"{model} {graph}, {layers} layers"
                if options.only in name:
                    words = [graph, model, str(layers), str(options.chunks)]
                    found.append(in_turns(name, trees, [words, words]))
                    print(found[-1].row(), flush=True)
    return found


def main() -> None:
    """Run the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--chunks", type=int, default=1, help="of the cells of one process")
    parser.add_argument("--ranks", action="store_true", help="runs of two ranks")
    parser.add_argument("--repeats", type=int, default=5, help="of the runs of two ranks")
    parser.add_argument("--mbit", type=float, default=0.0, help="rate of the links of two hosts")
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
        cells = measured(trees, options)
    words = shlex.join([*names, *sys.argv[3:]])
    target = ROOT / "docs" / "benchmarks" / f"{options.page}.md"
    target.write_text(page(cells, names, words), encoding="utf-8")


if __name__ == "__main__":
    main()

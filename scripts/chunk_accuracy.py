"""Test accuracy of ``--schedule async`` against the full batch and sequential steps by chunk.

python scripts/chunk_accuracy.py run [--ranks 1] [--graphs pubmed] [--models gcn] [--kinds full]
python scripts/chunk_accuracy.py report            # docs/benchmarks/chunk_accuracy.md

Full batch and sequential steps run in one process, pipelines on real ranks over gloo, one thread
each. The processes of one number of ranks start once and train their runs one after another. Each
finished run is at once a line of docs/benchmarks/data/chunk_accuracy.jsonl; ``run`` goes on where
it was interrupted. Two calls with other ``--ranks`` or ``--graphs`` may run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import FOLDER, read_cells  # noqa: E402
from chunk_accuracy_cells import GRAPHS, LAYERS, OTHERS, Cell, cells  # noqa: E402
from fidelity import commit  # noqa: E402

DATA = FOLDER / "data" / "chunk_accuracy.jsonl"
GRAPH_FOLDER = ROOT.parent / "shared" / "data"
RANKS = (1, 4, 8)


def next_cell(given: argparse.Namespace, ranks: int) -> Cell | None:
    """The most telling run on so many ranks that is selected and not finished."""
    rows = read_cells(given.data)
    for cell in cells(rows):
        is_selected = (
            cell.stages == ranks
            and cell.graph in given.graphs
            and cell.model in given.models
            and cell.kind in given.kinds
        )
        if is_selected and cell.key() not in rows and (given.root / f"{cell.graph}.npz").exists():
            return cell
    return None


def train(cell: Cell, world: Any, root: Path, most_epochs: int | None) -> dict[str, Any]:
    """Trains; returns the scores of every tenth epoch and of the last one."""
    from gnnpipe import TrainConfig, Trainer

    settings = cell.settings(root)
    if most_epochs is not None:
        settings["epochs"] = most_epochs
    start = time.process_time()
    row: dict[str, Any] = {"cell": cell.key(), **asdict(cell), "epochs": settings["epochs"]}
    history, row["error"] = [], ""
    try:
        result = Trainer(TrainConfig(**settings), world=world).fit()
        history = [(line, line.scores) for line in result.history if line.scores is not None]
        row["epoch_s"] = round(result.epoch_time_s, 4)
    except FloatingPointError as error:  # raised on all ranks: a result, too
        row["error"] = str(error)
    row["epoch"] = [line.epoch for line, _ in history]
    row["val"] = [round(scores.val_acc, 5) for _, scores in history]
    row["test"] = [round(scores.test_acc, 5) for _, scores in history]
    row["loss"] = [round(line.loss, 5) for line, _ in history]
    return row | {"process_s": round(time.process_time() - start, 1)}


def rank(given: argparse.Namespace, versions: dict[str, str]) -> None:
    """Trains on this rank all runs of its world size; rank 0 chooses them and writes the rows."""
    import torch

    from gnnpipe.runtime.comm.launch import launched_world_size
    from gnnpipe.runtime.comm.world import World

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = World.meet(launched_world_size(), "cpu", 1800.0)
    while (cell := world.share(next_cell(given, world.world_size))) is not None:
        row = train(cell, world, given.root, given.epochs)
        if world.rank == 0:
            row |= versions | {"date": time.strftime("%Y-%m-%d %H:%M"), "torch": torch.__version__}
            with given.data.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            shown = f"test {row['test'][-1]:.4f}" if row["test"] else row["error"]
            print(row["date"], cell.key(), f"{shown}, {row['process_s']} s", flush=True)
    world.leave()


def run(given: argparse.Namespace) -> int:
    """Starts the ranks of each number once."""
    for graph in given.graphs:
        if not (given.root / f"{graph}.npz").exists():
            print(f"--root {given.root}: no {graph}.npz; its runs are left out")
    given.data.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for ranks in given.ranks:
        if next_cell(given, ranks) is None:
            continue
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(ranks)]
        command += [__file__, "rank", *sys.argv[2:]]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            print(f"{ranks} ranks: exit code {done.returncode}; run again to go on")
            return done.returncode
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "rank", "report"])
    kinds = ("full", "sequential", "predict", *OTHERS)
    for name, known in (("graphs", tuple(GRAPHS)), ("models", tuple(LAYERS)), ("kinds", kinds)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known)
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS)
    parser.add_argument("--root", type=Path, default=GRAPH_FOLDER, help="folder of the graphs")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, help="of every run, for a trial of the script")
    given = parser.parse_args()
    if given.epochs is not None and given.data == DATA:
        parser.error(f"--epochs {given.epochs}: only for a trial; give another file with --data")
    if given.command == "run":
        return run(given)
    if given.command == "rank":
        rank(given, {"commit": commit(), "machine": platform.processor() or platform.machine()})
        return 0
    from chunk_accuracy_report import write

    write(read_cells(given.data))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does pipelined training end where exact training ends? Runs the cells, writes the pages.

python scripts/fidelity.py run main single      # cells of these tables that are not there yet
python scripts/fidelity.py run main --only amazon_photo gcn --workers 2
python scripts/fidelity.py report main          # docs/benchmarks/fidelity_main.md and plots

For a fixed K and seed the result does not depend on S and G (docs/explanation/exact-and-stale.md,
up to rounding), so one process with K chunks shows what S ranks show. Every cell that ends is a
line of docs/benchmarks/data/fidelity.jsonl; what is there is not run again, so the run can be
stopped and started at will.
The tables ``ablation`` and ``arxiv`` were not run again since gnnpipe's models are recorded; their
rows lie in data/fidelity_before.jsonl.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity_cells import Cell, tables  # noqa: E402

DATA = ROOT / "docs" / "benchmarks" / "data" / "fidelity.jsonl"
TAIL = 20
"""Last epochs, each of them evaluated: do they oscillate?"""


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train; evaluate every 10th epoch and each of the last 20."""
    import torch

    from gnnpipe.config import TrainConfig
    from gnnpipe.run.exact_epochs import ExactEpochs
    from gnnpipe.run.metrics_csv import measure_staleness
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import evaluate, train_epoch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    config = TrainConfig(**cell.settings())
    mesh = Mesh.join(1, 1)
    prepared = prepare(config, mesh)
    rank_runtime = build_rank(prepared, mesh)
    executor = rank_runtime.executor
    epochs, test, losses, times = [], [], [], []
    drift, moved, missed = [], [], []
    exact_epochs, walked_exactly = ExactEpochs(prepared), 0
    for epoch in range(config.epochs):
        start = time.perf_counter()
        order = prepared.chunk_order(epoch)
        program = exact_epochs.begin(epoch, executor.grad_clip)
        loss = train_epoch(rank_runtime, mesh, program, order, epoch)
        exact_epochs.end(program, executor.grad_clip.norm, executor.has_stepped)
        stale = measure_staleness(prepared, rank_runtime, mesh, order, program.is_exact)
        walked_exactly += program.is_exact
        times.append(time.perf_counter() - start)
        if (epoch + 1) % 10 == 0 or epoch >= config.epochs - TAIL:
            epochs.append(epoch + 1)
            test.append(round(evaluate(rank_runtime, mesh).test_acc, 6))
            losses.append(round(loss, 5))
            if stale is not None:
                for into, values in (
                    (drift, stale.drift),
                    (moved, stale.moved),
                    (missed, stale.missed),
                ):
                    into += [round(statistics.mean(values), 5)] if values else []
    graph = prepared.graph
    into_probes = int(graph.degrees[prepared.probes].sum()) if len(prepared.probes) else 0
    return {
        **asdict(cell),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "epoch": epochs,
        "test": test,
        "loss": losses,
        "drift": drift,
        "moved": moved,
        "missed": missed,
        "epoch_time_s": round(statistics.median(times), 4),
        "train_s": round(sum(times), 1),
        "extra_edges": into_probes / (2 * graph.num_edges),
        "extra_rows": len(prepared.probes) / graph.num_vertices,
        "exact_epochs": walked_exactly / config.epochs,
    }


def commit() -> str:
    """Short hash of the checkout that runs, marked if its code differs from it."""

    def git(*words: str) -> str:
        line = ["git", "-C", str(ROOT), *words]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    # Results of earlier cells are not code.
    changed = git("status", "--porcelain", "--untracked-files=no", "gnnpipe", "scripts")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def done() -> dict[str, dict[str, Any]]:
    """Finished cells by key."""
    if not DATA.exists():
        return {}
    found = {}
    for line in DATA.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[Cell(**{k: row[k] for k in Cell.__dataclass_fields__ if k in row}).key()] = row
    return found


def attempt(cell: Cell) -> tuple[Cell, dict[str, Any] | str]:
    """A cell that fails must not end the others."""
    try:
        return cell, run_cell(cell)
    except Exception as error:
        return cell, repr(error)


def run(names: list[str], only: list[str], workers: int) -> int:
    """Every cell that is not there yet."""
    have = done()
    todo: dict[str, Cell] = {}
    loss_rows = 0
    for name in names:
        for cell in tables()[name]:
            key = cell.key()
            known = {*key.split("|"), cell.dataset.partition("+")[0]}
            if known.issuperset(only):
                loss_rows += 1
                todo |= {} if key in have else {key: cell}
    if not loss_rows:
        print(f"--only {' '.join(only)}: no cell of {', '.join(names)} has all these words")
        return 2
    print(f"{len(todo)} cells to run", flush=True)
    failed = 0
    DATA.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the workers must end too
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        for cell, result in pool.imap_unordered(attempt, todo.values()):
            if isinstance(result, str):
                failed += 1
                print(f"{cell.key()}: {result}", flush=True)
                continue
            with open(DATA, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            tail = result["test"][-TAIL:]
            print(
                f"{cell.key()}: last {tail[-1]:.4f}, deviation {statistics.pstdev(tail):.4f}, "
                f"{result['train_s']} s",
                flush=True,
            )
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the cells that are not there yet")
    runner.add_argument("tables", nargs="+", choices=list(tables()))
    runner.add_argument("--only", nargs="*", default=[], help="cells with all these words")
    runner.add_argument("--workers", type=int, default=1)
    reporter = commands.add_parser("report", help="write the pages and plots")
    reporter.add_argument("tables", nargs="*", help="of these tables; none: of all")
    words = parser.parse_args()
    if words.command == "run" and words.workers < 1:
        parser.error(f"--workers {words.workers}: must be at least 1")
    if words.command == "run":
        return run(words.tables, words.only, words.workers)
    from fidelity_report import write_pages

    write_pages(done(), words.tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())

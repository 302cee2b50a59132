"""How much memory four stages take by schedule: fill-drain, 1f1b and async.

    python scripts/memory_async.py run [--graphs G ...] [--models M ...] [--repeats 1]
    python scripts/memory_async.py report

16 layers of 128, S = 4, K = 32, 3 epochs and an evaluation on CPUs; the ranks share this machine.
By rank, the growth from before its part is allocated to the peak of the run: of what is in use on
the heap (``in_use.py``), and of resident memory, which has the holes between blocks in it. Runs are
kept in docs/benchmarks/data/memory_async.jsonl; ``report`` writes docs/benchmarks/memory_async.md.
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
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import FOLDER, read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from memory_stages import GRAPHS  # noqa: E402

DATA, PAGE = FOLDER / "data" / "memory_async.jsonl", FOLDER / "memory_async.md"
MODELS, SCHEDULES = ("gcn", "gcnii", "sage", "resgcn"), ("fill-drain", "1f1b", "async")
LAYERS, HIDDEN, STAGES, CHUNKS, EPOCHS = 16, 128, 4, 32, 3
BOUND, HALF = 0.15, 0.5
"""Estimates are at most this far off; stage 0 takes at most this share of fill-drain's."""

Row = dict[str, Any]


def measured(graph: str, model: str, schedule: str) -> Row:
    """MiB of each rank: estimate, growth in use, growth of resident memory."""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(STAGES)]
        command += [str(ROOT / "scripts" / "in_use.py"), f"{place}/in_use", "train", *GRAPHS[graph]]
        command += ["--model", model, "--layers", str(LAYERS), "--hidden", str(HIDDEN)]
        command += ["--stages", str(STAGES), "--chunks", str(CHUNKS), "--schedule", schedule]
        command += ["--epochs", str(EPOCHS), "--eval-every", "0", "--checkpoint-every", "0"]
        command += ["--device", "cpu", "--no-predict", "--quiet", "--out", f"{place}/run"]
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
        result = json.loads(Path(place, "run", "result.json").read_text(encoding="utf-8"))
        in_use = [int(Path(place, f"in_use.{r}").read_text()) for r in range(STAGES)]
    before = result["memory_before_bytes"]
    resident = [p - b for p, b in zip(result["peak_memory_bytes"], before, strict=True)]
    estimates = [sum(e.values()) for e in result["memory_estimate_bytes"]]
    mib = {"estimate": estimates, "in_use": in_use, "resident": resident}
    return {name: [round(size / 2**20, 1) for size in sizes] for name, sizes in mib.items()}


def run(graphs: list[str], models: list[str], repeats: int) -> None:
    for _, graph, model, schedule in product(range(repeats), graphs, models, SCHEDULES):
        row = {"graph": graph, "model": model, "schedule": schedule}
        row |= measured(graph, model, schedule)
        row |= {"commit": commit(), "date": time.strftime("%d %B %Y")}
        with DATA.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def medians(rows: list[Row], kind: str) -> list[float]:
    """Median over runs, by rank."""
    return [statistics.median(row[kind][rank] for row in rows) for rank in range(STAGES)]


def report() -> None:
    """The page, from the kept runs."""
    rows = read_rows(DATA)
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["graph"], row["model"], row["schedule"]), []).append(row)
    table, off, halves = [], [], {"in_use": [], "resident": []}
    for (graph, model, schedule), found in cells.items():
        kinds = {kind: medians(found, kind) for kind in ("estimate", "in_use", "resident")}
        over = [u / e for u, e in zip(kinds["in_use"], kinds["estimate"], strict=True)]
        off += over
        shares = ["", ""]
        plain = cells.get((graph, model, "fill-drain"))
        if schedule != "fill-drain" and plain:
            for number, kind in enumerate(halves):
                share = kinds[kind][0] / medians(plain, kind)[0]
                shares[number] = f"{share:.2f}"
                if schedule == "async":
                    halves[kind].append(share)
        shown = [", ".join(f"{size:.0f}" for size in sizes) for sizes in kinds.values()]
        ratios = f"{min(over):.2f}-{max(over):.2f}"
        table.append(
            f"| {graph} | {model} | {schedule} | {' | '.join([*shown, ratios, *shares])} |"
        )
    near = sum(abs(x - 1) <= BOUND for x in off)
    said = [
        f"In use beside the estimate: {near} of {len(off)} ranks within {BOUND:.0%}, "
        f"{min(off):.2f} to {max(off):.2f} of it."
    ]
    for kind, name in (("in_use", "in use"), ("resident", "resident")):
        few = sum(share <= HALF for share in halves[kind])
        said.append(
            f"Stage 0 of async takes at most half of fill-drain's in {few} of "
            f"{len(halves[kind])} cells, {name} ({min(halves[kind]):.2f} to "
            f"{max(halves[kind]):.2f})."
        )
    commits, counts = sorted({row["commit"] for row in rows}), {len(x) for x in cells.values()}
    lines = [
        "# Memory of four stages, by schedule",
        "",
        f"`scripts/memory_async.py`, {rows[-1]['date']}, commit {', '.join(commits)}; "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}. {LAYERS} "
        f"layers of {HIDDEN}, S = {STAGES}, K = {CHUNKS}, {EPOCHS} epochs and an evaluation, on "
        "CPUs. MiB that each rank grew by, from before its part was allocated to the peak of the "
        f"run, stage by stage; medians of {', '.join(map(str, sorted(counts)))} run(s). *In use*: "
        "blocks of the heap that are allocated. *Resident*: all that the process has of the "
        "machine, with the holes between those blocks "
        "([decision 0052](../adr/0052-what-moves-in-async-is-small.md)). *Over estimate*: in use, "
        "least to most of the stages. *Of fill-drain*: stage 0, in use and resident.",
        "",
        *said,
        "",
        "| graph | model | schedule | estimate | in use | resident | over estimate | of "
        "fill-drain, in use | resident |",
        f"|{'---|' * 9}",
        *table,
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--graphs", nargs="+", default=["squirrel", "coauthor_physics"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if args.what == "run":
        run(args.graphs, args.models, args.repeats)
    report()


if __name__ == "__main__":
    main()

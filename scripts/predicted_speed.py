"""Predicted beside measured epoch time: how far off, and are the shapes ordered rightly?

python scripts/predicted_speed.py run [--graphs G] [--models M]   # some 12 minutes for all
python scripts/predicted_speed.py report                          # docs/benchmarks/predicted.md

{GCN, SAGE, GCNII} x {(1,1,1), (2,1,8), (1,2,1), (2,1,32)} (stages, shards, chunks) on two graphs,
ranks of one thread on this machine. A profile is taken once for each model and graph (``gnnpipe
profile`` on two ranks) and serves all four shapes; every cell is also run once with the short
profile that a run takes by itself. The shapes take turns. Finished runs are kept, with the
profiles, in docs/benchmarks/data/predicted.jsonl (or the file that PRED_DATA names) and not made
again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import SHARED  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
DATA = Path(os.environ.get("PRED_DATA", FOLDER / "data" / "predicted.jsonl"))
GRAPHS = {
    "coauthor_physics": ["--dataset", str(SHARED / "coauthor_physics.npz"), "--split", "60/20/20"],
    "debian": ["--dataset", "debian"],
}
MODELS = ("gcn", "sage", "gcnii")
SHAPES = ((1, 1, 1), (2, 1, 8), (1, 2, 1), (2, 1, 32))
LAYERS, HIDDEN, EPOCHS, REPEATS = 4, 64, 20, 2
PROFILES = ("once", "short")
APART = 0.15
"""Shapes nearer to each other than this need not be ordered rightly."""

Row = dict[str, Any]


def keep(row: Row) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
    with DATA.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def gnnpipe(ranks: int, words: list[str]) -> None:
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(
        [*command, "gnnpipe", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(f"gnnpipe {' '.join(words)}\n{done.stderr[-2000:]}")


def words_of(graph: str, model: str) -> list[str]:
    sizes = ["--model", model, "--layers", str(LAYERS), "--hidden", str(HIDDEN)]
    return [*GRAPHS[graph], *sizes, "--device", "cpu"]


def profile_of(graph: str, model: str, folder: Path) -> Path:
    """The one that was taken, or is now."""
    path = folder / f"{graph}-{model}.json"
    for row in read_rows(DATA):
        if row["kind"] == "profile" and (row["graph"], row["model"]) == (graph, model):
            path.write_text(json.dumps(row["profile"]), encoding="utf-8")
            return path
    start = time.perf_counter()
    gnnpipe(2, ["profile", *words_of(graph, model), "--save", str(path)])
    took_s = time.perf_counter() - start
    profile = json.loads(path.read_text(encoding="utf-8"))
    keep({"kind": "profile", "graph": graph, "model": model, "took_s": took_s, "profile": profile})
    return path


def run(graphs: list[str], models: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        for graph in graphs:
            for model in models:
                profile = profile_of(graph, model, Path(place))
                for repeat in range(REPEATS):
                    for source in PROFILES[: 2 - repeat]:
                        for shape in SHAPES:
                            one(graph, model, shape, source, repeat, profile, Path(place))


def one(
    graph: str,
    model: str,
    shape: tuple[int, int, int],
    source: str,
    repeat: int,
    profile: Path,
    place: Path,
) -> None:
    row = {
        "kind": "run",
        "graph": graph,
        "model": model,
        "shape": list(shape),
        "source": source,
        "repeat": repeat,
    }
    if any(row.items() <= old.items() for old in read_rows(DATA)):
        return
    stages, shards, chunks = shape
    out = place / "-".join([graph, model, *map(str, shape), source, str(repeat)])
    words = [
        "train",
        *words_of(graph, model),
        "--epochs",
        str(EPOCHS),
        "--eval-every",
        "0",
        "--stages",
        str(stages),
        "--shards",
        str(shards),
        "--chunks",
        str(chunks),
        "--out",
        str(out),
        "--quiet",
    ]
    if source == "once":
        words += ["--profile", str(profile)]
    gnnpipe(stages * shards, words)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    for name in ("predicted_epoch_time_s", "epoch_time_s"):
        row[name] = result[name]
    for name in ("predicted_time_shares", "time_shares"):
        row[name] = result[name]
    keep(row)
    off = row["predicted_epoch_time_s"] / row["epoch_time_s"] - 1
    print(f"{graph} {model} {shape} {source}: {row['epoch_time_s']:.4f} s, {off:+.1%}", flush=True)


def times_of_cells() -> dict[tuple[str, str, tuple[int, ...]], dict[str, list[float]]]:
    """By cell the measured epochs and the predicted ones by profile, seconds."""
    found: dict[tuple[str, str, tuple[int, ...]], dict[str, list[float]]] = {}
    for row in read_rows(DATA):
        if row["kind"] == "run":
            cell = found.setdefault((row["graph"], row["model"], tuple(row["shape"])), {})
            cell.setdefault("measured", []).append(row["epoch_time_s"])
            cell.setdefault(row["source"], []).append(row["predicted_epoch_time_s"])
    return found


def ordered(cells: dict[Any, dict[str, float]], source: str) -> tuple[int, int]:
    """Pairs of shapes of one graph and model that are ordered rightly, and how many count."""
    right = count = 0
    for (a, mine), (b, other) in combinations(cells.items(), 2):
        if a[:2] != b[:2] or source not in mine or source not in other:
            continue
        low, high = sorted([mine["measured"], other["measured"]])
        if high / low - 1 > APART:
            count += 1
            is_less = mine["measured"] < other["measured"]
            right += (mine[source] < other[source]) == is_less
    return right, count


def report() -> None:
    times = times_of_cells()
    if not times:
        raise SystemExit(f"{DATA}: nothing measured yet; python scripts/predicted_speed.py run")
    cells = {k: {n: statistics.median(v) for n, v in cell.items()} for k, cell in times.items()}
    dates = sorted(row["date"] for row in read_rows(DATA))
    versions = sorted({row["commit"] for row in read_rows(DATA)})
    lines = [
        "# Predicted beside measured",
        "",
        f"`scripts/predicted_speed.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}. "
        f"{LAYERS} layers of {HIDDEN}, {EPOCHS} epochs, ranks of one thread on one machine of "
        f"{os.cpu_count()} cores. Measured: the median of all runs of a cell (each the median of "
        "its epochs). Predicted by a profile that was taken once for each graph and model "
        "(`gnnpipe profile`, two ranks), and by the short one of each run.",
        "",
        "| graph | model | S, G, K | measured, ms | once, ms | off by | short, ms | off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    off: dict[str, list[float]] = {source: [] for source in PROFILES}
    for (graph, model, shape), cell in cells.items():
        shown = []
        for source in PROFILES:
            if source not in cell:
                shown += ["", ""]
                continue
            error = cell[source] / cell["measured"] - 1
            off[source].append(abs(error))
            shown += [f"{1e3 * cell[source]:.1f}", f"{error:+.1%}"]
        numbers = [f"{1e3 * cell['measured']:.1f}", *shown]
        lines.append(
            f"| {graph} | {model} | {', '.join(map(str, shape))} | {' | '.join(numbers)} |"
        )
    lines.append("")
    for source, words in (("once", "profile taken once"), ("short", "short profile")):
        if off[source]:
            right, count = ordered(cells, source)
            lines.append(
                f"- {words}: median error {statistics.median(off[source]):.1%}, worst "
                f"{max(off[source]):.1%}, of {len(off[source])} cells; of {count} pairs of shapes "
                f"that differ by over {APART:.0%}, {right} are ordered rightly."
            )
    spread = [max(cell["measured"]) / min(cell["measured"]) - 1 for cell in times.values()]
    lines.append(
        f"- of the measured epochs of a cell, the longest is {statistics.median(spread):.0%} over "
        f"the shortest on the median of the cells, {max(spread):.0%} at most."
    )
    took_s = [row["took_s"] for row in read_rows(DATA) if row["kind"] == "profile"]
    lines.append(
        f"- a profile that serves all shapes took {min(took_s):.0f} to {max(took_s):.0f} s to take."
    )
    text = "\n".join(lines) + "\n"
    (FOLDER / "predicted.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    if options.what == "run":
        run(options.graphs, options.models)
    else:
        report()


if __name__ == "__main__":
    main()

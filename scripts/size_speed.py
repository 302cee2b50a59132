"""Chunks and size: what K costs, and how time and memory grow with the graph, on one device.

python scripts/size_speed.py run [--part chunks|size|start] [--graphs G] [--repeats 5]
python scripts/size_speed.py report      # writes docs/benchmarks/size.md, .csv, .png and chunks

``chunks``: K from 1 to 128, with stale reads and without, the contenders (``peers.py``) in
processes that take turns. ``size``: planted graphs of 10^4 to 3 * 10^6 vertices with 10 edges each,
one process a size. ``start``: from the command to the end of the first epoch, and the partition's
part of it, nothing kept on disk. Finished cells are kept in docs/benchmarks/data/size.jsonl and not
measured again. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import curves, read_cells, write_csv  # noqa: E402
from fidelity import commit  # noqa: E402
from single_speed import Contender, brief, median  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
DATA = Path(os.environ.get("SIZE_DATA", FOLDER / "data" / "size.jsonl"))
CHUNKS = (1, 2, 8, 32, 128)
SHAPES = {f"K = {k}": f"ours:{k}" for k in CHUNKS} | {"K = 32, exact": "exact:32"}
"""Contenders by the head of their column."""
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
WIDTH, LAYERS, DEGREE = 64, 3, 10
WARM_UP = 3


def keep(cell: str, found: dict[str, Any]) -> None:
    row = {"cell": cell, "commit": commit(), "date": time.strftime("%Y-%m-%d"), **found}
    with DATA.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(cell, {k: v for k, v in found.items() if k != "results"}, flush=True)


def chunks(args: argparse.Namespace) -> None:
    for graph in args.graphs:
        cell = f"chunks|{graph}"
        if cell in read_cells(DATA):
            continue
        names = list(SHAPES.values())
        running = {n: Contender(sys.executable, n, [graph, "gcn", "3", "128"]) for n in names}
        for one in running.values():
            one.start()
        for _ in range(WARM_UP + args.repeats):
            for one in running.values():
                one.turn()
        results = {name: one.end() for name, one in running.items()}
        keep(cell, {"results": results})
        print({name: brief(r) for name, r in results.items()}, flush=True)


def size(args: argparse.Namespace) -> None:
    for n in SIZES:
        cell = f"size|{n}"
        if cell in read_cells(DATA):
            continue
        dataset = f"synthetic:planted:n={n},degree={DEGREE},classes=16,features=64"
        start = time.perf_counter()
        one = Contender(sys.executable, "ours", [dataset, "gcn", str(LAYERS), str(WIDTH)])
        one.start()
        ready = time.perf_counter() - start
        for _ in range(WARM_UP + args.repeats):
            one.turn()
        keep(cell, {"vertices": n, "ready_s": ready, **one.end()})


def start(args: argparse.Namespace) -> None:
    for graph in args.graphs:
        cell = f"start|{graph}"
        # The command finds no features in ego_twitter.
        if cell in read_cells(DATA) or graph == "ego_twitter":
            continue
        path = str(ROOT.parent / "shared" / "data" / f"{graph}.npz")
        dataset = graph if graph == "debian" or ":" in graph else path
        times = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            words = [
                sys.executable,
                "-m",
                "gnnpipe",
                "train",
                "--dataset",
                dataset,
                "--epochs",
                "1",
                "--layers",
                "3",
                "--hidden",
                "128",
                "--chunks",
                "32",
                "--out",
                "off",
                "--quiet",
                "--cache-dir",
                "off",
                "--split",
                "60/20/20",
                "--symmetrize",
            ]
            subprocess.run(words, check=True, cwd=ROOT, capture_output=True)
            times.append(time.perf_counter() - begin)
        code = (
            "import time; from gnnpipe.data.load import load_graph\n"
            "from gnnpipe.graph.chunking import make_chunking\n"
            "s = time.perf_counter()\n"
            f"g = load_graph({dataset!r}, split='60/20/20', symmetrize=True)\n"
            "r = time.perf_counter()\n"
            "make_chunking(g, chunks=32, shards=1, partitioner='metis', seed=0, cache_dir='off')\n"
            "print(r - s, time.perf_counter() - r)"
        )
        parts = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            check=True,
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.split()
        keep(cell, {"seconds": times, "read_s": float(parts[0]), "cut_s": float(parts[1])})


def growth(table: list[dict[str, Any]]) -> str:
    """How an edge's time grows from the first size whose rows are not all in the cache."""
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    cache_bytes = int(cache.removesuffix("K")) << 10
    last = table[-1]
    outside = next(row for row in table if row["vertices"] * WIDTH * 4 > cache_bytes)
    before = table[table.index(outside) - 1]
    return (
        f"The last cache of this machine holds {cache_bytes >> 20} MiB, a table of "
        f"{before['vertices']:,} rows {before['vertices'] * WIDTH * 4 / 2**20:.0f}. An edge of "
        f"{last['vertices']:,} vertices takes {last['ns'] / outside['ns']:.2f} times as long as "
        f"one of {outside['vertices']:,}, whose table does not fit, and "
        f"{last['ns'] / before['ns']:.2f} times as long as one of {before['vertices']:,}, whose "
        "table fits, but not all that a layer reads and writes."
    )


def report(args: argparse.Namespace) -> None:
    rows = list(read_cells(DATA).values())
    commits = sorted({row["commit"] for row in rows})
    text = [
        "# Chunks, size and start",
        "",
        f"Made by `scripts/size_speed.py run` and `report`; commits {', '.join(commits)}; "
        f"{max(row['date'] for row in rows)}; one thread.",
        "",
        "## K from 1 to 128, one process",
        "",
        "GCN 3 x 128, dropout 0.5, `--staleness auto`, in the last column `exact`; milliseconds of "
        "an epoch, median (least to most), processes in turns; ratio to K = 1; peak memory of the "
        "whole process.",
        "",
        f"| graph | {' | '.join(SHAPES)} |",
        "|---" * (len(SHAPES) + 1) + "|",
    ]
    of_chunks: list[dict[str, Any]] = []
    by_chunks: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        kind, _, graph = row["cell"].partition("|")
        if kind != "chunks":
            continue
        r = row["results"]
        first = median(r["ours:1"])
        cells = [
            f"{brief(r[n])}, {median(r[n]) / first:.2f}, {r[n]['peak_mib']:.0f} MiB"
            for n in SHAPES.values()
        ]
        text.append(f"| {graph} | {' | '.join(cells)} |")
        of_chunks += [
            {
                "graph": graph,
                "shape": shape,
                "epoch_ms": round(1e3 * median(r[n]), 1),
                "over_one_chunk": round(median(r[n]) / first, 2),
                "peak_mib": round(r[n]["peak_mib"]),
            }
            for shape, n in SHAPES.items()
        ]
        by_chunks[graph] = list(CHUNKS), [median(r[f"ours:{k}"]) / first for k in CHUNKS]
    if by_chunks:
        text += ["", curves("chunks", by_chunks, "K", "epoch over that of K = 1")]
    text += [
        "",
        "## Size",
        "",
        f"`synthetic:planted`, {DEGREE} directed edges a vertex, 64 features, 16 "
        f"classes; GCN {LAYERS} x {WIDTH}, K = 1. *Ready*: from the start of the process to the "
        "first epoch, making the graph and its order included.",
        "",
        "| vertices | epoch s | ns an edge and layer | peak MiB | bytes an edge | ready s |",
        "|---|---|---|---|---|---|",
    ]
    table = []
    for row in rows:
        if not row["cell"].startswith("size|"):
            continue
        n, seconds = row["vertices"], statistics.median(row["seconds"])
        edges = n * DEGREE
        table.append(
            {
                "vertices": n,
                "epoch s": round(seconds, 4),
                "ns": round(1e9 * seconds / edges / LAYERS, 1),
                "peak": round(row["peak_mib"]),
                "bytes": round(row["peak_mib"] * 2**20 / edges),
                "ready": round(row["ready_s"], 1),
            }
        )
        text.append("| " + " | ".join(f"{v:,}" for v in table[-1].values()) + " |")
    if table:
        by_edge = [t["vertices"] for t in table], [t["ns"] for t in table]
        line = curves("size", {"GCN": by_edge}, "vertices", "ns an edge and layer")
        text += ["", growth(table), "", line]
    text += [
        "",
        "## From the command to the end of the first epoch",
        "",
        "GCN 3 x 128, K = 32, no cached cut; seconds, median (least to most). *Read* and *cut* are "
        "timed on their own.",
        "",
        "| graph | first epoch done | read | cut |",
        "|---|---|---|---|",
    ]
    for row in rows:
        kind, _, graph = row["cell"].partition("|")
        if kind == "start":
            s = row["seconds"]
            text.append(
                f"| {graph} | {statistics.median(s):.1f} ({min(s):.1f}-{max(s):.1f}) | "
                f"{row['read_s']:.1f} | {row['cut_s']:.1f} |"
            )
    (FOLDER / "size.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    write_csv("size", table)
    write_csv("chunks", of_chunks)
    print("wrote docs/benchmarks/size.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("run")
    parts = {"chunks": chunks, "size": size, "start": start}
    one.add_argument("--part", nargs="+", default=list(parts), choices=list(parts))
    one.add_argument(
        "--graphs", nargs="+", default=["debian", "coauthor_physics", "squirrel", "ego_twitter"]
    )
    one.add_argument("--repeats", type=int, default=5)
    one.set_defaults(call=lambda args: [parts[name](args) for name in args.part])
    actions.add_parser("report").set_defaults(call=report)
    args = parser.parse_args()
    DATA.parent.mkdir(parents=True, exist_ok=True)
    args.call(args)


if __name__ == "__main__":
    main()

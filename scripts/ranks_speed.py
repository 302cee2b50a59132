"""What two ranks gain on two cores, and where their time goes, action by action.

python scripts/ranks_speed.py run [--graphs debian] [--turns 3]   # on an idle machine
python scripts/ranks_speed.py report                              # docs/benchmarks/ranks_speed.md

GCN of 16 layers x 128, one thread a rank. The shapes (stages, shards, chunks) of a graph take turns
with two trainings of half of the layers that run side by side without knowing each other: what two
processes can reach on this machine at all. Finished runs are kept in
docs/benchmarks/data/ranks_speed.jsonl.
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
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import FOLDER, read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import SHARED  # noqa: E402

from gnnpipe.perf import Collective, EpochSpans, Message  # noqa: E402

DATA = FOLDER / "data" / "ranks_speed.jsonl"
PAGE = FOLDER / "ranks_speed.md"
GRAPHS: dict[str, dict[str, Any]] = {
    "debian": {"dataset": "debian"},
    "coauthor_physics": {"dataset": str(SHARED / "coauthor_physics.npz"), "split": "60/20/20"},
    "squirrel": {"dataset": str(SHARED / "squirrel.npz"), "symmetrize": True},
}
LAYERS, HIDDEN, EPOCHS, WARM = 16, 128, 5, 3
HALF, ALONE = "two halves", "1,1,1"
SHAPES = (ALONE, "2,1,8", "1,2,1", HALF)
LIMIT, NEAR = 0.62, 1.10
"""Share of one rank's time that was asked for, or this many times what two halves take."""

Row = dict[str, Any]


def train(graph: str, shape: str, out: Path, name: str) -> None:
    """Trains on this rank; writes the median epoch, and the seconds of each kind of action."""
    import torch

    from gnnpipe.config import TrainConfig
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import train_epoch

    torch.set_num_threads(1)
    stages, shards, chunks = map(int, (ALONE if shape == HALF else shape).split(","))
    config = TrainConfig(
        **GRAPHS[graph],
        model="gcn",
        layers=LAYERS // 2 if shape == HALF else LAYERS,
        hidden=HIDDEN,
        stages=stages,
        shards=shards,
        chunks=chunks,
        epochs=WARM + EPOCHS,
        out="off",
        quiet=True,
    )
    mesh = Mesh.join(stages, shards)
    prepared = prepare(config, mesh)
    runtime = build_rank(prepared, mesh)
    times = []
    for epoch in range(WARM + EPOCHS):
        start_s = time.perf_counter()
        order = prepared.chunk_order(epoch)
        train_epoch(runtime, mesh, prepared.program_of(epoch), order, epoch)
        times.append(time.perf_counter() - start_s)
    seconds = defaultdict(list)
    for one in mesh.recorder.epochs:
        spent: dict[str, float] = defaultdict(float)
        waits = [(m.wait_start_s, m.wait_end_s) for m in _waits(one)]
        for action, start_s, end_s in one.actions:
            inside = sum(max(0.0, min(b, end_s) - max(a, start_s)) for a, b in waits)
            spent[action.kind.value] += end_s - start_s - inside
            spent["waits"] += inside
        spent["before and after"] = one.end_s - one.start_s - sum(spent.values())
        for kind, took_s in spent.items():
            seconds[kind].append(took_s)
    row = {
        "epoch_s": statistics.median(times[WARM:]),
        "actions_s": {kind: statistics.median(took) for kind, took in seconds.items()},
    }
    (out / f"{name}-{mesh.rank}.json").write_text(json.dumps(row), encoding="utf-8")


def _waits(epoch: EpochSpans) -> list[Message | Collective]:
    sync = [] if epoch.step_sync is None else [epoch.step_sync]
    return [*epoch.messages, *epoch.collectives, *sync]


def measured(graph: str, shape: str) -> Row:
    """Runs a shape once in processes of its own."""
    with tempfile.TemporaryDirectory() as place:
        words = [__file__, "rank", "--graphs", graph, "--shape", shape, "--out", place]
        command = [sys.executable]
        if shape not in (ALONE, HALF):
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        processes = [
            subprocess.Popen(
                [*command, *words, "--name", str(i)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2 if shape == HALF else 1)
        ]
        for process in processes:
            _, told = process.communicate()
            if process.returncode:
                raise SystemExit(f"{graph} {shape}: {told[-2000:]}")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(place).iterdir())]
    return {"epoch_s": max(rank["epoch_s"] for rank in ranks), "ranks": ranks}


def run(graphs: list[str], turns: int) -> None:
    for turn in range(turns):
        for graph in graphs:
            for shape in SHAPES:
                cell = {"graph": graph, "shape": shape, "turn": turn}
                if any(cell.items() <= row.items() for row in read_rows(DATA)):
                    continue
                row = cell | measured(graph, shape)
                row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
                with DATA.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(cell, f"{row['epoch_s']:.3f} s", flush=True)


def report() -> None:
    rows = read_rows(DATA)
    by_cell = defaultdict(list)
    for row in rows:
        by_cell[row["graph"], row["shape"]].append(row)
    turns = max(map(len, by_cell.values()))
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    dates = sorted(row["date"] for row in rows)
    lines = [
        "# What two ranks gain on two cores",
        "",
        f"`scripts/ranks_speed.py`, {dates[0]} to {dates[-1]}, commit {commits}; one machine of "
        f"{os.cpu_count()} cores, one thread a rank. GCN, {LAYERS} layers x {HIDDEN}, dropout 0.5, "
        f"default policies. Median (and range) of {turns} turns, each the "
        f"median of {EPOCHS} epochs. *Two halves*: two trainings of {LAYERS // 2} layers side by "
        "side, on their own: what two processes can reach.",
        "",
        f"| graph | shape | epoch, s | over {ALONE} | over two halves |",
        "|---|---|---|---|---|",
    ]
    for graph in GRAPHS:
        of_graph = {shape: by_cell[graph, shape] for shape in SHAPES}
        if not all(of_graph.values()):
            continue
        medians = {s: statistics.median(r["epoch_s"] for r in of_graph[s]) for s in SHAPES}
        for shape in SHAPES:
            took = [row["epoch_s"] for row in of_graph[shape]]
            lines.append(
                f"| {graph} | {shape} | {medians[shape]:.3f} ({min(took):.3f} to {max(took):.3f}) "
                f"| {medians[shape] / medians[ALONE]:.2f} | {medians[shape] / medians[HALF]:.2f} |"
            )
    lines += ["", *_actions(by_cell)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def _actions(by_cell: dict[tuple[str, str], list[Row]]) -> list[str]:
    """The table of the seconds that each rank spends in each kind of action."""
    shapes = SHAPES[:3]
    kinds = dict.fromkeys(
        kind
        for (_, shape), rows in by_cell.items()
        for row in rows
        for rank in row["ranks"]
        for kind, took_s in rank["actions_s"].items()
        if shape in shapes and took_s >= 0.001
    )
    lines = [
        "## Where the time goes",
        "",
        "Milliseconds of an epoch, medians; waits for messages and sums are apart from the actions "
        "that they lie in. *Before and after*: masks and tables before the first action, and waits "
        "for the other ranks after the last one.",
        "",
        f"| graph | shape | rank | {' | '.join(kinds)} |",
        "|---|---|---|" + "---|" * len(kinds),
    ]
    for graph in GRAPHS:
        for shape in shapes:
            rows = by_cell[graph, shape]
            for rank in range(len(rows[0]["ranks"]) if rows else 0):
                spent = [
                    statistics.median(r["ranks"][rank]["actions_s"].get(k, 0.0) for r in rows)
                    for k in kinds
                ]
                shown = " | ".join(f"{1000 * s:.0f}" if s >= 0.0005 else "" for s in spent)
                lines.append(f"| {graph} | {shape} | {rank} | {shown} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "rank", "report"])
    parser.add_argument("--graphs", nargs="+", choices=tuple(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.command == "run":
        run(given.graphs, given.turns)
    elif given.command == "rank":
        train(given.graphs[0], given.shape, given.out, given.name)
    else:
        report()


if __name__ == "__main__":
    main()

"""Seconds, epochs and bytes until a validation accuracy: full batch, pipeline, async, samplers.

python scripts/time_to_accuracy.py run [--minutes 25] [--python PYTHON]   # 2 ranks need root
python scripts/time_to_accuracy.py report             # docs/benchmarks/time_to_accuracy.md
python scripts/time_to_accuracy.py run --only amazon_photo gcn --data /tmp/t.jsonl --epochs 4

The target is the best validation accuracy of the tuned full batch, less half a point, of the same
graph, model and seed. All contenders run in turn in one process (on 2 ranks: in one process a
rank, each in a network namespace of its own, ``namespaces.py``), on one thread. The clock stops in
evaluation. A contender with several settings is counted by its fastest; a setting ends when
another one was faster. Finished runs are lines of docs/benchmarks/data/time_to_accuracy.jsonl and
are not made again; the most telling ones come first.

PyG's NeighborLoader needs torch_sparse (pyg_lib has no wheel for torch 2.13 on PyPI), which is
compiled for the torch that is there; gnnpipe does not need it. In an environment of its own:

python -m venv bench-env; bench-env/bin/pip install -c constraints.txt -e . setuptools wheel
FORCE_ONLY_CPU=1 bench-env/bin/pip install --no-build-isolation torch_scatter torch_sparse
python scripts/time_to_accuracy.py run --python bench-env/bin/python
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from loader_training import Curve, Problem, Setting  # noqa: E402
from loader_training import Run as LoaderRun  # noqa: E402
from namespaces import Hosts  # noqa: E402

from gnnpipe import Callback, Graph, TrainConfig, Trainer  # noqa: E402
from gnnpipe.data.load import load_graph  # noqa: E402
from gnnpipe.runtime.comm.launch import launched_world_size  # noqa: E402
from gnnpipe.runtime.comm.world import World  # noqa: E402

DATA = ROOT / "docs" / "benchmarks" / "data" / "time_to_accuracy.jsonl"
SHARED = next((p for up in ROOT.parents if (p := up / "shared" / "data").is_dir()), ROOT.parent)
GRAPHS: dict[str, dict[str, Any]] = {
    "amazon_photo": {"split": "10/20/70"},
    "squirrel": {"split": "60/20/20", "symmetrize": True},
    "pubmed": {"split": "10/20/70"},
    "coauthor_cs": {"split": "10/20/70"},
    "debian_deps": {"split": "60/20/20"},
}
"""As in chunk_accuracy.py; splits are drawn with the seed of the run."""
MODELS, LAYERS, CHUNKS = ("gcn", "sage"), 4, 32
BELOW, PORT = 0.005, 29871
"""Distance of the target from the best validation accuracy."""
LEAST_S, FACTOR, DEFAULT_FACTOR = 4.0, 2.0, 4.0
"""A run may take this many seconds, or this many times those of the tuned full batch."""
STAGES = [(1, 0), (2, 0), (2, 100)]
"""Ranks and Mbit/s (0: no limit); each with all models and graphs."""

TUNED_EPOCHS, PATIENCE = 200, 60
TUNING = DATA.with_name("chunk_accuracy.jsonl")
"""Runs of ``chunk_accuracy.py``: full batches with Adam, at several rates and schedules."""
TUNED_LR: Setting = {"lr": 0.003, "schedule": "constant"}
"""Where these are missing. Of 0.003, 0.01 and 0.03, constant, the rate at which GCN of 4 layers
reaches its accuracy first on amazon_photo, squirrel and pubmed."""
DEFAULT_LR: Setting = {"lr": 0.01, "schedule": "constant"}
SAMPLERS: dict[str, list[Setting]] = {
    "NeighborLoader": [
        {"fan_out": fan_out, "batch": batch, "lr": lr, "epochs": 60}
        for fan_out, batch in (([10] * 4, 512), ([15, 10, 5, 5], 1024), ([5] * 4, 512))
        for lr in (0.003, 0.01)
    ],
    "ClusterLoader": [
        {"parts": parts, "per_batch": per_batch, "lr": lr, "epochs": 100}
        for parts, per_batch in ((32, 1), (128, 4))
        for lr in (0.003, 0.01)
    ],
}
SAMPLER_KINDS = {"NeighborLoader": "neighbor", "ClusterLoader": "cluster"}
ASYNC = ((32, 50), (16, 50), (32, 25), (16, 25), (32, 100))
"""Chunks and epochs. The learning rate falls to 0 over the epochs: their number is a setting."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A graph, a model and the ranks; all its contenders run in the same processes."""

    graph: str
    model: str
    ranks: int
    mbit: int
    seed: int = 0


def contenders(cell: Cell, rows: list[Row]) -> list[tuple[str, Setting]]:
    """Returns names and settings in the order in which they run.

    On several ranks a sampler has the one setting that was the fastest on one process.
    """
    alone = Cell(cell.graph, cell.model, 1, 0, cell.seed)
    made = [r["setting"] for r in rows_of(rows, alone) if r["contender"] == "full batch, tuned"]
    rate = made[0] if made else tuned_rate(read_rows(TUNING), cell.graph, cell.model)
    tuned = {name: rate[name] for name in ("lr", "schedule")} | {"epochs": TUNED_EPOCHS}
    default = DEFAULT_LR | {"epochs": 2 * TUNED_EPOCHS}
    fast: list[tuple[str, Setting]] = [
        ("async", {"kind": "gnnpipe", "stages": cell.ranks, "chunks": chunks, "epochs": epochs})
        for chunks, epochs in ASYNC
    ]
    samplers = []
    for name, settings in SAMPLERS.items():
        given = [
            {"kind": SAMPLER_KINDS[name], "schedule": "constant"} | one | {"workers": 0}
            for one in settings
        ]
        if cell.ranks > 1:
            given = [_fastest(cell, name, rows) or given[0]]
        elif name == "NeighborLoader":  # a second process draws batches: faster with a free core
            given = [one | {"workers": 1} for one in given]
        samplers += [(name, one) for one in given]
    ours = {"kind": "gnnpipe", "stages": 1, "shards": cell.ranks, "chunks": 1}
    if cell.ranks == 1:
        return [
            ("full batch, tuned", {"kind": "full"} | tuned),
            *fast,
            *samplers,
            ("full batch, default", {"kind": "full"} | default),
            ("gnnpipe full batch, tuned", ours | tuned),
        ]
    pipeline = {"kind": "gnnpipe", "stages": cell.ranks, "chunks": CHUNKS}
    return [
        ("graph parallel, tuned", ours | tuned),
        *fast,
        *samplers,
        ("pipeline, tuned", pipeline | tuned),
        ("graph parallel, default", ours | default),
    ]


def tuned_rate(rows: list[Row], graph: str, model: str) -> Setting:
    """Returns the rate and schedule of the full batch that is the first at the target.

    The target is that of the best run on validation vertices. ``rows``: of ``TUNING``, seed 0.
    """
    wanted = {"graph": graph, "model": model, "kind": "full", "seed": 0, "error": ""}
    grid = [row for row in rows if wanted.items() <= row.items()]
    if not grid:
        return TUNED_LR
    target = max(max(row["val"]) for row in grid) - BELOW

    def epochs(row: Row) -> float:
        there = zip(row["epoch"], row["val"], strict=True)
        return float(next((epoch for epoch, value in there if value >= target), math.inf))

    best = min(grid, key=lambda row: (epochs(row), -max(row["val"])))
    return {"lr": best["lr"], "schedule": best["schedule"]}


def _fastest(cell: Cell, name: str, rows: list[Row]) -> Setting | None:
    """Returns the setting of a sampler that was the fastest on one process, without its worker."""
    alone = Cell(cell.graph, cell.model, 1, 0, cell.seed)
    found = [r for r in rows_of(rows, alone) if r["contender"] == name and r["reached"]]
    best = min(found, key=lambda r: r["reached"]["seconds"], default=None)
    return None if best is None else best["setting"] | {"workers": 0}


def rows_of(rows: list[Row], cell: Cell) -> list[Row]:
    """Returns the rows of a cell."""
    return [row for row in rows if vars(cell).items() <= row.items()]


def target_of(rows: list[Row], cell: Cell) -> float | None:
    """Returns the validation accuracy to be reached; ``None`` before the tuned full batch ran."""
    alone = Cell(cell.graph, cell.model, 1, 0, cell.seed)
    tuned = [r for r in rows_of(rows, alone) if r["contender"] == "full batch, tuned"]
    return max(tuned[0]["val"]) - BELOW if tuned else None


def limit_of(rows: list[Row], cell: Cell, contender: str) -> float:
    """Returns the seconds of training after which a run of the contender ends."""
    alone = Cell(cell.graph, cell.model, 1, 0, cell.seed)
    tuned = [r for r in rows_of(rows, alone) if r["contender"] == "full batch, tuned"]
    if not tuned:
        return math.inf
    at_target = next(
        s
        for s, v in zip(tuned[0]["seconds"], tuned[0]["val"], strict=True)
        if v >= max(tuned[0]["val"]) - BELOW
    )
    factor = DEFAULT_FACTOR if "default" in contender else FACTOR
    # Slow links make the same epochs longer, and settings end when another one was faster.
    factor *= 4.0 if cell.mbit else 1.0
    others = [
        r["reached"]["seconds"]
        for r in rows_of(rows, cell)
        if r["contender"] == contender and r["reached"]
    ]
    return min([max(LEAST_S, factor * at_target), *others])


def load(name: str, seed: int) -> Graph:
    """Returns a graph of ../shared/data, its split drawn by the seed; or any other data set."""
    file = SHARED / f"{name}.npz"
    return load_graph(str(file) if name in GRAPHS else name, **GRAPHS.get(name, {}), seed=seed)


class Watch(Callback):
    """Follows a run of gnnpipe on rank 0, and ends it with its curve."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve, self.seconds, self.set_up_s = curve, 0.0, 0.0
        self.start = time.perf_counter()

    def on_fit_start(self, trainer: Any) -> None:
        """Ends the set-up."""
        self.set_up_s = time.perf_counter() - self.start

    def on_epoch_end(self, trainer: Any, row: Any) -> bool:
        """Adds the epoch."""
        self.seconds += row.epoch_time_s
        if row.scores is None:
            return False
        return self.curve.add(self.seconds, row.epoch, row.scores.val_acc, row.scores.test_acc)


def train_ours(
    graph: Graph, cell: Cell, setting: Setting, curve: Curve, world: World
) -> tuple[float, int]:
    """Trains with gnnpipe; returns the seconds of set-up and the bytes of an epoch."""
    is_async = "lr" not in setting
    more = {"schedule": "async"} if is_async else {"lr_schedule": setting["schedule"]}
    names = ("stages", "shards", "chunks", "epochs", "lr")
    config = TrainConfig(
        **{name: setting[name] for name in names if name in setting},
        **more,
        model=cell.model,
        layers=LAYERS,
        hidden=64,
        dropout=0.5,
        seed=cell.seed,
        # An evaluation drains the pipeline.
        eval_every=2 if is_async and cell.ranks > 1 else 1,
        predict=False,
        cache_dir="off",
        device="cpu",
        out="off",
        quiet=True,
        timeout_s=600.0,
    )
    watch = Watch(curve)
    shared = None if world.world_size == 1 else world
    result = Trainer(config, graph=graph, world=shared, callbacks=[watch]).fit()
    return watch.set_up_s, result.comm_bytes_per_epoch["total"]


def measure(cell: Cell, todo: list[tuple[str, Setting]], data: Path) -> None:
    """Trains the contenders of a cell, on every rank; rank 0 adds a row for each."""
    ranks = launched_world_size()
    world = World.alone() if ranks == 1 else World.meet(ranks, "cpu", 600.0)
    graph = load(cell.graph, cell.seed)
    problem = Problem.of(graph, cell.model, LAYERS)
    with world.on_own_cores():
        for contender, setting in todo:
            rows = world.share(read_rows(data) if world.rank == 0 else [])
            target, limit_s = target_of(rows, cell), limit_of(rows, cell, contender)
            is_first = contender == "full batch, tuned"
            curve = Curve(
                None if is_first else target,
                math.inf if is_first else limit_s,
                PATIENCE if is_first and setting["schedule"] == "constant" else 0,
            )
            made, failed = (0.0, 0), ""
            try:
                made = _train(graph, problem, cell, setting, curve, world)
            except ImportError as error:
                failed = f"{error}".strip().splitlines()[-1]
            if world.rank == 0:
                row = _row(cell, contender, setting, curve, limit_s) | {
                    "set_up_s": round(made[0], 3),
                    "bytes_per_epoch": made[1],
                    "failed": failed,
                }
                row["reached"] = _reached(row, target)
                with data.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    world.leave()


def _train(
    graph: Graph, problem: Problem, cell: Cell, setting: Setting, curve: Curve, world: World
) -> tuple[float, int]:
    """Trains a contender; returns the seconds of set-up and the bytes of an epoch."""
    if setting["kind"] == "gnnpipe":
        return train_ours(graph, cell, setting, curve, world)
    run = LoaderRun(problem, setting, world, cell.seed)
    run.fit(curve)
    return run.set_up_s, run.bytes_per_epoch


def _row(cell: Cell, contender: str, setting: Setting, curve: Curve, limit_s: float) -> Row:
    """Returns what is known of a run; ``limit_s`` of infinity becomes null."""
    return vars(cell) | {
        "contender": contender,
        "setting": setting,
        "limit_s": round(limit_s, 3) if math.isfinite(limit_s) else None,
        "seconds": curve.seconds,
        "epochs": curve.epochs,
        "val": curve.val,
        "test": curve.test,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _reached(row: Row, target: float | None) -> Row | None:
    """Returns seconds, epochs and bytes until the target; of the tuned full batch its own one."""
    if row["failed"]:
        return None
    goal = max(row["val"]) - BELOW if row["contender"] == "full batch, tuned" else target
    assert goal is not None, "the tuned full batch runs first"
    for i, value in enumerate(row["val"]):
        if value >= goal:
            sent = int(row["bytes_per_epoch"] * row["epochs"][i])
            return {"seconds": row["seconds"][i], "epochs": row["epochs"][i], "bytes": sent}
    return None


def _line(row: Row) -> str:
    """Returns the line that the script prints about a run."""
    there = row["reached"]
    said = f"{there['seconds']:.2f} s, {there['epochs']:g} epochs" if there else "not reached"
    if row["failed"]:
        said = row["failed"]
    where = f"{row['graph']} {row['model']} {row['ranks']} ranks {row['mbit']} Mbit/s"
    return f"{where}: {row['contender']} {json.dumps(row['setting'])}: {said}"


def cells(only: list[str], stages: list[tuple[int, int]], seeds: int) -> list[Cell]:
    """Returns the cells, the most telling ones first."""
    graphs = [g for g in GRAPHS if not only or g in only]
    if only and not graphs:
        graphs = only[:1]
    models = [m for m in MODELS if not only or m in only] or list(MODELS)
    return [
        Cell(graph, model, ranks, mbit, seed)
        for seed in range(seeds)
        for ranks, mbit in stages
        for model in models
        for graph in graphs
    ]


def missing(cell: Cell, rows: list[Row], epochs: int) -> list[tuple[str, Setting]]:
    """Returns the contenders of a cell that have not run; ``epochs``: at most so many (0: all)."""
    made = [(r["contender"], r["setting"]) for r in rows_of(rows, cell) if not r["failed"]]
    found = []
    for contender, setting in contenders(cell, rows):
        if epochs:
            setting = setting | {"epochs": min(epochs, setting["epochs"])}
        if (contender, setting) not in made:
            found.append((contender, setting))
    return found


def run(given: argparse.Namespace) -> None:
    """Measures the cells that are missing, until the time is over."""
    given.data.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * given.minutes
    stages = [s for s in STAGES if s[0] in given.ranks]
    for cell in cells(given.only, stages, given.seeds):
        rows = read_rows(given.data)
        if cell.ranks > 1 and target_of(rows, cell) is None:
            print(f"{cell}: left out, its target comes from the run on one process", flush=True)
            continue
        todo = missing(cell, rows, given.epochs)
        if not todo:
            continue
        words = ["measure", "--cell", json.dumps(vars(cell)), "--todo", json.dumps(todo)]
        command = [given.python, str(Path(__file__).resolve()), *words, "--data", str(given.data)]
        is_finished = _finished(cell, command, end_s)
        for row in read_rows(given.data)[len(rows) :]:
            print(_line(row), flush=True)
        if not is_finished:
            print(f"{given.minutes:g} minutes are over; the next run goes on here", flush=True)
            return


def _finished(cell: Cell, command: list[str], end_s: float) -> bool:
    """Runs a cell on its ranks; returns whether it ended before ``end_s``, else ends it."""
    environment = {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as errors:
        if cell.ranks == 1:
            one = subprocess.Popen(command, stderr=errors, env=_environment(environment))
            return _wait([one], errors, end_s)
        with Hosts(cell.ranks, cell.mbit, "tta") as hosts:
            processes = [
                hosts.start(i, command, environment, PORT, errors) for i in range(cell.ranks)
            ]
            return _wait(processes, errors, end_s)


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def _wait(processes: list[subprocess.Popen[Any]], errors: IO[str], end_s: float) -> bool:
    """Waits for the processes; ends the script with their errors if one fails."""
    try:
        for process in processes:
            process.wait(max(end_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    if any(codes):
        errors.seek(0)
        raise SystemExit(f"a run failed with {codes}:\n{errors.read()[-3000:]}")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "measure", "report"])
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch_sparse")
    parser.add_argument("--only", nargs="+", default=[], help="graphs and models")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], choices=[1, 2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=0, help="at most so many, for a trial")
    parser.add_argument("--data", type=Path, default=DATA)
    for name in ("cell", "todo"):
        parser.add_argument(f"--{name}", default="", help="of measure")
    given = parser.parse_args()
    if given.command == "run":
        run(given)
    elif given.command == "measure":
        measure(Cell(**json.loads(given.cell)), json.loads(given.todo), given.data)
    else:
        from time_to_accuracy_page import write_page

        write_page(read_rows(given.data))


if __name__ == "__main__":
    main()

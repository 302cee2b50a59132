"""The plan of ``--plan auto``, measured against plain, graph, pipeline and hybrid runs.

python scripts/auto_speed.py run [--turns 4]       # needs root; about 3 minutes a turn
python scripts/auto_speed.py report                # docs/benchmarks/auto_speed.md
python scripts/auto_speed.py run --tiny --data /tmp/rows.jsonl     # a trial of the script

A cell is a case (graph and model), a number of ranks, and links with or without a limit. Hosts are
network namespaces of this machine (``namespaces.py``), one rank of one thread each. Each cell is
planned once, by ``gnnpipe train --plan auto``, which measures the model and the links itself. Then
the plan and the four shapes take turns. A plan that uses fewer ranks is trained on as many, and a
plan equal to one of the four shapes is not measured twice. Every measured run is a row of the data
file at once; ``run`` goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from namespaces import Hosts  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "auto_speed.md"
DATA = ROOT / "docs" / "benchmarks" / "data" / "auto_speed.jsonl"
PORT, LIMIT, MOST = 29671, 1.05, 4
LINKS = (100, 0)
"""Mbit/s; 0: no limit."""
RANKS = (1, 2, 4)
WARM_UP, FEWEST, RUN_S = 1, 3, 3.0
"""Epochs that do not count, fewest that do, and seconds after which a run ends."""

CASES: dict[str, dict[str, Any]] = {
    "gcn": {
        "dataset": "synthetic:planted:n=4000,degree=12,classes=5,features=64",
        "model": "gcn",
        "layers": 12,
        "hidden": 128,
        "staleness": "auto",
    },
    "gat": {
        "dataset": "synthetic:planted:n=3000,degree=10,classes=5,features=64",
        "model": "gat",
        "layers": 6,
        "hidden": 64,
        "staleness": "exact",
    },
}
TINY = {"layers": 4, "hidden": 16, "dataset": "synthetic:planted:n=500,degree=6,classes=3"}

SHAPES = {
    "plain": {1: (1, 1, 1)},
    "graph": {2: (1, 2, 1), 4: (1, 4, 1)},
    "pipeline": {2: (2, 1, 8), 4: (4, 1, 8)},
    "hybrid": {4: (2, 2, 8)},
}
"""S, G and K of each shape by the number of ranks."""

Row = dict[str, Any]


def settings_of(case: str, is_tiny: bool) -> dict[str, Any]:
    """Settings of a run, without its plan."""
    more = TINY if is_tiny else {}
    return CASES[case] | more | {"eval_every": 0, "device": "cpu", "quiet": True}


def append(data: Path, row: Row) -> None:
    """Adds a row to the data file."""
    row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
    with data.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def found(rows: list[Row], **key: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if key.items() <= row.items()]


def plan_cell(data: Path, ranks: int, mbit: int, case: str, is_tiny: bool) -> None:
    """Runs ``--plan auto`` for a few epochs and writes its plan as a row."""
    with tempfile.TemporaryDirectory() as place, Hosts(ranks, mbit, "auto") as hosts:
        out, words = Path(place) / "run", ["--plan", "auto", "--epochs", "2"]
        for name, value in settings_of(case, is_tiny).items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
        command = [sys.executable, "-m", "gnnpipe", "train", *words, "--out", str(out)]
        start_s = time.perf_counter()
        hosts.run(command, {"PYTHONPATH": str(ROOT)}, PORT)
        plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    used = sum(len(stage["ranks"]) for stage in plan["stages"])
    shape = [len(plan["stages"]), max(len(stage["ranks"]) for stage in plan["stages"])]
    row = {"kind": "plan", "ranks": ranks, "mbit": mbit, "case": case, "used": used}
    shape.append(plan["chunks"])
    row |= {"shape": shape, "schedule": plan["schedule"], "plan": plan}
    append(data, row | {"took_s": time.perf_counter() - start_s})
    print(ranks, mbit, case, "plan:", *shape, plan["schedule"], flush=True)


def jobs_of(rows: list[Row], used: int, mbit: int, turn: int) -> list[Row]:
    """The runs of a turn on so many ranks that are not in ``rows`` yet."""
    jobs: list[Row] = []
    for case in CASES:
        for name, by_ranks in SHAPES.items():
            if used in by_ranks:
                jobs.append({"case": case, "name": name, "shape": by_ranks[used]})
        for row in found(rows, kind="plan", case=case, used=used):
            # On one rank there is no link.
            if used == 1 or row["mbit"] == mbit:
                name = f"auto of {row['ranks']} ranks, {row['mbit']} Mbit/s"
                jobs.append({"case": case, "name": name, "plan": row["plan"]})
    key = {"kind": "run", "used": used, "mbit": mbit}
    equal = {(r["case"], r["name"]) for r in found(rows, **key) if r["copy_of"]}
    jobs = [job for job in jobs if (job["case"], job["name"]) not in equal]
    done = {(r["case"], r["name"]) for r in found(rows, **key, turn=turn)}
    jobs = [key | job | {"turn": turn} for job in jobs if (job["case"], job["name"]) not in done]
    # The plans of auto come after the shapes in the first turn, which finds equal plans.
    return jobs if turn % 2 == 0 else jobs[::-1]


def run(data: Path, turns: int, is_tiny: bool) -> None:
    """Plans and measures all cells."""
    data.parent.mkdir(parents=True, exist_ok=True)
    start_s = time.perf_counter()
    for ranks in RANKS:
        for mbit in LINKS:
            for case in CASES:
                if not found(read_rows(data), kind="plan", ranks=ranks, mbit=mbit, case=case):
                    plan_cell(data, ranks, mbit, case, is_tiny)
    for turn in range(turns):
        for used in range(1, MOST + 1):
            for mbit in LINKS if used > 1 else (0,):
                jobs = jobs_of(read_rows(data), used, mbit, turn)
                if not jobs:
                    continue
                with tempfile.TemporaryDirectory() as place, Hosts(used, mbit, "auto") as hosts:
                    file = Path(place) / "jobs.json"
                    file.write_text(json.dumps(jobs), encoding="utf-8")
                    words = ["rank", "--jobs", str(file), "--data", str(data)]
                    command = [sys.executable, __file__, *words, *(["--tiny"] * is_tiny)]
                    hosts.run(command, {"PYTHONPATH": str(ROOT)}, PORT)
        print(f"turn {turn} ended after {time.perf_counter() - start_s:.0f} s", flush=True)


def rank(jobs_file: Path, data: Path, is_tiny: bool) -> None:
    """Trains all jobs on this rank; rank 0 writes the rows."""
    from gnnpipe import Callback, TrainConfig, Trainer
    from gnnpipe.plan import Plan
    from gnnpipe.runtime.comm.launch import launched_world_size
    from gnnpipe.runtime.comm.world import World

    class Enough(Callback):
        """Ends a run by time."""

        def __init__(self) -> None:
            self.start_s = time.perf_counter()

        def on_epoch_end(self, trainer: Any, row: Any) -> bool:
            if row.epoch <= WARM_UP:
                self.start_s = time.perf_counter()
            return row.epoch >= WARM_UP + FEWEST and time.perf_counter() - self.start_s > RUN_S

    world = World.meet(launched_world_size(), "cpu")
    measured: dict[str, list[tuple[Plan, str]]] = {case: [] for case in CASES}
    for job in json.loads(jobs_file.read_text(encoding="utf-8")):
        settings = settings_of(job["case"], is_tiny) | {"epochs": 100, "out": "off"}
        given = None
        if "plan" in job:
            given = Plan.from_json(json.dumps(job["plan"]))
        else:
            settings |= dict(zip(("stages", "shards", "chunks"), job["shape"], strict=True))
        row = {k: v for k, v in job.items() if k not in ("plan", "shape")}
        equal = [name for plan, name in measured[job["case"]] if plan == given]
        row["copy_of"] = equal[0] if equal else ""
        if not equal:
            config = TrainConfig(**settings)
            trainer = Trainer(config, plan=given, world=world, callbacks=[Enough()])
            result = trainer.fit()
            # A plan of the search names the number type that it was found for.
            plan = replace(trainer.plan, comm_dtype=config.comm_dtype)
            measured[job["case"]].append((plan, job["name"]))
            times = [r.epoch_time_s for r in result.history][WARM_UP:]
            row |= {"epoch_s": statistics.median(times), "epochs": len(times)}
            row |= {"predicted_s": result.predicted_epoch_time_s, "loss": result.loss}
        if world.rank == 0:
            append(data, row)
    world.leave()


def times_of(rows: list[Row], case: str, name: str, used: int, mbit: int) -> dict[int, float]:
    """Seconds of an epoch by turn; of a plan that equals another one, those of the other one."""
    key = {"kind": "run", "case": case, "used": used, "mbit": mbit if used > 1 else 0}
    own = found(rows, **key, name=name)
    if own and own[0]["copy_of"]:
        own = found(rows, **key, name=own[0]["copy_of"])
    return {row["turn"]: row["epoch_s"] for row in own}


def cell_times(rows: list[Row], plan: Row) -> dict[str, dict[int, float]]:
    """Seconds of an epoch by turn, of every shape and of the plan ('auto')."""
    case, ranks, mbit, used = (plan[name] for name in ("case", "ranks", "mbit", "used"))
    times = {}
    for name, by_ranks in SHAPES.items():
        on = 1 if name == "plain" else ranks
        if on in by_ranks:
            times[name] = times_of(rows, case, name, on, mbit)
    name = f"auto of {ranks} ranks, {mbit} Mbit/s"
    return times | {"auto": times_of(rows, case, name, used, mbit)}


def shown(times: dict[int, float]) -> str:
    """Median, least and most, in ms."""
    if not times:
        return ""
    low, high = min(times.values()) * 1e3, max(times.values()) * 1e3
    return f"{statistics.median(times.values()) * 1e3:.0f} ({low:.0f} to {high:.0f})"


def report(data: Path, page: Path) -> None:
    """Writes the page."""
    rows = read_rows(data)
    table, ratios = [], []
    for plan in found(rows, kind="plan"):
        times = cell_times(rows, plan)
        if not all(times.values()):
            continue  # not complete
        best = [statistics.median(t.values()) for n, t in times.items() if n != "auto"]
        ratios.append(statistics.median(times["auto"].values()) / min(best))
        shape = " x ".join(map(str, plan["shape"]))
        link = f"{plan['mbit']} Mbit/s" if plan["mbit"] else "no limit"
        cells = [plan["case"], str(plan["ranks"]), link]
        cells += [shown(times.get(name, {})) for name in (*SHAPES, "auto")]
        cells += [f"{shape}, {plan['schedule']}, ranks: {plan['used']}", f"{ratios[-1]:.2f}"]
        table.append("| " + " | ".join(cells) + " |")
    if not table:
        raise SystemExit(f"{data}: nothing yet; python scripts/auto_speed.py run")
    dates, versions = sorted(r["date"] for r in rows), sorted({r["commit"] for r in rows})
    turns = 1 + max(row.get("turn", 0) for row in rows)
    good = sum(ratio <= LIMIT for ratio in ratios)
    what = "; ".join(
        f"{name}: `{c['dataset']}`, {c['model']} {c['layers']} x {c['hidden']}, `--staleness "
        f"{c['staleness']}`"
        for name, c in CASES.items()
    )
    lines = [
        "# The plan of auto, against four shapes",
        "",
        "This page measures the plans that `--plan auto` finds on 1, 2 and 4 ranks.",
        "",
        f"`scripts/auto_speed.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}. "
        f"{what}. Hosts are network namespaces of one machine of {os.cpu_count()} cores, a rank of "
        "one thread each. Times are milliseconds of an epoch: the median of "
        f"{turns} turn{'s' * (turns > 1)} (least to most) of the median of each run's epochs after "
        f"the first. Plain runs on one rank; pipelines and hybrids have 8 chunks. A plan that is "
        "equal to one of the four shapes is not measured twice; on one rank both links are one "
        "measurement. Ratio: auto over the best of the four, at most "
        f"{LIMIT} in {good} of {len(ratios)} cells, {max(ratios):.2f} at most.",
        "",
        "| case | ranks | links | plain | graph | pipeline | hybrid | auto | its plan | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *table,
    ]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{good} of {len(ratios)} cells at most {LIMIT}, {max(ratios):.2f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "rank", "report"])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--jobs", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        run(given.data, given.turns, given.tiny)
    elif given.command == "rank":
        rank(given.jobs, given.data, given.tiny)
    else:
        report(given.data, given.page)


if __name__ == "__main__":
    main()

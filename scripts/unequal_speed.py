"""Epoch times of equal shares and of shares by speed, with one rank at half speed and without.

python scripts/unequal_speed.py run [--data DIR] [--turns 3]   # about 15 minutes
python scripts/unequal_speed.py report                # docs/benchmarks/unequal_speed.md

A cell is a graph, a model and 2 or 3 ranks of one thread each on this machine. Its ranks measure
speeds, links and the model as `--plan auto` does, while the last rank has half of a core
(``throttle.py``, which needs root). Of the planned candidates the fastest with as many stages as
ranks (8 chunks) and the fastest with one stage (1 chunk) are trained, beside the same shape with
equal shares, with the throttle on and off, in turns. Predicted times are those that the planner
simulates. Graphs that are not there are left out. Finished cells are kept in
docs/benchmarks/data/unequal_speed.jsonl.
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
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402

from gnnpipe import TrainConfig, Trainer  # noqa: E402
from gnnpipe.plan import Placement, Plan, StageDag, StagePlan  # noqa: E402
from gnnpipe.planner import PlanRequest, Shape  # noqa: E402
from gnnpipe.planner.auto import every_candidate  # noqa: E402
from gnnpipe.planner.candidate import Candidate  # noqa: E402
from gnnpipe.planner.given_devices import Hardware  # noqa: E402
from gnnpipe.profiling.devices import measure_cluster, measure_speeds  # noqa: E402
from gnnpipe.profiling.links import BRIEF  # noqa: E402
from gnnpipe.profiling.profile import one_stage, take_planning_profile  # noqa: E402
from gnnpipe.profiling.search import search_space, workload_of_request  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.runtime.comm.world import World  # noqa: E402
from gnnpipe.setup.prepare import prepare  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "unequal_speed.md"
DATA = ROOT / "docs" / "benchmarks" / "data" / "unequal_speed.jsonl"
GRAPHS = ("amazon_photo", "pubmed", "dblp")
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"model": "gcn", "layers": 9, "hidden": 128},
    "gat": {"model": "gat", "layers": 6, "hidden": 64},
}
RANKS = (2, 3)
CHUNKS = {"stages": 8, "shards": 1}
AIM = 1.25
EPOCHS = 5
"""Epochs of every run."""

Row = dict[str, Any]


@dataclass
class Candidates:
    """Planner that measures the ranks and keeps, by shape, the equal and the planned candidate."""

    config: TrainConfig
    mesh: Mesh
    found: dict[str, dict[str, Candidate]] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()

    def num_ranks(self, shape: Shape) -> int:
        """Returns the number of ranks of the mesh."""
        del shape
        return self.mesh.world_size

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the plan of the first candidate, which is not trained."""
        assert request.prepared_with is not None
        mesh, ranks, model = self.mesh, self.mesh.world_size, request.model
        prepared = request.prepared_with(one_stage(model.num_ops))
        speeds = measure_speeds(prepared, mesh)
        self.speeds = speeds.speeds
        vertices = sum(request.graph.num_vertices.values())
        given = (vertices, model.num_ops, request.prepared_with, speeds.reference)
        profile = take_planning_profile(self.config, mesh, *given)
        request.halo(ranks, ranks)  # counted on all ranks
        hardware = Hardware(profile, None, measure_cluster(mesh, speeds, BRIEF), ranks)
        work = workload_of_request(self.config, request, hardware)
        space = search_space(self.config, work, hardware, uses_all=True)
        for shape, chunks in CHUNKS.items():
            stages = ranks if shape == "stages" else 1
            fitting = [
                c
                for c in every_candidate(space)
                if c.plan.num_stages == stages
                and c.plan.chunks == chunks
                and c.plan.schedule == "fill-drain"
            ]
            planned = min(fitting, key=lambda c: c.timeline.makespan_s)
            equal = equal_plan(shape, ranks, model.num_ops, planned.plan)
            even = replace(planned, plan=equal, dag=StageDag.of(equal, model))
            self.found[shape] = {"equal": even, "planned": planned}
        return self.found["shards"]["equal"].plan


def equal_plan(shape: str, ranks: int, num_ops: int, like: Plan) -> Plan:
    """Returns a plan with equal shares, or with equal numbers of ops."""
    if shape == "shards":
        stages = [StagePlan.even(tuple(range(num_ops)), tuple(range(ranks)))]
    else:
        ends = [i * num_ops // ranks for i in range(ranks + 1)]
        stages = [StagePlan.even(tuple(range(ends[i], ends[i + 1])), (i,)) for i in range(ranks)]
    return replace(like, stages=tuple(stages))


def measure(dataset: str, model: str, turns: int, split: str, out: str) -> None:
    """Measures one cell, on every rank; rank 0 writes it to ``out``."""
    from throttle import throttled

    ranks = int(os.environ["WORLD_SIZE"])
    config = TrainConfig(
        dataset=dataset,
        split=split,
        **MODELS[model],
        epochs=EPOCHS,
        eval_every=0,
        staleness="none",
        out="off",
        quiet=True,
        device="cpu",
    )
    world = World.meet(ranks, "cpu")
    is_slow = world.rank == ranks - 1
    with throttled() if is_slow else nullcontext():
        mesh = Mesh.of(world, Placement.grid(1, ranks))
        planner = Candidates(config, mesh)
        with world.on_own_cores():
            prepare(config, world, planner=planner)
    times: Row = {}
    for state in ("slow", "full") * turns:
        with throttled() if is_slow and state == "slow" else nullcontext():
            for shape, kinds in planner.found.items():
                for kind, candidate in kinds.items():
                    run = replace(config, chunks=1)
                    result = Trainer(run, plan=candidate.plan, world=world).fit()
                    times.setdefault(f"{shape} {kind} {state}", []).append(result.epoch_time_s)
    if world.rank == 0:
        for shape, kinds in planner.found.items():
            for kind, candidate in kinds.items():
                times[f"{shape} {kind} predicted"] = candidate.timeline.makespan_s
            stages = kinds["planned"].plan.stages
            times[f"{shape} plan"] = [[list(s.ranks), len(s.ops), list(s.shares)] for s in stages]
        times["speeds"] = list(planner.speeds)
        Path(out).write_text(json.dumps(times), encoding="utf-8")
    world.leave()


def run(data: Path, turns: int, only: str) -> None:
    """Measures all cells that are missing."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    for graph in [only] if only else GRAPHS:
        is_file = not graph.startswith("synthetic")
        dataset = str(data / f"{graph}.npz") if is_file else graph
        if is_file and not Path(dataset).exists():
            print(f"{dataset}: not there, left out", flush=True)
            continue
        for model in MODELS:
            for ranks in RANKS:
                cell: Row = {"graph": graph, "model": model, "ranks": ranks}
                if any(cell.items() <= row.items() for row in read_rows(DATA)):
                    continue
                start_s = time.monotonic()
                with tempfile.TemporaryDirectory() as place:
                    out = Path(place) / "cell.json"
                    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                    words += ["--nproc-per-node", str(ranks), __file__, "measure"]
                    words += ["--dataset", dataset, "--model", model, "--turns", str(turns)]
                    words += ["--split", "60/20/20" if is_file else "given", "--out", str(out)]
                    subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
                    row = cell | json.loads(out.read_text(encoding="utf-8"))
                row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
                with DATA.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(cell, f"{time.monotonic() - start_s:.0f} s", flush=True)


def _spread(values: list[float]) -> str:
    """Returns the median, and the smallest and the largest value."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def summary_of(rows: list[Row], ranks: int) -> str:
    """Returns how often the aims are reached with so many ranks."""
    lines = [line_of(row, shape) for row in rows if row["ranks"] == ranks for shape in CHUNKS]
    aims = [[cell.strip() for cell in line.split("|")] for line in lines]
    reached, near = (sum(cells[place] == "yes" for cells in aims) for place in (-3, -2))
    gains = [float(cells[8].split()[0]) for cells in aims]
    return (
        f"{ranks} ranks: gain {statistics.median(gains):.2f} in the median ({min(gains):.2f} to "
        f"{max(gains):.2f}); the aim is reached in {reached} of {len(lines)} cells, the prediction "
        f"is within 15 % in {near}."
    )


def line_of(row: Row, shape: str) -> str:
    """Returns the line of a shape of a cell in the table."""
    times = {
        (kind, what): row[f"{shape} {kind} {what}"]
        for kind in ("equal", "planned")
        for what in ("slow", "full")
    }
    turns = {
        what: [a / b for a, b in zip(times["equal", what], times["planned", what], strict=True)]
        for what in ("slow", "full")
    }
    gain = {what: statistics.median(found) for what, found in turns.items()}
    predicted = row[f"{shape} equal predicted"] / row[f"{shape} planned predicted"]
    plan = row[f"{shape} plan"]
    if shape == "stages":
        words = "/".join(str(ops) for _, ops, _ in sorted(plan)) + " layers"
    else:
        words = "/".join(f"{100 * share:.0f}" for share in plan[0][2]) + " % of the work"
    reached = "yes" if gain["slow"] >= AIM and gain["full"] < 1 else "no"
    near = "yes" if abs(predicted / gain["slow"] - 1) <= 0.15 else "no"
    cells = [row["graph"].partition(",")[0], row["model"], str(row["ranks"]), shape, words]
    cells += [f"{statistics.median(times[kind, 'slow']):.3f}" for kind in ("equal", "planned")]
    cells += [_spread(turns["slow"]), f"{predicted:.2f}", _spread(turns["full"])]
    return f"| {' | '.join([*cells, reached, near])} |"


def report() -> None:
    """Writes the page."""
    rows = read_rows(DATA)
    if not rows:
        raise SystemExit(f"{DATA}: nothing yet; python scripts/unequal_speed.py run")
    dates, versions = sorted(r["date"] for r in rows), sorted({r["commit"] for r in rows})
    speeds = sorted(row["speeds"][-1] for row in rows)
    lines = [
        "# Shares by speed with one slow rank",
        "",
        "This page compares equal shares with planned ones while one rank has half the speed.",
        "",
        f"`scripts/unequal_speed.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}; a "
        f"machine of {os.cpu_count()} cores, ranks of one thread. Linux gives the last rank half "
        "of a core (`scripts/throttle.py`). Stages: a rank each, 8 chunks, stale reads without "
        "technique. Shards: one stage, one chunk. All runs take turns. Times are medians of the "
        f"turns, and of the {EPOCHS} epochs of each, in seconds. Gain: time with equal shares over "
        "time with planned shares, median (least to most) of the turns; without the throttle the "
        "same plan should be slower (a gain below 1). Predicted: as simulated by the planner from "
        "a short measurement under the throttle. Measured speed of the slow rank: "
        f"{speeds[0]:.2f} to {speeds[-1]:.2f}. Aim: a gain of {AIM} with the throttle, and below 1 "
        "without. More ranks than cores share these, which the planner does not predict.",
        "",
        " ".join(summary_of(rows, ranks) for ranks in RANKS),
        "",
        "| graph | model | ranks | shape | planned | equal, s | planned, s | gain | gain predicted "
        "| gain without throttle | aim reached | prediction within 15 % |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [line_of(row, shape) for row in rows for shape in CHUNKS]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "measure", "report"])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="one graph")
    for name in ("dataset", "model", "split", "out"):
        parser.add_argument(f"--{name}", default="", help="of measure")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.dataset, given.model, given.turns, given.split, given.out)
    elif given.command == "run":
        run(given.data, given.turns, given.only)
    else:
        report()


if __name__ == "__main__":
    main()

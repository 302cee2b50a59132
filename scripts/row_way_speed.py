"""Epoch times of the ways in which rows travel, on slow and on fast links, and the way auto takes.

python scripts/row_way_speed.py run [--turns 3]    # needs root; about 6 minutes
python scripts/row_way_speed.py report             # docs/benchmarks/row_way_speed.md
python scripts/row_way_speed.py run --tiny --data /tmp/rows.jsonl     # a trial of the script

Hosts are network namespaces of this machine (``namespaces.py``), one rank of one thread each. A
cell is a graph, a number of ranks and a limit of the links. Its ranks measure the model and the
links as ``--plan auto`` does; of the candidates of the search, the one with one stage, one chunk
and all ranks says how rows travel. Then the same shape is trained with rows by halo, gathered and
by columns, in turns. Finished cells are kept in docs/benchmarks/data/row_way_speed.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from namespaces import Hosts  # noqa: E402

from gnnpipe import TrainConfig, Trainer  # noqa: E402
from gnnpipe.plan import Placement, Plan, RowWay  # noqa: E402
from gnnpipe.planner import PlanRequest, Shape, find_plan  # noqa: E402
from gnnpipe.planner.auto import every_candidate  # noqa: E402
from gnnpipe.planner.candidate import Candidate  # noqa: E402
from gnnpipe.planner.given_devices import Hardware  # noqa: E402
from gnnpipe.profiling.profile import take_planning_profile  # noqa: E402
from gnnpipe.profiling.search import search_space, workload_of_request  # noqa: E402
from gnnpipe.runtime.comm.launch import launched_world_size  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.runtime.comm.world import World  # noqa: E402
from gnnpipe.setup.prepare import prepare  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "row_way_speed.md"
DATA = ROOT / "docs" / "benchmarks" / "data" / "row_way_speed.jsonl"
GRAPHS = {
    "dense": "synthetic:planted:n=4000,degree=160,classes=4,features=32,homophily=0.25",
    "clustered": "synthetic:planted:n=4000,degree=12,classes=8,features=32,homophily=0.98",
}
TINY = {
    "dense": "synthetic:planted:n=600,degree=40,classes=4,features=8,homophily=0.25",
    "clustered": "synthetic:planted:n=600,degree=8,classes=8,features=8,homophily=0.98",
}
SETTINGS: dict[str, Any] = {"model": "gcn", "layers": 6, "hidden": 32}
RANKS, LINKS = (4, 2), (100, 0)
"""Links in Mbit/s; 0: no limit."""
EPOCHS, PORT, NEAR = 6, 29691, 0.05

Row = dict[str, Any]


@dataclass
class Search:
    """Planner that measures the ranks as ``--plan auto`` does, and keeps what the search says."""

    config: TrainConfig
    world: World
    found: list[Candidate] = field(default_factory=list)
    """On rank 0: one stage, one chunk and all ranks, with the ways that the search chooses."""
    best: str = ""
    """On rank 0: the plan that the search takes of all shapes."""
    halo: float = 0.0
    """M / N."""

    def num_ranks(self, shape: Shape) -> int:
        """Returns the number of ranks of the world."""
        del shape
        return self.world.world_size

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the plan of the candidate, which is not trained."""
        assert request.prepared_with is not None
        world, model = self.world, request.model
        ranks = world.world_size
        vertices = sum(request.graph.num_vertices.values())
        mesh = Mesh.of(world, Placement.grid(1, ranks))
        given = (vertices, model.num_ops, request.prepared_with, list(range(ranks)))
        profile = take_planning_profile(self.config, mesh, *given)
        self.halo = request.halo(ranks, ranks)  # counted on all ranks
        if world.rank == 0:
            hardware = Hardware(profile, None, None, ranks)
            work = workload_of_request(self.config, request, hardware)
            space = search_space(self.config, work, hardware)
            self.best = find_plan(space).best.name
            for one in every_candidate(space):
                if one.plan.num_stages == one.plan.chunks == 1 and one.plan.num_ranks == ranks:
                    self.found.append(one)
        plan: Plan = world.share(self.found[0].plan if self.found else None)
        return plan


def candidates_of(chosen: Candidate) -> dict[str, Candidate]:
    """Returns the candidate with every row by one way, by way; and what the search chooses."""
    ops = chosen.form.model.ops
    found = {}
    for way in RowWay:
        able = (i for i, op in enumerate(ops) if op.aggregates and not op.reason_against(way))
        ways = {} if way is RowWay.HALO else dict.fromkeys(able, way)
        found[way.value] = chosen.with_plan(replace(chosen.plan, ways=ways))
    same = [name for name, one in found.items() if one.plan == chosen.plan]
    return found if same else found | {"mixed": chosen}


def measure(graphs: dict[str, str], turns: int, out: str) -> None:
    """Measures the graphs, on every rank; rank 0 adds a line to ``out`` for each."""
    world = World.meet(launched_world_size(), "cpu")
    for graph, dataset in graphs.items():
        row = {"graph": graph, "dataset": dataset} | measured(dataset, turns, world)
        if world.rank == 0:
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    world.leave()


def measured(dataset: str, turns: int, world: World) -> Row:
    """Returns times and bytes of each way, and on rank 0 what the search says."""
    config = TrainConfig(
        dataset=dataset,
        **SETTINGS,
        epochs=EPOCHS,
        eval_every=0,
        predict=False,
        out="off",
        quiet=True,
        device="cpu",
    )
    search = Search(config, world)
    with world.on_own_cores():
        prepare(config, world, planner=search)
    plans: dict[str, Plan] = {}
    row: Row = {"halo": search.halo, "best": search.best}
    if world.rank == 0:
        chosen, said = search.found[0], candidates_of(search.found[0])
        plans = {name: one.plan for name, one in said.items()}
        row["predicted_s"] = {name: one.simulated_s for name, one in said.items()}
        row["chosen"] = next(name for name, plan in plans.items() if plan == chosen.plan)
    plans = world.share(plans)
    row |= {"epoch_s": {name: [] for name in plans}, "sent": {}, "formula": {}}
    for _ in range(turns):
        for name, plan in plans.items():
            result = Trainer(config, plan=plan, world=world).fit()
            row["epoch_s"][name].append(result.epoch_time_s)
            row["sent"][name] = result.comm_bytes_per_epoch["graph"]
            row["formula"][name] = result.comm_bytes_closed_form["graph"]
    return row


def run(data: Path, turns: int, is_tiny: bool) -> None:
    """Measures all cells that are missing; the graphs of a number of ranks and a link in one."""
    data.parent.mkdir(parents=True, exist_ok=True)
    for ranks in RANKS:
        for mbit in LINKS:
            cell: Row = {"ranks": ranks, "mbit": mbit}
            known = {row["graph"] for row in read_rows(data) if cell.items() <= row.items()}
            graphs = {g: d for g, d in (TINY if is_tiny else GRAPHS).items() if g not in known}
            if not graphs:
                continue
            start_s = time.monotonic()
            with tempfile.TemporaryDirectory() as place, Hosts(ranks, mbit, "ways") as hosts:
                out = Path(place) / "rows.jsonl"
                words = ["measure", "--graphs", json.dumps(graphs), "--turns", str(turns)]
                command = [sys.executable, __file__, *words, "--out", str(out)]
                hosts.run(command, {"PYTHONPATH": str(ROOT)}, PORT)
                rows = read_rows(out)
            with data.open("a", encoding="utf-8") as file:
                for row in rows:
                    row |= cell | {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
                    file.write(json.dumps(row) + "\n")
            chosen = ", ".join(f"{row['graph']} {row['chosen']}" for row in rows)
            print(cell, f"auto: {chosen}; {time.monotonic() - start_s:.0f} s", flush=True)


def spread(values: list[float]) -> str:
    """Returns the median, least and most, in ms."""
    low, middle, high = (f(values) * 1e3 for f in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def fastest_of(row: Row) -> str:
    """Returns the way with the least median time."""
    times: dict[str, list[float]] = row["epoch_s"]
    return min(times, key=lambda way: statistics.median(times[way]))


def is_near(row: Row) -> bool:
    """Returns whether the chosen way is at most ``NEAR`` slower than the fastest one."""
    times = {way: statistics.median(found) for way, found in row["epoch_s"].items()}
    return bool(times[row["chosen"]] <= (1 + NEAR) * min(times.values()))


def gains(row: Row) -> tuple[float, float]:
    """Returns the time by halo over that by columns, measured and predicted."""
    measured = {way: statistics.median(row["epoch_s"][way]) for way in ("halo", "columns")}
    said = row["predicted_s"]
    return measured["halo"] / measured["columns"], said["halo"] / said["columns"]


def lines_of(rows: list[Row]) -> list[str]:
    """Returns the two tables."""
    lines = [
        "| graph | ranks | link | M / N | halo, ms | gathered, ms | columns, ms | halo / columns | "
        "predicted | way of auto | fastest | auto over all shapes |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        link = f"{row['mbit']} Mbit/s" if row["mbit"] else "no limit"
        cells = [row["graph"], str(row["ranks"]), link, f"{row['halo']:.2f}"]
        cells += [spread(row["epoch_s"][way]) for way in ("halo", "gather", "columns")]
        cells += [f"{gain:.2f}" for gain in gains(row)]
        cells += [row["chosen"], fastest_of(row), row["best"]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Bytes of rows that all ranks send in an epoch, counted; and predicted times.",
        "",
        "| graph | ranks | link | halo, MB | gathered, MB | columns, MB | equal to closed form | "
        "halo, ms | gathered, ms | columns, ms |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        link = f"{row['mbit']} Mbit/s" if row["mbit"] else "no limit"
        cells = [row["graph"], str(row["ranks"]), link]
        cells += [f"{row['sent'][way] / 1e6:.2f}" for way in ("halo", "gather", "columns")]
        cells.append("yes" if row["sent"] == row["formula"] else "NO")
        cells += [f"{row['predicted_s'][way] * 1e3:.0f}" for way in ("halo", "gather", "columns")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary_of(rows: list[Row]) -> str:
    """Returns what the cells say in short."""
    near = sum(map(is_near, rows))
    words = [
        f"The way of auto is the fastest one, or at most {NEAR:.0%} slower, in {near} of "
        f"{len(rows)} cells."
    ]
    for row in rows:
        if row["graph"] == "dense" and row["mbit"]:
            measured, said = gains(row)
            words.append(
                f"On the dense graph, {row['ranks']} ranks and {row['mbit']} Mbit/s, columns are "
                f"{measured:.2f} times as fast as halo exchanges (predicted {said:.2f}), and auto "
                f"takes {row['chosen']}."
            )
    errors = [
        row["predicted_s"][way] / statistics.median(times) - 1
        for row in rows
        for way, times in row["epoch_s"].items()
    ]
    middle = statistics.median(abs(e) for e in errors)
    words.append(f"Predicted times are off by {middle:.0%} in the median.")
    return " ".join(words)


def report(data: Path, page: Path) -> None:
    """Writes the page."""
    rows = read_rows(data)
    if not rows:
        raise SystemExit(f"{data}: nothing yet; python scripts/row_way_speed.py run")
    dates, versions = sorted(r["date"] for r in rows), sorted({r["commit"] for r in rows})
    turns = max(len(times) for row in rows for times in row["epoch_s"].values())
    graphs = {row["graph"]: row["dataset"] for row in rows}
    lines = [
        "# Rows by halo, gathered or by columns, on slow and on fast links",
        "",
        "This page measures the three ways of the rows, and which one `--plan auto` takes.",
        "",
        f"`scripts/row_way_speed.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}. "
        f"GCN of {SETTINGS['layers']} layers of {SETTINGS['hidden']}; "
        + "; ".join(f"{name}: `{dataset}`" for name, dataset in graphs.items())
        + f". One stage, one chunk. Hosts are network namespaces of one machine of "
        f"{os.cpu_count()} cores, a rank of one thread each; without a limit, links are as fast as "
        f"the machine. Times are the median of {turns} turn{'s' * (turns > 1)} (least to most) of "
        f"the median of {EPOCHS} epochs. M / N: rows of other ranks that are read, for each row of "
        "the graph. Predicted: by the planner's simulation, from a short measurement on the same "
        "ranks and links. The devices count as equal. Auto over all shapes: the plan that the "
        "search takes if other shapes may be chosen.",
        "",
        summary_of(rows),
        "",
        *lines_of(rows),
    ]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "measure", "report"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--page", type=Path, default=PAGE)
    for name in ("graphs", "out"):
        parser.add_argument(f"--{name}", default="", help="of measure")
    given = parser.parse_args()
    if given.command == "measure":
        measure(json.loads(given.graphs), given.turns, given.out)
    elif given.command == "run":
        run(given.data, given.turns, given.tiny)
    else:
        report(given.data, given.page)


if __name__ == "__main__":
    main()

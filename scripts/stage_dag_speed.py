"""Stages cut at the branches of a model, against the best chain, on four ranks with slow links.

python scripts/stage_dag_speed.py run [--mbit 200] [--turns 3]   # needs root
python scripts/stage_dag_speed.py report           # docs/benchmarks/stage_dag_speed.md

Hosts are network namespaces of this machine (``namespaces.py``), one rank of one thread each. The
chain has an equal number of layers of every branch in each stage: each stage reads the one before.
The DAG has one branch, or one half of a branch, in each stage; the join is on the last stage. Both
have the same four ranks, chunks and schedule, and take turns. The predicted time of a run is that
of the short profile that the run takes before its first epoch. Finished runs are kept in
docs/benchmarks/data/stage_dag_speed.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from namespaces import Hosts  # noqa: E402

from gnnpipe.plan import ModelGraph, Plan, StagePlan  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "stage_dag_speed.md"
DATA = ROOT / "docs" / "benchmarks" / "data" / "stage_dag_speed.jsonl"
GRAPH = "synthetic:planted:n=6000,degree=10,classes=5,features=64"
HIDDEN, EPOCHS, RANKS, PORT = 64, 12, 4, 29631
MODELS = {"four_by_eight": (4, 8), "two_by_sixteen": (2, 16)}
"""Branches and layers."""
PROGRAMS = {"exact, K = 1": (1, "exact"), "exact, K = 8": (8, "exact"), "auto, K = 8": (8, "auto")}
"""Chunks and --staleness."""
KINDS = ("chain", "dag")

Row = dict[str, Any]


def settings_of(model: str, program: str) -> list[str]:
    """Flags of a run, without its plan."""
    _, staleness = PROGRAMS[program]
    words = ["--dataset", GRAPH, "--model", f"{ROOT}/scripts/branched_models.py:{model}"]
    words += ["--hidden", str(HIDDEN), "--staleness", staleness]
    return [*words, "--epochs", str(EPOCHS), "--eval-every", "0", "--device", "cpu", "--quiet"]


def plan_of(model: str, program: str, kind: str) -> Plan:
    """Returns the plan of four stages with one rank each."""
    from gnnpipe import TrainConfig
    from gnnpipe.data.load import configured_graph
    from gnnpipe.runtime.comm.world import World
    from gnnpipe.setup.prepare import prepare

    config = TrainConfig(
        dataset=GRAPH,
        model=f"{ROOT}/scripts/branched_models.py:{model}",
        hidden=HIDDEN,
        out="off",
        quiet=True,
    )
    graph = configured_graph(config, True)
    model_graph = prepare(config, World.alone(), graph).model_graph
    chunks, staleness = PROGRAMS[program]
    stages: list[list[int]] = [[] for _ in range(RANKS)]
    for op, stage in enumerate(stages_of(model_graph, model, kind)):
        stages[stage].append(op)
    schedule = "layer-sync" if chunks > 1 and staleness == "exact" else "fill-drain"
    made = (StagePlan.even(tuple(ops), (rank,)) for rank, ops in enumerate(stages))
    return Plan(tuple(made), chunks, schedule)


def stages_of(model_graph: ModelGraph, model: str, kind: str) -> list[int]:
    """Returns the stage of every op; an op without weights is in the last stage that it reads."""
    branches, layers = MODELS[model]
    by_value: dict[str, int] = {}
    found = []
    for op in model_graph.ops:
        places = [name.split(".") for name in op.weights if name.startswith("branches.")]
        if any(name.startswith("join.") for name in op.weights):
            stage = RANKS - 1
        elif places:
            branch, layer = int(places[0][1]), int(places[0][2])
            per_branch = RANKS // branches
            of_branch = branch * per_branch + layer * per_branch // layers
            stage = layer * RANKS // layers if kind == "chain" else of_branch
        else:
            stage = max((by_value[value] for value in op.inputs), default=0)
        by_value |= dict.fromkeys(op.outputs, stage)
        found.append(stage)
    return found


def train(hosts: Hosts, words: list[str], plan: Plan, folder: Path) -> Row:
    """Trains on all hosts; returns measured and predicted time of an epoch, and bytes sent."""
    folder.mkdir(parents=True)
    file = folder / "given.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    out = folder / "run"
    command = [sys.executable, "-m", "gnnpipe", "train", *words]
    command += ["--plan", str(file), "--out", str(out)]
    hosts.run(command, {"PYTHONPATH": str(ROOT)}, PORT)
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {
        "measured_s": result["epoch_time_s"],
        "predicted_s": result["predicted_epoch_time_s"],
        "sent": result["comm_bytes_per_epoch"]["total"],
        "loss": result["loss"],
    }


def run(mbit: int, turns: int) -> None:
    """Trains all cells; the two plans of a cell take turns."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, Hosts(RANKS, mbit, "dag") as hosts:
        for turn in range(turns):
            for model in MODELS:
                for program in PROGRAMS:
                    for kind in KINDS:
                        cell = {"mbit": mbit, "turn": turn, "model": model}
                        cell |= {"program": program, "kind": kind}
                        if any(cell.items() <= row.items() for row in read_rows(DATA)):
                            continue
                        folder = Path(place) / f"{turn}-{model}-{program}-{kind}"
                        plan = plan_of(model, program, kind)
                        row = cell | train(hosts, settings_of(model, program), plan, folder)
                        row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
                        with DATA.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row) + "\n")
                        print(cell, f"{row['measured_s']:.3f} s", flush=True)


def report() -> None:
    """Writes the page."""
    rows = read_rows(DATA)
    if not rows:
        raise SystemExit(f"{DATA}: nothing yet; python scripts/stage_dag_speed.py run")
    dates, versions = sorted(r["date"] for r in rows), sorted({r["commit"] for r in rows})
    turns = 1 + max(row["turn"] for row in rows)
    lines = [
        "# Stages at the branches of a model, against a chain",
        "",
        "This page compares two plans of models with separate branches on four ranks.",
        "",
        f"`scripts/stage_dag_speed.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}. "
        f"Graph `{GRAPH}`, GCN layers of {HIDDEN}; hosts are network namespaces of one machine of "
        f"{os.cpu_count()} cores, a rank of one thread each, so at most two ranks compute at once. "
        f"{turns} turn{'s' * (turns > 1)} of {EPOCHS} epochs; a time is the median of the turns' "
        "medians (least to most). The short profile is measured while all ranks compute at "
        "once, two to a core; in a chain they rarely do, so that its time is predicted too long. "
        "The chain has a quarter of the layers of every branch in each stage. The DAG has a "
        "branch, or half of one, in each stage. Predicted: by the short profile that each run "
        "takes.",
        "",
        "| branches x layers | program | Mbit/s | chain, s | DAG, s | gain measured | gain "
        "predicted | bytes, chain / DAG |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mbit in sorted({row["mbit"] for row in rows}):
        for model, (branches, layers) in MODELS.items():
            for program in PROGRAMS:
                chosen = {"mbit": mbit, "model": model, "program": program}
                of = {
                    kind: [r for r in rows if (chosen | {"kind": kind}).items() <= r.items()]
                    for kind in KINDS
                }
                if not all(of.values()):
                    continue
                times = {k: [r["measured_s"] for r in found] for k, found in of.items()}
                said = {k: statistics.median(r["predicted_s"] for r in of[k]) for k in KINDS}
                middle = {k: statistics.median(found) for k, found in times.items()}
                shown = [
                    f"{middle[k]:.3f} ({min(times[k]):.3f} to {max(times[k]):.3f})" for k in KINDS
                ]
                sent = of["chain"][0]["sent"] / of["dag"][0]["sent"]
                lines.append(
                    f"| {branches} x {layers} | {program} | {mbit} | {shown[0]} | {shown[1]} | "
                    f"{middle['chain'] / middle['dag']:.2f} | {said['chain'] / said['dag']:.2f} | "
                    f"{sent:.2f} |"
                )
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    run(given.mbit, given.turns) if given.command == "run" else report()


if __name__ == "__main__":
    main()

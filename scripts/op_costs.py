"""What the ops of a model take, measured, beside what the planner takes them for.

python scripts/op_costs.py run [--graphs G] [--models M] [--widths 64 128]
python scripts/op_costs.py report      # writes docs/benchmarks/op_costs.md

Four layers, one thread, 16 chunks; a profile of each model on each graph (``gnnpipe profile``), and
of the first, a middle and the last op the time of an epoch, forward and backward. Finished cells
are kept in docs/benchmarks/data/op_costs.jsonl and not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "op_costs.md"
DATA = Path(os.environ.get("OP_DATA", ROOT / "docs" / "benchmarks" / "data" / "op_costs.jsonl"))
PLACES = {0: "first", 1: "middle", 3: "last"}

Row = dict[str, Any]


def cell(row: Row) -> tuple[str, str, int]:
    return row["g"], row["model"], row["hid"]


def run(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    import torch
    from peers import load

    torch.set_num_threads(1)
    DATA.parent.mkdir(parents=True, exist_ok=True)
    for name in args.graphs:
        graph = load(name)
        for model in args.models:
            for width in args.widths:
                if (name, model, width) in {cell(row) for row in read_rows(DATA)}:
                    continue
                rows = measure(graph, name, model, width)
                with DATA.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                print(name, model, width, flush=True)


def measure(graph: Any, name: str, model: str, width: int) -> list[Row]:
    from gnnpipe import TrainConfig
    from gnnpipe.perf.parts import Side
    from gnnpipe.perf.profile import op_kind
    from gnnpipe.profiling.profile import take_profile
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.chunk_sizes import chunk_sizes
    from gnnpipe.setup.prepare import prepare

    mesh = Mesh.alone()
    config = TrainConfig(
        model=model, layers=4, hidden=width, dropout=0.5, chunks=16, out="off", quiet=True
    )
    times = take_profile(config, mesh, graph)[0].compute[0].ops
    prepared = prepare(config, mesh, graph)
    sizes, found = chunk_sizes(prepared).stages[0], []
    n, edges = graph.num_vertices, int(graph.degrees.sum())
    entries = int(graph.x.nnz if hasattr(graph.x, "nnz") else graph.x.size)
    for i in PLACES:
        op = prepared.model_graph.ops[i]
        costs, seconds = times[op_kind(op)], 0.0
        for side in Side:
            rows, links, stored = sizes.columns(op, side)
            for way in ("forward", "backward"):
                a = getattr(costs, f"{way}_{side}")
                each = a.base_s + a.per_row_s * rows + a.per_edge_s * links
                seconds += float((each + a.per_entry_s * stored).sum())
        if op.reads_features:
            end = costs.finish
            seconds += float(end.base_s + end.per_row_s * n + end.per_entry_s * entries)
        found.append(
            {
                "g": name,
                "model": model,
                "hid": width,
                "i": i,
                "c": seconds,
                "R": n,
                "E": edges,
                "EN": entries,
                "flops": op.flops_per_row,
                "ff": op.flops_per_feature,
                "push": op.push_width,
                "kept": op.kept_per_row,
                "commit": commit(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    return found


def by_flops(row: Row) -> float:
    return float(row["R"] * row["flops"] + row["EN"] * row["ff"] + 2 * row["E"] * row["push"])


def by_planner(row: Row) -> float:
    from gnnpipe.plan.model_graph import EDGE_FLOPS, KEPT_FLOPS

    products = row["R"] * row["flops"] + row["EN"] * row["ff"]
    passes = KEPT_FLOPS * row["R"] * row["kept"]
    return float(products + EDGE_FLOPS * row["E"] * row["push"] + passes)


def report(args: argparse.Namespace) -> None:
    del args
    rows = read_rows(DATA)
    says: dict[str, Callable[[Row], float]] = {
        "measured": lambda row: float(row["c"]),
        "planner": by_planner,
        "flops": by_flops,
    }
    commits, dates = ({row[k] for row in rows} for k in ("commit", "date"))
    text = [
        "# What the ops of a model take",
        "",
        f"Made by `scripts/op_costs.py run` and `report`; commits {', '.join(sorted(commits))}; "
        f"{max(dates)}; one thread. Four layers; first and last op over a middle one: measured, by "
        "the planner's costs (`op_costs`), and by floating-point operations alone, which it went "
        "by before.",
        "",
        "| graph | model | F | first: measured | planner | flops | last: measured | planner | "
        "flops |",
        "|---" * 9 + "|",
    ]
    off: dict[str, list[float]] = {"planner": [], "flops": []}
    for key in dict.fromkeys(map(cell, rows)):
        mine = {row["i"]: row for row in rows if cell(row) == key}
        line = []
        for i in (0, 3):
            ratios = {name: say(mine[i]) / say(mine[1]) for name, say in says.items()}
            line += [f"{ratio:.2f}" for ratio in ratios.values()]
            for name, errors in off.items():
                errors.append(abs(math.log(ratios[name] / ratios["measured"])))
        text.append(f"| {key[0]} | {key[1]} | {key[2]} | {' | '.join(line)} |")
    typical = {name: math.exp(statistics.median(errors)) - 1 for name, errors in off.items()}
    worst = {name: math.exp(max(errors)) for name, errors in off.items()}
    text += [
        "",
        f"Off by, in the middle and at worst: the planner {typical['planner']:.0%} and a factor of "
        f"{worst['planner']:.1f}, floating-point operations {typical['flops']:.0%} and "
        f"{worst['flops']:.1f}.",
    ]
    PAGE.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("wrote docs/benchmarks/op_costs.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("run")
    one.add_argument("--graphs", nargs="+", default=["coauthor_physics", "squirrel", "debian"])
    one.add_argument("--models", nargs="+", default=["gcn", "sage", "gcnii", "gat"])
    one.add_argument("--widths", nargs="+", type=int, default=[64, 128])
    one.set_defaults(call=run)
    actions.add_parser("report").set_defaults(call=report)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()

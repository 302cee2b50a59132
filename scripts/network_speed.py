"""Pipeline, graph parallel and hybrid on 2 or 4 hosts with slow links: time, bytes, exposed share.

python scripts/network_speed.py run [--graphs G] [--models M] [--layers 32] [--mbit 200] [--hosts 4]
python scripts/network_speed.py report      # writes docs/benchmarks/network.md, .csv and .png

Among ``--contenders``, "graph best" is graph parallelism with what ``graph_parallel.py`` holds;
cells that have it are a table of their own.

Hosts are network namespaces of this machine (``namespaces.py``; needs root), one rank and one
thread each, so on two cores four ranks share them: what is compared shares them alike. The
contenders of a cell are all there at once and take turns, an epoch each. A finished cell is kept in
docs/benchmarks/data/network.jsonl and not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import bars, read_cells, write_csv  # noqa: E402
from fidelity import commit  # noqa: E402
from namespaces import Hosts  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
DATA = Path(os.environ.get("NS_DATA", FOLDER / "data" / "network.jsonl"))
GRAPHS = {
    "coauthor_physics": "coauthor_physics",
    "squirrel": "squirrel",
    "debian": "debian",
    "reddit-like": "synthetic:planted:n=20000,degree=100,classes=41,features=128,homophily=0.3",
}
HIDDEN, CHUNKS, WARM_UP = 128, 32, 2
"""The first epoch is exact and the second has cold links."""


def contenders(hosts: int, chunks: int, model: str) -> dict[str, dict[str, Any]]:
    """Shapes by name; graph parallel is exact and has one chunk. Hybrid for one model only."""
    found = {
        "pipeline": {"stages": hosts, "shards": 1, "chunks": chunks},
        "graph": {"stages": 1, "shards": hosts, "chunks": 1},
    }
    if hosts > 2 and model == "gcn":
        found["hybrid"] = {"stages": hosts // 2, "shards": 2, "chunks": chunks}
    found["pipeline bf16"] = {**found["pipeline"], "comm_dtype": "bf16"}
    found["graph best"] = {**found["graph"], "is_best": True}
    return found


class Contender:
    """The ranks of a shape, which wait for their turn."""

    def __init__(self, hosts: Hosts, settings: dict[str, Any], port: int) -> None:
        command = [sys.executable, str(ROOT / "scripts" / "network_rank.py"), json.dumps(settings)]
        self.log = open(f"/tmp/network-{os.getpid()}-{port}.log", "w")  # noqa: SIM115
        self.ranks = [
            hosts.start(i, command, {}, port, errors=self.log) for i in range(hosts.count)
        ]

    def all_say(self) -> str:
        """A line of every rank; rank 0's."""
        lines = []
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank has died; see {self.log.name}")
            lines.append(line)
        return lines[0]

    def turn(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        self.all_say()

    def end(self) -> dict[str, Any]:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        found: dict[str, Any] = json.loads(self.all_say())
        for process in self.ranks:
            process.wait()
        return found

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()


def measure(cell: dict[str, Any], repeats: int, names: Sequence[str]) -> dict[str, Any]:
    every = contenders(cell["hosts"], cell["chunks"], cell["model"])
    # All ranks of all contenders are in memory at the same time.
    shapes = {name: shape for name, shape in every.items() if name in names}
    with Hosts(cell["hosts"], cell["mbit"]) as hosts:
        running: dict[str, Contender] = {}
        try:
            for i, (name, shape) in enumerate(shapes.items()):
                settings = {
                    "graph": GRAPHS[cell["graph"]],
                    "model": cell["model"],
                    "layers": cell["layers"],
                    "hidden": HIDDEN,
                    **shape,
                }
                running[name] = Contender(hosts, settings, 29517 + i)
                running[name].all_say()
            wire: dict[str, list[int]] = {name: [] for name in shapes}
            for _ in range(WARM_UP + repeats):
                for name, one in running.items():
                    before = sum(hosts.sent_bytes(i) for i in range(hosts.count))
                    one.turn()
                    after = sum(hosts.sent_bytes(i) for i in range(hosts.count))
                    wire[name].append(after - before)
            found = {name: one.end() | {"wire": wire[name]} for name, one in running.items()}
        except BaseException:
            for one in running.values():
                one.kill()
            raise
    return found


def run(args: argparse.Namespace) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    for mbit in args.mbit:
        for layers in args.layers:
            for graph in args.graphs:
                for model in args.models:
                    cell = {
                        "graph": graph,
                        "model": model,
                        "layers": layers,
                        "mbit": mbit,
                        "hosts": args.hosts,
                        "chunks": args.chunks,
                    }
                    key = "|".join(str(v) for v in cell.values())
                    if "graph best" in args.contenders:
                        key += "|best"
                    if key in read_cells(DATA):
                        continue
                    results = measure(cell, args.repeats, args.contenders)
                    row = {
                        "cell": key,
                        **cell,
                        "commit": commit(),
                        "date": time.strftime("%Y-%m-%d"),
                        "results": results,
                    }
                    with DATA.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(key, {k: round(seconds(v)[0], 2) for k, v in results.items()}, flush=True)


def seconds(result: dict[str, Any]) -> tuple[float, float, float]:
    """Median, least and most of the epochs that count."""
    counted = result["seconds"][WARM_UP:]
    return statistics.median(counted), min(counted), max(counted)


def share(result: dict[str, Any]) -> dict[str, float]:
    """Means over the ranks of the epoch of median length."""
    counted = list(zip(result["seconds"], result["shares"], strict=True))[WARM_UP:]
    ranks = sorted(counted, key=lambda pair: pair[0])[len(counted) // 2][1]
    return {key: statistics.mean(rank[key] for rank in ranks) for key in ranks[0]}


def exposed(result: dict[str, Any]) -> float:
    """Exposed over all pipeline communication."""
    s = share(result)
    total = s["exposed_pipeline_s"] + s["hidden_pipeline_s"]
    return s["exposed_pipeline_s"] / total if total else math.nan


def geometric(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(v) for v in values))


def report(args: argparse.Namespace) -> None:
    every = sorted(read_cells(DATA).values(), key=lambda row: (row["graph"], row["model"]))
    best = [row for row in every if "graph best" in row["results"]]
    alone = {row["cell"] for row in every if row not in best}
    rows = [row for row in every if row not in best or row["cell"][: -len("|best")] not in alone]
    commits = sorted({row["commit"] for row in rows})
    text = [
        "# Slow networks: pipeline, graph parallel, hybrid",
        "",
        f"Made by `scripts/network_speed.py run` and `report`; commits {', '.join(commits)}; "
        f"{max(row['date'] for row in rows)}; 2 cores, one thread a rank, hosts are network "
        "namespaces with a limit on each link (both ways).",
        f"Hidden {HIDDEN}, dropout 0.5; seconds of an epoch, median (least to most), contenders in "
        "turns. *Pipeline*: S = hosts, `--staleness auto`; *graph*: G = hosts, K = 1, exact; "
        "*hybrid*: G = 2. MB: what the program sent in an epoch, equal to the closed form in "
        "every cell. *Exposed*: the share of the pipeline's communication time that was waited "
        "for. Four ranks share two cores, so compute weighs twice as much as on four machines. "
        "*Imbalance*: the share of the graph-parallel epoch that a rank waits for other shards, "
        "whose boundaries METIS does not make equal. Machines differ in speed from commit to "
        "commit: compare within a row. At 3ee37971 other machines took an eighth of the "
        "processors' time, and compute took 1.2 to 2.4 times as long as on a faster machine at "
        "e8f7482f. There the 12 cells of 32 layers had a geometric mean of 4.84 at 200 Mbit/s and "
        "1.85 at 1 Gbit/s (e8f7482f, da8ebcf3, 03c1853f; a rebase replaced e8f7482f: its gnnpipe "
        "is that of d73bc244).",
        "",
        *against_the_best(best),
    ]
    table: list[dict[str, Any]] = []
    for row in rows:
        r = row["results"]
        assert all(v["sent"] == v["closed_form"] for v in r.values()), row["cell"]
        pipe, graph = seconds(r["pipeline"]), seconds(r["graph"])
        table.append(
            {
                "Mbit/s": row["mbit"],
                "hosts": row["hosts"],
                "L": row["layers"],
                "K": row["chunks"],
                "graph": row["graph"],
                "model": row["model"],
                "M/N": round(r["graph"]["crossings_per_vertex"], 2),
                "pipeline s": spread(pipe),
                "graph s": spread(graph),
                "hybrid s": spread(seconds(r["hybrid"])) if "hybrid" in r else "",
                "bf16 s": spread(seconds(r["pipeline bf16"])) if "pipeline bf16" in r else "",
                "graph / pipeline": round(graph[0] / pipe[0], 2),
                "pipeline MB": round(r["pipeline"]["sent"] / 1e6, 1),
                "graph MB": round(r["graph"]["sent"] / 1e6, 1),
                "bf16 MB": round(r["pipeline bf16"]["sent"] / 1e6, 1)
                if "pipeline bf16" in r
                else "",
                "exposed": f"{exposed(r['pipeline']):.0%}",
                "imbalance": f"{share(r['graph'])['imbalance_s'] / graph[0]:.0%}",
                "bubble": f"{share(r['pipeline'])['bubble_s'] / pipe[0]:.0%}",
            }
        )
    groups = sorted({(t["hosts"], t["Mbit/s"], t["L"]) for t in table})
    for hosts, mbit, layers in groups:
        of = [t for t in table if (t["hosts"], t["Mbit/s"], t["L"]) == (hosts, mbit, layers)]
        ratios = [t["graph / pipeline"] for t in of]
        text += [
            f"## {hosts} hosts, {mbit:g} Mbit/s, {layers} layers",
            "",
            f"graph / pipeline: geometric mean {geometric(ratios):.2f}, best {max(ratios):.2f}, "
            f"worst {min(ratios):.2f}, over {len(of)} cells.",
            "",
        ]
        keys = [k for k in table[0] if k not in ("hosts", "Mbit/s", "L")]
        text += [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
        text += [f"| {' | '.join(str(t[k]) for k in keys)} |" for t in of]
        text.append("")
    named = {
        f"{t['graph']} {t['model']} L {t['L']}, {t['hosts']} at {t['Mbit/s']:g}": {
            "graph parallel over pipeline": t["graph / pipeline"]
        }
        for t in table
    }
    text += [bars("network", named, "epoch, graph over pipeline", aim=1.0), ""]
    (FOLDER / "network.md").write_text("\n".join(text), encoding="utf-8")
    names = "median", "least", "most"
    write_csv(
        "network",
        [
            {
                "hosts": row["hosts"],
                "mbit_per_s": row["mbit"],
                "layers": row["layers"],
                "chunks": row["chunks"],
                "graph": row["graph"],
                "model": row["model"],
                "contender": name,
                **{f"{k}_s": round(s, 4) for k, s in zip(names, seconds(found), strict=True)},
                "sent_bytes": found["sent"],
                "exposed": share_text(exposed(found)),
                "commit": row["commit"],
            }
            for row in rows
            for name, found in row["results"].items()
        ],
    )
    print("wrote docs/benchmarks/network.md, .csv and .png")


def against_the_best(rows: list[dict[str, Any]]) -> list[str]:
    """The section of the cells in which graph parallelism got everything."""
    if not rows:
        return []
    keys = ["hosts", "Mbit/s", "layers", "graph", "model", "pipeline s", "graph s", "best s"]
    keys.append("ratio")
    lines = [
        "## Against the best graph parallelism",
        "",
        f"Commits {', '.join(sorted({row['commit'] for row in rows}))}; "
        f"{max(row['date'] for row in rows)}. *Best* is graph parallelism with what "
        "`scripts/graph_parallel.py` gives it and gnnpipe by itself does not: the product with the "
        "rows of its own shard runs while the rows of other shards arrive, and shards are balanced "
        "by the rows they receive. Same losses up to rounding. The ratio is that of the faster of "
        "*graph* and *best* to the pipeline: four ranks share two cores here, so a product under "
        "an exchange takes time from the exchange.",
        "",
        f"| {' | '.join(keys)} |",
        "|---" * len(keys) + "|",
    ]
    ratios = []
    for row in sorted(rows, key=lambda row: (row["mbit"], row["layers"], row["graph"])):
        r = row["results"]
        assert all(v["sent"] == v["closed_form"] for v in r.values()), row["cell"]
        s = {name: seconds(found) for name, found in r.items()}
        ratios.append(min(s["graph"][0], s["graph best"][0]) / s["pipeline"][0])
        cells = [row["hosts"], f"{row['mbit']:g}", row["layers"], row["graph"], row["model"]]
        cells += [spread(s[name]) for name in ("pipeline", "graph", "graph best")]
        lines.append(f"| {' | '.join(map(str, [*cells, f'{ratios[-1]:.2f}']))} |")
    lines += ["", f"Ratio: {min(ratios):.2f} to {max(ratios):.2f}; {len(rows)} cells.", ""]
    return lines


def share_text(value: float) -> str:
    """Empty where nothing travels between stages."""
    return "" if math.isnan(value) else f"{value:.4f}"


def spread(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.2f} ({values[1]:.2f}-{values[2]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("run")
    one.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    one.add_argument("--models", nargs="+", default=["gcn", "sage", "gcnii"])
    one.add_argument("--layers", nargs="+", type=int, default=[32])
    one.add_argument("--mbit", nargs="+", type=float, default=[200.0])
    one.add_argument("--hosts", type=int, default=4, choices=(2, 4))
    one.add_argument("--chunks", type=int, default=CHUNKS)
    one.add_argument("--repeats", type=int, default=5)
    names = list(contenders(4, CHUNKS, "gcn"))
    one.add_argument("--contenders", nargs="+", default=names[:4], choices=names)
    one.set_defaults(call=run)
    actions.add_parser("report").set_defaults(call=report)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()

"""An epoch on one device, one thread, against PyG and DGL in the same run.

python scripts/single_speed.py run [--graphs A B] [--models M] [--layers 3 16] [--widths 128]
                                   [--dgl-python PYTHON] [--repeats 7] [--held] [--even]
python scripts/single_speed.py report     # writes docs/benchmarks/single_speed.md, .csv and .png

The contenders of a cell (``peers.py``) are processes that take turns, one epoch each, so that what
else the machine does falls on all of them. Each has glibc's heap as its users have it: ours holds
what it frees (docs/adr/0018), the others have it as it comes; with --held all have ours. A finished
cell is kept in docs/benchmarks/data/single_speed.jsonl and not measured again. DGL 1.1.3 runs with
torch 2.13 when it is installed without its dependencies, in an environment of its own:

python -m venv dgl-env; dgl-env/bin/pip install torch==2.13.0 torch_geometric numpy scipy pymetis
dgl-env/bin/pip install --no-deps dgl==1.1.3
dgl-env/bin/pip install requests networkx psutil tqdm packaging "setuptools<70"
"""

from __future__ import annotations

import argparse
import contextlib
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

from benchmark_files import bars, read_cells, write_csv  # noqa: E402
from fidelity import commit  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "single_speed.md"
DATA = Path(os.environ.get("SS_DATA", ROOT / "docs" / "benchmarks" / "data" / "single_speed.jsonl"))
DENSE = {
    "squirrel": "squirrel",
    "planted, degree 80": "synthetic:planted:n=30000,degree=80,classes=20,features=128",
}
SPARSE = {name: name for name in ("debian", "coauthor_physics", "ego_twitter", "cnr_2000")}
CONTENDERS = ("ours", "ours:32", "floor", "pyg:csr", "pyg:sparse", "pyg:edge_index", "dgl")
EVEN = ("ours", "pyg:csr", "pyg:transpose", "pyg:features", "pyg:order", "pyg:even")
"""With --even: PyG gets, one after the other, what gnnpipe has (``peers.with_pyg_evened``)."""
HELD = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
"""What ``gnnpipe.heap.held_heap`` sets, for every contender."""
WARM_UP, SLOW_S, SLOW_TURNS = 3, 3.0, 3
"""First turns that do not count; who needs longer than this for an epoch gets so many turns."""


class Contender:
    """A process that waits for its turn."""

    def __init__(self, python: str, name: str, cell: list[str], held: bool = False) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if held:
            environment["GLIBC_TUNABLES"] = HELD
        line = [python, str(ROOT / "scripts" / "peers.py"), name, *cell]
        # Peak memory is this process's own only if it does not inherit ours.
        self.process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.times: list[float] = []
        self.failed = ""

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line or line.startswith("failed"):
            self.failed = line.removeprefix("failed ") or "died"
        return line

    def start(self) -> None:
        self._line()

    def turn(self) -> None:
        slow = len(self.times) >= SLOW_TURNS and min(self.times) > SLOW_S
        if self.failed or slow:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says why, or that it died
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        line = self._line()
        if not self.failed:
            self.times.append(float(line))

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        line = "" if self.failed else self._line()
        self.process.wait()
        if self.failed:
            return {"failed": self.failed}
        peak = float(line)
        counted = self.times[1 if len(self.times) == SLOW_TURNS else WARM_UP :]
        return {"seconds": counted, "peak_mib": peak}


def measure(cell: list[str], contenders: list[str], args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    # The largest do not fit into memory together, and go one after the other.
    for group in [[name] for name in contenders] if is_apart(cell) else [contenders]:
        running = {}
        for name in group:
            python = args.dgl_python if name == "dgl" else sys.executable
            running[name] = Contender(python, name, cell, args.held)
            running[name].start()
        for _ in range(WARM_UP + args.repeats):
            for one in running.values():
                one.turn()
        found |= {name: one.end() for name, one in running.items()}
    return found


def is_apart(cell: list[str]) -> bool:
    """Contenders of the cell (dataset, model, layers, width) are not there at the same time."""
    dataset, _, layers, _ = cell
    return dataset in SPARSE and (int(layers) > 3 or dataset in ("cnr_2000", "coauthor_physics"))


def run(args: argparse.Namespace) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    for graph in args.graphs:
        for model in args.models:
            for layers in args.layers:
                for width in args.widths:
                    key = f"{graph}|{model}|{layers}|{width}" + ("|held" if args.held else "")
                    key += "|even" if args.even else ""
                    if key in read_cells(DATA):
                        continue
                    contenders = [
                        name
                        for name in (EVEN if args.even else args.contenders)
                        if not (name == "floor" and model == "gat")
                        and not (name == "dgl" and not args.dgl_python)
                    ]
                    dataset = {**DENSE, **SPARSE}[graph]
                    found = measure([dataset, model, str(layers), str(width)], contenders, args)
                    row = {
                        "cell": key,
                        "commit": commit(),
                        "date": time.strftime("%Y-%m-%d"),
                        "allocator": "held" if args.held else allocator(),
                        "results": found,
                    }
                    with DATA.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(key, {k: brief(v) for k, v in found.items()}, flush=True)


def allocator() -> str:
    names = ("THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES", "LD_PRELOAD")
    return " ".join(f"{n}={os.environ[n]}" for n in names if os.environ.get(n)) or "as it comes"


def median(result: dict[str, Any] | None) -> float:
    return statistics.median(result["seconds"]) if result and "seconds" in result else float("nan")


def brief(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "failed" in result:
        return "not installed" if "No module" in result["failed"] else str(result["failed"])
    ms = [1e3 * t for t in result["seconds"]]
    return f"{statistics.median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"


def ratio(mine: float, other: float, digits: int = 2) -> str:
    return f"{other / mine:.{digits}f}" if other == other and mine == mine else ""


def report(args: argparse.Namespace) -> None:
    every = list(read_cells(DATA).values())
    even = [row for row in every if row["cell"].endswith("|even")]
    every = [row for row in every if row not in even]
    rows = [row for row in every if not row["cell"].endswith("|held")]
    held = [row for row in every if row["cell"].endswith("|held")]
    commits = sorted({row["commit"] for row in every})
    text = [
        "# An epoch on one device",
        "",
        f"Made by `scripts/single_speed.py run` and `report`; commits {', '.join(commits)}; "
        f"{max(row['date'] for row in every)}; one thread. glibc's heap as the users of each have "
        "it: ours holds what it frees (in cells of commits 0182ac2 and later; in earlier ones as "
        "it comes), the others as it comes; [further down](#with-the-heap-held) all have ours.",
        "Milliseconds of an epoch (forward, loss, backward, Adam; dropout 0.5), median (least to "
        "most); the contenders take turns, 3 turns do not count; who needs over 3 s for an epoch "
        "takes 3 turns in all, of which the first does not count. On sparse graphs with 16 layers, "
        "on cnr_2000 and coauthor_physics memory holds one contender at a time, so they ran one "
        "after the other. *best form* is the faster of "
        "PyG with a torch CSR tensor and, where torch_sparse is installed, a SparseTensor. "
        "*floor* is meant as a lower bound, and where the rows stay in the cache it is none, for "
        "torch's gather is slower there than the product: our own epoch without its "
        "aggregations, but for writing their rows, plus reading every neighbour's row once for "
        "each of them. *K = 32* is our default policy of stale rows on 32 chunks against "
        "one chunk. PyG's and DGL's SAGE aggregates the raw features in its first layer, ours "
        "their linear map, or (of the dense features of all but squirrel, debian and "
        "coauthor_physics) reads what was aggregated once before training. From commit f1e1f54 on "
        "our last layer makes in training the rows of training vertices alone (60 % of all; "
        "attention's makes all), the others' make all. ego_twitter and "
        "cnr_2000 have 128 random features. " + args.note,
        "",
    ]
    table: list[dict[str, Any]] = []
    text += [*evened(even), *summary(rows), "", picture(rows), "", *tables(rows, table, "##")]
    if held:
        text += [
            "## With the heap held",
            "",
            "glibc gives large temporaries back to the system and takes them anew, cleared, in "
            "every epoch. Our own runs set its heap so that it does not "
            "([adr 0018](../adr/0018-settings-of-the-heap.md)); here all contenders have that "
            "setting. Who makes the largest temporaries gains most: PyG with edge_index.",
            "",
            *summary(held),
            "",
            *tables(held, table, "###"),
        ]
    write_csv("single_speed", table)
    PAGE.write_text("\n".join(text), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def evened(rows: list[dict[str, Any]]) -> list[str]:
    """The table in which PyG gets what gnnpipe has, step by step."""
    if not rows:
        return []
    head = ["graph", "model", "layers", "ours", "PyG CSR", "+ kept transpose", "+ sparse features"]
    head += ["+ our vertex order", "+ our heap", "best of PyG / ours", "commit"]
    text = [
        "## Evened out",
        "",
        "PyG with what a careful user can add by hand. Each column has everything to its left: a "
        "torch CSR matrix; a transposed matrix that is kept for backward (an autograd function in "
        "place of torch_sparse, which was not tried); the sparse features multiplied by the first "
        "Linear (no change where features are dense); the order of the vertices that gnnpipe "
        "makes; gnnpipe's allocator settings. Without dropout all columns gave the same losses to "
        "1e-6 (coauthor_physics, 3 layers of 16). Measured on 26 November 2026 (commit 02440dc), "
        "and on 27 November beside a busy core (c582e7c); x86_64 cores two to three times as slow "
        "as for the tables further down: compare within a row only. F is 128; 7 turns count. "
        "Milliseconds of an "
        "epoch, median (least to most); the contenders take turns, but on coauthor_physics and "
        "with 16 layers they ran one after another.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    ratios = []
    for row in rows:
        graph, model, layers, _ = row["cell"].split("|")[:4]
        r = row["results"]
        ratios.append(min(median(r.get(name)) for name in EVEN[1:]) / median(r["ours"]))
        times = " | ".join(brief(r.get(name)) for name in EVEN)
        text.append(
            f"| {graph} | {model} | {layers} | {times} | {ratios[-1]:.2f} | {row['commit']} |"
        )
    mean = statistics.geometric_mean(ratios)
    text += ["", f"Ratios {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mean:.2f}.", ""]
    return [*text, "## Each as its users have it", ""]


def tables(rows: list[dict[str, Any]], numbers: list[dict[str, Any]], level: str) -> list[str]:
    """A table for each model; ``numbers`` gets a line for each contender of a cell."""
    head = [
        "layers",
        "F",
        "ours",
        "floor",
        "x floor",
        "K = 32 / 1",
        "PyG CSR",
        "PyG SparseTensor",
        "PyG edge_index",
        "DGL",
        "best form / ours",
        "edge_index / ours",
        "DGL / ours",
    ]
    text: list[str] = []
    for model in dict.fromkeys(row["cell"].split("|")[1] for row in rows):
        text += [
            f"{level} {model}",
            "",
            f"| graph | {' | '.join(head)} |",
            "|---" * (len(head) + 1) + "|",
        ]
        for row in rows:
            graph, name, layers, width = row["cell"].split("|")[:4]
            if name != model:
                continue
            r = row["results"]
            ms = {k: median(r.get(k)) for k in CONTENDERS}
            forms = [v for v in (ms["pyg:csr"], ms["pyg:sparse"]) if v == v]
            best = min(forms) if forms else float("nan")
            cells = [
                layers,
                width,
                brief(r.get("ours")),
                brief(r.get("floor")),
                ratio(ms["floor"], ms["ours"]),
                ratio(ms["ours"], ms["ours:32"]),
                *(brief(r.get(k)) for k in ("pyg:csr", "pyg:sparse", "pyg:edge_index", "dgl")),
                ratio(ms["ours"], best),
                ratio(ms["ours"], ms["pyg:edge_index"], 1),
                ratio(ms["ours"], ms["dgl"]),
            ]
            text.append(f"| {graph} | {' | '.join(cells)} |")
            numbers += [
                {
                    "model": model,
                    "graph": graph,
                    "layers": layers,
                    "hidden": width,
                    "contender": k,
                    "heap": "held" if row["cell"].endswith("|held") else "as it comes",
                    "median_ms": round(ms[k], 2),
                    "least_ms": round(1e3 * min(v["seconds"]), 2),
                    "most_ms": round(1e3 * max(v["seconds"]), 2),
                    "commit": row["commit"],
                }
                for k, v in r.items()
                if "seconds" in v
            ]
        text.append("")
    return text


def picture(rows: list[dict[str, Any]]) -> str:
    """How many times as long as ours the others take; edge_index is off its scale."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        graph, model, layers, width = row["cell"].split("|")
        ms = {k: median(v) for k, v in row["results"].items()}
        forms = [v for v in (ms.get("pyg:csr"), ms.get("pyg:sparse")) if v is not None and v == v]
        found = {"PyG's best form": min(forms, default=float("nan")) / ms["ours"]}
        found["DGL"] = ms.get("dgl", float("nan")) / ms["ours"]
        wide = "" if width == "128" else f" x {width}"
        groups[f"{model} {layers}{wide} {graph}"] = found
    return bars("single_speed", groups, "their epoch over ours", aim=1.0)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What was to be reached, and in how many cells it is; the others by name."""
    aims: dict[str, list[tuple[str, float, float]]] = {}
    for row in rows:
        graph, model, layers, width = row["cell"].split("|")[:4]
        ms = {k: median(v) for k, v in row["results"].items()}
        best = min(
            (ms[k] for k in ("pyg:csr", "pyg:sparse") if ms.get(k, ms["ours"]) == ms.get(k)),
            default=float("nan"),
        )
        name = f"{graph} {model} {layers}" + ("" if width == "128" else f" x {width}")
        wanted = {"the best form": (best, 3.0 if graph in DENSE else 1.6)}
        wanted["edge_index"] = ms["pyg:edge_index"], 6.0
        wanted["DGL"] = ms.get("dgl", float("nan")), 1.3
        if model == "gat":
            wanted = {f"{k}, attention": (v, 1.0) for k, (v, _) in wanted.items()}
        for what, (other, aim) in wanted.items():
            key = f"{aim:g} times as fast as {what}" + (
                (" (dense graphs)" if graph in DENSE else " (sparse graphs)")
                if what == "the best form"
                else ""
            )
            if other == other:
                aims.setdefault(key, []).append((name, other / ms["ours"], aim))
    lines = ["| aim | cells | reached | not reached |", "|---|---|---|---|"]
    for key, cells in aims.items():
        missed = [f"{name} {value:.2f}" for name, value, aim in cells if value < aim]
        count = len(cells)
        lines.append(f"| {key} | {count} | {count - len(missed)} | {', '.join(missed)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("run")
    one.add_argument("--graphs", nargs="+", default=[*DENSE, *SPARSE], choices=[*DENSE, *SPARSE])
    one.add_argument("--models", nargs="+", default=["gcn", "sage", "gcnii", "gat"])
    one.add_argument("--layers", nargs="+", type=int, default=[3, 16])
    one.add_argument("--widths", nargs="+", type=int, default=[128])
    one.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    one.add_argument("--dgl-python")
    one.add_argument("--repeats", type=int, default=7)
    one.set_defaults(call=run)
    one.add_argument("--held", action="store_true", help="the heap of all gives nothing back")
    one.add_argument("--even", action="store_true", help="PyG gets what gnnpipe has, by steps")
    two = actions.add_parser("report")
    two.add_argument("--note", default="", help="what else is to be known of the machine")
    two.set_defaults(call=report)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()

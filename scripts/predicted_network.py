"""Predicted beside measured epoch time on slow links, and whether the critical resource is right.

python scripts/predicted_network.py run [--hosts 2 4]     # needs root; some 30 minutes for both
python scripts/predicted_network.py report                # docs/benchmarks/predicted_network.md

Hosts are network namespaces of this machine (``namespaces.py``), one rank of one thread each. For
every number of hosts and rate a profile is taken once, over those links, and serves all shapes.
What is critical by the prediction: wires, if at least half of its critical path is messages,
exchanges and sums. What is critical in truth: wires, if twice the rate makes the measured epoch at
least a quarter shorter (were they all of the path, it would be one half), and the devices, if by a
tenth at most; between the two neither is.
Finished runs are kept in docs/benchmarks/data/predicted_network.jsonl (or the
file that PNET_DATA names) and not made again.
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
from predicted_speed import GRAPHS  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
DATA = Path(os.environ.get("PNET_DATA", FOLDER / "data" / "predicted_network.jsonl"))
SHAPES = {2: ((2, 1, 8), (1, 2, 1)), 4: ((4, 1, 8), (2, 2, 8), (1, 4, 1))}
"""(stages, shards, chunks) by hosts."""
MBIT = (50, 100, 200, 400, 800, 1600)
"""Each is twice the one before: the truth about it."""
GRAPH, MODEL, LAYERS, HIDDEN, EPOCHS = "coauthor_physics", "gcn", 4, 64, 15
WIRES = {
    "SEND_F",
    "SEND_B",
    "EXCHANGE_F",
    "EXCHANGE_B",
    "REDUCE_FIT",
    "REDUCE_MEAN",
    "REDUCE_GRAD",
    "SYNC",
}
HALF, SHORTER, SAME = 0.5, 0.25, 0.1
PORT = 29617

Row = dict[str, Any]


def wires_share(trace: dict[str, Any]) -> float:
    """Of the predicted critical path."""
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    path = [
        e
        for e in events
        if e["ph"] == "X" and processes[e["pid"]] == "predicted" and e["args"]["critical"]
    ]
    # An exchange stands in the lane of every shard that takes part.
    spans = {(e["cat"], e["ts"], e["args"]["stage"]): e["dur"] for e in path}
    on_wires = sum(length for (kind, _, _), length in spans.items() if kind in WIRES)
    return on_wires / sum(spans.values())


def gnnpipe(hosts: Hosts, command_name: str, *words: str) -> None:
    """A command on every host."""
    command = [
        sys.executable,
        "-m",
        "gnnpipe",
        command_name,
        *GRAPHS[GRAPH],
        "--model",
        MODEL,
        "--layers",
        str(LAYERS),
        "--hidden",
        str(HIDDEN),
        "--device",
        "cpu",
        "--quiet",
        *words,
    ]
    hosts.run(command, {"PYTHONPATH": str(ROOT)}, PORT)


def one(hosts: Hosts, shape: tuple[int, int, int], profile: Path, place: Path) -> Row:
    """Train in one shape, and predict it."""
    stages, shards, chunks = map(str, shape)
    gnnpipe(
        hosts,
        "train",
        "--epochs",
        str(EPOCHS),
        "--eval-every",
        "0",
        "--profile",
        str(profile),
        "--stages",
        stages,
        "--shards",
        shards,
        "--chunks",
        chunks,
        "--out",
        str(place),
    )
    result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    trace = json.loads((place / "trace.json").read_text(encoding="utf-8"))
    return {
        "predicted_s": result["predicted_epoch_time_s"],
        "measured_s": result["epoch_time_s"],
        "wires": wires_share(trace),
    }


def run(counts: list[int]) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for count in counts:
            for mbit in MBIT:
                with Hosts(count, mbit, "pnet") as hosts:
                    measure(hosts, Path(place))


def measure(hosts: Hosts, place: Path) -> None:
    """All shapes at one rate; what is done is not made again."""
    where = {"hosts": hosts.count, "mbit": hosts.mbit}
    cells = [where | {"shape": list(shape)} for shape in SHAPES[hosts.count]]
    done = read_rows(DATA)
    left = [cell for cell in cells if not any(cell.items() <= row.items() for row in done)]
    if not left:
        return
    name = f"{hosts.count}-{hosts.mbit}"
    profile = place / f"{name}.json"
    start_s = time.monotonic()
    gnnpipe(hosts, "profile", "--save", str(profile))
    took_s = round(time.monotonic() - start_s, 1)
    for cell in left:
        folder = place / "-".join([name, *map(str, cell["shape"])])
        row = cell | one(hosts, tuple(cell["shape"]), profile, folder) | {"profile_s": took_s}
        row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
        with DATA.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        off = row["predicted_s"] / row["measured_s"] - 1
        print(f"{cell}: {row['measured_s']:.3f} s, {off:+.1%}", flush=True)


def truth(row: Row, faster: Row | None) -> str:
    """What was critical, by the run at twice the rate."""
    if faster is None:
        return ""
    less = 1 - faster["measured_s"] / row["measured_s"]
    return "wires" if less >= SHORTER else "devices" if less <= SAME else "both"


def report() -> None:
    found = {(row["hosts"], tuple(row["shape"]), row["mbit"]): row for row in read_rows(DATA)}
    if not found:
        raise SystemExit(f"{DATA}: nothing yet; python scripts/predicted_network.py run")
    dates = sorted(row["date"] for row in found.values())
    versions: dict[int, set[str]] = {}
    for (count, *_), row in sorted(found.items()):
        versions.setdefault(count, set()).add(row["commit"])
    commits = (f"{', '.join(sorted(of))} ({count} hosts)" for count, of in versions.items())
    lines = [
        "# Predicted beside measured, on slow links",
        "",
        f"`scripts/predicted_network.py`, {dates[0]} to {dates[-1]}, commit "
        f"{', '.join(commits)}. {GRAPH}, {MODEL} of {LAYERS} layers of {HIDDEN}, {EPOCHS} epochs; "
        f"hosts are network namespaces of one machine of {os.cpu_count()} cores, a rank of one "
        "thread each; one profile for each rate and number of hosts. "
        "*wires*: share of the predicted critical path. *in truth*: what was "
        "critical, by the measured epoch at twice the rate (wires: a quarter shorter or more; "
        "devices: a tenth or less; both: between).",
        "",
        "| hosts | S, G, K | Mbit/s | measured, s | predicted, s | off by | wires | critical | "
        "in truth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    right = told = 0
    off: dict[int, list[float]] = {}
    for (count, shape, mbit), row in sorted(found.items()):
        error = row["predicted_s"] / row["measured_s"] - 1
        off.setdefault(count, []).append(abs(error))
        said = "wires" if row["wires"] >= HALF else "devices"
        was = truth(row, found.get((count, shape, 2 * mbit)))
        told += was in ("wires", "devices")
        right += said == was
        lines.append(
            f"| {count} | {', '.join(map(str, shape))} | {mbit} | {row['measured_s']:.3f} | "
            f"{row['predicted_s']:.3f} | {error:+.1%} | {row['wires']:.0%} | {said} | {was} |"
        )
    lines.append("")
    lines += [
        f"- {count} hosts: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
        f"of {len(errors)} runs."
        for count, errors in sorted(off.items())
    ]
    lines.append(f"- Of {told} runs with one critical resource it is named rightly in {right}.")
    text = "\n".join(lines) + "\n"
    (FOLDER / "predicted_network.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--hosts", nargs="+", type=int, choices=list(SHAPES), default=list(SHAPES))
    options = parser.parse_args()
    if options.what == "run":
        run(options.hosts)
    else:
        report()


if __name__ == "__main__":
    main()

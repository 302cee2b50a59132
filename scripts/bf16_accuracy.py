"""What rounding to bf16 costs in accuracy: the same runs without, of rows, and of products.

    python scripts/bf16_accuracy.py run [--graphs G ...] [--seeds 3]   # some 20 minutes for all
    python scripts/bf16_accuracy.py report               # docs/benchmarks/bf16_accuracy.md

Rows with ``--comm-dtype bf16``, products with ``--matmul-dtype bf16``. GCN with 4 layers and GCNII
with 16, hidden 64, dropout 0.5, 32 chunks, 100 epochs on two stages (rows are rounded between
stages, too, so one process would not show it all). Test accuracy at the epoch that validates best,
evaluated every 10 epochs. The contenders take turns; finished runs are kept in
docs/benchmarks/data/bf16_accuracy.jsonl (or the file that BF16_DATA names).
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import SHARED  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
DATA = Path(os.environ.get("BF16_DATA", FOLDER / "data" / "bf16_accuracy.jsonl"))
GRAPHS = {
    # Stored directed.
    "squirrel": ["--split", "60/20/20", "--symmetrize"],
    "amazon_photo": ["--split", "60/20/20"],
    "pubmed": ["--split", "10/20/70"],
}
MODELS = {"gcn": 4, "gcnii": 16}
EPOCHS, CHUNKS, STAGES = 100, 32, 2
KINDS = {"float32": [], "rows": ["--comm-dtype", "bf16"], "products": ["--matmul-dtype", "bf16"]}

Row = dict[str, Any]


def run(graphs: list[str], seeds: int) -> None:
    for seed in range(seeds):
        for graph in graphs:
            for model in MODELS:
                for kind in KINDS:
                    one(graph, model, kind, seed)


def one(graph: str, model: str, kind: str, seed: int) -> None:
    row: Row = {"graph": graph, "model": model, "kind": kind, "seed": seed}
    if any(row.items() <= old.items() for old in read_rows(DATA)):
        return
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(STAGES),
            "-m",
            "gnnpipe",
            "train",
            "--dataset",
            str(SHARED / f"{graph}.npz"),
            *GRAPHS[graph],
            "--model",
            model,
            "--layers",
            str(MODELS[model]),
            "--hidden",
            "64",
            "--dropout",
            "0.5",
            "--epochs",
            str(EPOCHS),
            "--eval-every",
            "10",
            "--chunks",
            str(CHUNKS),
            "--stages",
            str(STAGES),
            "--seed",
            str(seed),
            *KINDS[kind],
            "--quiet",
            "--device",
            "cpu",
            "--no-predict",
            "--checkpoint-every",
            "0",
            "--out",
            f"{place}/run",
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        result = json.loads(Path(place, "run", "result.json").read_text(encoding="utf-8"))
    row["test_acc"] = result["test_acc_at_best_val"]
    row["sent_bytes"] = result["comm_bytes_per_epoch"]["total"]
    row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
    with DATA.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(graph, model, kind, seed, f"{row['test_acc']:.4f}", flush=True)


def report() -> None:
    found = read_rows(DATA)
    if not found:
        raise SystemExit(f"{DATA}: no runs yet; first `run`")
    days, made = sorted({r["date"][:10] for r in found}), sorted({r["commit"] for r in found})
    lines = [
        "# What rounding to bf16 costs in accuracy",
        "",
        f"`scripts/bf16_accuracy.py`, {' to '.join(dict.fromkeys((days[0], days[-1])))}, commit "
        f"{', '.join(made)}. S = {STAGES}, K = {CHUNKS}, hidden 64, dropout 0.5, {EPOCHS} epochs. "
        "Test accuracy in percent at the best validation epoch, mean (standard deviation) of the "
        "seeds; *difference*: of the pairs of one seed, bf16 minus float32, mean (standard error). "
        "*Bytes*: sent in an epoch, bf16 over float32.",
    ]
    rows_of = {
        "rows": "## Rows (`--comm-dtype bf16`)",
        "products": "## Products with weights (`--matmul-dtype bf16`)",
    }
    for kind, title in rows_of.items():
        lines += ["", title, "", *_table(found, kind)]
    text = "\n".join(lines) + "\n"
    (FOLDER / "bf16_accuracy.md").write_text(text, encoding="utf-8")
    print(text)


def _table(found: list[Row], kind: str) -> list[str]:
    """``kind`` beside float32, and all pairs together."""
    lines = [
        "| graph | model | seeds | float32 | bf16 | difference | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    everywhere: list[float] = []
    for graph in GRAPHS:
        for model, layers in MODELS.items():
            cell = [r for r in found if (r["graph"], r["model"]) == (graph, model)]
            by = {(r["kind"], r["seed"]): r for r in cell}
            seeds = [s for k, s in by if k == kind and ("float32", s) in by]
            if len(seeds) < 2:
                continue
            pairs = [[100 * by[k, s]["test_acc"] for k in ("float32", kind)] for s in seeds]
            plain, rounded = ([pair[i] for pair in pairs] for i in range(2))
            differences = [low - full for full, low in pairs]
            everywhere += differences
            error = statistics.stdev(differences) / len(differences) ** 0.5
            share = by[kind, seeds[0]]["sent_bytes"] / by["float32", seeds[0]]["sent_bytes"]
            lines.append(
                f"| {graph} | {model} {layers} | {len(seeds)} | {_spread(plain)} | "
                f"{_spread(rounded)} | {statistics.mean(differences):+.2f} ({error:.2f}) | "
                f"{share:.2f} |"
            )
    if len(everywhere) > 1:
        error = statistics.stdev(everywhere) / len(everywhere) ** 0.5
        lines += [
            "",
            f"Over all {len(everywhere)} pairs: {statistics.mean(everywhere):+.2f} ({error:.2f}), "
            f"least {min(everywhere):+.2f}, most {max(everywhere):+.2f}.",
        ]
    return lines


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({statistics.stdev(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=GRAPHS)
    running.add_argument("--seeds", type=int, default=3)
    commands.add_parser("report")
    args = parser.parse_args()
    if args.command == "run":
        run(args.graphs, args.seeds)
    else:
        report()


if __name__ == "__main__":
    main()

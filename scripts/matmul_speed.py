"""What ``--matmul-dtype bf16`` saves: epochs with products in float32 and in bf16, in turns.

    python scripts/matmul_speed.py [--graphs G ...] [--models M ...] [--layers 3 16] [--repeats 9]

One process and thread, hidden 128, dropout 0.5, K = 1; both trainings are in memory and take turns
of an epoch, of which the first two do not count. Writes docs/benchmarks/matmul_speed.md. What it
costs in accuracy: ``bf16_accuracy.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity import commit  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "matmul_speed.md"
GRAPHS = ("squirrel", "debian", "coauthor_physics", "ego_twitter")
MODELS = ("gcn", "sage", "gcnii", "gat")
WIDTH, WARM_UP = 128, 2


def cell(graph: str, model: str, layers: int, repeats: int) -> str:
    """A line of the table."""
    import torch
    from peers import load, ours

    torch.set_num_threads(1)
    loaded = load(graph)
    epochs = [ours(loaded, model, layers, WIDTH, matmul=kind)[0] for kind in ("same", "bf16")]
    times: list[list[float]] = [[], []]
    for _ in range(repeats + WARM_UP):
        for epoch, some in zip(epochs, times, strict=True):
            start_s = time.perf_counter()
            epoch()
            some.append(1e3 * (time.perf_counter() - start_s))
    whole, low = (some[WARM_UP:] for some in times)
    pairs = sorted(a / b for a, b in zip(whole, low, strict=True))
    return (
        f"| {graph} | {model} | {layers} | {_spread(whole)} | {_spread(low)} | "
        f"{statistics.median(pairs):.2f} ({pairs[0]:.2f}-{pairs[-1]:.2f}) |"
    )


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({min(times):.0f}-{max(times):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=GRAPHS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 16])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.cell:
        graph, model, layers = args.cell
        from gnnpipe.heap import held_heap

        with held_heap():  # as in a run
            print(cell(graph, model, int(layers), args.repeats))
        return
    lines = [
        "# What products in bf16 save",
        "",
        f"`scripts/matmul_speed.py`, {time.strftime('%d %B %Y')}, commit {commit()}. Milliseconds "
        f"of an epoch, one thread, hidden {WIDTH}, dropout 0.5, K = 1, settings of the heap as in "
        f"a run; median (least to most) of {args.repeats}, in turns. *times*: of the pairs of "
        "turns. What it costs in accuracy: [bf16_accuracy.md](bf16_accuracy.md).",
        "",
        "| graph | model | layers | float32 | bf16 | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for graph in args.graphs:
        for layers in args.layers:
            for model in args.models:
                command = [sys.executable, __file__, "--cell", graph, model, str(layers)]
                command += ["--repeats", str(args.repeats)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr[-2000:])
                lines.append(done.stdout.strip().splitlines()[-1])
                print(lines[-1], flush=True)
                # Of what is done so far: all of it takes half an hour.
                PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

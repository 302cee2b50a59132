"""How much memory ranks take beside the estimate: GCN, SAGE, GCNII, users' models on four shapes.

    python scripts/memory_growth.py [--graphs coauthor_physics debian] [--layers 4 16] [--repeats 3]

Over a run of 6 epochs the growth of each rank, from before its part is allocated to its peak, over
what ``gnnpipe info`` says: of what is in use (``in_use.py``), and of resident memory, which has the
holes of the heap in it. Writes docs/benchmarks/memory_growth.md.
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
from collections.abc import Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity import commit  # noqa: E402
from predicted_speed import GRAPHS, MODELS, SHAPES  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "memory_growth.md"
USERS = ("sage", "gin", "classic")
"""Of ``users_models.py``, with BatchNorm."""
BOUND = 0.1


def grown(
    graph: str, model: Sequence[str], shape: tuple[int, int, int]
) -> list[tuple[float, float]]:
    """By rank, growth in use and resident, over the estimate."""
    stages, shards, chunks = shape
    ranks = stages * shards
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [str(ROOT / "scripts" / "in_use.py"), f"{place}/in_use"]
        command += ["train", *GRAPHS[graph], *model]
        command += ["--epochs", "6", "--eval-every", "0", "--device", "cpu"]
        command += ["--stages", str(stages), "--shards", str(shards), "--chunks", str(chunks)]
        command += ["--out", f"{place}/run", "--quiet", "--no-predict"]
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
        result = json.loads(Path(place, "run", "result.json").read_text(encoding="utf-8"))
        in_use = [int(Path(place, f"in_use.{r}").read_text(encoding="ascii")) for r in range(ranks)]
    names = ("peak_memory_bytes", "memory_before_bytes", "memory_estimate_bytes")
    by_rank = zip(in_use, *(result[name] for name in names), strict=True)
    return [
        (used / sum(estimate.values()), (peak - before) / sum(estimate.values()))
        for used, peak, before, estimate in by_rank
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    table, medians = [], ([], [])
    for graph in args.graphs:
        built_in = [
            (f"{model} {layers}", ["--model", model, "--layers", str(layers), "--hidden", "64"])
            for model, layers in product(MODELS, args.layers)
        ]
        maker = ["--model", str(ROOT / "scripts" / "users_models.py") + ":make_model"]
        own = [(f"user's {u}", [*maker, "--model-args", f"name='{u}'"]) for u in USERS]
        for name, model in [*built_in, *own]:
            for shape in SHAPES:
                runs = [grown(graph, model, shape) for _ in range(args.repeats)]
                cells = []
                for kind in range(2):
                    ranks = [sorted(run[r][kind] for run in runs) for r in range(len(runs[0]))]
                    medians[kind].extend(statistics.median(found) for found in ranks)
                    cells.append(
                        ", ".join(
                            f"{statistics.median(found):.2f}"
                            + f" ({found[0]:.2f}-{found[-1]:.2f})" * (args.repeats > 1)
                            for found in ranks
                        )
                    )
                shown = ", ".join(map(str, shape))
                table.append(f"| {graph} | {name} | {shown} | {cells[0]} | {cells[1]} |")
                print(table[-1], flush=True)
    said = []
    for name, found in zip(("In use", "Resident"), medians, strict=True):
        near = sum(abs(x - 1) <= BOUND for x in found)
        said.append(
            f"{name}: {near} of {len(found)} ranks within {BOUND:.0%}, median "
            f"{statistics.median(found):.2f}, least {min(found):.2f}, most {max(found):.2f}."
        )
    spread = f"median of {args.repeats} runs (least to most)" if args.repeats > 1 else "one run"
    lines = [
        "# Memory beside its estimate",
        "",
        f"`scripts/memory_growth.py`, {time.strftime('%d %B %Y')}, commit {commit()}. 64 wide, "
        "users' models (`scripts/users_models.py`, with BatchNorm) 3 layers of 128; 6 epochs on "
        "CPUs: "
        f"growth over the estimate of each rank, {spread}. "
        "*In use*: blocks of the heap that are allocated, and shared memory of the messages that "
        "the rank sends. *Resident*: all that the process has of the machine, also the holes "
        "between those blocks and the messages that it receives "
        "([adr 0018](../adr/0018-settings-of-the-heap.md)).",
        "",
        " ".join(said),
        "",
        "| graph | model, layers | S, G, K | in use | resident |",
        "|---|---|---|---|---|",
        *table,
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

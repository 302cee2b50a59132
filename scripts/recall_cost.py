"""Does the RECALL action pay? Epochs with it and without it, on real ranks, in turns.

    torchrun --nproc-per-node 2 scripts/recall_cost.py [--graph debian] [--blocks 6] [--write]

RECALL passes the probe vertices under backward for the forecast of the next epoch. Without it the
next epoch does that pass before its FORECAST, where nothing hides it. Blocks of epochs with and
without RECALL take turns; rank 0 prints the median epoch of each kind and the ratios of
neighbouring blocks, and writes docs/benchmarks/recall_cost.md with --write.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from fidelity import commit

from gnnpipe import TrainConfig
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.schedule import ActionKind, CheckedProgram, SpecialPosition
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epoch

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = 6
"""Of a block; the first is not counted, because it follows an epoch of the other kind."""


def without_recall(program: CheckedProgram) -> CheckedProgram:
    """The program without RECALL and its messages."""
    stages = (
        tuple(
            a
            for a in actions
            if a.kind is not ActionKind.RECALL and a.position != SpecialPosition.RECALLED_PROBE
        )
        for actions in program.stages
    )
    return replace(program, stages=tuple(stages))


def main() -> None:
    """Run the blocks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--graph", default="debian")
    parser.add_argument("--model", default="gcnii")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stages = int(os.environ["WORLD_SIZE"])
    config = TrainConfig(
        dataset=options.graph,
        model=options.model,
        layers=options.layers,
        hidden=options.hidden,
        stages=stages,
        chunks=options.chunks,
        epochs=10**6,
        out="off",
        quiet=True,
    )
    mesh = Mesh.join(stages, 1)
    prepared = prepare(config, mesh)
    rank_runtime = build_rank(prepared, mesh)
    number, medians = 0, []
    for block in range(2 * options.blocks + 1):
        times = []
        for _ in range(EPOCHS):
            program = prepared.program_of(max(number, 1) if block else number)
            if block % 2 == 0:
                program = without_recall(program)
            mesh.gather(None)
            start_s = time.perf_counter()
            train_epoch(rank_runtime, mesh, program, prepared.chunk_order(number), number)
            times.append(max(mesh.gather(time.perf_counter() - start_s)))
            number += 1
        medians.append(statistics.median(times[1:]))
    if mesh.rank == 0:
        report(options, stages, medians[1:])
    mesh.leave()


def report(options: argparse.Namespace, stages: int, medians: list[float]) -> None:
    """Print the numbers, and write the page."""
    with_it, without = medians[::2], medians[1::2]
    ratios = [b / a for a, b in zip(with_it, without, strict=True)]
    cell = f"{options.model} {options.layers} x {options.hidden}, {options.graph}, "
    cell += f"({stages}, 1, {options.chunks})"
    line = (
        f"| {cell} | {1e3 * statistics.median(with_it):.0f} | "
        f"{1e3 * statistics.median(without):.0f} | {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) | {commit()} |"
    )
    print(line)
    if not options.write:
        return
    page = ROOT / "docs" / "benchmarks" / "recall_cost.md"
    if not page.exists():
        head = ["cell", "with RECALL, ms", "without, ms", "without / with", "commit"]
        page.write_text(
            "# Does the RECALL action pay?\n\nMade by `scripts/recall_cost.py` on "
            f"{os.cpu_count()} cores ({platform.machine()}), one thread per rank, gloo. Blocks of "
            f"{EPOCHS} epochs with and without RECALL take turns; an epoch is that of the slowest "
            "rank; median of the blocks, and the ratio of neighbouring blocks with the smallest "
            "and the largest. Without RECALL the pass of the probe vertices with the weights of "
            "the last epoch runs at the beginning of the next epoch.\n\n"
            f"| {' | '.join(head)} |\n{'|---' * len(head)}|\n",
            encoding="utf-8",
        )
    with page.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()

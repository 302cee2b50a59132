"""What a checkpoint costs the epoch that it is written under.

    python scripts/checkpoint_cost.py [--epochs 200] [--every 5]

Runs on one thread, every n-th epoch followed by a checkpoint: the epochs around one against the
median of those of the same period that are not touched. Writes docs/benchmarks/checkpoint_cost.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity import commit  # noqa: E402

WIDTHS = (16, 64)
PAGE = ROOT / "docs" / "benchmarks" / "checkpoint_cost.md"


def main() -> None:
    """Train, compare, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    found = [measure(hidden, options.epochs, options.every) for hidden in WIDTHS]
    lines = "\n".join(row(*one) for one in found)
    text = f"""# What a checkpoint costs

`scripts/checkpoint_cost.py`, {time.strftime("%-d %B %Y")}, commit {commit()}, {os.cpu_count()}
cores, one thread: debian, gcnii, 16 layers, K = 32, `--staleness auto`, {options.epochs} epochs. A
checkpoint is written behind every {options.every}th, while training goes on.

| hidden | checkpoint | an epoch | delay where it is copied | where it is written | one later |
|---|---|---|---|---|---|
{lines}

Counted from the beginning of one epoch to that of the next. The delay is the median over all
checkpoints of (epoch / median of the epochs in the same period that no checkpoint touches) - 1,
with the standard error of that median.
"""
    PAGE.write_text(text, encoding="utf-8")
    print(text)


def measure(hidden: int, epochs: int, every: int) -> tuple[int, int, float, list[list[float]]]:
    """Width, bytes of a checkpoint, seconds of an epoch, and the delays by place."""
    from gnnpipe import TrainConfig, Trainer
    from gnnpipe.train import loop

    folder = Path(tempfile.mkdtemp(prefix="gnnpipe-cost-"))
    config = TrainConfig(
        dataset="debian",
        model="gcnii",
        layers=16,
        hidden=hidden,
        chunks=32,
        epochs=epochs,
        eval_every=0,
        checkpoint_every=every,
        out=str(folder / "run"),
        quiet=True,
    )
    walls: list[float] = []
    plain = loop.Loop._epoch

    def timed(self: loop.Loop, epoch: int) -> bool:
        # From one epoch's beginning to the next: copying the tensors is part of it.
        walls.append(time.perf_counter())
        return plain(self, epoch)

    loop.Loop._epoch = timed  # type: ignore[method-assign]
    Trainer(config).fit()
    loop.Loop._epoch = plain  # type: ignore[method-assign]
    size = sum(p.stat().st_size for p in next((folder / "run/checkpoints").iterdir()).iterdir())
    shutil.rmtree(folder)
    lengths = [b - a for a, b in itertools.pairwise(walls)]
    delays: list[list[float]] = [[], [], []]
    # The first two checkpoints are written while the process that writes is started.
    for behind in range(3 * every, len(lengths) - every, every):
        untouched = statistics.median(lengths[behind + 2 : behind + every - 1])
        for place, length in enumerate(lengths[behind - 1 : behind + 2]):
            delays[place].append(length / untouched - 1)
    return hidden, size, statistics.median(lengths), delays


def row(hidden: int, size: int, epoch_s: float, delays: list[list[float]]) -> str:
    """One line of the table."""
    words = []
    for found in delays:
        # Of a median of many: 1.25 times that of the mean.
        error = 1.25 * statistics.stdev(found) / len(found) ** 0.5
        words.append(f"{statistics.median(found):+.1%} ± {error:.1%}")
    return f"| {hidden} | {size / 2**20:.0f} MiB | {epoch_s:.3f} s | {' | '.join(words)} |"


if __name__ == "__main__":
    main()

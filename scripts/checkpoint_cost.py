"""Measures the time that a run waits for its checkpoints.

    python scripts/checkpoint_cost.py [--epochs 100] [--every 5]

Trains on one thread and times every checkpoint. Writes docs/benchmarks/checkpoint_cost.md: seconds
a checkpoint, and their share of a run that writes one in ten minutes, the default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity import commit  # noqa: E402

from gnnpipe import TrainConfig, Trainer  # noqa: E402
from gnnpipe.train import loop  # noqa: E402

WIDTHS = (16, 64, 256)
PAGE = ROOT / "docs" / "benchmarks" / "checkpoint_cost.md"


def main() -> None:
    """Train, measure, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    lines = "\n".join(measure(hidden, options.epochs, options.every) for hidden in WIDTHS)
    text = f"""# What a checkpoint costs

`scripts/checkpoint_cost.py`, {time.strftime("%-d %B %Y")}, commit {commit()}, {os.cpu_count()}
cores, one thread: debian, gcnii, 16 layers, K = 32, `--staleness auto`, {options.epochs} epochs, a
checkpoint after every {options.every}th. Training waits for the write (docs/adr/0033).

| hidden | checkpoint | an epoch | a write, median (least to most) | share of ten minutes |
|---|---|---|---|---|
{lines}
"""
    PAGE.write_text(text, encoding="utf-8")
    print(text)


def measure(hidden: int, epochs: int, every: int) -> str:
    """Return a line of the table."""
    times_s: list[float] = []
    plain = loop.Loop._save

    def timed(self: loop.Loop) -> None:
        start = time.perf_counter()
        plain(self)
        times_s.append(time.perf_counter() - start)

    loop.Loop._save = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="gnnpipe-cost-") as folder:
        config = TrainConfig(
            dataset="debian",
            model="gcnii",
            layers=16,
            hidden=hidden,
            chunks=32,
            epochs=epochs,
            eval_every=0,
            checkpoint_every=every,
            out=f"{folder}/run",
            quiet=True,
        )
        result = Trainer(config).fit()
        newest = max(Path(folder, "run/checkpoints").iterdir())
        size = sum(path.stat().st_size for path in newest.iterdir())
    loop.Loop._save = plain  # type: ignore[method-assign]
    epoch_s = statistics.median(row.epoch_time_s for row in result.history)
    write_s = statistics.median(times_s)
    share = write_s / loop.CHECKPOINT_AFTER_S
    return (
        f"| {hidden} | {size / 2**20:.0f} MiB | {epoch_s:.3f} s | {write_s:.2f} s "
        f"({min(times_s):.2f} to {max(times_s):.2f}) | {share:.2%} |"
    )


if __name__ == "__main__":
    main()

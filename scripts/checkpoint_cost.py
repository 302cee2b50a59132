"""What a checkpoint costs the epoch that it is written under.

    python scripts/checkpoint_cost.py [--epochs 60] [--every 6]

One run on one thread, every n-th epoch followed by a checkpoint: the epochs behind one against the
median of those that are not, which are nearest in time. Writes docs/benchmarks/checkpoint_cost.md.
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

PAGE = ROOT / "docs" / "benchmarks" / "checkpoint_cost.md"


def main() -> None:
    """Train, compare, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--every", type=int, default=6)
    options = parser.parse_args()
    from gnnpipe import TrainConfig, Trainer
    from gnnpipe.train import loop

    folder = Path(tempfile.mkdtemp(prefix="gnnpipe-cost-"))
    config = TrainConfig(
        dataset="debian", model="gcnii", layers=16, hidden=64, chunks=32, epochs=options.epochs,
        eval_every=0, checkpoint_every=options.every, out=str(folder / "run"), quiet=True,
    )  # fmt: skip
    walls: list[float] = []
    plain = loop.Loop._epoch

    def timed(self: loop.Loop, epoch: int) -> bool:
        # From one epoch's beginning to the next: copying the tensors is part of it.
        walls.append(time.perf_counter())
        return plain(self, epoch)

    loop.Loop._epoch = timed  # type: ignore[method-assign]
    Trainer(config).fit()
    size = sum(p.stat().st_size for p in next((folder / "run/checkpoints").iterdir()).iterdir())
    shutil.rmtree(folder)
    lengths = [b - a for a, b in itertools.pairwise(walls)]
    ratios = []
    for behind in range(2 * options.every, len(lengths) - 1, options.every):
        # The copy falls into the epoch before, the writing into this one and maybe the next.
        touched = lengths[behind - 1 : behind + 2]
        near = lengths[behind - 4 : behind - 1] + lengths[behind + 2 : behind + 4]
        ratios.append(sum(touched) / (len(touched) * statistics.median(near)))
    extra = [3 * (r - 1) for r in ratios]
    quarters = statistics.quantiles(extra, n=4)
    text = f"""# What a checkpoint costs

`scripts/checkpoint_cost.py`, {time.strftime("%-d %B %Y")}, commit {commit()}, {os.cpu_count()}
cores, one thread: debian, gcnii, 16 layers x 64, K = 32, `--staleness auto`. A checkpoint of
{size / 2**20:.0f} MiB is written behind every {options.every}th epoch, while training goes on.

| | share of an epoch |
|---|---|
| delay by one checkpoint, median of {len(extra)} | {statistics.median(extra):.1%} |
| quarters | {quarters[0]:.1%} to {quarters[2]:.1%} |
| an epoch without | {statistics.median(lengths):.3f} s |

Counted from the beginning of one epoch to that of the next, over the epoch in which the tensors are
copied and the two after it, against the median of their neighbours.
"""
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

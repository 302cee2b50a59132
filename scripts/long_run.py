"""Does a run grow? Memory and file descriptors over two thousand epochs with checkpoints.

    python scripts/long_run.py [--epochs 2000] [--ranks 1]

Looks at every rank's /proc after each fortieth epoch. Exit code 1 if memory grows by more than 1 %
between the first tenth and the end, or if a rank ends with more descriptors than it had then.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_ranks import ranks

ROOT = Path(__file__).resolve().parents[1]
MOST_GROWTH = 0.01


def main() -> int:
    """Run, look, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gnnpipe-long-"))
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.ranks),
        "-m",
        "gnnpipe",
        "train",
        "--dataset",
        "karate",
        "--layers",
        "4",
        "--hidden",
        "16",
        "--chunks",
        "4",
        "--stages",
        str(options.ranks),
        "--epochs",
        str(options.epochs),
        "--checkpoint-every",
        "100",
        "--quiet",
        "--out",
        str(folder / "run"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment)
    looks: dict[int, list[tuple[int, int, int]]] = {}
    step = options.epochs // 50
    while process.poll() is None:
        done = epochs(folder / "run")
        for pid in ranks(process.pid) if done >= options.epochs // 10 else []:
            seen = looks.setdefault(pid, [])
            if not seen or done >= seen[-1][0] + step:
                with contextlib.suppress(OSError):  # it has just ended
                    seen.append((done, *held(pid)))
        time.sleep(0.05)
    wrong = process.returncode != 0
    for rank, seen in enumerate(looks.values()):
        (first, before_kib, opened), (last, after_kib, left) = seen[0], seen[-1]
        growth = after_kib / before_kib - 1
        print(
            f"rank {rank}: epoch {first} to {last}: {before_kib:,} to {after_kib:,} KiB, "
            f"{growth:+.2%}; descriptors {opened} to {left}, at most {max(d for _, _, d in seen)}"
        )
        wrong |= growth > MOST_GROWTH or left > opened
    shutil.rmtree(folder)
    return int(wrong)


def held(pid: int) -> tuple[int, int]:
    """Resident KiB, and open descriptors."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return kib, len(os.listdir(f"/proc/{pid}/fd"))


def epochs(run: Path) -> int:
    """That are done."""
    try:
        with open(run / "metrics.csv", encoding="utf-8", newline="") as file:
            return len(list(csv.DictReader(file)))
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill a random rank at a random moment, again and again: does the run come back the same?

    python scripts/kill_ranks.py --times 20 --stages 2 --shards 1 --schedule async

One run is left alone; every other one, with the same settings under ``torchrun --max-restarts``,
loses a rank to SIGKILL between its first epoch and its last. All must end, and their metrics.csv
must be the first one's to the last bit (but for the two columns of times, which are never the
same). Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("epoch_time_s", "eval_time_s")


def start(
    out: Path, stages: int, shards: int, epochs: int, hidden: int, schedule: str, log: Path
) -> subprocess.Popen[bytes]:
    """One run under torchrun, a process group of its own."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "3",
        "--nproc-per-node",
        str(stages * shards),
        "-m",
        "gnnpipe",
        "train",
        "--dataset",
        "debian",
        "--model",
        "gcnii",
        "--layers",
        "8",
        "--hidden",
        str(hidden),
        "--stages",
        str(stages),
        "--shards",
        str(shards),
        "--chunks",
        "8",
        "--schedule",
        schedule,
        "--epochs",
        str(epochs),
        "--eval-every",
        "5",
        "--checkpoint-every",
        "4",
        "--out",
        str(out),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with open(log, "wb") as file:
        return subprocess.Popen(
            words, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def ranks(pid: int) -> list[int]:
    """The processes that torchrun has started."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def rows(out: Path) -> list[dict[str, str]]:
    """metrics.csv without times."""
    try:
        with open(out / "metrics.csv", newline="", encoding="utf-8") as file:
            return [{k: v for k, v in r.items() if k not in TIMES} for r in csv.DictReader(file)]
    except OSError:
        return []


def main() -> int:
    """Run, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--schedule", default="fill-drain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=240.0, help="a run may take so long")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="gnnpipe-kill-"))
    shape = options.stages, options.shards, options.epochs, options.hidden, options.schedule
    calm = start(folder / "calm", *shape, folder / "calm.log")
    if calm.wait(options.limit_s):
        print((folder / "calm.log").read_text())
        return 1
    expected = rows(folder / "calm")
    wrong = 0
    for number in range(options.times):
        out, log = folder / f"run-{number}", folder / f"run-{number}.log"
        process = start(out, *shape, log)
        began = time.monotonic()
        epoch = draw.randrange(1, options.epochs - 1)
        while len(rows(out)) < epoch and process.poll() is None:
            time.sleep(0.02)
        time.sleep(draw.random() * 0.2)
        alive = ranks(process.pid)
        victim = draw.randrange(options.stages * options.shards)
        if victim < len(alive):
            os.kill(alive[victim], signal.SIGKILL)
        killed = time.monotonic()
        try:
            code: int | None = process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = None
        found = rows(out)
        is_same = code == 0 and found == expected
        wrong += not is_same
        lines = log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "resuming from" in line]
        print(
            f"{number + 1}: rank {victim} killed after epoch {epoch} ({killed - began:.1f} s), "
            f"exit code {code} {time.monotonic() - killed:.1f} s later, "
            f"{told[-1].rpartition('/')[2] if told else 'started anew'}: "
            f"{'same' if is_same else 'DIFFERENT'}",
            flush=True,
        )
        if not is_same:
            print(f"see {log}")
    print(f"{options.times - wrong} of {options.times} runs ended with the same metrics.csv")
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Feed every reader with drawn input for some minutes: only gnnpipe's own errors may come out.

    python scripts/fuzz.py --minutes 10

Targets are those of ``tests/fuzzing.py``, each with a new seed in every round; a fault is printed
with the smallest input that shows it, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Verbosity, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzzing import TARGETS, attempt

ROUND = 100
"""Examples of a target before the next one's turn."""


def fuzz(name: str, number: int) -> tuple[int, str]:
    """Examples read in a round of one target, and the fault that came out, if any."""
    target, count = TARGETS[name], 0

    @seed(number)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.strategy)
    def run(drawn: object) -> None:
        nonlocal count
        count += 1
        attempt(target, drawn)

    try:
        run()
    except Exception:
        return count, traceback.format_exc()
    return count, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counts, faults, number = dict.fromkeys(TARGETS, 0), {}, options.seed
    while time.monotonic() < end:
        for name in TARGETS:
            if name in faults or time.monotonic() >= end:
                continue
            count, fault = fuzz(name, number)
            counts[name] += count
            if fault:
                faults[name] = fault
                print(f"--- {name}, seed {number}\n{fault}", flush=True)
        number += 1
    for name, count in counts.items():
        print(f"{name:<12} {count:>8,} inputs, {'FAULT' if name in faults else 'no fault'}")
    print(f"{sum(counts.values()):,} inputs, {len(faults)} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

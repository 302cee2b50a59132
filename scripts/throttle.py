"""Makes ranks slow from outside: a throttled rank sleeps as long as each of its actions computed.

python scripts/throttle.py RANKS SLEEP FLAGS   # gnnpipe FLAGS; ranks like 1 or 0,2

SLEEP is the time to sleep for each second of computing: 1 makes a rank half as fast. Only the
compute actions of the executor and the beginning of a pass are slowed; waiting for other ranks is
no compute time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gnnpipe.runtime import executor
from gnnpipe.runtime.executor import Executor
from gnnpipe.runtime.stage import Stage
from gnnpipe.schedule import Action, ActionKind

SLOWED = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.FORECAST,
    ActionKind.CARRY,
    ActionKind.STEP,
)
"""Actions that compute."""


@contextmanager
def throttled(sleep: float = 1.0) -> Iterator[None]:
    """Makes every executor of this process sleep ``sleep`` seconds for each second of computing."""
    methods, before = executor._METHODS, dict(executor._METHODS)

    def slow(kind: ActionKind) -> None:
        def run(self: Executor, action: Action) -> None:
            start_s, waited_s = time.perf_counter(), _waited_s(self)
            before[kind](self, action)
            computed_s = time.perf_counter() - start_s - (_waited_s(self) - waited_s)
            time.sleep(max(sleep * computed_s, 0.0))

        methods[kind] = run

    def begin(self: Stage, *arguments: Any) -> None:
        start_s = time.perf_counter()
        inner_begin(self, *arguments)
        time.sleep(sleep * (time.perf_counter() - start_s))

    for kind in SLOWED:
        slow(kind)
    inner_begin, Stage.begin = Stage.begin, begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        methods.update(before)
        Stage.begin = inner_begin  # type: ignore[method-assign]


def _waited_s(runner: Executor) -> float:
    """Returns the seconds that this rank has waited for others in the epoch so far."""
    epoch = runner.mesh.recorder._epoch
    if epoch is None:
        return 0.0
    syncs = [epoch.step_sync] if epoch.step_sync else []
    waits = [*epoch.messages, *epoch.collectives, *syncs]
    return sum(wait.wait_end_s - wait.wait_start_s for wait in waits)


def main() -> int:
    from gnnpipe.cli.main import main as gnnpipe

    ranks, sleep, *flags = sys.argv[1:]
    if os.environ.get("RANK", "0") not in ranks.split(","):
        return gnnpipe(flags)
    with throttled(float(sleep)):
        return gnnpipe(flags)


if __name__ == "__main__":
    raise SystemExit(main())

"""Makes a rank slow from outside: Linux gives its process a share of a core (a CPU controller).

python scripts/throttle.py RANKS FLAGS   # gnnpipe FLAGS with ranks like 1 or 0,2 at half speed

It needs root and a mounted cgroup CPU controller (version 1 or 2). A rank that waits is not slowed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 4000
"""Short beside a layer of a measured model, so that single steps are slow."""


@contextmanager
def throttled(share: float = 0.5) -> Iterator[None]:
    """Gives this process ``share`` of a core inside the block."""
    root = Path("/sys/fs/cgroup")
    is_v2 = (root / "cgroup.controllers").exists()
    top = root if is_v2 else root / "cpu"
    line = next(
        line
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        if is_v2 or "cpu" in line.split(":")[1].split(",")
    )
    before, own = top / line.split(":")[2].lstrip("/"), top / f"gnnpipe-{os.getpid()}"
    quota = f"{int(share * PERIOD_US)}"
    try:
        own.mkdir()
        if is_v2:
            (own / "cpu.max").write_text(f"{quota} {PERIOD_US}", encoding="utf-8")
        else:
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="utf-8")
            (own / "cpu.cfs_quota_us").write_text(quota, encoding="utf-8")
        (own / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
    except OSError as error:
        raise SystemExit(
            f"throttle.py: {error}; it needs root and a cgroup CPU controller"
        ) from error
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        own.rmdir()


def main() -> int:
    from gnnpipe.cli.main import main as gnnpipe

    ranks, *flags = sys.argv[1:]
    if os.environ.get("RANK", "0") not in ranks.split(","):
        return gnnpipe(flags)
    with throttled():
        return gnnpipe(flags)


if __name__ == "__main__":
    raise SystemExit(main())

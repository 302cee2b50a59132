"""How much memory this machine, or the container around this process, has to give.

A size that does not even fit into all of it is a mistake, and is told before anything is allocated:
Linux promises memory that it has not, and kills the process when it is used.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["memory_bytes"]

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """Main memory and swap, or the limit of the container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap_bytes()]
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or 'max': no limit
            sizes.append(int(Path(limit).read_text(encoding="ascii")))
    return min(sizes)


def _swap_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0

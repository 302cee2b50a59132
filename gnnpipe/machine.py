"""Which machine this is, and how much memory it, or the container around us, has to give.

A size that does not even fit into all of it is a mistake, and is told before anything is allocated:
Linux promises memory that it has not, and kills the process when it is used.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

__all__ = ["free_bytes", "machine_key", "memory_bytes"]

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_key() -> str:
    """Tells machines apart, those of one name too; processes of one machine find the same."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot}"
    return platform.node()


def memory_bytes() -> int:
    """Main memory and swap, or the limit of the container if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap_bytes()]
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or 'max': no limit
            sizes.append(int(Path(limit).read_text(encoding="ascii")))
    return min(sizes)


def free_bytes() -> int:
    """Memory that programs could still have, without swap; all of it where nobody says."""
    return _from_kernel("MemAvailable") or memory_bytes()


def _swap_bytes() -> int:
    return _from_kernel("SwapTotal")


def _from_kernel(name: str) -> int:
    """A size of /proc/meminfo in bytes; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0

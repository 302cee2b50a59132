"""Identity and memory of this machine, or of the container that the process runs in.

Sizes are checked against the memory before anything is allocated: Linux grants allocations that
exceed the memory and kills the process when the pages are used.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_key() -> str:
    """Return a text that all processes of a machine share and no other machine has."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot}"
    return platform.node()


def memory_bytes() -> int:
    """Return the size of main memory and swap, or the container's limit if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _meminfo("SwapTotal")]
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no file, or 'max': no limit
            sizes.append(int(Path(limit).read_text(encoding="ascii")))
    return min(sizes)


def free_bytes() -> int:
    """Return the available memory without swap; all memory where the kernel does not say."""
    return _meminfo("MemAvailable") or memory_bytes()


def _meminfo(name: str) -> int:
    """Return an entry of /proc/meminfo in bytes; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0

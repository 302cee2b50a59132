"""Settings of glibc's heap, so that an epoch reuses the memory which the epoch before has freed.

By default glibc returns large freed blocks to the system and gets them back as zeroed pages, in
every epoch. ``held_heap`` stops this with ``mallopt`` while a run trains. ``HEAP_SETTINGS`` also
switches off glibc's caches of small blocks, which leave holes between large ones; glibc reads
these settings only when a process starts (docs/adr/0032).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

HEAP_SETTINGS = ":".join(
    f"glibc.malloc.{name}"
    for name in ("tcache_count=0", "mxfast=0", "mmap_max=0", "trim_threshold=1099511627776")
)
"""Value of the environment variable GLIBC_TUNABLES that takes the least memory."""

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_HELD = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
# glibc adjusts its thresholds up to these values, but no longer once mallopt was called.
_DEFAULTS = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20}
_blocks: list[Callable[..., int]] = []
"""Blocks of ``held_heap`` that have not ended; the heap is one for the whole process, too."""
_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def has_own_settings() -> bool:
    """Return whether the environment sets glibc's heap or preloads another allocator."""
    preloads = "malloc" in os.environ.get("LD_PRELOAD", "")
    return preloads or any(name in os.environ for name in _VARIABLES)


@contextlib.contextmanager
def held_heap() -> Iterator[None]:
    """Keep freed memory in the process inside the block, and return it to the system at the end.

    The setting holds for the whole process, and until the last of several blocks has ended.
    Does nothing where the user has chosen settings (``has_own_settings``) or without glibc.
    """
    mallopt = None if has_own_settings() else _glibc("mallopt")
    if mallopt is None:
        yield
        return
    _blocks.append(mallopt)
    try:
        for name, value in _HELD.items():
            mallopt(name, value)
        yield
    finally:
        _blocks.pop()
        if not _blocks:
            for name, value in _DEFAULTS.items():
                mallopt(name, value)
            give_back()


def give_back() -> None:
    """Return freed memory to the system, where glibc has ``malloc_trim``."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or ``None`` where the library has no such function."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

"""Has glibc's heap keep what an epoch frees in pieces that the next epoch can use again.

The tensors of an epoch are of a few sizes, and come and go alike in each. By default glibc splits a
few dozen bytes off every block that it aligns for torch, keeps them aside for small things, and so
finds each block a little too small the next time: the heap grows to nearly twice of what is in use,
and its end, given back and taken anew, has to be cleared in every epoch. Without those caches of
small blocks, and with nothing given back while it trains, it does neither (docs/adr/0018). glibc
reads this when a process starts, so a command starts itself once more, before anything is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

__all__ = ["HEAP_SETTINGS", "give_back", "settle_heap"]

HEAP_SETTINGS = ":".join(
    f"glibc.malloc.{name}"
    for name in ("tcache_count=0", "mxfast=0", "mmap_max=0", "trim_threshold=1099511627776")
)
"""What GLIBC_TUNABLES has to be."""

COMMANDS = ("train", "verify", "profile")
"""Those that train."""


def settle_heap() -> None:
    """Start this process again under ``HEAP_SETTINGS``, with the same words, as the same process.

    Nothing where it was so started, where the user has settings or an allocator of their own, and
    on other systems.
    """
    own = "GLIBC_TUNABLES" in os.environ or "malloc" in os.environ.get("LD_PRELOAD", "")
    if own or sys.platform != "linux" or not set(sys.argv[1:2]) & set(COMMANDS):
        return
    os.environ["GLIBC_TUNABLES"] = HEAP_SETTINGS
    with contextlib.suppress(OSError, ValueError):  # or it goes on as it is
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def give_back() -> None:
    """Return to the system what reading and cutting the graph have freed, where glibc has it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

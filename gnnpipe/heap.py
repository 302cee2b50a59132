"""Has glibc's heap keep what an epoch frees in pieces that the next epoch can use again.

The tensors of an epoch are of a few sizes, and come and go alike in each. By default glibc splits a
few dozen bytes off every block that it aligns for torch, keeps them aside for small things, and so
finds each block a little too small the next time: the heap grows to nearly twice of what is in use,
and its end, given back and taken anew, has to be cleared in every epoch. Without those caches of
small blocks, and with nothing given back while it trains, it does neither (docs/adr/0018). glibc
reads this when a process starts, so a command starts itself once more, before anything is done. A
script of the user's cannot be started again; there a run sets from within what can be set so
(``held_heap``): the same time, and more holes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

__all__ = ["HEAP_SETTINGS", "give_back", "held_heap", "settle_heap"]

HEAP_SETTINGS = ":".join(
    f"glibc.malloc.{name}"
    for name in ("tcache_count=0", "mxfast=0", "mmap_max=0", "trim_threshold=1099511627776")
)
"""What GLIBC_TUNABLES has to be."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Of ``mallopt`` (malloc.h)."""
_HELD = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
_FREE = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20}
"""As glibc has it once the process has freed something large. By itself it gets there step by step,
but no more once it was told anything."""
_USERS = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""What glibc reads when a process starts."""

COMMANDS = ("train", "verify", "profile")
"""Those that train."""


def settle_heap() -> None:
    """Start this process again under ``HEAP_SETTINGS``, with the same words, as the same process.

    Nothing where it was so started, where the user has settings or an allocator of their own, and
    on other systems.
    """
    if _is_users() or not set(sys.argv[1:2]) & set(COMMANDS):
        return
    os.environ["GLIBC_TUNABLES"] = HEAP_SETTINGS
    with contextlib.suppress(OSError, ValueError):  # or it goes on as it is
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def held_heap() -> Iterator[None]:
    """Meanwhile nothing that is freed goes back to the system, behind it all of it.

    Nothing is set where ``settle_heap`` or the user has set it, by a variable: that ``mallopt`` was
    called cannot be seen. It is for the whole process, and of several the first to end ends all.
    """
    mallopt = None if _is_users() else _of_glibc("mallopt")
    if mallopt is None:
        yield
        return
    try:
        for name, value in _HELD.items():
            mallopt(name, value)
        yield
    finally:
        for name, value in _FREE.items():
            mallopt(name, value)
        give_back()


def give_back() -> None:
    """Return to the system what reading and cutting the graph have freed, where glibc has it."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _is_users() -> bool:
    """The user, or a command's start, has chosen how memory is handed out; or it is not glibc."""
    preloads = "malloc" in os.environ.get("LD_PRELOAD", "")
    is_set = any(name in os.environ for name in _USERS)
    return is_set or preloads or sys.platform != "linux"


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library, if it has it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

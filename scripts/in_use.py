"""Runs ``gnnpipe`` with a thread that notes how much memory is in use at most (glibc).

    python scripts/in_use.py FILE train ...        # or under torchrun

Counted are the blocks of the heap and the shared memory of the messages that a rank sends. Resident
memory has the holes of the heap in it, and the messages that the rank receives. Writes the growth
in bytes, from before a rank's part is allocated to the peak, to FILE.RANK.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from gnnpipe.cli.main import main  # noqa: E402
from gnnpipe.runtime.comm import machine_links  # noqa: E402
from gnnpipe.runtime.comm.shared_memory import SharedMemoryLink  # noqa: E402
from gnnpipe.setup import build  # noqa: E402

EVERY_S = 0.001


class _Info(ctypes.Structure):
    """What ``mallinfo2`` gives."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = _Info
held = build.held_bytes
before = peak = 0
links: list[SharedMemoryLink] = []


class KnownLink(SharedMemoryLink):
    """A link that is counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        links.append(self)


def in_use() -> int:
    """Bytes of the heap, of all arenas and of blocks of their own, and of messages."""
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd) + sum(link.memory_bytes for link in links)


def begin(device: torch.device) -> int:
    """Where a run looks at what it holds before it allocates, start to count."""
    global before, peak
    found = held(device)
    before = peak = in_use()
    return found


def watch() -> None:
    """For ever."""
    global peak
    while True:
        peak = max(peak, in_use())
        time.sleep(EVERY_S)


if __name__ == "__main__":
    build.held_bytes = begin
    machine_links.SharedMemoryLink = KnownLink  # type: ignore[misc]
    threading.Thread(target=watch, daemon=True).start()
    file = sys.argv.pop(1)
    try:
        main(sys.argv[1:])
    finally:
        rank = os.environ.get("RANK", "0")
        Path(f"{file}.{rank}").write_text(f"{peak - before}\n", encoding="ascii")

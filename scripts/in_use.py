"""Runs ``gnnpipe`` with a thread that notes how much of the heap is in use at most (glibc).

    python scripts/in_use.py FILE train ...        # or under torchrun

Resident memory has the holes of the heap in it; this has not. Writes the growth in bytes, from
before a rank's part is allocated to the peak, to FILE.RANK.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from gnnpipe.cli.main import main  # noqa: E402
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


def in_use() -> int:
    """Bytes, of all arenas and of blocks of their own."""
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


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
    threading.Thread(target=watch, daemon=True).start()
    file = sys.argv.pop(1)
    try:
        main(sys.argv[1:])
    finally:
        rank = os.environ.get("RANK", "0")
        Path(f"{file}.{rank}").write_text(f"{peak - before}\n", encoding="ascii")

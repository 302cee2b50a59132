"""``gnnpipe`` and ``python -m gnnpipe``, which is how torchrun starts it."""

from __future__ import annotations

import os
import sys
import threading

from gnnpipe.cli.main import main
from gnnpipe.heap import settle_heap

__all__ = ["run"]

INTERRUPTED = 130


def run() -> int:
    """The command; its exit code."""
    settle_heap()
    code = main()
    if code == INTERRUPTED and threading.active_count() > 1:
        # A thread that still writes would be torn out of torch's own code, which aborts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(run())

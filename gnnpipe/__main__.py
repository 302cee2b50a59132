"""``gnnpipe`` and ``python -m gnnpipe``, which is how torchrun starts it."""

from __future__ import annotations

import sys

from gnnpipe.cli import main
from gnnpipe.heap import settle_heap

__all__ = ["run"]


def run() -> int:
    """The command; its exit code."""
    settle_heap()
    return main()


if __name__ == "__main__":
    sys.exit(run())

"""Python's garbage collector set aside while millions of small objects are made.

It looks for cycles each time their number has grown by some share, and there are none: that doubled
the time of a simulation.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """It runs again afterwards if it ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

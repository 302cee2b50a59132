"""Starts sends and receives from a thread of its own.

To start one over gloo takes a lock that gloo's thread holds while it handles what arrives, and
writes into the socket. Measured beside work on a core of its own that is .3 to .6 ms for a send and
a receive of 4 to 40 KB, and 4 ms where two ranks share a core: time in which nothing is computed.
So a rank only says what is to be started; the thread does so in that order (docs/adr/0022). On a
GPU a start costs nothing, and has to stand in the stream where it was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

__all__ = ["StartThread", "Transfer"]

Begin = Callable[[], Sequence[dist.Work | None]]
"""Starts some sends and receives and returns at once."""


class Transfer:
    """Sends and receives that were asked for together."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._works: Sequence[dist.Work | None] = ()
        self._fault: BaseException | None = None
        self._is_begun = threading.Event()

    def begin(self) -> None:
        """Start them; a fault is for who waits."""
        try:
            self._works = self._begin()
            if None in self._works:
                raise RuntimeError("this rank is not part of the process group it sends in")
        except BaseException as fault:
            self._fault = fault
        self._is_begun.set()

    def wait(self) -> None:
        """Until all of them are over. Raises what starting or moving them has raised."""
        self._is_begun.wait()
        if self._fault is not None:
            raise self._fault
        for work in self._works:
            if work is not None:
                work.wait()


class StartThread:
    """Of one rank. Its thread is there from the first transfer until ``close``."""

    def __init__(self, has_thread: bool = True) -> None:
        self._has_thread = has_thread
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, begin: Begin) -> Transfer:
        """Have these sends and receives started, behind all that were asked for before.

        What they read must not change, and what they write must not be read, until ``wait``.
        """
        transfer = Transfer(begin)
        if not self._has_thread:
            transfer.begin()
            return transfer
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="courier", daemon=True)
            self._thread.start()
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        """End the thread, once it has started what was asked for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _carry(self) -> None:
        while (transfer := self._queue.get()) is not None:
            transfer.begin()

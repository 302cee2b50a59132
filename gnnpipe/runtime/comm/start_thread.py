"""Starts sends and receives from a separate thread.

Over gloo, starting a message takes a lock that gloo's own thread holds while it handles arriving
data, and writes into the socket: 0.3 to 0.6 ms for a send and a receive of 4 to 40 KB, and 4 ms
if two ranks share a core. Without the thread, computation would stop during that time
(docs/adr/0022). On a GPU starting is cheap, and must happen in stream order on the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

Begin = Callable[[], Sequence[dist.Work | None]]
"""Starts sends and receives, and returns at once."""


class StartedMessages:
    """Sends and receives that are started and awaited together."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._works: Sequence[dist.Work | None] = ()
        self._fault: BaseException | None = None
        self._is_begun = threading.Event()

    def begin(self) -> None:
        """Start the messages; an error is kept and raised by ``wait``."""
        try:
            self._works = self._begin()
            if None in self._works:
                raise RuntimeError("this rank is not a member of the message's process group")
        except BaseException as fault:
            self._fault = fault
        self._is_begun.set()

    def wait(self) -> None:
        """Wait until all messages are complete; raise the error of a failed one."""
        self._is_begun.wait()
        if self._fault is not None:
            raise self._fault
        for work in self._works:
            if work is not None:
                work.wait()


class StartThread:
    """Starts one rank's messages in order, in a thread that runs from the first until ``close``."""

    def __init__(self, has_thread: bool = True) -> None:
        self._has_thread = has_thread
        self._queue: SimpleQueue[StartedMessages | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, begin: Begin) -> StartedMessages:
        """Start messages after all earlier ones.

        Until ``wait``, data to send must not change, and received data must not be read.
        """
        transfer = StartedMessages(begin)
        if not self._has_thread:
            transfer.begin()
            return transfer
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="start messages", daemon=True)
            self._thread.start()
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        """End the thread after it has started all messages."""
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():  # a garbage collection runs in any
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            transfer.begin()
            del transfer  # it may be the last to hold its messages

"""Told to stop: by SIGTERM, as a scheduler does before it takes the machine away, or by the clock.

A run stops between two epochs, behind a checkpoint. If an epoch takes longer than the sender of the
signal waits, the process ends without: the last checkpoint is what remains.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType

from gnnpipe.errors import ExitCode
from gnnpipe.run.rank_log import is_lost_peer

__all__ = ["PATIENCE_S", "Stopping"]

SIGTERM = "SIGTERM"
"""As a reason."""

PATIENCE_S = 10.0
"""How long a rank that lost another one keeps silent."""

GRACE_S = 25.0
"""Most wait 30 s from SIGTERM to SIGKILL; some of it is left for leaving."""


class Stopping:
    """Of one rank; a context in which SIGTERM is noted instead of obeyed."""

    def __init__(self, time_limit_s: float) -> None:
        """The clock begins now; 0 is no limit."""
        self._limit, self._start = time_limit_s, time.monotonic()
        self._before: object = None
        self._fd_before = -1
        self._timer: threading.Timer | None = None
        self._patient_until = 0.0
        self.reason = ""
        """Why, once it is so."""

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            # The main thread may be deep in a product: Python's own handler waits for its end, a
            # byte in a socket does not. And the thread that listens may get its turn only after
            # a short epoch: the handler does not wait for that.
            self._heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            self._before = signal.signal(signal.SIGTERM, self._hear)
            self._fd_before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            self._listener = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._listener.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and is_lost_peer(error):
            self.hear_out()  # while SIGTERM ends nothing
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._fd_before)
            before = self._before if callable(self._before) else signal.SIG_DFL
            signal.signal(signal.SIGTERM, before)
            # Which ends the thread, whoever else has the socket (a child that was forked).
            self._told.shutdown(socket.SHUT_RDWR)
            self._told.close()
            self._listener.join()
        # Only now: a thread that had its turn late may have started the clock just before.
        if self._timer is not None:
            self._timer.cancel()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.reason = SIGTERM

    def _listen(self) -> None:
        with self._heard as heard:
            while byte := heard.recv(1):
                if byte[0] == signal.SIGTERM:
                    self._note()

    def _note(self) -> None:
        self.reason = SIGTERM
        if self._timer is None:
            self._timer = threading.Timer(GRACE_S, _leave)
            self._timer.daemon = True
            self._timer.start()

    def hear_out(self) -> None:
        """Of a rank that lost another one: wait for SIGTERM, but not for long, and once.

        The rank at fault speaks first; then torchrun ends the others.
        """
        self._patient_until = self._patient_until or time.monotonic() + PATIENCE_S
        # No event, which a handler that comes while it is looked at would wait for without end.
        while self.reason != SIGTERM and time.monotonic() < self._patient_until:
            time.sleep(0.02)

    def began(self, ago_s: float) -> None:
        """The run is older than this process."""
        self._start = min(self._start, time.monotonic() - ago_s)

    def is_due(self, epoch_time_s: float) -> bool:
        """Whether to stop now, when another epoch would take so long, evaluation and all."""
        if self._limit and time.monotonic() - self._start + epoch_time_s > self._limit:
            self.reason = self.reason or f"--time-limit {self._limit:g}"
        return bool(self.reason)


def _leave() -> None:
    print(
        f"gnnpipe: the epoch was not over {GRACE_S:.0f} s after SIGTERM; what remains is the last "
        "checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.STOPPED)

"""Stops a run early: on SIGTERM, as a cluster scheduler sends it, or after a time limit.

A run stops between two epochs, after a checkpoint. If the current epoch takes too long, the process
ends without another checkpoint.
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

SIGTERM = "SIGTERM"
"""Reason of a run that was stopped by the signal."""

PATIENCE_S = 10.0
"""Time that a rank waits after it has lost another rank, so that the failed rank reports first."""

GRACE_S = 25.0
"""Time from SIGTERM to the end of the process; most schedulers send SIGKILL after 30 s."""


class Stopping:
    """Stop conditions of one rank; inside this context SIGTERM does not end the process."""

    def __init__(self, time_limit_s: float) -> None:
        """Start the clock; a limit of 0 means none."""
        self._limit, self._start = time_limit_s, time.monotonic()
        self._before: object = None
        self._fd_before = -1
        self._timer: threading.Timer | None = None
        self._patient_until = 0.0
        self.reason = ""
        """Why the run has to stop; '' if it has not."""

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            # Two ways, because each may be late: Python's handler waits for the end of a long
            # operator in the main thread, the listening thread for its turn.
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
            self.hear_out()  # while SIGTERM does not end the process
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._fd_before)
            before = self._before if callable(self._before) else signal.SIG_DFL
            signal.signal(signal.SIGTERM, before)
            # Ends the thread, even if a forked child has the socket, too.
            self._told.shutdown(socket.SHUT_RDWR)
            self._told.close()
            self._listener.join()
        # After the thread has ended, which may have started the timer just before.
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
        """Wait for SIGTERM for a limited time, once, after another rank was lost.

        The failed rank reports first; then torchrun sends SIGTERM to the others.
        """
        self._patient_until = self._patient_until or time.monotonic() + PATIENCE_S
        # Not threading.Event: a signal handler that interrupts its lock would block for ever.
        while self.reason != SIGTERM and time.monotonic() < self._patient_until:
            time.sleep(0.02)

    def began(self, ago_s: float) -> None:
        """Start the clock this many seconds ago: the run is older than this process."""
        self._start = min(self._start, time.monotonic() - ago_s)

    def is_due(self, epoch_time_s: float) -> bool:
        """Return whether to stop before another epoch of this length (with evaluation)."""
        if self._limit and time.monotonic() - self._start + epoch_time_s > self._limit:
            self.reason = self.reason or f"--time-limit {self._limit:g}"
        return bool(self.reason)


def _leave() -> None:
    print(
        f"gnnpipe: the epoch did not end within {GRACE_S:.0f} s of SIGTERM; the last checkpoint "
        "remains",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.STOPPED)

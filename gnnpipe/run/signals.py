"""Stops a run early: on SIGTERM, as a cluster scheduler sends it, on Ctrl-C, or after a time limit.

A run stops between two epochs, after a checkpoint. If the current epoch takes too long, or on a
second Ctrl-C, the process ends without another checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from gnnpipe.errors import ExitCode
from gnnpipe.run.rank_log import is_lost_peer

SIGTERM, SIGINT = "SIGTERM", "Ctrl-C"
"""Reasons of a run that was stopped by a signal."""

PATIENCE_S = 10.0
"""Time that a rank waits after it has lost another rank, so that the failed rank reports first."""

GRACE_S = 25.0
"""Time from SIGTERM to the end of the process; most schedulers send SIGKILL after 30 s."""

SAME_S = 2.0
"""Under torchrun one Ctrl-C reaches a rank twice, from the terminal and from torchrun, within this
time."""

LEAVE_S = 1.0
"""Time from a second Ctrl-C to the end of a process whose main thread does not react."""

INTERRUPTED = (
    "interrupted: the run stops after this epoch (with --schedule async, at the next flush), with "
    "a checkpoint; again: at once"
)


class _Presses:
    """Counts Ctrl-C as heard in one of two ways."""

    def __init__(self) -> None:
        self.count, self._first_at = 0, 0.0

    def add(self) -> None:
        now = time.monotonic()
        if self.count and _is_under_torchrun() and now - self._first_at < SAME_S:
            return
        self.count, self._first_at = self.count + 1, self._first_at or now


class Stopping:
    """Stop conditions of one rank; inside this context SIGTERM does not end the process.

    Nor does the first Ctrl-C, if ``tell`` is set.
    """

    def __init__(self, time_limit_s: float) -> None:
        """Start the clock; a limit of 0 means none."""
        self._limit, self._start = time_limit_s, time.monotonic()
        self._before: dict[int, object] = {}
        self._fd_before = -1
        self._timer: threading.Timer | None = None
        self._patient_until = 0.0
        self.reason = ""
        """Why the run has to stop; '' if it has not."""
        self.tell: Callable[[str], None] | None = None
        """Called with a line for the user at the first Ctrl-C, from another thread; ``None``:
        Ctrl-C ends the process at once, as always in Python."""

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            # Two ways, because each may be late: Python's handler waits for the end of a long
            # operator in the main thread, the listening thread for its turn.
            self._heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            self._before = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._hear)}
            is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if is_usual and self.tell is not None:
                self._presses, self._bytes = _Presses(), _Presses()
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._hear_interrupt)
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
            for number, before in self._before.items():
                signal.signal(number, before if callable(before) else signal.SIG_DFL)
            # Ends the thread, even if a forked child has the socket, too.
            self._told.shutdown(socket.SHUT_RDWR)
            self._told.close()
            self._listener.join()
        # After the thread has ended, which may have started the timer just before.
        if self._timer is not None:
            self._timer.cancel()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._has_reason(SIGTERM)

    def _hear_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._presses.add()
        self._has_reason(SIGINT)
        # Python may call this once for two signals; the thread counts both.
        if max(self._presses.count, self._bytes.count) > 1:
            raise KeyboardInterrupt

    def _has_reason(self, reason: str) -> None:
        """Set the reason; torchrun sends SIGTERM after Ctrl-C, which remains the reason."""
        self.reason = SIGINT if SIGINT in (self.reason, reason) else reason

    def _listen(self) -> None:
        with self._heard as heard:
            while byte := heard.recv(1):
                if byte[0] == signal.SIGTERM:
                    self._has_reason(SIGTERM)
                    self._leave_after(GRACE_S, SIGTERM, ExitCode.STOPPED)
                elif byte[0] == signal.SIGINT and signal.SIGINT in self._before:
                    self._note_interrupt()

    def _note_interrupt(self) -> None:
        before = self._bytes.count
        self._bytes.add()
        self._has_reason(SIGINT)
        if self._bytes.count > 1:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            self._leave_after(LEAVE_S, "a second Ctrl-C", ExitCode.INTERRUPTED)
        elif before == 0:
            if _is_under_torchrun():  # which sends SIGKILL after 30 s
                self._leave_after(GRACE_S, SIGINT, ExitCode.INTERRUPTED)
            assert self.tell is not None
            self.tell(INTERRUPTED)

    def _leave_after(self, seconds: float, reason: str, code: ExitCode) -> None:
        """End the process after this time, unless the context has ended or will end it sooner."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, _leave, (seconds, reason, code))
            self._timer.daemon = True
            self._timer.start()

    def hear_out(self) -> None:
        """Wait for SIGTERM for a limited time, once, after another rank was lost.

        The failed rank reports first; then torchrun sends SIGTERM to the others.
        """
        self._patient_until = self._patient_until or time.monotonic() + PATIENCE_S
        # Not threading.Event: a signal handler that interrupts its lock would block for ever.
        while self.reason not in (SIGTERM, SIGINT) and time.monotonic() < self._patient_until:
            time.sleep(0.02)

    def began(self, ago_s: float) -> None:
        """Start the clock this many seconds ago: the run is older than this process."""
        self._start = min(self._start, time.monotonic() - ago_s)

    def is_due(self, epoch_time_s: float) -> bool:
        """Return whether to stop before another epoch of this length (with evaluation)."""
        if self._limit and time.monotonic() - self._start + epoch_time_s > self._limit:
            self.reason = self.reason or f"--time-limit {self._limit:g}"
        return bool(self.reason)


def _is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _leave(seconds: float, reason: str, code: ExitCode) -> None:
    print(
        f"gnnpipe: the epoch did not end within {seconds:.0f} s of {reason}; the last checkpoint "
        "remains",
        file=sys.stderr,
        flush=True,
    )
    os._exit(code)

"""Lines and warnings of a run: on the terminal, and in Python's logging under the name gnnpipe.

A library that is used from Python does not configure logging. The user may attach handlers to the
logger "gnnpipe" or to the root. If one of them writes to the terminal, nothing is printed besides.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

LOGGER = logging.getLogger("gnnpipe")
# Otherwise Python itself would print warnings of a logger that nobody has configured.
LOGGER.addHandler(logging.NullHandler())


_SHOWN_AFTER_S, _LINE_EVERY_S, _REDRAWN_EVERY_S = 2.0, 10.0, 0.5
"""Time before a step is shown; then time between two plain lines, and two lines on a terminal."""

_CLEAR = "\r\x1b[2K"
"""Moves a terminal's cursor to the start of its line and erases the line."""


def is_shown(level: int) -> bool:
    """Return whether a handler of the user's writes this level of LOGGER to the terminal."""
    if not LOGGER.isEnabledFor(level):
        return False
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        for handler in logger.handlers:
            # rich's handler has a console in place of a stream.
            console = getattr(handler, "console", None)
            stream = getattr(handler, "stream", getattr(console, "file", None))
            if stream in terminal and stream is not None and handler.level <= level:
                return True
        logger = logger.parent if logger.propagate else None
    return False


def say(text: str, is_quiet: bool = False) -> None:
    """Log a line, and print it unless ``is_quiet`` or logging shows it."""
    LOGGER.info(text)
    _erase_step()
    if not is_quiet and not is_shown(logging.INFO):
        print(text, flush=True)


def warn(text: str) -> None:
    """Log a warning, and raise it as Python's at the line outside gnnpipe that led here.

    Python's warning is left out where logging shows the text on the terminal.
    """
    LOGGER.warning(text)
    _erase_step()
    if is_shown(logging.WARNING):
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "gnnpipe":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


class Step:
    """Shows that a long step of the set-up goes on, and about how long the step still takes.

    A context manager around the step; nothing is shown of a step of under 2 s. On a terminal one
    line on stderr is updated; elsewhere a line is printed at most every 10 s. A step inside another
    one shows nothing of its own.
    """

    def __init__(self, text: str, is_quiet: bool = False, is_first: bool = True) -> None:
        """``text``: as in 'reading cora'; ``is_first``: this process is rank 0, which shows it."""
        self._text, self._is_quiet, self._is_first = text, is_quiet, is_first
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = 0.0
        self._end_s: float | None = None
        """When the step will have ended, by estimate."""
        self.is_drawn = False
        """Whether the line is on the terminal."""

    def __enter__(self) -> Step:
        self._start_s = time.monotonic()
        if self._is_first and not _open_steps:
            self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
            self._thread.start()
        _open_steps.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        _erase_step()
        _open_steps.remove(self)

    def _show(self) -> None:
        is_printed = not self._is_quiet and not is_shown(logging.INFO)
        is_live = is_printed and sys.stderr.isatty()
        logged_s, wait_s = -math.inf, _SHOWN_AFTER_S
        while not self._ended.wait(wait_s):
            wait_s = _REDRAWN_EVERY_S if is_live else _LINE_EVERY_S
            now, text = time.monotonic(), self._line()
            if now - logged_s >= _LINE_EVERY_S:
                LOGGER.info(text)
                logged_s = now
            with _drawing:
                if is_printed and not _hidden_by:
                    text = _CLEAR + text if is_live else f"{text}\n"
                    print(text, end="", file=sys.stderr, flush=True)
                    self.is_drawn = is_live

    def _line(self) -> str:
        now = time.monotonic()
        line = f"{self._text}: {now - self._start_s:.0f} s"
        if self._end_s is not None and self._end_s > now + 0.5:
            line += f", about {self._end_s - now:.0f} s left"
        return line

    def expect(self, share: float, left_s: float | None) -> None:
        """Set when the step will have ended, as ``report_progress``."""
        now = time.monotonic()
        if left_s is None and share > 0:
            left_s = (now - self._start_s) * (1 - share) / share
        if left_s is not None:
            self._end_s = now + left_s


_open_steps: list[Step] = []

_hidden_by: list[str] = []
"""Reasons why no step is shown."""

_drawing = threading.Lock()


def report_progress(share: float = 0.0, left_s: float | None = None) -> None:
    """Tell the innermost ``Step`` how much of it is done, as a share, or how long it still takes.

    Does nothing outside of a step.
    """
    if _open_steps:
        _open_steps[-1].expect(share, left_s)


@contextmanager
def hidden_steps(reason: str) -> Iterator[None]:
    """Shows no step inside the block, as another progress bar does."""
    _hidden_by.append(reason)
    _erase_step()
    try:
        yield
    finally:
        _hidden_by.remove(reason)


def _erase_step() -> None:
    """Free the terminal's line for other text."""
    for step in _open_steps[:1]:
        with _drawing:
            if step.is_drawn:
                print(_CLEAR, end="", file=sys.stderr, flush=True)
            step.is_drawn = False


def human_bytes(size: float) -> str:
    """Return a size as text, in the unit that fits.

    >>> human_bytes(3 * 2**20)
    '3.0 MiB'
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"

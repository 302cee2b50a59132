"""Lines and warnings of a run: on the terminal, and in Python's logging under the name gnnpipe.

A library that is used from Python does not configure logging. The user may attach handlers to the
logger "gnnpipe" or to the root. If one of them writes to the terminal, nothing is printed besides.
"""

from __future__ import annotations

import logging
import sys
import warnings

LOGGER = logging.getLogger("gnnpipe")
# Otherwise Python itself would print warnings of a logger that nobody has configured.
LOGGER.addHandler(logging.NullHandler())


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
    if not is_quiet and not is_shown(logging.INFO):
        print(text, flush=True)


def warn(text: str) -> None:
    """Log a warning, and raise it as Python's at the line outside gnnpipe that led here.

    Python's warning is left out where logging shows the text on the terminal.
    """
    LOGGER.warning(text)
    if is_shown(logging.WARNING):
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "gnnpipe":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)

"""Exceptions that end a run early, and the exit codes of the command line.

The message of an ``InputError`` names the flag or field, the value and what to try instead. The
command line prints it as one line; Python callers can catch it as a ``ValueError``.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    DONE = 0
    FAILED = 1
    """The run failed, or ``verify`` found a difference."""
    BAD_INPUT = 2
    STOPPED = 75
    """The run was told to stop and can be continued (EX_TEMPFAIL)."""
    INTERRUPTED = 130
    """Ended by Ctrl-C (128 + SIGINT)."""


class InputError(ValueError):
    """A flag, field, file or data set cannot be used; the message says what to do."""


class StoppedError(Exception):
    """The run stopped because it was told to; the message says how to continue it."""


class FailedError(RuntimeError):
    """The run failed for an external reason, such as a full disk."""


class IdleRank(SystemExit):
    """This rank has no work in the plan; ends the process with exit code 0 unless it is caught."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.DONE))


class LostPeerError(RuntimeError):
    """A rank of this machine has ended, or sends nothing; users see it as a ``LostRankError``."""


class LostRankError(RuntimeError):
    """Another rank has ended; the message says from which checkpoint the run can be continued."""

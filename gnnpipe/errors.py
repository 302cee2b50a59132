"""What ends a run early: input that a user can put right, and what happens to a run from outside.

A message names the flag or field, the value that was given and what to try instead. The command
line prints it as one line and exits with code 2; Python callers catch it as a ``ValueError``.
"""

from __future__ import annotations

__all__ = ["FailedError", "InputError", "LostRankError", "StoppedError"]


class InputError(ValueError):
    """Input from outside (flag, field, file, data) that cannot be used, and what to do about it."""


class StoppedError(Exception):
    """The run was told to stop, and did; the text says where it can go on."""


class FailedError(RuntimeError):
    """The run cannot go on for a reason outside of it (a full disk), told in one line."""


class LostRankError(RuntimeError):
    """Another rank has gone, and the run with it; the text says what there is to go on from."""

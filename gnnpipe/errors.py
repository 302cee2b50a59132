"""One error class for everything a user can put right.

A message names the flag or field, the value that was given and what to try instead. The command
line prints it as one line and exits with code 2; Python callers catch it as a ``ValueError``.
"""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """Input from outside (flag, field, file, data) that cannot be used, and what to do about it."""

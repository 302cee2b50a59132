"""Entry point of the ``gnnpipe`` command and of ``python -m gnnpipe``, which torchrun starts."""

from __future__ import annotations

import os
import sys
import threading

from gnnpipe.cli.main import main
from gnnpipe.errors import ExitCode


def run() -> int:
    """Run the command and return its exit code."""
    code = main()
    if code == ExitCode.INTERRUPTED and threading.active_count() > 1:
        # At a normal exit Python stops threads inside torch's C++ code, which aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(run())

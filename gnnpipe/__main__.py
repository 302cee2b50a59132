"""``python -m gnnpipe``, which is how torchrun starts it."""

from __future__ import annotations

import sys

from gnnpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())

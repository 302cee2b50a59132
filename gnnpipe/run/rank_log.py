"""What happened on this rank, for whoever looks afterwards: ``logs/rank-3.txt`` of the run.

torchrun prints last what the rank that failed first has written into its error file; so that is
where the cause belongs, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from gnnpipe.checkpoint.retention import again_with
from gnnpipe.errors import FailedError, LostRankError

__all__ = ["RankError", "RankLog", "is_lost_peer", "lost_rank"]


class RankError(RuntimeError):
    """A fault of one rank, with its place in the program; how torchrun tells of it."""


class RankLog:
    """Of one rank; silent without a folder."""

    def __init__(self, run: Path | None, rank: int) -> None:
        self._rank = rank
        self._path = None if run is None else run / "logs" / f"rank-{rank}.txt"

    def say(self, text: str) -> None:
        """Add a line; a disk that takes none ends nothing."""
        if self._path is None or not (self._path.parents[1] / "config.toml").exists():
            return  # nothing has been begun, and nothing is to be left behind
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def failed(self, error: BaseException) -> None:
        """Write down an error of this rank with its traceback, here and for torchrun."""
        self.say("".join(traceback.format_exception(error)).rstrip())
        places = [note for note in getattr(error, "__notes__", ()) if note.startswith("gnnpipe:")]
        where = places[0].removeprefix("gnnpipe: ") if places else f"rank {self._rank}"
        if not is_lost_peer(error):
            _tell_torchrun(f"{where}: {type(error).__name__}: {error}", error)

    def gave_up(self, reason: str) -> None:
        """Write down why this process is about to end, on the screen too."""
        self.say(reason)
        print(f"gnnpipe: rank {self._rank}: {reason}", file=sys.stderr, flush=True)
        _tell_torchrun(f"rank {self._rank}: {reason}", None)


def is_lost_peer(error: BaseException) -> bool:
    """The error came out of torch.distributed rather than out of this rank's own work."""
    if not isinstance(error, RuntimeError) or isinstance(error, FailedError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    told = "torch/distributed" in frames[-1].filename.replace(os.sep, "/") if frames else False
    return told or "/gloo/transport/" in str(error) or "Connection closed by peer" in str(error)


def lost_rank(error: BaseException, rank: int, run: Path | None) -> LostRankError:
    """``error`` as ``rank`` tells of it, with what there is to go on from in the folder ``run``."""
    # gloo begins with the place in its own source, and guesses at reasons behind the first point.
    text = re.sub(r"^\[\S+:\d+\] |\.\s.*|\n.*", "", str(error), flags=re.DOTALL)
    where = "nothing was written (--out off)" if run is None else again_with(run)
    return LostRankError(f"rank {rank} lost another rank ({text[:120].strip()}); {where}")


def _tell_torchrun(text: str, cause: BaseException | None) -> None:
    """Write the error file of this rank, if torchrun has given it one."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    try:
        raise RankError(text) from cause
    except RankError as told:
        # Only of an error that is being handled the traceback is written, its last line the text.
        get_error_handler().record_exception(told)

"""Log file of a rank in the run folder (``logs/rank-3.txt``), and the error file of torchrun.

At the end torchrun prints the error file of the rank that failed first, so the cause of a failure
is written there, too.
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

from gnnpipe.checkpoint.retention import resume_advice
from gnnpipe.errors import FailedError, LostPeerError, LostRankError


class RankError(RuntimeError):
    """An error of one rank with its position in the program, as torchrun prints it."""


class RankLog:
    """Log of one rank; writes nothing without a run folder."""

    def __init__(self, run: Path | None, rank: int) -> None:
        self._rank = rank
        self._path = None if run is None else run / "logs" / f"rank-{rank}.txt"

    def say(self, text: str) -> None:
        """Add a line; a failed write is ignored."""
        if self._path is None or not (self._path.parents[1] / "config.toml").exists():
            return  # the run has not started: leave no files
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def failed(self, error: BaseException) -> None:
        """Log an error of this rank with its traceback, here and for torchrun."""
        self.say("".join(traceback.format_exception(error)).rstrip())
        places = [note for note in getattr(error, "__notes__", ()) if note.startswith("gnnpipe:")]
        where = places[0].removeprefix("gnnpipe: ") if places else f"rank {self._rank}"
        if not is_lost_peer(error):
            _tell_torchrun(f"{where}: {type(error).__name__}: {error}", error)

    def gave_up(self, reason: str) -> None:
        """Log why this process is about to end, also on stderr."""
        self.say(reason)
        print(f"gnnpipe: rank {self._rank}: {reason}", file=sys.stderr, flush=True)
        _tell_torchrun(f"rank {self._rank}: {reason}", None)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether another rank has ended, as torch.distributed or shared memory tells."""
    if isinstance(error, LostPeerError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, FailedError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    is_torch = "torch/distributed" in frames[-1].filename.replace(os.sep, "/") if frames else False
    return is_torch or "/gloo/transport/" in str(error) or "Connection closed by peer" in str(error)


def lost_rank(error: BaseException, rank: int, run: Path | None) -> LostRankError:
    """Return the error for the user: what was lost and how the run in ``run`` can be resumed."""
    # gloo's message starts with a source line and adds guesses after the first sentence.
    text = re.sub(r"^\[\S+:\d+\] |\.\s.*|\n.*", "", str(error), flags=re.DOTALL)
    where = "nothing was written (--out off)" if run is None else resume_advice(run)
    return LostRankError(f"rank {rank} lost another rank ({text[:120].strip()}); {where}")


def _tell_torchrun(text: str, cause: BaseException | None) -> None:
    """Write the error file that torchrun has given to this rank, if any."""
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    try:
        raise RankError(text) from cause
    except RankError as error:
        # The handler writes the traceback of the exception that is being handled.
        get_error_handler().record_exception(error)

"""A process that writes one rank's tensors to disk, so that the rank goes on undisturbed.

A thread of the rank's own would share Python's lock with the one that trains, and its table of
pages: an epoch of half a second then takes a quarter longer. torch's asynchronous checkpoints go
to a process for the same reason; theirs runs the user's script anew, which this one does not.

It reads requests from stdin and answers on stdout, a line of JSON each; the tensors are in a block
of memory that it shares with the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.serialization import set_crc32_options

from gnnpipe.checkpoint.rank_file import RankFile, write_rank_file
from gnnpipe.checkpoint.staging import StagedTensors, tensors_at

__all__ = ["AsyncWriter", "serve"]

WORTH_BYTES = 16 << 20
"""Less is written by the rank itself: the process takes two seconds and 265 MiB to start."""

_START = """import sys
sys.path[:] = {paths!r}
from gnnpipe.checkpoint.writer_process import serve
serve({handle}, {parent}, {cores})"""
_READY = "gnnpipe is ready to write\n"
_MOST_STARTS = 2
_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1
_PATIENCE_S, _SLOW_BYTES_PER_S = 5.0, 50e6


class AsyncWriter:
    """The rank's side; where the process is not there (yet, or any more) there is no answer."""

    def __init__(self, staged: StagedTensors, cores: Collection[int] = ()) -> None:
        """``cores`` that the process may use; none: those of the rank."""
        self._staged, self._cores = staged, sorted(cores)
        self._process: subprocess.Popen[str] | None = None
        self._starts = 0
        self._is_ready = False
        self._hurry = threading.Event()

    def start(self) -> None:
        """Begin to start it, if it is worth it; called before every checkpoint."""
        self._hurry.clear()
        if self._process is not None and self._process.poll() is None:
            return
        if self._staged.size_bytes < WORTH_BYTES or self._starts == _MOST_STARTS:
            return
        self._starts += 1
        self._is_ready = False
        # It imports from where this process does, and not from the folder one happens to be in.
        code = _START.format(
            paths=sys.path, handle=self._staged.handle, parent=os.getpid(), cores=self._cores
        )
        kinds = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment}
        flags = [name for name, is_on in kinds.items() if is_on]
        with contextlib.suppress(OSError, TypeError):
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=(self._staged.handle,),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for those who train.
            )
            weakref.finalize(self, _end, self._process)

    def hurry(self) -> None:
        """Somebody waits for the checkpoint: do not wait for the process to start."""
        self._hurry.set()

    @property
    def patience_s(self) -> float:
        """Longer than any disk that is fit for it takes to write what is staged."""
        return _PATIENCE_S + self._staged.size_bytes / _SLOW_BYTES_PER_S

    def give_up(self) -> None:
        """End the process: it may have been stopped, and who asked it waits for an answer."""
        if self._process is not None:
            self._process.kill()

    def write(self, folder: Path, rank: int) -> RankFile | None:
        """Write what is staged to ``folder``; ``None`` if nobody is there to do so.

        Raises ``OSError`` or ``RuntimeError`` where writing failed.
        """
        if self._process is None:
            return None
        try:
            if not self._comes_up():
                return None
            request = [str(folder), rank, self._staged.size_bytes, self._staged.places]
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line())
        except (OSError, ValueError, EOFError):
            # It has died, and must not write any more when the rank does.
            _end(self._process)
            return None
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"])
        if "text" in answer:
            raise RuntimeError(answer["text"])
        return RankFile(**answer)

    def _comes_up(self) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        look = select.poll()  # which takes any number of descriptors
        look.register(self._process.stdout)
        while not self._is_ready:
            if look.poll(1000 * _LOOK_S):
                # Whatever else a start prints is passed over.
                self._is_ready = self._line() == _READY
            elif self._hurry.is_set():
                return False
        return True

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        if not found:
            raise EOFError
        return found


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what it did not take is lost
            assert pipe is not None
            pipe.close()


def serve(handle: int, parent: int, cores: Collection[int]) -> None:
    """The process's side: until stdin ends, or whoever started it."""
    with contextlib.suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        if cores:
            os.sched_setaffinity(0, cores)
    with contextlib.suppress(OSError):
        os.nice(10)  # What trains comes first, where there are fewer cores than processes.
    set_crc32_options(compute_crc32=False)  # The rank takes a checksum of the whole file.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else prints does not answer.
    print(_READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        folder, rank, size_bytes, places = json.loads(line)
        if os.getppid() != parent:
            return  # The folder may be a new run's by now.
        try:
            block = mmap.mmap(handle, size_bytes, access=mmap.ACCESS_COPY)
            tensors = tensors_at(block, places)
            answer = write_rank_file(Path(folder), rank, tensors).to_dict()
        except BaseException as error:
            answer = {"text": " ".join(str(error).split()) or type(error).__name__}
            if isinstance(error, OSError) and error.errno:
                answer = {"errno": error.errno, "text": error.strerror}
        print(json.dumps(answer), file=answers, flush=True)

"""A process that writes one rank's tensors to disk, so that the rank goes on undisturbed.

A thread of the rank's own would share Python's lock with the one that trains, and its table of
pages: an epoch of half a second then takes a quarter longer. torch's asynchronous checkpoints go
to a process for the same reason; theirs runs the user's script anew, which this one does not.

It reads requests from stdin and answers on stdout, a line of JSON each; the tensors are in a block
of memory that it shares with the rank.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from torch.serialization import set_crc32_options

from gnnpipe.train.checkpoint.rank_file import RankFile, write_rank_file
from gnnpipe.train.checkpoint.staged import StagedTensors, tensors_at

__all__ = ["Beside", "serve"]

WORTH_BYTES = 16 << 20
"""Less is written by the rank itself: the process takes two seconds and 265 MiB to start."""

_ROOT = Path(__file__).resolve().parents[3]
_START = "from gnnpipe.train.checkpoint.beside import serve; serve({handle}, {parent})"
_LOOK_S = 0.05


class Beside:
    """The rank's side; where the process is not there (yet, or any more) there is no answer."""

    def __init__(self, staged: StagedTensors) -> None:
        self._staged = staged
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False
        self._hurry = threading.Event()

    def start(self) -> None:
        """Begin to start it, if it is worth it; called before every checkpoint."""
        self._hurry.clear()
        if self._process is not None or self._staged.size_bytes < WORTH_BYTES:
            return
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                # -P: what lies in the folder that one happens to be in is not imported.
                [sys.executable, "-P", "-c",
                 _START.format(handle=self._staged.handle, parent=os.getpid())],
                pass_fds=(self._staged.handle,), env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for those who train.
            )  # fmt: skip
            weakref.finalize(self, _end, self._process)

    def hurry(self) -> None:
        """Somebody waits for the checkpoint: do not wait for the process to start."""
        self._hurry.set()

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
            answer = self._answer()
        except (OSError, ValueError):
            return None  # It has died; the rank can write, too.
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"])
        if "text" in answer:
            raise RuntimeError(answer["text"])
        return RankFile(**answer)

    def _comes_up(self) -> bool:
        assert self._process is not None
        assert self._process.stdout is not None
        while not self._is_ready:
            if select.select([self._process.stdout], [], [], _LOOK_S)[0]:
                self._is_ready = bool(self._answer())
            elif self._hurry.is_set():
                return False
        return True

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def serve(handle: int, parent: int) -> None:
    """The process's side: until stdin ends."""
    with contextlib.suppress(OSError):
        os.nice(10)  # What trains comes first, where there are fewer cores than processes.
    set_crc32_options(compute_crc32=False)  # The rank takes a checksum of the whole file.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else prints does not answer.
    print(json.dumps({"is": "ready"}), file=answers, flush=True)
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

"""Writes checkpoints while training goes on.

The tensors are copied between two epochs, which takes as long as memory does; the rest happens in
a thread, which talks to the other ranks in a group of its own. One write at a time: the next one
waits for it.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from gnnpipe.checkpoint.retention import checkpoint_path, drop_old, remove_unfinished
from gnnpipe.checkpoint.staging import StagedTensors
from gnnpipe.checkpoint.writer import write_checkpoint
from gnnpipe.checkpoint.writer_process import AsyncWriter
from gnnpipe.files import how_to_write

__all__ = ["Saver"]


_SCARCE_BYTES = 1 << 20
"""Less is a full disk."""


_LEAVE_S = 10.0

_SWITCH_S = 2e-4
"""How long this thread may keep Python from the other that trains: 5 ms, which is Python's own,
after each of its short steps double the epoch."""


@contextmanager
def _beside_training() -> Iterator[None]:
    """Get out of the way: shorter turns, and no checksum of torch's beside ours."""
    interval_s, sums = sys.getswitchinterval(), get_crc32_options()
    sys.setswitchinterval(_SWITCH_S)
    set_crc32_options(compute_crc32=False)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        set_crc32_options(compute_crc32=sums)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is heard behind it: half a thread can be neither waited for nor left."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # It is not heard here.
        return
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


class Saver:
    """Of one rank; all ranks save at the same epochs."""

    def __init__(
        self,
        run: Path,
        kept: int,
        group: dist.ProcessGroup | None,
        rank: int,
        cores: Collection[int] = (),
    ) -> None:
        """``run``: the folder of the run, that all ranks see; ``kept`` checkpoints remain.

        ``cores``: all that this machine's ranks may use, for the process that writes.
        """
        self.run, self._kept, self._group, self._rank = run, kept, group, rank
        self._staged = StagedTensors()
        self._beside = AsyncWriter(self._staged, cores)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._free_bytes = 0
        self.begun = 0
        """Epoch of the last checkpoint that was begun; 0: none."""
        self.whole = 0
        """Epoch of the newest checkpoint that is known to be whole; 0: none."""

    def save(
        self, epoch: int, tensors: Mapping[str, Tensor], texts: Mapping[str, str], is_last: bool
    ) -> None:
        """Begin to write the checkpoint behind ``epoch`` (from 1); ``tensors`` are copied first.

        ``is_last``: there is no training beside it.
        """
        self.wait()
        if self.has_failed:
            return  # All ranks know by now, or will when they meet.
        copies: Mapping[str, Tensor] | Exception
        try:
            copies = self._staged.take(tensors)
        except Exception as error:  # no memory, for one: all ranks must hear of it
            copies = error
        with _uninterrupted():
            self.begun = epoch
            if not is_last:
                self._beside.start()
            self._thread = threading.Thread(
                target=self._write, args=(epoch, copies, texts), name="checkpoint", daemon=True
            )
            self._thread.start()

    def _write(
        self, epoch: int, tensors: Mapping[str, Tensor] | Exception, texts: Mapping[str, str]
    ) -> None:
        try:
            path = checkpoint_path(self.run, epoch)
            with _beside_training():
                write_checkpoint(path, tensors, texts, self._group, self._beside)
            if self._rank == 0:
                drop_old(self.run, self._kept, epoch)
        except Exception as error:
            self._free_bytes = shutil.disk_usage(self.run).free
            self._error = error
            if self._rank == 0:
                remove_unfinished(self.run)

    def wait(self) -> None:
        """Until what was begun is on disk."""
        if self._thread is not None:
            self._beside.hurry()
            self._thread.join(self._beside.patience_s)
            if self._thread.is_alive():
                self._beside.give_up()
            self._thread.join()
            self._thread = None
            if self._error is None:
                self.whole = self.begun

    def leave(self) -> None:
        """The run is interrupted: give what was begun a moment to get on disk."""
        if self._thread is not None:
            self._beside.hurry()
            self._thread.join(_LEAVE_S)

    @property
    def has_failed(self) -> bool:
        """Whether a write has gone wrong, as far as is known now."""
        return self._error is not None

    @property
    def fault(self) -> tuple[str, str]:
        """What went wrong, in a line, and what to do about it; both empty if nothing has."""
        error = self._error
        if error is None:
            return "", ""
        return self._words(error), how_to_write(getattr(error, "errno", None))

    def _words(self, error: BaseException) -> str:
        if self._free_bytes < _SCARCE_BYTES and not getattr(error, "errno", 0):
            # Torch's own writer hides what a full disk says.
            return os.strerror(errno.ENOSPC)
        return getattr(error, "strerror", None) or str(error) or type(error).__name__

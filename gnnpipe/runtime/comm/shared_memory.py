"""Messages between two ranks of one machine, through shared memory.

The sender copies rows into memory that both ranks map, and the receiver copies them out. Over
gloo's loopback connections the same rows cost several times as much processor time, on the cores
that compute (docs/adr/0065).

Each direction of a link has an arena of shared memory and a pipe. For every message the sender
writes a record into the pipe that names the message's block of the arena. When the receiver has
copied the block, it writes a record into the pipe of the other direction, and the sender uses the
block again. A pipe ends when its writer ends, so the end of a rank is noticed at once (if the rank
has forked a process, when that one ends, too).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import sys
import threading
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.errors import LostPeerError
from gnnpipe.runtime.comm.start_thread import StartThread

_RECORD = struct.Struct("<4q")
"""Channel, number of the message in its channel, offset and bytes of its block. Writes of this size
are never split, and a full read is a whole number of records."""

_ROOM_MS = 100
"""Longest time until a thread that waits for room in a pipe notices that the link is closed."""

_PAGE_BYTES, _LEAST_ARENA_BYTES = 1 << 12, 1 << 20


class Channel(IntEnum):
    """Messages of a channel arrive in the order in which they were sent."""

    FORWARD = 0
    """Values of the stage before."""
    BACKWARD = 1
    """Gradients of the stage after."""
    SHARDS = 2
    """All-to-alls among the shards of a stage."""
    FREED = 3
    """No message: the receiver has copied a block of the other direction."""


class Arena:
    """The blocks of shared memory of one direction, at the sender."""

    def __init__(self) -> None:
        self.file = os.memfd_create("gnnpipe", os.MFD_CLOEXEC)
        self.size_bytes = 0
        """The most that blocks have reached: memory that the system has given."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._free = [(0, sys.maxsize)]
        """Start and end of what is free, ascending."""
        self._blocks: dict[int, int] = {}
        """End of each block by its offset."""

    def take(self, size: int) -> tuple[int, Tensor]:
        """Return offset and memory, uint8 [size], of a new block: the first that is free."""
        room = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        index = next(i for i, (start, end) in enumerate(self._free) if end - start >= room)
        start, end = self._free.pop(index)
        if end - start > room:
            self._free.insert(index, (start + room, end))
        self._blocks[start] = start + room
        self.size_bytes = max(self.size_bytes, start + room)
        if self.size_bytes > len(self._memory):
            os.ftruncate(self.file, max(2 * self.size_bytes, _LEAST_ARENA_BYTES))
            self._memory = map_file(self.file)
        return start, self._memory[start : start + size]

    def free(self, offset: int) -> None:
        """Allow the memory of a block to be used again."""
        insort(self._free, (offset, self._blocks.pop(offset)))
        joined = self._free[:1]
        for start, end in self._free[1:]:
            if start == joined[-1][1]:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._free = joined

    def close(self) -> None:
        """Close the file and give up the memory."""
        os.close(self.file)
        self._memory = torch.empty(0, dtype=torch.uint8)


def map_file(file: int) -> Tensor:
    """Return the memory of a whole shared file, uint8 [bytes]."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


@dataclass(frozen=True)
class LinkFiles:
    """The open files of a rank's end of a link."""

    arena: Arena
    """Memory of the messages that this rank sends."""
    to_peer: int
    """Pipe of the records that this rank writes."""
    their_arena: int
    from_peer: int


class SharedMemoryLink:
    """This rank's end of the link to another rank of its machine."""

    def __init__(self, rank: int, files: LinkFiles, timeout_s: float) -> None:
        """``rank``: the other one; ``timeout_s``: longest wait for a message."""
        self.rank, self._files, self._timeout_s = rank, files, timeout_s
        self._closed = threading.Event()
        self._memory = torch.empty(0, dtype=torch.uint8)
        """The other rank's arena."""
        self._sent: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()
        self._arrived: dict[tuple[int, int], tuple[int, int]] = {}
        """Offset and bytes of messages that have not been copied, by channel and number."""
        self._writer: StartThread | None = None
        """Writes the records once the pipe has been full, so that ``send`` never waits."""
        for pipe in (files.to_peer, files.from_peer):
            os.set_blocking(pipe, False)
        self._readable = select.poll()
        self._readable.register(files.from_peer, select.POLLIN)

    @property
    def memory_bytes(self) -> int:
        """Shared memory of the messages that this rank sends."""
        return self._files.arena.size_bytes

    def send(self, channel: Channel, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Send the elements of ``parts`` as ``dtype``; they may change as soon as this returns.

        A message without elements is not sent.
        """
        size = sum(part.numel() for part in parts) * dtype.itemsize
        if size == 0:
            return
        self._read_records()  # blocks that are free again
        offset, block = self._files.arena.take(size)
        for part, target in zip(parts, _split(block, parts, dtype), strict=True):
            target.copy_(part.detach())
        self._write_record(channel, self._sent[channel], offset, size)
        self._sent[channel] += 1

    def receive(self, channel: Channel, parts: Sequence[Tensor]) -> SharedMemoryMessage:
        """Return the next message of the channel, which fills ``parts`` when it is awaited."""
        has_elements = any(part.numel() for part in parts)
        number = self._awaited[channel]
        self._awaited[channel] += has_elements
        return SharedMemoryMessage(self, channel, number, parts if has_elements else ())

    def copy(self, channel: Channel, number: int, parts: Sequence[Tensor]) -> None:
        """Wait for a message and copy it into ``parts``, which have its number type.

        Raises:
            LostPeerError: the other rank has ended, or has sent nothing for too long.
        """
        self._check_open()
        while (channel, number) not in self._arrived:
            if not self._readable.poll(1e3 * self._timeout_s):
                raise LostPeerError(f"rank {self.rank} has sent nothing for {self._timeout_s:g} s")
            self._read_records()
        offset, size = self._arrived.pop((channel, number))
        if offset + size > len(self._memory):
            self._memory = map_file(self._files.their_arena)
        block = self._memory[offset : offset + size]
        for part, source in zip(parts, _split(block, parts, parts[0].dtype), strict=True):
            part.copy_(source)
        self._write_record(Channel.FREED, 0, offset, size)

    def close(self) -> None:
        """Close this end; records that the full pipe has not taken are dropped."""
        if self._closed.is_set():
            return  # the files' numbers may be those of other files by now
        self._closed.set()
        if self._writer is not None:
            self._writer.close()
        self._files.arena.close()
        for file in (self._files.to_peer, self._files.their_arena, self._files.from_peer):
            os.close(file)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        self.close()

    def _read_records(self) -> None:
        """Read the records that have arrived."""
        self._check_open()
        try:
            records = os.read(self._files.from_peer, 1 << 16)
        except BlockingIOError:
            return
        if not records:
            raise LostPeerError(f"rank {self.rank} has ended")
        for channel, number, offset, size in _RECORD.iter_unpack(records):
            if channel == Channel.FREED:
                self._files.arena.free(offset)
            else:
                self._arrived[channel, number] = offset, size

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError(f"the link to rank {self.rank} is closed")

    def _write_record(self, *record: int) -> None:
        """Write a record; after the pipe has been full once, in a thread."""
        data = _RECORD.pack(*record)
        if self._writer is None:
            try:
                _write(self._files.to_peer, data)
                return
            except BlockingIOError:
                self._writer = StartThread()
        # Without this object, which the thread would keep alive.
        self._writer.start(partial(_write_when_free, self._files.to_peer, data, self._closed))


@dataclass(frozen=True)
class SharedMemoryMessage:
    """A message that is to arrive."""

    link: SharedMemoryLink
    channel: Channel
    number: int
    parts: Sequence[Tensor]

    def wait(self) -> None:
        """Wait for the message and copy it into its parts."""
        if self.parts:
            self.link.copy(self.channel, self.number, self.parts)


def _write(pipe: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # reading tells that the rank has ended
        os.write(pipe, data)


def _write_when_free(pipe: int, data: bytes, closed: threading.Event) -> list[dist.Work | None]:
    """Write when the pipe has room, unless the link is closed before."""
    room = select.poll()
    room.register(pipe, select.POLLOUT)
    while not closed.is_set():
        if room.poll(_ROOM_MS):
            _write(pipe, data)
            break
    return []


def _split(block: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> Iterable[Tensor]:
    """Return the memory of each part, in its shape; an error if the block has another size."""
    elements = torch.split(block.view(dtype), [part.numel() for part in parts])
    return (each.view(part.shape) for each, part in zip(elements, parts, strict=True))

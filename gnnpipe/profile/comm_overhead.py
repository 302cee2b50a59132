"""What messages and exchanges take from processors that compute meanwhile, between real ranks.

Gloo's threads, the kernel's copies and interrupts, and what all of them push out of the caches.
Ranks that only wait for a message see a third of it, so it is measured beside work: the same passes
over a table with and without messages under way, and the difference in processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from gnnpipe.profile.comm_times import exchange_of
from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["LOAD_SIZES", "Load", "exchange_load", "message_load"]

LOAD_SIZES = (1 << 10, 1 << 19)
"""Bytes of what is sent."""

NUMBERS, ROUNDS = 1 << 21, 8
"""Of the table that is worked on (8 MiB), and passes over it with a message each."""


@dataclass(frozen=True)
class Load:
    """Processor seconds of one message, or exchange, at one end."""

    own_s: float
    """Of the thread that computes."""
    other_s: float
    """Of the other threads of that rank."""


class _Waits(Protocol):
    def wait(self) -> object: ...


Start = Callable[[int], Sequence[_Waits]]
"""Begins one transfer of so many bytes each way."""


def message_load(mesh: Mesh, pair: tuple[int, int], repeats: int) -> list[Load]:
    """Of a message between two ranks, by size; on every rank.

    Each sends one and receives one while it computes; half of it is one.
    """
    other = sum(pair) - mesh.rank

    def start(size_bytes: int) -> Sequence[_Waits]:
        room = torch.empty(size_bytes, dtype=torch.uint8, device=mesh.device)
        data = torch.zeros_like(room)
        arriving = mesh.start_thread.start(lambda: [dist.irecv(room, src=other)])
        return arriving, mesh.start_thread.start(lambda: [dist.isend(data, dst=other)])

    by_rank = mesh.gather(_by_size(mesh, start, repeats, mesh.rank in pair))
    ends = zip(*(by_rank[rank] for rank in pair), strict=True)
    return [Load(sum(e.own_s for e in both) / 4, sum(e.other_s for e in both) / 4) for both in ends]


def exchange_load(mesh: Mesh, repeats: int) -> list[Load]:
    """Of an all-to-all among the shards, by size, what a shard sends; the mean of all ranks."""

    def start(size_bytes: int) -> Sequence[_Waits]:
        return (exchange_of(size_bytes, mesh),)

    by_rank = mesh.gather(_by_size(mesh, start, repeats, True))
    return [
        Load(statistics.fmean(e.own_s for e in all_of), statistics.fmean(e.other_s for e in all_of))
        for all_of in zip(*by_rank, strict=True)
    ]


def _by_size(mesh: Mesh, start: Start, repeats: int, takes_part: bool) -> list[Load]:
    found = []
    table = torch.ones(NUMBERS if takes_part else 0, device=mesh.device)
    for size_bytes in LOAD_SIZES:
        mesh.gather(None)
        own: list[float] = []
        other: list[float] = []
        for _ in range(repeats + 1 if takes_part else 0):
            alone = _work(table, None, size_bytes)
            beside = _work(table, start, size_bytes)
            own.append((beside.own_s - alone.own_s) / ROUNDS)
            other.append((beside.other_s - alone.other_s) / ROUNDS)
        # The first ones fault their pages in.
        found.append(Load(_typical_s(own[1:]), _typical_s(other[1:])))
    return found


def _typical_s(times: Sequence[float]) -> float:
    """Nothing took less than nothing, nor who had no part in it."""
    return max(statistics.median(times), 0.0) if times else 0.0


def _work(table: torch.Tensor, start: Start | None, size_bytes: int) -> Load:
    """Of all rounds."""
    own_s, all_s = time.thread_time(), time.process_time()
    under_way: list[_Waits] = []
    for _ in range(ROUNDS):
        if start is not None:
            under_way += start(size_bytes)
        table.mul_(1.0)
    for transfer in under_way:
        transfer.wait()
    own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
    return Load(own_s, max(all_s - own_s, 0.0))

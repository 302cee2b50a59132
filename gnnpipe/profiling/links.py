"""Measures the links between ranks: clocks, messages, exchanges among shards, gradient sums.

A transfer costs two things. Its time is measured while nothing is computed. The processor time that
it takes from ranks that compute meanwhile (calls, gloo's threads, copies, interrupts, evicted
caches) is the difference between the same passes over a table with and without transfers under way;
a rank that only waits for a message sees a third of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from gnnpipe.collectives import CollectiveWork
from gnnpipe.machine import machine_key
from gnnpipe.perf.fit import fit_link
from gnnpipe.perf.profile import Affine, LinkTimes
from gnnpipe.plan import Placement
from gnnpipe.runtime.comm.cpu_affinity import crowding
from gnnpipe.runtime.comm.halo_exchange import sum_over_shards
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.p2p import PointToPoint, ValueSize
from gnnpipe.runtime.comm.shard_group import MeshShards
from gnnpipe.schedule import Direction


class Waitable(Protocol):
    """A transfer that has been started."""

    def wait(self) -> object:
        """Return when the transfer has ended."""


ROUNDS, PROBE_BYTES = 3, 1 << 20
"""Repeats and message size of ``clock_offset`` and ``receive_bandwidth``."""


def most_ranks_per_machine(mesh: Mesh) -> int:
    """Largest number of ranks on one machine; call it on every rank."""
    hosts = mesh.gather(machine_key())
    return max(hosts.count(host) for host in hosts)


def clock_offset(mesh: Mesh) -> float:
    """Seconds to add to this rank's clock to get rank 0's, to half the quickest round trip.

    Cristian's method: rank 0 answers each rank in turn with the time of its own clock.
    """
    best = (float("inf"), 0.0)
    for rank in range(1, mesh.world_size):
        if mesh.rank not in (0, rank):
            continue
        for _ in range(ROUNDS):
            time_s = torch.zeros(1, dtype=torch.float64)
            start_s = mesh.recorder.clock()
            if mesh.rank == 0:
                dist.recv(time_s, src=rank, group=mesh.control_group)
                time_s[0] = mesh.recorder.clock()
                dist.send(time_s, dst=rank, group=mesh.control_group)
            else:
                dist.send(time_s, dst=0, group=mesh.control_group)
                dist.recv(time_s, src=0, group=mesh.control_group)
                end_s = mesh.recorder.clock()
                best = min(best, (end_s - start_s, float(time_s) - (start_s + end_s) / 2))
    return best[1]


def receive_bandwidth(mesh: Mesh) -> float:
    """Bytes per second received while all stages send to the next and the previous one.

    The best of a few rounds; infinite with one stage, and on GPUs, where nothing is recorded.
    """
    if mesh.device.type != "cpu":
        return float("inf")
    stages = [s for s in (mesh.stage - 1, mesh.stage + 1) if 0 <= s < mesh.stages]
    peers = [p for s in stages for p in mesh.placement.counterparts(mesh.rank, s)]
    best = 0.0 if peers else float("inf")
    messages = _ByteMessages(mesh, PROBE_BYTES)
    for _ in range(ROUNDS):
        start_s = mesh.recorder.clock()
        for peer in peers:
            messages.post(peer, PROBE_BYTES)
            messages.send(peer, PROBE_BYTES)
        for peer in peers:
            messages.take(peer)
        messages.drain()
        time_s = max(mesh.recorder.clock() - start_s, 1e-9)
        best = max(best, len(peers) * PROBE_BYTES / time_s)
    return best


@dataclass(frozen=True)
class LinkTest:
    """Sizes of transfers to measure, and how often."""

    sizes_bytes: tuple[int, ...]
    warm_up: int
    repeats: int
    """At least 2."""


BRIEF = LinkTest((1 << 10, 1 << 14, 1 << 17, 1 << 20), warm_up=1, repeats=6)
THOROUGH = LinkTest((1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23), warm_up=2, repeats=7)


@dataclass(frozen=True)
class Links:
    """Measured links, as in ``Profile``; None where the mesh has no such link."""

    message: LinkTimes | None
    exchange: LinkTimes | None
    shard_sum: LinkTimes | None
    pair_exchange: LinkTimes | None = None
    pair_sum: LinkTimes | None = None


def measure_links(
    mesh: Mesh, test: LinkTest, pairs: Sequence[tuple[int, int]], steps_have_exchanges: bool
) -> Links:
    """Links of the mesh; for messages the pair of median speed among ``pairs``, on every rank.

    ``steps_have_exchanges``: the measured steps already contain the processor time that a rank's
    own thread spends on exchanges.
    """
    # With spare cores, other threads do not slow the ranks down.
    is_crowded = crowding(torch.get_num_threads(), mesh.gather) >= 1

    def busy(loads: Sequence[CpuLoad], messages: int, counts_own: bool) -> Affine:
        if mesh.device.type != "cpu":
            return Affine()  # The CPU's load does not slow down a GPU.
        times_s = [load.own_s * counts_own + load.other_s * is_crowded for load in loads]
        link = fit_link(LOAD_SIZES, times_s, messages)
        return Affine(link.latency_s, 1 / link.bandwidth_bytes_per_s)

    sizes = test.sizes_bytes
    message = exchange = shard_sum = None
    by_pair = zip(_message_times(mesh, test, pairs), pairs, strict=True)
    if by_speed := sorted(by_pair, key=lambda found: found[0][-1]):
        times, pair = by_speed[len(by_speed) // 2]
        loads = message_load(mesh, pair, test.repeats)
        message = replace(fit_link(sizes, times), busy=busy(loads, 1, True))
    # Of stages with different numbers of shards, those with the most are measured.
    most = max(map(len, mesh.placement.stages))
    if most > 1:
        link, shard_sum = _shard_links(mesh, test)
        loads = exchange_load(mesh, test.repeats)
        # Little is computed during gradient sums, so their processor time is not counted.
        exchange = replace(link, busy=busy(loads, most - 1, not steps_have_exchanges))
    return Links(message, exchange, shard_sum)


def measure_all_links(mesh: Mesh, test: LinkTest) -> Links:
    """Links for plans of any shape; ``mesh`` has one stage whose shards are all ranks.

    Exchanges and sums are also measured between two shards, on the pairs of ranks 0 and 1, 2 and 3,
    and so on at once: over a network, a larger group reaches a smaller part of a link's bandwidth.
    """
    found = measure_links(mesh, test, list(pairwise(range(mesh.world_size))), False)
    if mesh.world_size <= 2:
        return found
    ranks = range(mesh.world_size)
    placement = Placement(tuple(tuple(ranks[first : first + 2]) for first in ranks[::2]))
    pairs = Mesh.of(mesh, placement, mesh.collectives)
    exchange, shard_sum = _shard_links(pairs, test)
    pairs.close_groups()  # after an error messages may be under way, and closing would wait
    return replace(found, pair_exchange=exchange, pair_sum=shard_sum)


def _shard_links(mesh: Mesh, test: LinkTest) -> tuple[LinkTimes, LinkTimes]:
    """Links of an exchange and of a sum among the shards of the largest stages."""
    most = max(map(len, mesh.placement.stages))

    def exchange_rows(size_bytes: int) -> None:
        _start_exchange(size_bytes, mesh).wait()

    def sum_gradients(size_bytes: int) -> None:
        sum_over_shards(torch.zeros(size_bytes // 4, device=mesh.device), mesh)

    use = mesh.collectives.rows.link_use(most, 1)
    exchange = fit_link(test.sizes_bytes, _slowest(mesh, test, exchange_rows), use.messages)
    uses = [mesh.collectives.sum.link_use(most, size) for size in test.sizes_bytes]
    times = _slowest(mesh, test, sum_gradients)
    return exchange, fit_link([use.sent_bytes for use in uses], times, uses[0].messages)


def message_links(mesh: Mesh, test: LinkTest, pairs: Sequence[tuple[int, int]]) -> list[LinkTimes]:
    """Link of every pair of ranks, one pair after another; on every rank."""
    return [fit_link(test.sizes_bytes, times) for times in _message_times(mesh, test, pairs)]


def _message_times(
    mesh: Mesh, test: LinkTest, pairs: Sequence[tuple[int, int]]
) -> list[list[float]]:
    """Seconds of a message (half of a round trip) by pair and size, on every rank.

    One pair at a time.
    """
    found = []
    for pair in pairs:
        messages = _ByteMessages(mesh, max(test.sizes_bytes))
        work = partial(_round_trip, messages, mesh.rank == pair[0], sum(pair) - mesh.rank)
        times = _times_by_size(mesh, test, work, mesh.rank in pair)
        round_trips: list[float] = mesh.gather(times)[pair[0]]
        found.append([time_s / 2 for time_s in round_trips])
    return found


def _round_trip(messages: _ByteMessages, first: bool, other: int, size_bytes: int) -> None:
    messages.post(other, size_bytes)
    if first:
        messages.send(other, size_bytes)
    messages.take(other)
    if not first:
        messages.send(other, size_bytes)
    messages.drain()


class _ByteMessages:
    """Messages of plain bytes, sent as training sends its values."""

    def __init__(self, mesh: Mesh, most_bytes: int) -> None:
        self._value = torch.zeros(most_bytes, 1, dtype=torch.uint8, device=mesh.device)
        self._messages = PointToPoint(mesh, torch.uint8, torch.uint8)
        self.drain = self._messages.drain

    def post(self, rank: int, size_bytes: int) -> None:
        size = ValueSize(size_bytes, 1, [(rank, slice(0, size_bytes))])
        self._messages.post(Direction.FORWARD, rank, 0, {"x": size})

    def send(self, rank: int, size_bytes: int) -> None:
        pieces = [(rank, slice(0, size_bytes))]
        self._messages.send(Direction.FORWARD, 0, {"x": self._value}, {"x": pieces})

    def take(self, rank: int) -> None:
        self._messages.take(Direction.FORWARD, rank, 0)


def _start_exchange(size_bytes: int, mesh: Mesh) -> CollectiveWork:
    """Start a row exchange in which each shard sends ``size_bytes`` in equal parts."""
    counts = [max(size_bytes // (mesh.shards - 1), 1)] * mesh.shards
    counts[mesh.shard] = 0
    data = torch.zeros(sum(counts), 1, dtype=torch.uint8, device=mesh.device)
    rows = mesh.collectives.rows
    return rows.start(MeshShards(mesh), torch.empty_like(data), data, counts, counts, len(data))


def _slowest(mesh: Mesh, test: LinkTest, work: Callable[[int], None]) -> list[float]:
    """Seconds of the slowest rank by size."""
    by_rank = mesh.gather(_times_by_size(mesh, test, work, _has_most_shards(mesh)))
    return [max(times) for times in zip(*by_rank, strict=True)]


def _times_by_size(
    mesh: Mesh, test: LinkTest, work: Callable[[int], None], takes_part: bool
) -> list[float]:
    """Seconds of ``work`` by size on this rank; all ranks start together."""
    found = []
    for size_bytes in test.sizes_bytes:
        mesh.gather(None)
        times = []
        for _ in range(test.warm_up + test.repeats if takes_part else 0):
            start_s = mesh.recorder.clock()
            work(size_bytes)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            times.append(mesh.recorder.clock() - start_s)
        # The second quickest: other programs can only slow it down.
        found.append(sorted(times[test.warm_up :] or [0.0, 0.0])[1])
    return found


LOAD_SIZES = (1 << 10, 1 << 19)
"""Bytes of a transfer whose processor time is measured."""

TABLE_NUMBERS, PASSES = 1 << 21, 8
"""Numbers of the table that is worked on (8 MiB), and passes over it with a transfer each."""


@dataclass(frozen=True)
class CpuLoad:
    """Processor seconds that one transfer takes at one end."""

    own_s: float
    """Time of the thread that computes."""
    other_s: float
    """Time of the rank's other threads."""


@dataclass(frozen=True)
class _SentAndReceived:
    """A message each way between this rank and ``other``."""

    messages: PointToPoint
    other: int
    position: int

    def wait(self) -> None:
        self.messages.take(Direction.FORWARD, self.other, self.position)
        self.messages.drain()


Start = Callable[[int], Sequence[Waitable]]
"""Starts one transfer of so many bytes each way."""


def message_load(mesh: Mesh, pair: tuple[int, int], repeats: int) -> list[CpuLoad]:
    """Load of a message between two ranks by size; on every rank.

    Each of the two sends one and receives one while it computes; a message is half of that.
    """
    messages = PointToPoint(mesh, torch.float32, torch.float32)
    other = sum(pair) - mesh.rank
    values = {size: torch.zeros(size // 256, 64, device=mesh.device) for size in LOAD_SIZES}
    positions = count()

    def start(size_bytes: int) -> Sequence[Waitable]:
        value, position, way = values[size_bytes], next(positions), Direction.FORWARD
        pieces = [(other, slice(0, len(value)))]
        messages.post(way, other, position, {"x": ValueSize(len(value), value.shape[1], pieces)})
        messages.send(way, position, {"x": value}, {"x": pieces})
        return (_SentAndReceived(messages, other, position),)

    by_rank = mesh.gather(_loads_by_size(mesh, start, repeats, mesh.rank in pair))
    ends = zip(*(by_rank[rank] for rank in pair), strict=True)
    return [
        CpuLoad(sum(e.own_s for e in both) / 4, sum(e.other_s for e in both) / 4) for both in ends
    ]


def exchange_load(mesh: Mesh, repeats: int) -> list[CpuLoad]:
    """Load of an all-to-all among the shards by bytes that a shard sends; a mean over ranks."""

    def start(size_bytes: int) -> Sequence[Waitable]:
        return (_start_exchange(size_bytes, mesh),)

    takes_part = _has_most_shards(mesh)
    # Every rank calls, because the repeats start together on all ranks.
    found = mesh.gather((takes_part, _loads_by_size(mesh, start, repeats, takes_part)))
    by_rank = [loads for is_measured, loads in found if is_measured]
    return [
        CpuLoad(statistics.fmean(e.own_s for e in ends), statistics.fmean(e.other_s for e in ends))
        for ends in zip(*by_rank, strict=True)
    ]


def _has_most_shards(mesh: Mesh) -> bool:
    """Whether no stage has more shards than the stage of this rank."""
    return mesh.shards == max(map(len, mesh.placement.stages))


def _loads_by_size(mesh: Mesh, start: Start, repeats: int, takes_part: bool) -> list[CpuLoad]:
    found = []
    table = torch.ones(TABLE_NUMBERS if takes_part else 0, device=mesh.device)
    for size_bytes in LOAD_SIZES:
        mesh.gather(None)
        own: list[float] = []
        other: list[float] = []
        for _ in range(repeats + 1 if takes_part else 0):
            alone = _pass_times(table, None, size_bytes)
            loaded = _pass_times(table, start, size_bytes)
            own.append((loaded.own_s - alone.own_s) / PASSES)
            other.append((loaded.other_s - alone.other_s) / PASSES)
        # Memory pages are first touched in the first repeat.
        found.append(CpuLoad(_median_s(own[1:]), _median_s(other[1:])))
    return found


def _median_s(times: Sequence[float]) -> float:
    """The median, at least 0; 0 of no times."""
    return max(statistics.median(times), 0.0) if times else 0.0


def _pass_times(table: torch.Tensor, start: Start | None, size_bytes: int) -> CpuLoad:
    """Processor times of all passes over the table."""
    own_s, all_s = time.thread_time(), time.process_time()
    under_way: list[Waitable] = []
    for _ in range(PASSES):
        if start is not None:
            under_way += start(size_bytes)
        table.mul_(1.0)
    for transfer in under_way:
        transfer.wait()
    own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
    return CpuLoad(own_s, max(all_s - own_s, 0.0))

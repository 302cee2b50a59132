"""What if: the same program with other costs.

How an epoch answers to a large change cannot be read off its critical path, for another path takes
over; so it is simulated again. More chunks, stages or shards are another program, with chunks of
other sizes, and no matter of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from gnnpipe.perf.costs import Costs
from gnnpipe.perf.critical import critical_shares, place_of
from gnnpipe.perf.profile import LinkTimes, Profile
from gnnpipe.perf.profiled_costs import sync_time_s
from gnnpipe.perf.simulate import Timeline, simulate
from gnnpipe.perf.tasks import Task, Tasks
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.plan.cluster import Cluster, Link
from gnnpipe.schedule import Program

__all__ = ["LESS", "ChangedCosts", "ClusterCosts", "sensitivity", "what_ifs", "with_links"]


def with_links(profile: Profile, cluster: Cluster, shards: int) -> Profile:
    """The profile with the cluster's link, which it need not have measured."""
    link = LinkTimes(cluster.link.latency_s, cluster.link.bandwidth_bytes_per_s, 0.0)
    # Of a sum each shard sends 2 (G - 1) / G times its bytes.
    sent = max(2 * (shards - 1) / shards, 1e-9)
    summed = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / sent)
    return replace(profile, message=link, exchange=link, gradient_sum=summed)


LESS = 0.1


def sensitivity(
    timeline: Timeline, name: Callable[[Task], str] = place_of, most: int = 6
) -> dict[str, float]:
    """Change of the epoch, relative to it and so below 0, by what takes ``LESS`` less time.

    Of the ``most`` largest on the critical path; all that is not on it has none.
    """
    tasks = timeline.tasks
    places = [name(what) for what in tasks.what]
    found = {}
    for place in list(critical_shares(timeline, name))[:most]:
        times = [
            time_s * (1 - LESS) if at == place else time_s
            for at, time_s in zip(places, tasks.duration_s, strict=True)
        ]
        shorter = simulate(replace(tasks, duration_s=times)).makespan_s
        found[place] = shorter / timeline.makespan_s - 1
    return found


class ChangedCosts:
    """``Costs`` of other devices and links than those of ``costs``."""

    def __init__(
        self,
        costs: Costs,
        shards: int,
        *,
        shard_bandwidth: float = 1.0,
        speed: Mapping[int, float] | None = None,
    ) -> None:
        """Factors: on the bandwidth among shards (latencies stay), and on the speed of ranks."""
        self._costs, self._shards = costs, shards
        self._among = shard_bandwidth
        self._speed = speed or {}

    def _slower(self, stage: int, shard: int) -> float:
        return 1.0 / self._speed.get(stage * self._shards + shard, 1.0)

    def begin_s(self, stage: int, shard: int) -> float:
        """At the rank's speed."""
        return self._costs.begin_s(stage, shard) * self._slower(stage, shard)

    def step_s(self, way: str, stage: int, shard: int, chunk: int, step: int) -> float:
        """At the rank's speed."""
        return self._costs.step_s(way, stage, shard, chunk, step) * self._slower(stage, shard)

    def finish_s(self, stage: int, shard: int) -> float:
        """At the rank's speed."""
        return self._costs.finish_s(stage, shard) * self._slower(stage, shard)

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """At the rank's speed."""
        return self._costs.pull_s(stage, shard, chunk, step) * self._slower(stage, shard)

    def pilot_s(self, kind: str, stage: int, shard: int) -> float:
        """At the rank's speed."""
        return self._costs.pilot_s(kind, stage, shard) * self._slower(stage, shard)

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """Unchanged."""
        return self._costs.fit_bytes(stage)

    def update_s(self, stage: int, shard: int) -> float:
        """At the rank's speed."""
        return self._costs.update_s(stage, shard) * self._slower(stage, shard)

    def message_bytes(self, way: str, source: int, target: int, shard: int, chunk: int) -> int:
        """Unchanged."""
        return self._costs.message_bytes(way, source, target, shard, chunk)

    def has_exchange(self, stage: int, step: int) -> bool:
        """Unchanged."""
        return self._costs.has_exchange(stage, step)

    def exchange_bytes(self, way: str, stage: int, shard: int, chunk: int, step: int) -> int:
        """Unchanged."""
        return self._costs.exchange_bytes(way, stage, shard, chunk, step)

    def mean_bytes(self, stage: int, step: int) -> Sequence[int]:
        """Unchanged."""
        return self._costs.mean_bytes(stage, step)

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        """Unchanged."""
        return self._costs.gradient_bytes(stage, steps)

    def link_s(self, source: int, target: int, size_bytes: int) -> float:
        """Unchanged."""
        return self._costs.link_s(source, target, size_bytes)

    # With twice the bandwidth an exchange takes as long as one of half the size took.

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """At the changed bandwidth."""
        return self._costs.exchange_s(stage, [round(b / self._among) for b in sizes_bytes])

    def reduce_s(self, stage: int, size_bytes: int) -> float:
        """At the changed bandwidth."""
        return self._costs.reduce_s(stage, round(size_bytes / self._among))

    def sync_s(self) -> float:
        """Unchanged: no bandwidth makes a few numbers travel faster."""
        return self._costs.sync_s()

    def link(self, source: int, target: int) -> str:
        """Unchanged."""
        return self._costs.link(source, target)

    def group(self, stage: int) -> str:
        """Unchanged."""
        return self._costs.group(stage)


def what_ifs(
    timeline: Timeline, program: Program, costs: Costs, order: Sequence[int] | None = None
) -> dict[str, float]:
    """Seconds of an epoch by what is changed; ``timeline`` is the epoch as it is.

    Twice the bandwidth, between stages and among shards (where there are such); the busiest rank
    half and twice as fast; nothing overlapped.
    """
    shards, ranks = program.shards, len(program.stages) * program.shards
    tasks = timeline.tasks
    busy = timeline.busy_s()[:ranks]
    busiest = busy.index(max(busy))
    found = {}
    # Where the order and the number of tasks stay, only their times are asked for again.
    if len(program.stages) > 1:
        times = [
            costs.link_s(
                what.stage * shards + what.shard,
                what.peer * shards + what.shard,
                round(what.size_bytes / 2),
            )
            if what.kind.startswith("SEND_")
            else time_s
            for what, time_s in zip(tasks.what, tasks.duration_s, strict=True)
        ]
        found["twice the bandwidth between stages"] = _makespan_s(tasks, times)
    if shards > 1:
        changed = ChangedCosts(costs, shards, shard_bandwidth=2)
        doubled = program_tasks(program, changed, order)
        found["twice the bandwidth among shards"] = simulate(doubled).makespan_s
    for factor, words in ((0.5, "half"), (2.0, "twice")):
        times = [
            time_s / factor if on == busiest else time_s
            for on, time_s in zip(tasks.resource, tasks.duration_s, strict=True)
        ]
        found[f"rank {busiest} {words} as fast"] = _makespan_s(tasks, times)
    if ranks > 1:
        blocking = program_tasks(program, costs, order, overlap=False)
        found["nothing overlapped"] = simulate(blocking).makespan_s
    return found


def _makespan_s(tasks: Tasks, times_s: list[float]) -> float:
    return simulate(replace(tasks, duration_s=times_s)).makespan_s


class ClusterCosts(ChangedCosts):
    """``costs``, of a profile ``with_links``, at each device's speed and by each pair's link."""

    def __init__(self, costs: Costs, shards: int, ranks: int, cluster: Cluster) -> None:
        """Ranks run on the first of the cluster's devices, in their order."""
        speed = {rank: device.speed for rank, device in enumerate(cluster.devices[:ranks])}
        super().__init__(costs, shards, speed=speed)
        self._cluster, self._num_shards, self._ranks = cluster, shards, ranks
        self._latency_s = max(
            [cluster.link.latency_s, *(p.latency_s for p in cluster.pairs.values())]
        )

    def link_s(self, source: int, target: int, size_bytes: int) -> float:
        """By the link of the two."""
        return _time_s(self._cluster.between(source, target), size_bytes)

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """As slow as the slowest pair, if it moved its share of what the busiest shard sends."""
        peers = self._num_shards - 1
        return peers * self._slowest_s(stage, max(sizes_bytes) / peers)

    def reduce_s(self, stage: int, size_bytes: int) -> float:
        """Two exchanges of a part each."""
        return 2 * (self._num_shards - 1) * self._slowest_s(stage, size_bytes / self._num_shards)

    def sync_s(self) -> float:
        """By the latency of the slowest link."""
        return sync_time_s(self._ranks, self._latency_s)

    def _slowest_s(self, stage: int, size_bytes: float) -> float:
        first = stage * self._num_shards
        own = self._cluster.pairs
        if not own:
            return _time_s(self._cluster.link, size_bytes)
        ranks = range(first, first + self._num_shards)
        return max(
            _time_s(self._cluster.between(*pair), size_bytes) for pair in combinations(ranks, 2)
        )


def _time_s(link: Link, size_bytes: float) -> float:
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s

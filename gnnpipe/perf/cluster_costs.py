"""What a plan costs on the devices and links of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from gnnpipe.perf.costs import Costs
from gnnpipe.perf.profile import LinkTimes, Profile
from gnnpipe.perf.profiled_costs import meeting_time_s
from gnnpipe.perf.what_if import ChangedCosts
from gnnpipe.plan.cluster import Cluster, Link

__all__ = ["ClusterCosts", "with_links"]


def with_links(profile: Profile, cluster: Cluster, shards: int) -> Profile:
    """The profile with the cluster's link, which it need not have measured."""
    link = LinkTimes(cluster.link.latency_s, cluster.link.bandwidth_bytes_per_s, 0.0)
    # Of a sum each shard sends 2 (G - 1) / G times its bytes.
    sent = max(2 * (shards - 1) / shards, 1e-9)
    summed = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / sent)
    return replace(profile, message=link, exchange=link, gradient_sum=summed)


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

    def meeting_s(self) -> float:
        """By the latency of the slowest link."""
        return meeting_time_s(self._ranks, self._latency_s)

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

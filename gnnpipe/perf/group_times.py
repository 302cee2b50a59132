"""Times of the ops of a chunk on the devices of a stage, and of their collectives.

The devices count by their slowest one, the largest share and the slowest link alone (``Group``), so
that the times of alike groups are computed once. Chunks of a shard are taken as equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from gnnpipe.collectives import DEFAULT_COLLECTIVES, ROW_EXCHANGES, SHARD_SUMS
from gnnpipe.perf.op_table import Floats, OpTable, prefix_sums
from gnnpipe.perf.parts import column_work
from gnnpipe.perf.workload import STALE_SHARE
from gnnpipe.plan import StagePlan
from gnnpipe.plan.cluster import Cluster, Link

COLUMNS_GAIN = 0.9
"""Rows travel by columns if the time of an op falls below this part of it: the closed form takes
the exchanges of columns as overlapping as well as those of a halo, which they do not quite."""

SUM_BYTES = 8
"""Bytes of a number in a sum for a mean or a forecast (float64)."""


class Group(NamedTuple):
    """The devices of one stage, as far as the time of the stage depends on these."""

    shards: int
    slowdown: float = 1.0
    """1 / speed of the slowest device."""
    work: float = 1.0
    """Largest quotient of a device's share and its speed."""
    share: float = 1.0
    """Largest share."""
    link: Link | None = None
    """Slowest link between two of the devices; None: the links of the profile."""
    recompute: bool = False
    """The stage keeps only the inputs of its steps until backward."""
    by_columns: frozenset[int] = frozenset()
    """Ops whose rows travel by columns (``RowWay.COLUMNS``), also of other stages."""

    @classmethod
    def even(cls, shards: int, link: Link | None) -> Group:
        """Return G devices of speed 1 with equal shares."""
        return cls(shards, 1.0, 1 / shards, 1 / shards, link)

    @classmethod
    def of(
        cls, stage: StagePlan, cluster: Cluster | None, by_columns: Collection[int] = ()
    ) -> Group:
        """Return the devices of a stage; ranks are devices of the cluster."""
        most, shards, recompute = max(stage.shares), len(stage.ranks), stage.recompute
        moved = frozenset(by_columns if shards > 1 else ())
        if cluster is None:
            return cls(shards, 1.0, most, most, None, recompute, moved)
        speeds = [cluster.devices[rank].speed for rank in stage.ranks]
        work = max(share / speed for share, speed in zip(stage.shares, speeds, strict=True))
        link = slowest_link(cluster, stage.ranks)
        return cls(shards, 1 / min(speeds), work, most, link, recompute, moved)


class GroupTimes:
    """Times of ops and collectives for K chunks."""

    def __init__(self, table: OpTable, chunks: int, is_exact: bool) -> None:
        """``is_exact``: layer by layer, without stale rows."""
        self.table, self.workload = table, table.workload
        self.chunks, self.is_exact = chunks, is_exact
        self._prefixes: dict[Group, Floats] = {}
        self._begins: dict[Group, Floats] = {}
        self._probes: dict[Group, Floats] = {}
        self._ways: dict[Group, frozenset[int]] = {}

    def with_ways(self, group: Group) -> Group:
        """Return the group with rows that travel by columns wherever this is faster."""
        if not self.is_exact or group.shards == 1:
            return group
        if self.workload.halo(group.shards) <= 2 * (1 - group.share):
            return group  # a halo of so few rows sends fewer numbers than columns
        if group not in self._ways:
            can = self.table.movable
            pairs = (group._replace(by_columns=frozenset(ops)) for ops in ((), can))
            halo, columns = (self._op_times(one).sum(0) for one in pairs)
            self._ways[group] = frozenset(i for i in can if columns[i] < COLUMNS_GAIN * halo[i])
        return group._replace(by_columns=self._ways[group])

    def passes(self, group: Group) -> Floats:
        """Return the prefix sums over the ops of a chunk's forward and backward, [2, ops + 1]."""
        if group not in self._prefixes:
            self._prefixes[group] = prefix_sums(self._op_times(group))
        return self._prefixes[group]

    def _op_times(self, group: Group) -> Floats:
        """Return the times of each op's forward and backward for a chunk, [2, ops]."""
        chunks, shards, table = self.chunks, group.shards, self.table
        recompute = group.recompute and not self.workload.profile.recompute
        costs = table.steps(recompute)
        part = group.work / chunks
        forward = costs.forward_base_s * group.slowdown + costs.forward_s * part
        backward = costs.backward_base_s * group.slowdown + costs.backward_s * part
        if shards == 1:
            return np.stack([forward, backward])
        numbers = table.pushed * (self.workload.halo(shards) / chunks)
        copied = table.compute.boundary_per_number_s * numbers * group.work
        sent = numbers * group.share * self.workload.memory.row_bytes
        exchange, busy = self._exchange_times(sent, group)
        for mean in table.is_mean.nonzero()[0]:
            exchange[mean] = self.sum_s(table.widths[mean] * SUM_BYTES, group)
        arrives = np.maximum(exchange - costs.pull_s * part, 0.0)
        again = np.zeros_like(exchange)
        if group.by_columns:
            moved = self._column_times(group)
            for i in group.by_columns:
                exchange[i], again[i], busy[i], copied[i] = (times[i] for times in moved)
                arrives[i] = exchange[i]
                more = (self._column_work(float(table.widths[i]), group) - group.work) / chunks
                forward[i] += more * costs.forward_edges_s[i]
                backward[i] += more * costs.pull_s[i]
        if self.is_exact and chunks > 1:
            # The exchange of a chunk overlaps with the same step of the next chunk.
            later = (chunks - 1) / chunks
            arrives = arrives / chunks + later * np.maximum(exchange - backward, 0.0)
            exchange = exchange / chunks + later * np.maximum(exchange - forward, 0.0)
        waits = copied + busy + again
        return np.stack([forward + exchange + waits, backward + arrives + waits])

    def ports(self, group: Group) -> Floats:
        """Return prefix sums over the ops of a chunk's exchanges in a port, one way, [2, ops + 1].

        Row 0 has the seconds for which they fill the port, row 1 their number. All are 0 where
        ranks have no ports (``ProfiledCosts.port_s``). Rows that travel by columns count as rows of
        a halo.
        """
        pushed, message = self.table.pushed, self.workload.profile.message
        if group.link is not None or message is None or group.shards == 1:
            return prefix_sums(np.zeros((2, len(pushed))))
        rows = group.share * self.workload.halo(group.shards) / self.chunks
        sent = pushed * (rows * self.workload.memory.row_bytes)
        exchange, _ = self._exchange_times(sent, group)
        filled = np.minimum(sent / message.bandwidth_bytes_per_s, exchange)
        return prefix_sums(np.stack([filled, pushed > 0]))

    def _column_work(self, width: float, group: Group) -> float:
        """Return ``Group.work`` of the work on edges by columns, of rows of ``width`` columns.

        The device with the largest share has the most columns; the slowest one reads at least as
        much as for one column.
        """
        own = np.array([group.share * width, 1.0])
        found = column_work(own, int(width), self.workload.memory.row_bytes)
        most, least = float(found[0]), float(found[1])
        return max(most * group.work / group.share, least * group.slowdown)

    def _column_times(self, group: Group) -> tuple[Floats, ...]:
        """Return times of rows that travel by columns, one way, [ops] each.

        These are: the exchange of rows for columns; that of the aggregated columns for rows, which
        is always waited for; the processor time of both; and the copies before and after.
        """
        table = self.table
        # A shard with share s sends s (1 - s) of all numbers.
        part = group.share * (1 - group.share) * self.workload.memory.row_bytes / self.chunks
        there, there_busy = self._exchange_times(table.pushed * part, group)
        back, back_busy = self._exchange_times(table.aggregated * part, group)
        number_s = table.compute.boundary_per_number_s
        copied = 2 * number_s * table.pushed * group.work / self.chunks
        return there, back, there_busy + back_busy, copied

    def _exchange_times(self, sent: Floats, group: Group) -> tuple[Floats, Floats]:
        """Return the time on the link and the processor time of exchanges of so many bytes."""
        use = ROW_EXCHANGES[DEFAULT_COLLECTIVES.row_exchange].link_use(group.shards, 1 << 20)
        latency_s, bytes_per_s = self._speed_of(group.link, "exchange", group.shards)
        has_any = sent > 0
        time_s = use.messages * latency_s + sent * (use.sent_bytes / 2**20) / bytes_per_s
        busy = np.zeros_like(sent)
        link = self.workload.profile.exchange
        if group.link is None and link is not None:
            busy = link.busy.base_s * (group.shards - 1) + link.busy.per_row_s * sent
        return time_s * has_any, busy * has_any

    def sum_s(self, size_bytes: float, group: Group) -> float:
        """Return the time of a sum over the shards."""
        use = SHARD_SUMS[DEFAULT_COLLECTIVES.shard_sum].link_use(group.shards, int(size_bytes))
        latency_s, bytes_per_s = self._speed_of(group.link, "shard_sum", group.shards)
        return use.messages * latency_s + use.sent_bytes / bytes_per_s

    def message_s(self, numbers: float, link: Link | None) -> float:
        """Return the time of a message of so many numbers of rows."""
        latency_s, bytes_per_s = self._speed_of(link, "message")
        return latency_s + numbers * self.workload.memory.row_bytes / bytes_per_s

    def _speed_of(
        self, link: Link | None, name: str, shards: int | None = None
    ) -> tuple[float, float]:
        """Return latency and bandwidth of a link of the cluster, or of the profile's ``name``."""
        if link is not None:
            return link.latency_s, link.bandwidth_bytes_per_s
        found = self.workload.profile.link(name, shards)
        return found.latency_s, found.bandwidth_bytes_per_s

    def begin(self, group: Group) -> Floats:
        """Return prefix sums of the times before the first and after the last action, [ops + 1]."""
        if group not in self._begins:
            costs = self.table.begin(self.chunks > 1)
            times = costs.base_s * group.slowdown + costs.work_s * group.work + costs.finish_s
            self._begins[group] = prefix_sums(times)
        return self._begins[group]

    def probes(self, group: Group) -> Floats:
        """Return prefix sums of the times of a forecast, and of carrying it, [2, ops + 1].

        The forecast is carried to the stale rows.
        """
        if group not in self._probes:
            costs, shards = self.table.probes, group.shards
            halo = self.workload.halo(shards) if shards > 1 else 0.0
            forecast = costs.forecast_base_s * group.slowdown + costs.forecast_s * group.work
            for i in costs.fits.nonzero()[0] if shards > 1 else ():
                forecast[i] += self.sum_s(costs.fits[i] * SUM_BYTES, group)
            stale = STALE_SHARE * (1 + halo) * group.work
            carry = costs.carry_base_s * group.slowdown + costs.carry_s * stale
            self._probes[group] = prefix_sums(np.stack([forecast, carry]))
        return self._probes[group]


def slowest_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """Return the least bandwidth and the largest latency between any two of the ranks."""
    links = [cluster.link]
    if cluster.pairs and len(ranks) > 1:
        here, count = set(ranks), math.comb(len(ranks), 2)
        inside = [link for (a, b), link in cluster.pairs.items() if a in here and b in here]
        links = inside if len(inside) == count else [*inside, cluster.link]
    return Link(
        min(link.bandwidth_bytes_per_s for link in links), max(link.latency_s for link in links)
    )

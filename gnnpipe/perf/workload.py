"""A model, a graph by its sizes, devices and links: all that the cost of a plan depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnpipe.perf.memory import MemorySettings, ShardSizes
from gnnpipe.perf.parts import ChunkSizes, PlanSizes
from gnnpipe.perf.profile import LINK_NAMES, LinkTimes, Profile, op_kind
from gnnpipe.plan import LossRows, ModelGraph, Plan, StageDag
from gnnpipe.plan.cluster import Cluster, Link

STALE_SHARE = 0.5
"""Share of the rows that are read stale (assumed)."""


def num_probes(
    model: ModelGraph, num_vertices: Mapping[str, int], of_each_type: int
) -> dict[str, int]:
    """Return the number of probe vertices by vertex type; at most all vertices of the type."""
    if not any(op.is_forecast for op in model.aggregations):
        return dict.fromkeys(num_vertices, 0)
    return {name: min(of_each_type, count) for name, count in num_vertices.items()}


@dataclass(frozen=True)
class Workload:
    """A model, a graph by its sizes, and the devices and links: everything but the plan."""

    model: ModelGraph
    profile: Profile
    cluster: Cluster | None
    """Devices and links; None: equal devices and the links of the profile."""
    num_vertices: Mapping[str, int]
    num_edges: Mapping[str, int]
    feature_entries: Mapping[str, int]
    loss_rows: LossRows
    loss_numbers: int
    """Numbers that the loss keeps until backward."""
    halo: Callable[[int], float]
    """Rows of other shards that are read, for each own row (M / N), by the number of shards G."""
    probes: int
    """Probe vertices of a forecast; 0: no forecast."""
    memory: MemorySettings
    """The settings of an exact program; ``is_exact`` is replaced for others."""
    ranks_at_once: int = 1
    """Ranks that compute at once on one machine, as in the profile."""

    @property
    def comm_dtype(self) -> str:
        """The number type of the rows as in ``--comm-dtype``."""
        return "bf16" if self.memory.rounds_rows else "same"

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Ops before which a stage may begin."""
        return self.model.cuts

    @cached_property
    def crossing(self) -> list[int]:
        """Width of the values that cross the place before each op."""
        return self.model.crossing()

    @cached_property
    def table_rows(self) -> dict[str, int]:
        """Rows of the history tables, by type; the pairs of a link prediction read all vertices."""
        total = sum(self.num_vertices.values())
        return {t: self.num_vertices.get(t, total) for t in self.num_edges}

    @cached_property
    def kinds(self) -> list[str]:
        """Kind of each op."""
        return [op_kind(op) for op in self.model.ops]

    def with_links(self, factor: float) -> Workload:
        """Return the same work with links of ``factor`` times the bandwidth."""

        def faster(link: Link) -> Link:
            return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)

        def timed(link: LinkTimes | None) -> LinkTimes | None:
            bytes_per_s = 0.0 if link is None else link.bandwidth_bytes_per_s * factor
            return link and replace(link, bandwidth_bytes_per_s=bytes_per_s)

        own = self.profile
        links: dict[str, Any] = {name: timed(getattr(own, name)) for name in LINK_NAMES}
        profile = replace(own, **links)
        cluster = self.cluster and Cluster(
            self.cluster.devices,
            faster(self.cluster.link),
            {ends: faster(link) for ends, link in self.cluster.pairs.items()},
        )
        return replace(self, profile=profile, cluster=cluster)

    def with_devices(self, devices: Sequence[int]) -> Workload:
        """Return the same work on these devices of the cluster, as ranks in this order."""
        most = max(times.ranks for times in self.profile.compute)
        own, ranks = self, min(len(devices), most)
        if ranks != self.ranks_at_once:
            own = replace(self, ranks_at_once=ranks)
        if self.cluster is None or list(devices) == list(range(len(self.cluster.devices))):
            return own
        place = {device: rank for rank, device in enumerate(devices)}
        pairs = {
            (min(place[a], place[b]), max(place[a], place[b])): link
            for (a, b), link in self.cluster.pairs.items()
            if a in place and b in place
        }
        chosen = tuple(self.cluster.devices[device] for device in devices)
        return replace(own, cluster=Cluster(chosen, self.cluster.link, pairs))

    def plan_sizes(self, plan: Plan, is_exact: bool) -> PlanSizes:
        """Return equal chunks; shards as large as their shares."""
        every = {stage.shares for stage in plan.stages} | {plan.split.shares}
        by_shares = {shares: self._chunk_sizes(plan, shares, is_exact) for shares in every}
        parts = by_shares[plan.split.shares]
        stages = tuple(by_shares[stage.shares] for stage in plan.stages)
        return PlanSizes(stages, plan.split, parts.rows, parts.probes)

    def _chunk_sizes(self, plan: Plan, shares: tuple[float, ...], is_exact: bool) -> ChunkSizes:
        parts = np.array(shares)[:, None].repeat(plan.chunks, 1) / plan.chunks
        halo = self.halo(len(shares)) if len(shares) > 1 else 0.0
        probes = self.probes * (not is_exact)

        def divided(counts: Mapping[str, float]) -> dict[str, npt.NDArray[np.int64]]:
            return {t: np.round(count * parts).astype(np.int64) for t, count in counts.items()}

        by_shard = {t: n * parts.sum(1) for t, n in self.table_rows.items()}
        stale = STALE_SHARE * (1 + halo) * (not is_exact)
        crossing = divided({t: n * halo for t, n in self.table_rows.items()})
        loss = self.loss_rows
        limited = divided({"rows": loss.rows, "edges": loss.edges})
        return ChunkSizes(
            rows=divided(self.table_rows),
            edges=divided(self.num_edges),
            entries=divided(dict.fromkeys(self.table_rows, 0) | dict(self.feature_entries)),
            boundary=crossing,
            halo=crossing,
            stale={t: np.round(rows * stale).astype(np.int64) for t, rows in by_shard.items()},
            probes={t: np.round(probes * parts.sum(1)).astype(np.int64) for t in by_shard},
            loss_rows=loss.ops,
            loss_row_counts=limited["rows"],
            loss_row_edges=limited["edges"],
            loss_row_source_edges=limited["edges"],
        )

    def shard_sizes(self, share: float, shards: int, is_exact: bool) -> ShardSizes:
        """Return the sizes of a shard, for the estimate of its memory."""
        halo = self.halo(shards) if shards > 1 else 0.0
        pairs = sum(n for t, n in self.num_edges.items() if t not in self.num_vertices)
        edges, vertices = sum(self.num_edges.values()) - pairs, sum(self.num_vertices.values())
        entries, probes = sum(self.feature_entries.values()), self.probes * (not is_exact)
        loss = self.loss_rows
        return ShardSizes(
            own_rows={t: math.ceil(n * share) for t, n in self.table_rows.items()},
            halo_rows={t: math.ceil(n * share * halo) for t, n in self.table_rows.items()},
            own_edges=math.ceil(edges * share),
            graph_edges=edges,
            feature_entries=math.ceil(entries * share),
            loss_rows=replace(
                loss, rows=math.ceil(loss.rows * share), edges=math.ceil(loss.edges * share)
            ),
            loss_numbers=math.ceil(self.loss_numbers * share),
            own_pairs=math.ceil(pairs * share),
            # The edges between chunks are not known: the largest possible share.
            live_share=float(not is_exact),
            copied_share=self.halo(max(shards, 2)),
            probe_rows=dict.fromkeys(self.table_rows, math.ceil(probes * share)),
            probe_edges=math.ceil(probes * share * edges / vertices),
            probe_feature_entries=math.ceil(probes * share * entries / vertices),
            graph_rows=self.table_rows,
            graph_loss_rows=loss,
            columns_share=share,
        )


def alike_shards(dag: StageDag, cluster: Cluster | None) -> list[int] | None:
    """Return one shard of each class of shards with equal shares, devices and links.

    Two shards are alike if these are equal in every stage. ``program_tasks`` needs only one of
    them, if their sizes are equal as in ``Workload.plan_sizes``. None: the stages have different
    shards, which are not compared.
    """
    stages = dag.plan.stages
    if not dag.plan.split.has_equal_stages:
        return None
    found: dict[tuple[object, ...], int] = {}
    for shard in range(len(stages[0].ranks)):
        key: list[object] = [stage.shares[shard] for stage in stages]
        if cluster is not None:
            key += [cluster.devices[stage.ranks[shard]].speed for stage in stages]
            if cluster.pairs:
                ends = ((stages[t.source], stages[t.target]) for t in dag.transfers)
                key += [cluster.between(a.ranks[shard], b.ranks[shard]) for a, b in ends]
        found.setdefault(tuple(key), shard)
    return list(found.values())

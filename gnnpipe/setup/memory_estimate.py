"""The memory estimate of the ranks of a prepared run: its shards counted, then by formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import shard_layout, table_layouts
from gnnpipe.graph.operators import EVERYONE
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.quality import copied_rows, crossing_degrees
from gnnpipe.perf import MemoryEstimate, estimate_memory
from gnnpipe.plan import LossRows
from gnnpipe.setup.loss_rows import loss_rows_of_shard
from gnnpipe.setup.prepare import Prepared
from gnnpipe.tasks.loss import kept_by_loss

__all__ = ["memory_by_rank", "memory_of_rank"]

Counts = npt.NDArray[np.int64]


def memory_by_rank(prepared: Prepared) -> list[MemoryEstimate]:
    """The estimate of every rank, in rank order."""
    plan = prepared.plan
    # A shard is counted once, not for every stage.
    crossing = _crossing(prepared)
    held = [_Held.of(prepared, shard, crossing) for shard in range(plan.shards)]
    return [
        _memory(prepared, stage, held[shard])
        for stage in range(plan.num_stages)
        for shard in range(plan.shards)
    ]


def memory_of_rank(prepared: Prepared, stage: int, shard: int) -> MemoryEstimate:
    """The estimate of one rank."""
    return _memory(prepared, stage, _Held.of(prepared, shard, _crossing(prepared)))


@dataclass(frozen=True)
class _Held:
    """What the ranks of a shard hold, whatever their stage."""

    own_rows: dict[str, int]
    halo_rows: dict[str, int]
    own_pairs: int
    own_edges: int
    live_share: float
    feature_entries: int
    pilot_rows: dict[str, int]
    pilot_edges: int
    pilot_feature_entries: int
    loss_numbers: int
    loss_rows: LossRows

    @classmethod
    def of(cls, prepared: Prepared, shard: int, crossing: Counts | None) -> _Held:
        graph = prepared.graph
        layout = shard_layout(graph, prepared.chunking, shard)
        layouts = table_layouts(graph, prepared.chunking, layout)
        probes = np.intersect1d(layout.own, prepared.probes)
        return cls(
            own_rows={t: of.num_own for t, of in layouts.items()},
            halo_rows={t: len(of.halo) for t, of in layouts.items()},
            own_pairs=int(graph.pairs.degrees[layout.own].sum()) if graph.pairs else 0,
            own_edges=int(graph.degrees[layout.own].sum()),
            live_share=_live_share(graph, layout.own, crossing),
            feature_entries=_feature_entries(graph, layout.own),
            pilot_rows={t: int(np.isin(of.own, probes).sum()) for t, of in layouts.items()},
            pilot_edges=int(graph.degrees[probes].sum()),
            pilot_feature_entries=_feature_entries(graph, probes),
            loss_numbers=int(graph.train_mask[layout.own].sum()) * kept_by_loss(graph),
            loss_rows=loss_rows_of_shard(
                graph, prepared.loss_row_mask, prepared.loss_rows, layout.own
            ),
        )


def _memory(prepared: Prepared, stage: int, held: _Held) -> MemoryEstimate:
    graph, config = prepared.graph, prepared.config
    sparse = isinstance(graph.x, sp.csr_array)
    if graph.types is not None:
        sparse = any(isinstance(x, sp.csr_array) for x in graph.types.features.values())
    linear = all(op.is_linear or op.is_mean for op in prepared.model_graph.aggregations)
    return estimate_memory(
        prepared.plan,
        prepared.model_graph,
        stage,
        **vars(held),
        is_exact=prepared.program.is_exact,
        sparse_features=sparse,
        symmetric=_symmetric(prepared),
        snapshot=config.staleness_settings.snapshot_every > 1,
        extra_weights=(len(prepared.probes) > 0) + (config.kept_epoch == "best"),
        number_bytes=prepared.dtype.itemsize,
        row_bytes=prepared.row_dtype.itemsize,
        recompute=config.recompute,
        copied_share=(
            0.0 if linear else copied_rows(graph, prepared.chunking) / graph.num_vertices
        ),
    )


def _crossing(prepared: Prepared) -> Counts | None:
    """Edges into every vertex [N] from another chunk; none where chunks read nothing stale."""
    if prepared.program.is_exact:
        return None
    return crossing_degrees(prepared.graph, prepared.chunking)


def _live_share(graph: Graph, rows: Counts, crossing: Counts | None) -> float:
    """Of the edges into some rows and their loops."""
    if crossing is None:
        return 0.0
    entries = len(rows) + int(graph.degrees[rows].sum())
    # Of two chunks that read each other one stands in front.
    return 1.0 - float(crossing[rows].sum()) / 2 / max(entries, 1)


def _feature_entries(graph: Graph, rows: npt.NDArray[np.int64]) -> int:
    """Stored numbers of the features of some rows."""
    total = 0
    for name, is_of in graph.row_types.items():
        if graph.types is not None and name not in graph.types.features:
            continue
        x = graph.features(name)
        number = np.cumsum(is_of) - 1
        chosen = number[rows[is_of[rows]]]
        if isinstance(x, sp.csr_array):
            total += int(np.diff(x.indptr)[chosen].sum())
        else:
            total += len(chosen) * x.shape[1]
    return total


def _symmetric(prepared: Prepared) -> bool:
    """Whether A equals its transpose everywhere, so that one copy serves both."""
    whole = prepared.model.stage_module(0, prepared.plan.num_ops)
    kinds = {a.structure for a in whole.aggregations} - {PAIRS}
    return kinds <= {"gcn", "gcn-improved", "gcn-loopless", "sum", "edges", "loops", EVERYONE} and (
        prepared.graph.is_symmetric
    )

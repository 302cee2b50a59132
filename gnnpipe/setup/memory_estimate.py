"""Estimates the memory of a prepared run's ranks, and refuses a run that cannot fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.layout import shard_layout, table_layouts
from gnnpipe.graph.operators import EVERYONE, SUM, SYMMETRIC_KINDS
from gnnpipe.graph.order import resolve_order
from gnnpipe.graph.partition import METIS_BASED
from gnnpipe.graph.quality import copied_rows, crossing_degrees
from gnnpipe.machine import memory_bytes
from gnnpipe.ops.hashed_dropout import GROUP_BYTES
from gnnpipe.optim.weight_policies import WEIGHT_POLICIES
from gnnpipe.output import human_bytes
from gnnpipe.perf import MemoryEstimate, MemorySettings, ShardSizes, estimate_memory
from gnnpipe.runtime.comm.launch import launched_local_rank
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.by_chunk import partitioner_of
from gnnpipe.setup.chunk_sizes import feature_entries
from gnnpipe.setup.inputs import number_dtype, reason_not_recorded, row_dtype
from gnnpipe.setup.loss_rows import loss_rows_of_shard
from gnnpipe.setup.prepared import Prepared
from gnnpipe.setup.recompute_every import fastest_that_fits, recomputing, settle_recompute_every
from gnnpipe.tasks.loss import kept_by_loss

_METIS_ENTRY_BYTES = 110
"""Memory of METIS per adjacency entry, with the copies of its input (measured: 105 to 110)."""

Counts = npt.NDArray[np.int64]


def memory_by_rank(prepared: Prepared) -> list[MemoryEstimate]:
    """Returns the estimate of every rank, in rank order."""
    plan = prepared.plan
    crossing = _crossing(prepared)
    # Counted once per shard, not once per rank.
    sizes: dict[tuple[tuple[int, ...], int], ShardSizes] = {}
    settings = _settings_of(prepared)
    found = []
    for stage, shard in plan.placement:
        key = plan.split.bounds[stage], shard
        if key not in sizes:
            sizes[key] = _shard_sizes(prepared, stage, shard, crossing)
        found.append(
            estimate_memory(prepared.dag, prepared.model_graph, stage, sizes[key], settings)
        )
    return found


def memory_of_rank(prepared: Prepared, stage: int, shard: int) -> MemoryEstimate:
    """Returns the estimate of one rank."""
    sizes = _shard_sizes(prepared, stage, shard, _crossing(prepared))
    return estimate_memory(prepared.dag, prepared.model_graph, stage, sizes, _settings_of(prepared))


def least_memory_bytes(prepared: Prepared, stage: int, shard: int) -> int:
    """Returns a lower bound for a rank: its share of all rows and edges, without halo rows."""
    graph, loss_rows = prepared.graph, prepared.loss_rows
    share = prepared.plan.stages[stage].shares[shard]

    def part(count: int) -> int:
        # Equal shares may be a little less than a whole number of rows.
        return int(count * share + 1e-6)

    entries = sum(int(feature_entries(graph, t).sum()) for t in graph.row_types)
    sizes = ShardSizes(
        own_rows={t: part(int(rows.sum())) for t, rows in graph.table_rows.items()},
        halo_rows=dict.fromkeys(graph.table_rows, 0),
        own_edges=part(graph.num_edges),
        graph_edges=graph.num_edges,
        own_pairs=part(graph.pairs.num_pairs) if graph.pairs else 0,
        feature_entries=part(entries),
        loss_numbers=part(int(graph.train_mask.sum())) * _kept_by_loss(prepared),
        loss_rows=replace(loss_rows, rows=part(loss_rows.rows), edges=part(loss_rows.edges)),
        **_whole_sizes(prepared),
        columns_share=share,
    )
    settings = replace(_settings_of(prepared), symmetric=True, extra_weights=0)
    return estimate_memory(prepared.dag, prepared.model_graph, stage, sizes, settings).total


def check_memory(prepared: Prepared, mesh: Mesh) -> None:
    """Raise ``InputError`` on every rank if the ranks of a machine need more than its memory.

    Linux grants more memory than the machine has, and kills the process once the memory is used,
    without a message about the setting that was too large. A refused run could not have finished:
    a lower bound of its memory exceeds all the memory of the machine.
    """
    error = None
    if mesh.device.type == "cuda":
        here = [mesh.rank]
        capacity_bytes = torch.cuda.get_device_properties(mesh.device).total_memory
    else:
        first = mesh.rank - launched_local_rank() if mesh.world_size > 1 else 0
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here = list(range(max(0, first), min(first + count, mesh.world_size)))
        capacity_bytes = memory_bytes()
    # To measure a model, every rank of the mesh runs the same plan of one rank.
    placement = prepared.plan.placement
    places = [placement.place(rank % placement.num_ranks) for rank in here]
    needed_bytes = sum(least_memory_bytes(prepared, *place) for place in places)
    if needed_bytes > capacity_bytes:
        ranks = (
            f"rank {mesh.rank} takes" if len(here) == 1 else f"its {len(here)} ranks together take"
        )
        where = "GPU" if mesh.device.type == "cuda" else "machine"
        error = InputError(
            f"model {prepared.model.size_text}: {ranks} at least {human_bytes(needed_bytes)}, and "
            f"this {where} has {human_bytes(capacity_bytes)}; "
            f"try {_recomputation_that_fits(prepared, places, capacity_bytes)}a smaller --hidden, "
            "or more --stages or --shards on more machines"
        )
    mesh.agree(error)


def _recomputation_that_fits(
    prepared: Prepared, places: Sequence[tuple[int, int]], capacity_bytes: int
) -> str:
    """Returns the flags, with a comma, that may make a run fit; '' if recomputation cannot."""
    if reason_not_recorded(prepared.model):
        return ""

    def bytes_with(every: int) -> int:
        other = replace(prepared, config=recomputing(prepared.config, every))
        return sum(least_memory_bytes(other, *place) for place in places)

    every, size_bytes = fastest_that_fits(
        prepared.model_graph, prepared.plan, bytes_with, capacity_bytes
    )
    if size_bytes > capacity_bytes:
        return ""
    return "--recompute, " if every == 1 else f"--recompute --recompute-every {every}, "


def fit_recompute_every(prepared: Prepared, memory_bytes: int, *, warns: bool = True) -> Prepared:
    """Returns the run with the n that ``--recompute-every 0`` leaves open.

    ``memory_bytes``: of the smallest device. ``warns``: whether this rank warns if no n fits.
    """

    def bytes_of(config: TrainConfig) -> int:
        return max(e.on_device for e in memory_by_rank(replace(prepared, config=config)))

    config = settle_recompute_every(
        prepared.config, prepared.model_graph, prepared.plan, bytes_of, memory_bytes, warns=warns
    )
    return replace(prepared, config=config)


def rank_memory_bytes(world: World) -> int:
    """Return the memory of this rank's device; on CPUs the rank's part of the machine's."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory)
    return memory_bytes() // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def partition_memory_bytes(prepared: Prepared) -> int:
    """Returns the peak on rank 0 while the graph is read and partitioned."""
    graph, config, plan = prepared.graph, prepared.config, prepared.plan
    arrays = [graph.indptr, graph.indices, graph.y, *graph.edge_data.values()]
    for x in [graph.x] if graph.types is None else graph.types.features.values():
        arrays += [x.data, x.indices, x.indptr] if isinstance(x, sp.csr_array) else [x]
    partitioner = partitioner_of(config, plan)
    order = resolve_order(config.order, partitioner, graph.num_vertices)
    is_cut = plan.chunks * plan.most_shards > 1 and partitioner in METIS_BASED
    edges = graph.num_edges * (1 if graph.is_symmetric else 2)
    graph_bytes, runs_metis = sum(a.nbytes for a in arrays), is_cut or order == "metis"
    # The graph and its renumbered copy; METIS runs beside the graph alone.
    return graph_bytes + max(graph_bytes, _METIS_ENTRY_BYTES * edges * runs_metis)


def memory_settings(
    config: TrainConfig,
    chunks: int,
    schedule: str,
    *,
    has_sparse_features: bool,
    is_symmetric: bool,
    is_exact: bool,
    extra_weights: int,
) -> MemorySettings:
    """Returns the settings of ``config`` that decide what a rank holds.

    ``chunks`` and ``schedule``: of the plan.
    """
    return MemorySettings(
        sparse_features=has_sparse_features,
        symmetric=is_symmetric,
        snapshot=config.staleness_settings_for(chunks, schedule).snapshot_every > 1,
        recompute=config.recompute,
        recompute_every=max(config.recompute_every, 1),
        is_exact=is_exact,
        number_bytes=number_dtype(config).itemsize,
        row_bytes=row_dtype(config).itemsize,
        extra_weights=extra_weights,
        mask_group_bytes=GROUP_BYTES,
    )


def with_program(
    settings: MemorySettings, config: TrainConfig, program: CheckedProgram
) -> MemorySettings:
    """Returns the settings with the chunks in flight and the versions of the weights."""
    if not program.steps_by_chunk or program.chunks == 1:
        return settings
    # Of several steps an epoch, all gradients are gathered in one tensor (``optim.flat_step``).
    gathered = int((program.consistency.optimizer_steps or 1) > 1)
    gaps = [max(gaps) if program.largest_gap else None for gaps in program.version_gaps]
    policy = WEIGHT_POLICIES[config.weights]
    held = (0 if gap is None else policy.copies_held(gap) for gap in gaps)
    copies = tuple(gathered + number for number in held)
    return replace(settings, in_flight=program.in_flight, version_copies=copies)


def _settings_of(prepared: Prepared) -> MemorySettings:
    graph, config = prepared.graph, prepared.config
    features = [graph.x] if graph.types is None else list(graph.types.features.values())
    settings = memory_settings(
        config,
        prepared.plan.chunks,
        prepared.plan.schedule,
        has_sparse_features=any(map(sp.issparse, features)),
        is_symmetric=_symmetric(prepared),
        is_exact=prepared.program.is_exact,
        extra_weights=(len(prepared.probes) > 0) + (config.kept_epoch == "best"),
    )
    return with_program(settings, config, prepared.program)


def _shard_sizes(prepared: Prepared, stage: int, shard: int, crossing: Counts | None) -> ShardSizes:
    """Returns the sizes of a shard, equal for all stages of the same shards."""
    graph, chunking = prepared.graph, prepared.chunkings[stage]
    layout = shard_layout(graph, chunking, shard)
    layouts = table_layouts(graph, chunking, layout)
    probes = np.intersect1d(layout.own, prepared.probes)
    entries = sum(feature_entries(graph, t) for t in graph.row_types)
    assert isinstance(entries, np.ndarray)
    is_linear = all(op.is_linear or op.is_mean for op in prepared.model_graph.aggregations)
    probe_rows = {t: int(np.isin(each.own, probes).sum()) for t, each in layouts.items()}
    labelled = layouts[graph.target].num_own + probe_rows[graph.target]
    has_labels = prepared.config.label_inputs > 0
    return ShardSizes(
        own_rows={t: each.num_own for t, each in layouts.items()},
        halo_rows={t: len(each.halo) for t, each in layouts.items()},
        own_edges=int(graph.degrees[layout.own].sum()),
        graph_edges=graph.num_edges,
        feature_entries=int(entries[layout.own].sum()),
        loss_rows=loss_rows_of_shard(graph, prepared.loss_row_mask, prepared.loss_rows, layout.own),
        loss_numbers=int(graph.train_mask[layout.own].sum()) * _kept_by_loss(prepared),
        own_pairs=int(graph.pairs.degrees[layout.own].sum()) if graph.pairs else 0,
        live_share=_live_share(prepared, layout.own, crossing),
        copied_share=(
            0.0 if is_linear else copied_rows(graph, prepared.chunking) / graph.num_vertices
        ),
        probe_rows=probe_rows,
        probe_edges=int(graph.degrees[probes].sum()),
        probe_feature_entries=int(entries[probes].sum()),
        label_numbers=labelled * graph.num_classes if has_labels else 0,
        **_whole_sizes(prepared),
        columns_share=prepared.plan.stages[stage].shares[shard],
    )


def _whole_sizes(prepared: Prepared) -> dict[str, Any]:
    """Returns the sizes of the whole graph that every shard needs if rows travel by columns."""
    rows = prepared.graph.table_rows.items()
    return {
        "graph_rows": {t: int(chosen.sum()) for t, chosen in rows},
        "graph_loss_rows": prepared.loss_rows,
    }


def _kept_by_loss(prepared: Prepared) -> int:
    return kept_by_loss(prepared.graph, prepared.model_graph.output_width)


def _crossing(prepared: Prepared) -> Counts | None:
    """Returns the edges into each vertex from other chunks, [N]; ``None`` if exact."""
    if prepared.program.is_exact:
        return None
    return crossing_degrees(prepared.graph, prepared.chunking)


def _live_share(prepared: Prepared, rows: Counts, crossing: Counts | None) -> float:
    """Returns the mean share of the edges into ``rows``, with self-loops, that gradients take.

    These are the edges that are read live, or those inside chunks if gradients stay there.
    """
    if crossing is None:
        return 0.0
    entries = len(rows) + int(prepared.graph.degrees[rows].sum())
    # Of two chunks that read each other, the one that is first in the order is read live.
    lost = 1.0 if prepared.program.steps_by_chunk else 0.5
    return 1.0 - lost * float(crossing[rows].sum()) / max(entries, 1)


def _symmetric(prepared: Prepared) -> bool:
    """Whether all matrices of the model equal their transposes, so that one copy is stored."""
    aggregations = prepared.model_graph.aggregations
    kinds = {op.structure for op in aggregations if not op.over_pairs} - {EVERYONE, SUM}
    return prepared.graph.is_symmetric and kinds <= {*SYMMETRIC_KINDS}

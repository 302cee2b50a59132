"""Refuses what cannot fit into memory before it is allocated.

Linux grants memory that it has not and kills the process once it is used, without a word of which
setting was too large. So what a run takes at the least is held against all the memory there is; a
run that is refused here could not have ended well. What it will really take, ``gnnpipe info`` says.
"""

from __future__ import annotations

import os
from dataclasses import replace

import scipy.sparse as sp
import torch

from gnnpipe.errors import InputError
from gnnpipe.machine import memory_bytes
from gnnpipe.perf import estimate_memory
from gnnpipe.perf.memory import human_bytes
from gnnpipe.runtime.comm.launch import launched_local_rank
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import Prepared
from gnnpipe.tasks.loss import kept_by_loss

__all__ = ["check_memory", "least_bytes"]


def check_memory(prepared: Prepared, mesh: Mesh) -> None:
    """``InputError`` on every rank if the ranks of some machine cannot fit into it."""
    error = None
    if mesh.device.type == "cuda":
        here = [mesh.rank]
        room = torch.cuda.get_device_properties(mesh.device).total_memory
    else:
        first = mesh.rank - launched_local_rank() if mesh.world_size > 1 else 0
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here = list(range(max(0, first), min(first + count, mesh.world_size)))
        room = memory_bytes()
    need = sum(least_bytes(prepared, rank // mesh.shards) for rank in here)
    if need > room:
        ranks = f"rank {mesh.rank} takes" if len(here) == 1 else f"its {len(here)} ranks take"
        where = "GPU" if mesh.device.type == "cuda" else "machine"
        error = InputError(
            f"model {prepared.model.size_text}: {ranks} at least {human_bytes(need)}, and this "
            f"{where} has {human_bytes(room)}; try --recompute, a smaller --hidden, or more "
            "--stages or --shards on more machines"
        )
    mesh.agree(error)


def least_bytes(prepared: Prepared, stage: int) -> int:
    """Bytes of a rank of ``stage`` if its shard were the mean one and read no halo rows."""
    graph, plan, shards = prepared.graph, prepared.plan, prepared.plan.shards
    loss_rows = prepared.loss_rows
    features = [graph.x] if graph.types is None else list(graph.types.features.values())
    entries = sum(x.nnz if isinstance(x, sp.csr_array) else x.size for x in features)
    return estimate_memory(
        plan,
        prepared.model_graph,
        stage,
        own_rows={t: int(rows.sum()) // shards for t, rows in graph.table_rows.items()},
        halo_rows=dict.fromkeys(graph.table_rows, 0),
        own_edges=graph.num_edges // shards,
        live_share=0.0,
        is_exact=prepared.program.is_exact,
        own_pairs=graph.pairs.num_pairs // shards if graph.pairs else 0,
        feature_entries=entries // shards,
        sparse_features=any(isinstance(x, sp.csr_array) for x in features),
        symmetric=True,
        snapshot=prepared.config.staleness_settings.snapshot_every > 1,
        pilot_rows=dict.fromkeys(graph.table_rows, 0),
        pilot_edges=0,
        pilot_feature_entries=0,
        extra_weights=0,
        number_bytes=prepared.dtype.itemsize,
        row_bytes=prepared.row_dtype.itemsize,
        recompute=prepared.config.recompute,
        copied_share=0.0,
        loss_numbers=int(graph.train_mask.sum()) // shards * kept_by_loss(graph),
        loss_rows=replace(
            loss_rows, rows=loss_rows.rows // shards, edges=loss_rows.edges // shards
        ),
    ).total

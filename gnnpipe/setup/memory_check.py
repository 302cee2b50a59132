"""Refuses a run that cannot fit into memory, before it allocates.

Linux grants more memory than the machine has, and kills the process once the memory is used,
without a message about the setting that was too large. A refused run could not have finished: a
lower bound of its memory exceeds all the memory of the machine. ``gnnpipe info`` shows the full
estimate.
"""

from __future__ import annotations

import os

import torch

from gnnpipe.errors import InputError
from gnnpipe.machine import memory_bytes
from gnnpipe.perf.memory import human_bytes
from gnnpipe.runtime.comm.launch import launched_local_rank
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import least_memory_bytes
from gnnpipe.setup.prepared import Prepared


def check_memory(prepared: Prepared, mesh: Mesh) -> None:
    """Raise ``InputError`` on every rank if the ranks of a machine need more than its memory."""
    error = None
    if mesh.device.type == "cuda":
        here = [mesh.rank]
        capacity_bytes = torch.cuda.get_device_properties(mesh.device).total_memory
    else:
        first = mesh.rank - launched_local_rank() if mesh.world_size > 1 else 0
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here = list(range(max(0, first), min(first + count, mesh.world_size)))
        capacity_bytes = memory_bytes()
    needed_bytes = sum(least_memory_bytes(prepared, mesh.placement.stage(rank)) for rank in here)
    if needed_bytes > capacity_bytes:
        ranks = (
            f"rank {mesh.rank} takes" if len(here) == 1 else f"its {len(here)} ranks together take"
        )
        where = "GPU" if mesh.device.type == "cuda" else "machine"
        error = InputError(
            f"model {prepared.model.size_text}: {ranks} at least {human_bytes(needed_bytes)}, and "
            f"this {where} has {human_bytes(capacity_bytes)}; try --recompute, a smaller --hidden, "
            "or more --stages or --shards on more machines"
        )
    mesh.agree(error)

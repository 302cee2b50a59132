"""Memory and communication of a run before it starts: ``gnnpipe info`` and its Python function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.graph.graph import Graph
from gnnpipe.perf import MemoryEstimate
from gnnpipe.plan import Plan
from gnnpipe.planner import AUTO, GivenPlan
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.profiling.search import OfflinePlanner
from gnnpipe.run.summary import info_lines
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.inputs import warn_of_vain_settings
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare, warn_of_stale_rows
from gnnpipe.tasks.loss import LossFn


@dataclass(frozen=True)
class Info:
    """Memory and communication of a configuration; ``str`` gives the text of ``gnnpipe info``."""

    memory: list[MemoryEstimate]
    """Estimate by rank, in bytes."""
    sent_bytes: int
    """Bytes sent in an epoch by all ranks."""
    text: str

    def __str__(self) -> str:
        return self.text


def info(
    config: TrainConfig,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    plan: Plan | None = None,
    loss_fn: LossFn | None = None,
    hardware: Hardware | None = None,
) -> Info:
    """Plan and partition for any number of ranks in one process, without training.

    The arguments are those of ``Trainer``, and so are the errors. ``hardware``: the devices for
    ``plan="auto"``.
    """
    world = World.alone()
    search = None
    if config.plan == AUTO and plan is None:
        search = OfflinePlanner(config, hardware or Hardware(devices=1))
    planner = GivenPlan(plan) if plan else search
    prepared = prepare(config, world, graph, model, planner, loss_fn)
    warn_of_stale_rows(prepared, world)
    warn_of_vain_settings(config, prepared.plan, prepared.model, prepared.graph, world)
    memory = memory_by_rank(prepared)
    lines = info_lines(prepared, memory)
    if search is not None and hardware is not None:
        found = search.found[-1]
        reasons = *found.plan_lines(), *found.prediction_lines(), *found.search_lines()
        lines = [*reasons, *lines]
    text = "\n".join(lines)
    return Info(memory, prepared.volume.total, text)

"""What a run will take, before it: ``gnnpipe info``, and the same for parts given in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnpipe.config import TrainConfig
from gnnpipe.run.summary import info_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare

if TYPE_CHECKING:
    from torch import nn

    from gnnpipe.graph.graph import Graph
    from gnnpipe.perf import MemoryEstimate
    from gnnpipe.plan import Plan
    from gnnpipe.tasks.loss import LossFn

__all__ = ["Info", "info"]


@dataclass(frozen=True)
class Info:
    """Of one shape; printed, it is what ``gnnpipe info`` shows."""

    memory: list[MemoryEstimate]
    """By rank, in bytes; ``total`` is all of one."""
    sent_bytes: int
    """In an epoch, over all ranks."""
    text: str

    def __str__(self) -> str:
        return self.text


def info(
    config: TrainConfig,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    plan: Plan | None = None,
    loss_fn: LossFn | None = None,
) -> Info:
    """Cut and plan for any number of ranks, on one process; nothing is trained.

    The parts are those of ``Trainer``. ``InputError`` for what it would refuse.
    """
    prepared = prepare(config, Mesh.alone(), graph, model, plan, loss_fn)
    memory = memory_by_rank(prepared)
    text = "\n".join(info_lines(prepared, memory))
    return Info(memory, prepared.volume.total, text)

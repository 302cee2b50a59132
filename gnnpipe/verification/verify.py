"""Function ``gnnpipe.verify``: compares a run with a reference on one device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gnnpipe.capture.preserve import detached_copy
from gnnpipe.config import TrainConfig
from gnnpipe.config.validation import check_verifiable
from gnnpipe.data.load import configured_graph
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.plan import Plan
from gnnpipe.planner import GivenPlan, Planner
from gnnpipe.profiling.search import ranks_of_plan, run_planner
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.inputs import check_trainable
from gnnpipe.setup.prepare import join_world, prepare
from gnnpipe.tasks.loss import LossFn
from gnnpipe.verification.comparison import (
    TOLERANCE,
    Comparison,
    compare_epochs,
    reference_line,
    verdict,
)


@dataclass(frozen=True)
class Verification:
    """Result of ``verify``; ``str`` gives the text of ``gnnpipe verify``."""

    epochs: tuple[Comparison, ...]
    """By epoch."""
    tolerance: float
    """Largest relative difference that counts as equal."""
    text: str

    @property
    def largest(self) -> float:
        """Largest relative difference of a loss or a gradient."""
        return max(epoch.largest for epoch in self.epochs)

    @property
    def is_equal(self) -> bool:
        """Whether the run computes the same as the reference, up to the tolerance."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        return self.text


def verify(
    config: TrainConfig,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    plan: Plan | None = None,
    world: World | None = None,
    loss_fn: LossFn | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Trains ``config.epochs`` epochs and compares each with a reference on one device.

    The reference is the module in plain PyG, or with stale rows a second walk over the same chunks
    in the same order.
    Every rank calls the function, under torchrun as for a run; the result is the same on all.

    >>> config = TrainConfig(dataset="karate", chunks=2, epochs=2, dtype="float64")
    >>> verify(config).is_equal
    True

    Args:
        config: The settings. Three epochs in float64 are enough to find a fault; in float32 the
            tolerance is larger.
        graph: The graph, in place of ``config.dataset``.
        model: The model, in place of ``config.model``; a copy of the model is trained.
        plan: The plan, in place of ``config.plan``.
        world: The ranks, if they have been joined for another run of this process.
        loss_fn: The loss, as for ``Trainer``.
        tolerance: Largest relative difference that counts as equal; ``None``: 1e-9 in float64, 1e-5
            in float32.

    Raises:
        InputError: An argument is wrong; the run rounds to bf16 or has labels as inputs; the model
            runs as it is or assigns buffers in forward; the model sums over all vertices or draws
            edges, and epochs are stale; or the model draws edges and has dropout on edges.
    """
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise InputError(f"--tolerance {tolerance}: must be a number above 0, like 1e-5")
    check_verifiable(config)
    planner: Planner | None = None if plan is None else GivenPlan(plan)
    met = world or join_world(config, planner)
    planner = planner or run_planner(config, met)
    prepared = prepare(config, met, graph, detached_copy(model), planner, loss_fn)
    check_trainable(prepared.graph, "verify()", loss_fn)
    met = ranks_of_plan(config, prepared.plan, met)
    mesh = Mesh.of(met, prepared.plan.placement, prepared.plan.collectives)
    if graph is None and mesh.rank == 0:
        # Read a second time, so that the reference shares nothing with the run.
        graph = configured_graph(config, loss_fn is None)
    epochs = compare_epochs(graph, prepared, mesh, config.epochs)
    tolerance = tolerance or TOLERANCE[config.dtype]
    lines = [*head_lines(prepared), *(epoch.text() for epoch in epochs)]
    lines += [reference_line(prepared), verdict(prepared, epochs, tolerance)]
    if world is None:
        mesh.leave()
    return Verification(tuple(epochs), tolerance, "\n".join(lines))

"""The input of a planner, the registry of planners, and plans that are read from a file.

A planner maps the model's ops to stages, ranks and chunks. It sees numbers only: no tensor, no
partition and no process group exists yet. Adding a planner takes one file that registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gnnpipe.documents import document_text, named
from gnnpipe.errors import InputError
from gnnpipe.plan import ALL_ROWS, LossRows, ModelGraph, Plan, RowWay, StageDag
from gnnpipe.registry import Registry, nearest
from gnnpipe.schedule import SCHEDULES


@dataclass(frozen=True)
class Shape:
    """The shape (S, G, K) that the config asks for."""

    stages: int
    """S."""
    shards: int
    """G."""
    chunks: int
    """K."""
    is_exact: bool = False
    """No read may be stale."""
    row_way: RowWay = RowWay.HALO
    """How the rows of every aggregation that can use this way travel among the shards."""
    schedule: str = "fill-drain"
    """Name of the schedule, unless no read may be stale."""
    rounds_rows: bool = False
    """Rows in tables and messages are rounded."""


@dataclass(frozen=True)
class GraphCounts:
    """Sizes of a graph, by the type of the vertices ('' in a graph of one type)."""

    num_vertices: Mapping[str, int]
    num_edges: Mapping[str, int]
    """Edges into the vertices of a type; for link prediction also the number of 'pairs'."""
    feature_entries: Mapping[str, int]
    """Stored numbers of the input features."""
    loss_rows: LossRows = ALL_ROWS
    """Rows that the last aggregation computes in training, as estimated before the partition."""
    loss_numbers: int = 0
    """Numbers that the loss keeps until backward."""
    has_sparse_features: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a planner may look at."""

    model: ModelGraph
    graph: GraphCounts
    shape: Shape
    is_whole: bool = False
    """The model runs as it is, on one rank and in one chunk only."""
    halo: Callable[[int, int], float] = lambda shards, most: 1.0
    """Returns the rows of other shards that are read for each own row, by the number of shards and
    the largest number that will be asked for; called on all ranks."""
    prepared_with: Callable[[Plan], Any] | None = None
    """Prepares the run with another plan, whose steps can then be measured; on all ranks."""
    why_not_async: str = ""
    """Why the run cannot take optimizer steps without a drain; '' if it can."""


class Planner(Protocol):
    """A planner; an entry of ``PLANNERS``."""

    def num_ranks(self, shape: Shape) -> int | None:
        """Return the number of ranks of the plan; called before the graph is read.

        None: as many as there are.
        """

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan; ``InputError`` if no plan exists for this model and shape."""


PLANNERS: Registry[Planner] = Registry("plan")

AUTO = "auto"
"""The value of ``--plan`` that searches a plan."""


@dataclass(frozen=True)
class GivenPlan:
    """Planner that returns a given plan, if the plan fits the model."""

    given: Plan
    source: str = "plan"
    """The file, with its flag, for messages."""

    def __post_init__(self) -> None:
        if not isinstance(self.given, Plan):
            raise InputError(f"plan: is a {type(self.given).__name__}; try Plan.from_json(text)")

    @classmethod
    def read(cls, path: str) -> GivenPlan:
        """Read the plan of a JSON file; ``InputError`` if this fails."""
        source = f"--plan {path!r}"
        hint = f"give a plan.json or a planner; {nearest(path, PLANNERS)}"
        return cls(Plan.from_json(document_text(path, source, hint), source), source)

    def num_ranks(self, shape: Shape) -> int:
        """Return the number of ranks of the plan."""
        del shape
        return self.given.num_ranks

    def plan(self, request: PlanRequest) -> Plan:
        """Return the given plan, checked against the model."""
        with naming_plan(self):
            check_plan(self.given, request.model)
            self._check_pieces(request.graph.num_vertices)
        return self.given

    def _check_pieces(self, num_vertices: Mapping[str, int]) -> None:
        chunks, parts = self.given.chunks, self.given.split.num_parts
        if self.given.split.can_cut(num_vertices, chunks):
            return
        vertices = sum(num_vertices.values())
        if parts > vertices:
            raise InputError(
                f"plan: stages: the shares cut {vertices:,} vertices into {parts:,} parts; try "
                "fewer ranks in a stage"
            )
        raise InputError(
            f"plan: chunks {chunks}: too many for {vertices:,} vertices (parts of a chunk by the "
            f"shares: {parts}); try {vertices // parts} or fewer"
        )


def planner_named(name: str) -> Planner:
    """Return the planner for a value of ``--plan``: a registered planner, or the path of a plan."""
    return PLANNERS[name] if name in set(PLANNERS) else GivenPlan.read(name)


def naming_plan(planner: Planner) -> AbstractContextManager[None]:
    """Name the file of a given plan in an ``InputError`` of the block that is about the plan."""
    return named("plan", planner.source if isinstance(planner, GivenPlan) else "plan")


def check_plan(plan: Plan, model: ModelGraph) -> None:
    """Raise ``InputError`` if the plan is for another model, or cannot run."""
    if plan.num_ops != model.num_ops:
        raise InputError(
            f"plan: is for {plan.num_ops} ops, and {model.name} has {model.num_ops}; try the "
            "--layers that the plan was made with, --plan uniform or --plan auto"
        )
    # Each raises for an unknown name.
    _ = SCHEDULES[plan.schedule], plan.collectives.rows, plan.collectives.sum
    _check_ties(plan, model)
    StageDag.of(plan, model)  # raises if the order of the stages is wrong


def _check_ties(plan: Plan, model: ModelGraph) -> None:
    """Check that ops that must be in one stage are (``ModelGraph.ties``)."""
    stage_of = {op: i for i, stage in enumerate(plan.stages) for op in stage.ops}
    for op, earlier in model.ties:
        if stage_of[op] != stage_of[earlier]:
            raise InputError(
                f"plan: op {op} must be in the stage of op {earlier}; stages of consecutive ops "
                f"may begin with {', '.join(map(str, model.cuts))}"
            )

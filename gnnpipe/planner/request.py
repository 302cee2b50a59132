"""The input of a planner, and the registry of planners.

A planner maps the model's ops to stages, ranks and chunks. It sees numbers only: no tensor, no
partition and no process group exists yet. Adding a planner takes one file that registers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gnnpipe.plan import ALL_ROWS, LossRows, ModelGraph, Plan
from gnnpipe.registry import Registry


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


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a planner may look at."""

    model: ModelGraph
    graph: GraphCounts
    shape: Shape


class Planner(Protocol):
    """A planner; an entry of ``PLANNERS``."""

    def num_ranks(self, shape: Shape) -> int:
        """Return the number of ranks of the plan; called before the graph is read."""

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan; ``InputError`` if no plan exists for this model and shape."""


PLANNERS: Registry[Planner] = Registry("plan")

"""Planners: assign ops, ranks and shares of the work to stages."""

from gnnpipe.planner.planner import (
    PLANNERS,
    GivenPlan,
    GraphCounts,
    Planner,
    PlanRequest,
    Shape,
    check_plan,
    planner_named,
)
from gnnpipe.planner.uniform import UniformPlanner

__all__ = [
    "PLANNERS",
    "GivenPlan",
    "GraphCounts",
    "PlanRequest",
    "Planner",
    "Shape",
    "UniformPlanner",
    "check_plan",
    "planner_named",
]

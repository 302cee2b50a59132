"""Planners: assign ops, ranks and shares of the work to stages."""

from gnnpipe.planner.from_file import GivenPlan, check_plan, planner_named
from gnnpipe.planner.request import PLANNERS, GraphCounts, Planner, PlanRequest, Shape
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

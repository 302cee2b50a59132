"""Planners: which op, which rank and which share of the rows go to which stage."""

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

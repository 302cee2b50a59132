"""Planners: assign ops, ranks and shares of the work to stages."""

from gnnpipe.planner.auto import AutoPlanner, find_plan
from gnnpipe.planner.candidate import MAX_CHUNKS, SearchSpace
from gnnpipe.planner.found_plan import FoundPlan
from gnnpipe.planner.planner import (
    AUTO,
    PLANNERS,
    GivenPlan,
    GraphCounts,
    Planner,
    PlanRequest,
    Shape,
    check_plan,
    naming_plan,
    planner_named,
)
from gnnpipe.planner.time_to_target import find_plan_for_target
from gnnpipe.planner.uniform import UniformPlanner

__all__ = [
    "AUTO",
    "MAX_CHUNKS",
    "PLANNERS",
    "AutoPlanner",
    "FoundPlan",
    "GivenPlan",
    "GraphCounts",
    "PlanRequest",
    "Planner",
    "SearchSpace",
    "Shape",
    "UniformPlanner",
    "check_plan",
    "find_plan",
    "find_plan_for_target",
    "naming_plan",
    "planner_named",
]

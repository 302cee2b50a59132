"""Who decides which layers go where."""

from gnnpipe.planner.uniform import plan_uniform

__all__ = ["plan_uniform"]

"""WHAT goes where: the model as plain data, and the plan that places it. No torch in here."""

from gnnpipe.plan.model_graph import ModelGraph, Op
from gnnpipe.plan.plan import Plan, Transfer

__all__ = ["ModelGraph", "Op", "Plan", "Transfer"]

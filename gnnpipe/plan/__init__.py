"""WHAT goes where: the model as plain data, and the plan that places it. No torch in here."""

from gnnpipe.plan.asked import ALL_ROWS, Asked, asked_of
from gnnpipe.plan.buckets import gradient_buckets, gradient_steps, op_gradient_steps
from gnnpipe.plan.model_graph import ModelGraph, Op, made_once, shared_tables
from gnnpipe.plan.plan import Plan, Transfer

__all__ = [
    "ALL_ROWS", "Asked", "ModelGraph", "Op", "Plan", "Transfer", "asked_of", "gradient_buckets",
    "gradient_steps", "made_once", "op_gradient_steps", "shared_tables",
]  # fmt: skip

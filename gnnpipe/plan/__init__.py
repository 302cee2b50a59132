"""The model as plain data, and the plan that assigns its ops to stages and ranks; without torch."""

from gnnpipe.plan.buckets import gradient_buckets, gradient_steps, op_gradient_steps
from gnnpipe.plan.loss_rows import ALL_ROWS, LossRows, choose_loss_rows
from gnnpipe.plan.model_graph import ModelGraph, Op, shared_tables
from gnnpipe.plan.op_steps import op_steps
from gnnpipe.plan.plan import Placement, Plan, StagePlan
from gnnpipe.plan.row_ways import RowWay, column_bounds
from gnnpipe.plan.segments import Segments
from gnnpipe.plan.shard_split import ShardSplit
from gnnpipe.plan.stage_dag import StageDag, Transfer

__all__ = [
    "ALL_ROWS",
    "LossRows",
    "ModelGraph",
    "Op",
    "Placement",
    "Plan",
    "RowWay",
    "Segments",
    "ShardSplit",
    "StageDag",
    "StagePlan",
    "Transfer",
    "choose_loss_rows",
    "column_bounds",
    "gradient_buckets",
    "gradient_steps",
    "op_gradient_steps",
    "op_steps",
    "shared_tables",
]

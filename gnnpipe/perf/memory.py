"""How much memory a rank will take, by formula, before anything is allocated.

Counted per rank: the graph's structure, the features (first stage), history tables with snapshots
and gradients, what autograd keeps of every own row until backward, weights with their gradients and
Adam's two moments, the pilot rows of a forecast and the kept weights of a best epoch. Not counted:
the interpreter and torch themselves, and what reading the data takes before training;
``gnnpipe info`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnpipe.plan import ModelGraph, Op, Plan

__all__ = ["MemoryEstimate", "estimate_memory"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    structure: int
    features: int
    history: int
    activations: int
    weights: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.structure + self.features + self.history + self.activations + self.weights


def estimate_memory(
    plan: Plan,
    model: ModelGraph,
    stage: int,
    *,
    own_rows: int,
    halo_rows: int,
    own_edges: int,
    feature_entries: int,
    sparse_features: bool,
    symmetric: bool,
    snapshot: bool,
    pilot_edges: int,
    pilot_feature_entries: int,
    extra_weights: int,
    number_bytes: int,
) -> MemoryEstimate:
    """For a rank of ``stage`` whose shard owns n rows, reads h halo rows, and has E edges into it.

    ``feature_entries``: stored numbers of the own rows' features; ``pilot_edges`` and
    ``pilot_feature_entries``: edges into this shard's pilot rows, and stored numbers of their
    features; ``extra_weights``: copies of the weights beside those that are trained.
    """
    first, last = plan.stages[stage]
    ops = model.ops[first:last]
    rows = own_rows + halo_rows
    linear = any(op.is_linear for op in ops if op.aggregates and not op.is_mean)
    copies = 1 if symmetric and plan.shards == 1 else 2
    entries = own_edges + own_rows
    structure = copies * entries * (4 + number_bytes) + 4 * (own_rows + rows) if linear else 0
    structure += pilot_edges * (4 + number_bytes) if linear else 0
    if not all(op.is_linear or op.is_mean for op in ops):
        structure += 16 * (entries + pilot_edges)
    features = 0
    if any(op.reads_features for op in ops):
        # Sparse rows are kept with their transpose; both as (index, value).
        each = 2 * (4 + number_bytes) if sparse_features else number_bytes
        features = (feature_entries + pilot_feature_entries) * each
    alone = plan.chunks == 1 and plan.shards == 1
    table_rows = 0 if alone else rows * (2 if snapshot else 1)
    history = sum(_history(op, table_rows, own_rows, rows) for op in ops) * number_bytes
    activations = sum(_kept(op) for op in ops)
    # Weight, gradient and Adam's two.
    weights = sum(op.num_parameters for op in ops) * (4 + extra_weights) * number_bytes
    return MemoryEstimate(
        structure, features, history, activations * own_rows * number_bytes, weights
    )


def _history(op: Op, table_rows: int, own_rows: int, rows: int) -> int:
    """Numbers of one table and its gradients."""
    if op.is_mean:
        return 0  # A row for each chunk.
    return op.push_width * (table_rows + (own_rows if op.is_linear else rows))


def _kept(op: Op) -> int:
    """Numbers that autograd keeps for a row of an op.

    The aggregated row, the norm's input, the activation's output, the row after dropout with its
    mask (a quarter), the values handed on; an estimate that the standard models stay near.
    """
    dropout = 0.0 if op.reads_features else 1.25
    wide = op.push_width * (3 + dropout) + sum(op.outputs.values())
    return int(wide if op.is_linear or op.is_mean else wide * 2)

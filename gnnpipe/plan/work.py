"""What work takes beside a dense product, by measurement (docs/benchmarks/op_costs.md)."""

from __future__ import annotations

__all__ = ["EDGE_FLOPS", "KEPT_FLOPS"]

EDGE_FLOPS = 10
"""Operations of a dense product in the time that one number of a neighbour's row takes to be read
and added."""
KEPT_FLOPS = 80
"""The same for a number of a row that is written, and kept until backward as a rule: norm,
activation, dropout and copies pass over it."""

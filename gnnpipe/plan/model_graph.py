"""The model as planners and cost formulas see it: widths and counts, no tensors.

One op is one GNN layer. Widths are numbers per row, so multiplying by rows and the size of a number
gives bytes. The layers form a chain; a value that skips layers (GCNII's h0) is named in every
``out_widths`` it passes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LayerOp", "ModelGraph"]


@dataclass(frozen=True)
class LayerOp:
    """One layer: row-wise work, one aggregation, row-wise work."""

    name: str
    push_width: int
    """Width of the rows it pushes into its history table and aggregates."""
    kept_widths: Mapping[str, int]
    """Values it holds for a row while the row's neighbours are aggregated."""
    out_widths: Mapping[str, int]
    """Values it returns for a row; what crosses a stage boundary behind it."""
    num_parameters: int
    flops_per_row: int
    """Multiply-adds x 2 of its dense products for one row, forward, features left out."""
    flops_per_feature: int = 0
    """Multiply-adds x 2 for one stored number of the input features."""
    is_linear: bool = True


@dataclass(frozen=True)
class ModelGraph:
    """A chain of L layers over features of ``num_features``."""

    name: str
    num_features: int
    num_classes: int
    ops: tuple[LayerOp, ...]

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.ops)

    @property
    def num_parameters(self) -> int:
        """Weights of all layers together."""
        return sum(op.num_parameters for op in self.ops)

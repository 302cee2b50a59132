"""GCN (Kipf and Welling, arXiv 1609.02907): ``relu(norm(A x W + b))``, A the normalised adjacency.

Every aggregation runs at the hidden width: the first layer transforms before it aggregates and the
last one after, which is the same product in the cheaper order and keeps what is sent at H a row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, Rows, Values, input_linear

__all__ = ["GCNLayer"]


class GCNLayer(Layer):
    """One GCN layer; all but the last end with LayerNorm and ReLU, all but the first drop."""

    aggregation = "gcn"

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(index, spec)
        out = self.out_widths["x"]
        if self.is_first:
            self.encode = input_linear(spec)
        if not self.is_first or self.is_last:
            self.lin = Linear(spec.hidden, out, bias=False, weight_initializer="glorot")
        self.bias = nn.Parameter(torch.zeros(out))
        if not self.is_last:
            self.norm = nn.LayerNorm(out)

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push the transformed rows; the last layer pushes them as they are."""
        if self.is_first:
            return self.encode(rows.features), {}
        x = rows.dropout(values["x"], self.spec.dropout, site=self.index)
        return (x if self.is_last else self.lin(x)), {}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Bias, norm and activation; the last layer transforms."""
        if self.is_last:
            return {"x": self.lin(received) + self.bias}
        return {"x": torch.relu(self.norm(received + self.bias))}


MODELS.add("gcn", GCNLayer)

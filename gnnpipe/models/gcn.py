"""GCN (Kipf and Welling, arXiv 1609.02907).

Every aggregation runs at the hidden width H: the first layer computes ``A (x W)``, later layers
compute ``(A x) W``. Later layers push rows that their own W has not multiplied, so stale rows do
not depend on an old W, and the gradient of W counts every neighbour.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, PushMaker, Rows, Values, input_linear
from gnnpipe.ops.norm_relu import norm_relu


class GCNLayer(Layer):
    """``x' = dropout(relu(LayerNorm(A x W + b)))``; the last layer returns ``A x W + b``.

    A is the adjacency matrix with self-loops, normalised as ``D^-1/2 (A + I) D^-1/2``.
    """

    aggregation = "gcn"
    maps_features = cuda_graph_safe = True
    push_maker = PushMaker.AFTER

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
        """Push ``x W`` in the first layer, x in later layers."""
        return self.encode(rows.features) if self.is_first else values["x"], {}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Apply W (except in the first layer), bias, norm, activation and dropout."""
        if self.is_last:
            return {"x": linear(received, self.lin.weight, self.bias)}
        weight = None if self.is_first else self.lin.weight
        options = self.norm_relu_options(rows)
        x = norm_relu(self.norm, self.bias, received, weight, options=options)
        return {"x": x}


MODELS.add("gcn", GCNLayer)

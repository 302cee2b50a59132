"""GraphSAGE with the mean (Hamilton et al., arXiv 1706.02216), on the whole graph.

As in ``gcn``, every aggregation runs at the hidden width: the first layer averages ``x W_l``, later
layers average x.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, PushMaker, Rows, Values, input_linear
from gnnpipe.ops.norm_relu import norm_relu


class SAGELayer(Layer):
    """``x' = dropout(relu(LayerNorm(mean(x) W_l + x W_r + b)))``; the last layer is the sum."""

    aggregation = "mean"
    maps_features = keeps_features = cuda_graph_safe = True
    push_maker = PushMaker.AFTER

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(index, spec)
        out = self.out_widths["x"]
        if self.is_first:
            self.encode = input_linear(spec)
            self.encode_self = input_linear(spec)
        if not self.is_first or self.is_last:
            self.lin = Linear(spec.hidden, out, bias=False, weight_initializer="glorot")
            self.lin_self = Linear(spec.hidden, out, bias=False, weight_initializer="glorot")
        self.bias = nn.Parameter(torch.zeros(out))
        if not self.is_last:
            self.norm = nn.LayerNorm(out)

    @property
    def kept_widths(self) -> dict[str, int]:
        """The row's own part: ``x W_r`` in the first layer, else x."""
        return {"x": self.spec.hidden}

    def own_values(self, rows: Rows) -> Values:
        """Return ``x W_r`` of the features."""
        return {"x": self.encode_self(rows.features)}

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push ``x W_l`` in the first layer, x in later layers; keep the row's own part."""
        if self.is_first:
            return self.encode(rows.features), self.own_values(rows)
        return values["x"], values

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Add the neighbours' mean to the row's own part."""
        own = values["x"]
        if self.is_last:
            own = linear(own, self.lin_self.weight, self.bias)
            return {"x": torch.addmm(own, received, self.lin.weight.t())}
        weights = (None, None) if self.is_first else (self.lin.weight, self.lin_self.weight)
        pairs = received, weights[0], own, weights[1]
        x = norm_relu(self.norm, self.bias, *pairs, options=self.norm_relu_options(rows))
        return {"x": x}


MODELS.add("sage", SAGELayer)

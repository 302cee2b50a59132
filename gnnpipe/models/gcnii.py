"""GCNII (Chen et al., arXiv 2007.02133): deep GCN with an initial residual and identity mapping.

``x' = relu((1 - beta) m + beta m W)`` with ``m = (1 - alpha) A x + alpha h0`` and
``beta = log(theta / layer + 1)``. h0, the encoded features, is read by every layer: it is the value
that skips ahead, so it travels with x over every stage boundary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, PushMaker, Rows, Values, input_linear
from gnnpipe.ops.norm_relu import gcnii_mix

__all__ = ["GCNIILayer"]


class GCNIILayer(Layer):
    """One GCNII layer; the first also encodes the features, the last also decodes to classes."""

    aggregation = "gcn"
    reads = ("x", "h0")
    reads_settings = ("alpha", "theta")
    cuda_graph_safe = True
    push_maker = PushMaker.AFTER

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(index, spec)
        self.beta = math.log(spec.theta / (index + 1) + 1.0)
        if self.is_first:
            self.encode = input_linear(spec, bias=True)
        self.lin = Linear(spec.hidden, spec.hidden, bias=False, weight_initializer="glorot")
        self.norm = nn.LayerNorm(spec.hidden)
        if self.is_last:
            self.decode = Linear(spec.hidden, spec.num_classes, weight_initializer="glorot")

    @property
    def has_bf16_products(self) -> bool:
        """Its own, whatever stands in front and behind."""
        return True

    @property
    def kept_widths(self) -> dict[str, int]:
        """h0 passes through."""
        return {"h0": self.spec.hidden}

    @property
    def out_widths(self) -> dict[str, int]:
        """x, and h0 for the layers that follow."""
        return super().out_widths | ({} if self.is_last else {"h0": self.spec.hidden})

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push x; the first layer makes h0 from the features, and x of it by dropout."""
        if not self.is_first:
            return values["x"], {"h0": values["h0"]}
        h0 = torch.relu_(self.encode(rows.features))
        return rows.dropout(h0, self.spec.dropout, site=self.index), {"h0": h0}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Mix with h0, map, norm, activation and dropout."""
        h0 = values["h0"]
        # A subclass may read ``received`` after this method.
        overwrites = rows.may_overwrite and type(self) is GCNIILayer
        x = gcnii_mix(
            received,
            h0,
            self.lin.weight,
            self.norm,
            self.spec.alpha,
            self.beta,
            self.spec.is_rounded,
            self.dropout_mask(rows, self.spec.hidden),
            rows.output_buffer,
            overwrites,
        )
        return {"x": self.decode(x)} if self.is_last else {"x": x, "h0": h0}


MODELS.add("gcnii", GCNIILayer)

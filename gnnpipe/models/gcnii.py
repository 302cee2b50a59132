"""GCNII (Chen et al., arXiv 2007.02133): deep GCN with an initial residual and identity mapping.

Every layer reads h0, the encoded features, so h0 crosses every stage boundary together with x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, PushMaker, Rows, Values, input_linear
from gnnpipe.ops.norm_relu import gcnii_mix


class GCNIILayer(Layer):
    """``x' = dropout(relu(LayerNorm((1 - beta) m + beta m W)))``.

    ``m = (1 - alpha) A x + alpha h0`` with ``beta = log(theta / (index + 1) + 1)``, A normalised
    as in GCN. The first layer computes ``h0 = relu(x W + b)`` of the features and aggregates
    ``dropout(h0)``; the last layer also decodes to classes.
    """

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
        """True: every layer has a hidden map of its own."""
        return True

    @property
    def kept_widths(self) -> dict[str, int]:
        """``after`` mixes in h0."""
        return {"h0": self.spec.hidden}

    @property
    def out_widths(self) -> dict[str, int]:
        """x, and h0 for the next layer."""
        return super().out_widths | ({} if self.is_last else {"h0": self.spec.hidden})

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push x; the first layer computes h0 and x from the features."""
        if not self.is_first:
            return values["x"], {"h0": values["h0"]}
        h0 = torch.relu_(self.encode(rows.features))
        return rows.dropout(h0, self.spec.dropout, site=self.index), {"h0": h0}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Mix with h0, map, norm, activation and dropout."""
        h0 = values["h0"]
        # A subclass may read ``received`` after it has called this method.
        overwrites = rows.may_overwrite and type(self) is GCNIILayer
        x = gcnii_mix(
            received,
            h0,
            self.lin.weight,
            self.norm,
            self.spec.alpha,
            self.beta,
            self.norm_relu_options(rows),
            overwrites,
        )
        return {"x": self.decode(x)} if self.is_last else {"x": x, "h0": h0}


MODELS.add("gcnii", GCNIILayer)

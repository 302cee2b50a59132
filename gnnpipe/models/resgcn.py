"""ResGCN+ (DeeperGCN, Li et al., arXiv 2006.07739): pre-activation residual GCN layers.

The residual path is never normalised, which allows deep models. W is applied after A, so stale rows
do not depend on an old W (see ``gcn``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, PushMaker, Rows, Values, input_linear
from gnnpipe.ops.bf16_matmul import linear
from gnnpipe.ops.norm_relu import NormReluOptions, norm_relu


class ResGCNLayer(Layer):
    """``x' = x + A dropout(relu(LayerNorm(x))) W + b``, A normalised as in GCN.

    The first layer also encodes the features. The last layer also decodes to classes, after norm,
    ReLU and dropout.
    """

    aggregation = "gcn"
    cuda_graph_safe = True
    push_maker = PushMaker.BEFORE

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode = input_linear(spec, bias=True)
        self.norm = nn.LayerNorm(spec.hidden)
        self.lin = Linear(spec.hidden, spec.hidden, bias=False, weight_initializer="glorot")
        self.bias = nn.Parameter(torch.zeros(spec.hidden))
        if self.is_last:
            self.norm_out = nn.LayerNorm(spec.hidden)
            self.decode = Linear(spec.hidden, spec.num_classes, weight_initializer="glorot")

    @property
    def has_bf16_products(self) -> bool:
        """True: every layer has a hidden map of its own."""
        return True

    @property
    def kept_widths(self) -> dict[str, int]:
        """The residual x."""
        return {"x": self.spec.hidden}

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push the pre-activated rows; keep the residual."""
        x = self.encode(rows.features) if self.is_first else values["x"]
        # Sites up to num_layers belong to the dropout that ends a layer.
        site = self.spec.num_layers + 1 + self.index
        mask = rows.mask(self.spec.hidden, self.spec.dropout, site=site)
        options = NormReluOptions(mask=mask, output_buffer=rows.output_buffer)
        return norm_relu(self.norm, None, x, None, options=options), {"x": x}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Apply W and bias, add the residual."""
        x = values["x"] + self.bias
        if self.spec.is_rounded:
            x = x + linear(received, self.lin.weight, None, is_rounded=True)
        else:
            x = torch.addmm(x, received, self.lin.weight.t())
        if not self.is_last:
            return {"x": x}
        options = NormReluOptions(mask=self.dropout_mask(rows, self.spec.hidden))
        return {"x": self.decode(norm_relu(self.norm_out, None, x, None, options=options))}


MODELS.add("resgcn", ResGCNLayer)

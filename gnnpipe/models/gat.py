"""GAT (Velickovic et al., arXiv 1710.10903), with the weights of PyG's ``GATConv``.

Attention reads both ends of every edge, so aggregation is not a product with a fixed matrix. The
layer pushes its transformed rows ``x W``, and attention runs on the block of a chunk: the chunk's
rows and its halo.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.errors import InputError
from gnnpipe.models.gat_attention import attend
from gnnpipe.models.layer import MODELS, Layer, LayerSpec, Rows, Values, input_linear
from gnnpipe.ops.bf16_matmul import linear
from gnnpipe.ops.hashed_dropout import keyed_dropout


class GATLayer(Layer):
    """``x' = dropout(elu(GATConv(x W)))`` with a loop at every vertex.

    The results of ``heads`` heads are concatenated to the hidden width. The last layer also decodes
    to classes. Attention coefficients are not dropped. There is no norm and no encoder with bias:
    with them, features that are all positive would leave the rows nearly alike.
    """

    aggregation = "loops"
    reads_settings = ("heads",)

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(index, spec)
        if spec.hidden % spec.heads:
            raise InputError(f"heads {spec.heads}: does not divide hidden {spec.hidden}")
        if self.is_first:
            self.encode = input_linear(spec)
        else:
            self.lin = Linear(spec.hidden, spec.hidden, bias=False, weight_initializer="glorot")
        self.conv = GATConv(
            spec.hidden, spec.hidden // spec.heads, heads=spec.heads, add_self_loops=False
        )
        # ``before`` applies the linear map, once per row; the convolution must not repeat it.
        self.conv.lin = nn.Identity()
        if self.is_last:
            self.decode = Linear(spec.hidden, spec.num_classes, weight_initializer="glorot")

    @property
    def has_bf16_products(self) -> bool:
        """Whether there is a linear map of rows; the last layer's map does not give the logits."""
        return not self.is_first

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push ``x W``, in the first layer of the features."""
        if self.is_first:
            return self.encode(rows.features), {}
        return linear(values["x"], self.lin.weight, None, self.spec.is_rounded), {}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Attend over the block, then activation and dropout."""
        block = rows.block
        assert block is not None
        if block.is_fused:
            x = attend(self.conv, received, None, block)
        else:
            pair = (received, received[: block.size[1]])
            x = self.conv(pair, block.edge_index, size=block.size)
        x = keyed_dropout(elu(x), self.dropout_mask(rows, self.spec.hidden))
        return {"x": self.decode(x) if self.is_last else x}


MODELS.add("gat", GATLayer)

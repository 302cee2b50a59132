"""GAT (Velickovic et al., arXiv 1710.10903), through PyG's unchanged ``GATConv``.

Attention needs both ends of every edge, so this layer does not lower to a fixed product: it pushes
its input rows, and the convolution runs on the rectangular block of a chunk and its halo.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import MODELS, Layer, LayerSpec, Rows, Values, input_linear

__all__ = ["GATLayer"]


class GATLayer(Layer):
    """One GAT layer of ``heads`` heads whose results are concatenated to the hidden width.

    The first layer also encodes the features, the last also decodes to classes. Attention itself is
    not dropped: such a mask would belong to edges, whose order depends on chunks and shards.
    """

    aggregation = "loops"

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode = input_linear(spec, bias=True)
        self.conv = GATConv(
            spec.hidden, spec.hidden // spec.heads, heads=spec.heads, add_self_loops=False
        )
        self.norm = nn.LayerNorm(spec.hidden)
        if self.is_last:
            self.decode = Linear(spec.hidden, spec.num_classes, weight_initializer="glorot")

    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Push x after dropout."""
        x = self.encode(rows.features) if self.is_first else values["x"]
        return rows.dropout(x, self.spec.dropout, site=self.index), {}

    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Attend over the block, then norm and activation."""
        block = rows.block
        assert block is not None
        pair = (received, received[: block.size[1]])
        x = elu(self.norm(self.conv(pair, block.edge_index, size=block.size)))
        if not self.is_last:
            return {"x": x}
        return {"x": self.decode(rows.dropout(x, self.spec.dropout, site=self.spec.num_layers))}


MODELS.add("gat", GATLayer)

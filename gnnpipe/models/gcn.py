"""GCN (Kipf and Welling, arXiv 1609.02907)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from gnnpipe.models.registry import MODELS, widths


class GCN(nn.Module):
    """``x' = dropout(relu(LayerNorm(A x W + b)))``; the last layer returns ``A x W + b``.

    A is the adjacency matrix with self-loops, normalised as ``D^-1/2 (A + I) D^-1/2``.
    """

    def __init__(
        self, num_features: int, num_classes: int, layers: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        sizes = widths(num_features, num_classes, layers, hidden)
        self.convs = nn.ModuleList(GCNConv(before, after) for before, after in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Returns logits [N, C] of features ``x`` [N, F]."""
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.dropout(norm(conv(x, edge_index)).relu())
        logits: Tensor = self.convs[-1](x, edge_index)
        return logits


MODELS.add("gcn", GCN)

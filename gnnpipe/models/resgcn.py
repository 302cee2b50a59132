"""ResGCN+ (DeeperGCN, Li et al., arXiv 2006.07739): pre-activation residual GCN layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from gnnpipe.models.registry import MODELS


class ResGCN(nn.Module):
    """``x' = x + A dropout(relu(LayerNorm(x))) W + b``, A normalised as in GCN.

    A linear map encodes the features; norm, ReLU, dropout and a linear map decode. The residual
    path is never normalised, which allows deep models.
    """

    def __init__(
        self, num_features: int, num_classes: int, layers: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_classes)
        self.convs = nn.ModuleList(GCNConv(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers + 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Returns logits [N, C] of features ``x`` [N, F]."""
        x = self.encode(x)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = x + conv(self.dropout(norm(x).relu()), edge_index)
        logits: Tensor = self.decode(self.dropout(self.norms[-1](x).relu()))
        return logits


MODELS.add("resgcn", ResGCN)

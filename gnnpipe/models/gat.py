"""GAT (Velickovic et al., arXiv 1710.10903)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv

from gnnpipe.errors import InputError
from gnnpipe.models.registry import MODELS


class GAT(nn.Module):
    """``x' = dropout(elu(GATConv(x)))`` with a loop at every vertex; a linear map of the last x.

    The results of ``heads`` heads are concatenated to the hidden width. Attention coefficients are
    not dropped. There is no norm, and no map with a bias before the first layer: with them, rows of
    features that are all positive would be nearly equal.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        layers: int,
        hidden: int,
        dropout: float,
        heads: int = 4,
    ) -> None:
        """``InputError`` unless ``heads`` divides ``hidden``."""
        if heads < 1:
            raise InputError(f"heads {heads} is less than 1")
        if hidden % heads:
            wider = hidden + heads - hidden % heads
            raise InputError(f"heads {heads} does not divide hidden {hidden}; try hidden {wider}")
        super().__init__()
        sizes = pairwise([num_features, *[hidden] * layers])
        self.convs = nn.ModuleList(GATConv(a, b // heads, heads=heads) for a, b in sizes)
        self.decode, self.dropout = nn.Linear(hidden, num_classes), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Returns logits [N, C] of features ``x`` [N, F]."""
        for conv in self.convs:
            x = self.dropout(elu(conv(x, edge_index)))
        logits: Tensor = self.decode(x)
        return logits


MODELS.add("gat", GAT)

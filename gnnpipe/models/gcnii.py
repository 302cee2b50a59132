"""GCNII (Chen et al., arXiv 2007.02133): deep GCN with an initial residual and identity mapping."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GCN2Conv

from gnnpipe.errors import InputError
from gnnpipe.models.registry import MODELS


class GCNII(nn.Module):
    """``x' = dropout(relu(LayerNorm((1 - beta) m + beta m W)))``; a linear map of the last x.

    ``m = (1 - alpha) A x + alpha h0`` with ``beta = log(theta / (index + 1) + 1)``, A normalised
    as in GCN; ``h0 = relu(features W + b)``, and the first x is ``dropout(h0)``.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        layers: int,
        hidden: int,
        dropout: float,
        alpha: float = 0.1,
        theta: float = 0.5,
    ) -> None:
        """``InputError`` unless 0 <= ``alpha`` < 1 and ``theta`` > 0."""
        if not 0 <= alpha < 1:
            raise InputError(f"alpha {alpha} is not at least 0 and less than 1")
        if not theta > 0:
            raise InputError(f"theta {theta} is not more than 0")
        super().__init__()
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_classes)
        self.convs = nn.ModuleList(
            GCN2Conv(hidden, alpha, theta, layer=index + 1) for index in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Returns logits [N, C] of features ``x`` [N, F]."""
        first = self.encode(x).relu()
        x = self.dropout(first)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.dropout(norm(conv(x, first, edge_index)).relu())
        logits: Tensor = self.decode(x)
        return logits


MODELS.add("gcnii", GCNII)

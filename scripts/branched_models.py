"""Models of separate branches of GCN layers, which a last linear layer joins.

Used by ``stage_dag_speed.py``; each function is a ``--model scripts/branched_models.py:NAME``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from gnnpipe import Graph, TrainConfig


class Branches(nn.Module):
    """B branches of L layers each."""

    def __init__(
        self, features: int, hidden: int, classes: int, branches: int, layers: int
    ) -> None:
        """``hidden``: width of every layer."""
        super().__init__()
        self.branches = nn.ModuleList(
            nn.ModuleList(GCNConv(features if i == 0 else hidden, hidden) for i in range(layers))
            for _ in range(branches)
        )
        self.join = nn.Linear(branches * hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns the logits [N, C]."""
        ends = []
        for branch in self.branches:
            h = x
            for layer in branch:
                h = layer(h, edge_index).relu()
            ends.append(h)
        return self.join(torch.cat(ends, dim=1))


def _made(graph: Graph, config: TrainConfig, branches: int, layers: int) -> Branches:
    torch.manual_seed(0)
    return Branches(graph.num_features, config.hidden, graph.num_classes, branches, layers)


def four_by_eight(graph: Graph, config: TrainConfig) -> Branches:
    """Returns 4 branches of 8 layers."""
    return _made(graph, config, 4, 8)


def two_by_sixteen(graph: Graph, config: TrainConfig) -> Branches:
    """Returns 2 branches of 16 layers."""
    return _made(graph, config, 2, 16)

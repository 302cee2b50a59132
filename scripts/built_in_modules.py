"""The built-in models as ordinary PyG modules, and their weights from the built-in layers.

``recorded_speed.py`` trains both forms in turns. F features, C classes, H hidden columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg


def widths(num_features: int, num_classes: int, layers: int, hidden: int) -> list[int]:
    """Columns of the rows before, between and after the layers: [F, H, ..., H, C]."""
    return [num_features, *[hidden] * (layers - 1), num_classes]


class GCN(nn.Module):
    """``x' = dropout(relu(LayerNorm(A x W + b)))``; the last layer is ``A x W + b``."""

    def __init__(self, F: int, C: int, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            self.conv(a, b) for a, b in pairwise(widths(F, C, layers, hidden))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)

    def conv(self, inputs: int, outputs: int) -> nn.Module:
        """The convolution."""
        return pyg.GCNConv(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Logits [N, C]."""
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.dropout(norm(conv(x, edge_index)).relu())
        return self.convs[-1](x, edge_index)

    def take(self, layers: Sequence[Any]) -> None:
        """Copy the weights of built-in layers."""
        for conv, layer in zip(self.convs, layers, strict=True):
            conv.lin.weight.copy_((layer.encode if layer.is_first else layer.lin).weight)


class SAGE(GCN):
    """``x' = dropout(relu(LayerNorm(mean(x) W_l + x W_r + b)))``; the last layer is the sum."""

    def conv(self, inputs: int, outputs: int) -> nn.Module:
        """The convolution."""
        return pyg.SAGEConv(inputs, outputs)

    def take(self, layers: Sequence[Any]) -> None:
        """Copy the weights of built-in layers."""
        for conv, layer in zip(self.convs, layers, strict=True):
            first = layer.is_first
            conv.lin_l.weight.copy_((layer.encode if first else layer.lin).weight)
            conv.lin_r.weight.copy_((layer.encode_self if first else layer.lin_self).weight)
            conv.lin_l.bias.zero_()


class Deep(nn.Module):
    """A linear encoder, layers of one width with LayerNorm, and a linear decoder."""

    def __init__(self, F: int, C: int, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(F, hidden), nn.Linear(hidden, C)
        self.convs = nn.ModuleList(self.conv(hidden, i) for i in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def take(self, layers: Sequence[Any]) -> None:
        """Copy the weights of built-in layers."""
        self.encode.weight.copy_(layers[0].encode.weight)
        self.encode.bias.copy_(layers[0].encode.bias)
        self.decode.load_state_dict(layers[-1].decode.state_dict())
        for conv, layer in zip(self.convs, layers, strict=True):
            self.take_layer(conv, layer)


class GCNII(Deep):
    """``x' = dropout(relu(LayerNorm(GCN2Conv(x, h0))))`` with ``h0 = relu(encode(x))``."""

    def conv(self, hidden: int, index: int) -> nn.Module:
        """The convolution."""
        return pyg.GCN2Conv(hidden, alpha=0.1, theta=0.5, layer=index + 1)

    def take_layer(self, conv: Any, layer: Any) -> None:
        """Copy the weights of a layer."""
        conv.weight1.copy_(layer.lin.weight.t())

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Logits [N, C]."""
        first = self.encode(x).relu()
        x = self.dropout(first)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.dropout(norm(conv(x, first, edge_index)).relu())
        return self.decode(x)


class ResGCN(Deep):
    """``x' = x + GCNConv(dropout(relu(LayerNorm(x))))``."""

    def __init__(self, F: int, C: int, layers: int, hidden: int, dropout: float) -> None:
        super().__init__(F, C, layers, hidden, dropout)
        self.norm_out = nn.LayerNorm(hidden)

    def conv(self, hidden: int, index: int) -> nn.Module:
        """The convolution."""
        return pyg.GCNConv(hidden, hidden)

    def take_layer(self, conv: Any, layer: Any) -> None:
        """Copy the weights of a layer."""
        conv.lin.weight.copy_(layer.lin.weight)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Logits [N, C]."""
        x = self.encode(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(self.dropout(norm(x).relu()), edge_index)
        return self.decode(self.dropout(self.norm_out(x).relu()))


class GAT(nn.Module):
    """``x' = dropout(elu(GATConv(x)))``, and a decoder."""

    def __init__(self, features: int, C: int, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        sizes = [features] + [hidden] * layers
        self.convs = nn.ModuleList(pyg.GATConv(a, b // 4, heads=4) for a, b in pairwise(sizes))
        self.decode, self.dropout = nn.Linear(hidden, C), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Logits [N, C]."""
        for conv in self.convs:
            x = self.dropout(F.elu(conv(x, edge_index)))
        return self.decode(x)

    def take(self, layers: Sequence[Any]) -> None:
        """Copy the weights of built-in layers."""
        self.decode.load_state_dict(layers[-1].decode.state_dict())
        for conv, layer in zip(self.convs, layers, strict=True):
            lin = layer.encode if layer.is_first else layer.lin
            conv.load_state_dict({**layer.conv.state_dict(), "lin.weight": lin.weight})


MODULES = {"gcn": GCN, "sage": SAGE, "gcnii": GCNII, "resgcn": ResGCN, "gat": GAT}


def twin(name: str, built_in: Any, num_features: int, num_classes: int) -> nn.Module:
    """The module of a built-in model, with the weights of ``built_in``, a ``GNN``."""
    layers = built_in.stack()
    spec = layers[0].spec
    module = MODULES[name](num_features, num_classes, len(layers), spec.hidden, spec.dropout)
    module.to(next(built_in.parameters()).dtype)
    with torch.no_grad():
        module.take(layers)
    return module

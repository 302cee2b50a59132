"""Rules for HANConv and HGTConv, which attend over several relations at once.

The rules make of them row-wise work, one attention for each relation, and a row-wise combination of
the relations' results. HANConv's weights of the relations are means over all vertices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.utils import scatter, softmax

from gnnpipe.capture.markers import aggregate
from gnnpipe.graph.operators import EVERYONE

Attend = Callable[[nn.Module, Any, Any, Any], Any]
"""Records the call of an attention on (source rows, target rows, edges)."""

HeteroRule = Callable[[Any, Mapping[str, Any], Mapping[Any, Any], Attend], dict[str, Any]]
"""Maps (convolution, features by type, edges by relation, ``Attend``) to results by type."""


class _AdditiveAttention(pyg.MessagePassing):  # type: ignore[misc]
    """GAT's attention for mapped rows: sources [n, H D + H] with scores, target scores [m, H]."""

    def __init__(self, heads: int, negative_slope: float, dropout: float) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.heads, self.negative_slope, self.dropout = heads, negative_slope, dropout

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """Rows [m, H D]."""
        read, reading = x
        rows, alpha = read[:, : -self.heads], read[:, -self.heads :]
        size = (len(read), len(reading))
        out: Tensor = self.propagate(edge_index, x=(rows, None), alpha=(alpha, reading), size=size)
        return out

    def message(
        self, x_j: Tensor, alpha_i: Tensor, alpha_j: Tensor, index: Tensor, size_i: int | None
    ) -> Tensor:
        """Messages [E, H D]."""
        alpha = nn.functional.leaky_relu(alpha_j + alpha_i, self.negative_slope)
        alpha = softmax(alpha, index, num_nodes=size_i)
        alpha = nn.functional.dropout(alpha, p=self.dropout, training=self.training)
        return (x_j.view(len(x_j), self.heads, -1) * alpha[:, :, None]).flatten(1)


class _ProductAttention(pyg.MessagePassing):  # type: ignore[misc]
    """Dot-product attention of keys and values [n, 2 H D] and queries [m, H D].

    Returns also the logarithm of each softmax's denominator, with which ``_joined`` combines
    several relations into one softmax over all their edges.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.heads = heads

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """Rows [m, H D + H]; the last H are -inf for a vertex without neighbours."""
        read, reading = x
        count = len(reading)
        source, target = edge_index
        key, value = read.chunk(2, dim=1)
        keys, queries = self._by_head(key)[source], self._by_head(reading)[target]
        score = (keys * queries).sum(-1)
        with torch.no_grad():
            largest = scatter(score, target, 0, count, "max")
        weight = torch.exp(score - largest[target])
        total = scatter(weight, target, 0, count, "sum")
        rows = self._by_head(value)[source] * weight[:, :, None]
        out = scatter(rows, target, 0, count, "sum") / total.clamp(min=1e-16)[:, :, None]
        is_read = total > 0
        safe = torch.where(is_read, total, torch.ones_like(total))
        size = torch.where(is_read, safe.log() + largest, torch.full_like(total, -torch.inf))
        return torch.cat([out.flatten(1), size], dim=1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, x.shape[1] // self.heads)


def _han(
    conv: Any, x: Mapping[str, Any], edges: Mapping[Any, Any], attend: Attend
) -> dict[str, Any]:
    """GAT within each relation, then a softmax over relations of means over all vertices."""
    heads, width = conv.heads, conv.out_channels
    rows = {name: conv.proj[name](value) for name, value in x.items()}
    found: dict[str, list[Any]] = {name: [] for name in x}
    for relation, index in edges.items():
        source, _, target = relation
        name = "__".join(relation)
        parts = {t: rows[t].view(-1, heads, width // heads) for t in (source, target)}
        read = (parts[source] * conv.lin_src[name]).sum(dim=-1)
        reading = (parts[target] * conv.lin_dst[name]).sum(dim=-1)
        attention = _AdditiveAttention(heads, conv.negative_slope, conv.dropout)
        out = attend(attention, torch.cat([rows[source], read], dim=1), reading, index)
        found[target].append(out.relu())
    return {name: _weighed(conv, outs) for name, outs in found.items()}


def _weighed(conv: Any, outs: list[Any]) -> Any:
    """HANConv's semantic attention over the relations' results; None without relations."""
    if not outs:
        return None
    means = [aggregate(conv.k_lin(out).tanh(), structure=EVERYONE) for out in outs]
    scores = torch.cat([(conv.q * mean).sum(dim=-1, keepdim=True) for mean in means], dim=1)
    share = scores.softmax(dim=1)
    parts = [share[:, i : i + 1] * out for i, out in enumerate(outs)]
    return sum(parts[1:], parts[0])


def _hgt(
    conv: Any, x: Mapping[str, Any], edges: Mapping[Any, Any], attend: Attend
) -> dict[str, Any]:
    """Dot-product attention with one softmax over the edges of all relations into a vertex."""
    heads, width = conv.heads, conv.out_channels
    split = {
        t: [v[:, i * width : (i + 1) * width] for i in range(3)] for t, v in conv.kqv_lin(x).items()
    }
    found: dict[str, list[Any]] = {name: [] for name in x}
    for relation, index in edges.items():
        source, _, target = relation
        key, _, value = split[source]
        place, count = conv.edge_types_map[relation], len(conv.edge_types)
        scale = conv.p_rel["__".join(relation)].view(heads, 1) / math.sqrt(width // heads)
        key = _by_head(key, conv.k_rel.weight[place::count], heads) * scale
        value = _by_head(value, conv.v_rel.weight[place::count], heads)
        read = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
        found[target].append(attend(_ProductAttention(heads), read, split[target][1], index))
    joined = {t: _joined(outs, heads) for t, outs in found.items() if outs}
    results: dict[str, Any] = {}
    for name, out in conv.out_lin({t: nn.functional.gelu(v) for t, v in joined.items()}).items():
        if conv.out_lin.lins[name].out_channels == _width(conv, name):
            alpha = conv.skip[name].sigmoid()
            out = alpha * out + (1 - alpha) * x[name]
        results[name] = out
    return results


def _width(conv: Any, name: str) -> int:
    return int(conv.kqv_lin.lins[name].in_channels)


def _by_head(rows: Any, weight: Any, heads: int) -> Any:
    """Rows [n, H D] times one matrix for each head, weight [H, D, D]; returns [n, H, D]."""
    return torch.einsum("nhd,hde->nhe", rows.unflatten(1, (heads, -1)), weight)


def _joined(outs: list[Any], heads: int) -> Any:
    """Combines results [m, H D + H] of several softmaxes into that of one softmax, [m, H D]."""
    sizes = torch.stack([out[:, -heads:] for out in outs], dim=1)
    largest = sizes.amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weight = torch.exp(sizes - largest)
    share = weight / weight.sum(dim=1, keepdim=True).clamp(min=1e-16)
    parts = [
        out[:, :-heads].unflatten(1, (heads, -1)) * share[:, i, :, None]
        for i, out in enumerate(outs)
    ]
    return sum(parts[1:], parts[0]).flatten(1)


HETERO_RULES: dict[type[nn.Module], HeteroRule] = {pyg.HANConv: _han, pyg.HGTConv: _hgt}

"""Rules for attentions.

The linear maps of GAT, GATv2 and TransformerConv are moved out of the convolution. Each row is then
mapped once, before it is pushed; on a block, the unchanged convolution would map the row again for
every chunk that reads it, and push wide or sparse features as dense rows. The rules apply if the
mapped rows are no wider than the input.

HANConv and HGTConv attend over several relations at once. They become row-wise work, one attention
for each relation, and a row-wise combination of the relations' results. HANConv's weights of the
relations are means over all vertices.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.utils import scatter, softmax

from gnnpipe.capture.fx_names import FEATURES, is_input
from gnnpipe.capture.markers import aggregate
from gnnpipe.capture.rules.convolutions import OtherKindError, Rule
from gnnpipe.graph.operators import EVERYONE
from gnnpipe.models.gat_attention import is_additive, is_as_shipped

_MAPS: dict[type[nn.Module], tuple[str, ...]] = {
    pyg.GATConv: ("lin",),
    pyg.GATv2Conv: ("lin_l", "lin_r"),
    pyg.TransformerConv: ("lin_query", "lin_key", "lin_value"),
}
"""Linear maps of an attention by name."""


class _Columns(nn.Module):
    """Columns first..last-1 of rows [n, F]; replaces a map that was computed before."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        """[n, last - first]."""
        return x[:, self.first : self.last]


def is_mapped(conv: nn.Module) -> bool:
    """Whether an attention's linear maps were moved out by a rule."""
    return any(
        isinstance(conv._modules.get(name), nn.Identity) for name in _MAPS.get(type(conv), ())
    )


def _check(conv: Any, x: Any, made: int) -> None:
    """Raises ``OtherKindError`` unless maps are PyG's ``Linear``, and rows [n, made] no wider."""
    maps = [conv._modules[name] for name in _MAPS[type(conv)]]
    if not all(isinstance(lin, Linear) for lin in maps):
        raise OtherKindError
    given = maps[0].in_channels
    # Features of the same width are better pushed unmapped, because they are never stale.
    if made > given or (made == given and is_input(x.node, FEATURES)):
        raise OtherKindError


def _rest(conv: Any, bias: str | None, **modules: nn.Module | None) -> Any:
    """A shallow copy of the convolution with shared weights, other modules and no ``bias``."""
    rest = copy.copy(conv)
    rest._modules = {**conv._modules, **modules}
    rest._parameters = {**conv._parameters, **({bias: None} if bias else {})}
    return rest


def _gat(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """GATConv: ``attend(x W) + x W_res + b``."""
    if not is_additive(conv):
        raise OtherKindError
    _check(conv, x, conv.heads * conv.out_channels)
    rest = _rest(conv, "bias", lin=nn.Identity(), res=None)
    return _plus(conv, make(rest, conv.lin(x), None), x)


def _gat_v2(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """GATv2Conv: ``attend(x W_l + b_l, x W_r + b_r) + x W_res + b``."""
    if not is_as_shipped(conv):
        raise OtherKindError
    _check(conv, x, conv.heads * conv.out_channels)
    rest = _rest(conv, "bias", lin_l=nn.Identity(), lin_r=nn.Identity(), res=None)
    reading = None if conv.share_weights else conv.lin_r(x)
    return _plus(conv, make(rest, conv.lin_l(x), reading), x)


def _plus(conv: Any, out: Any, x: Any) -> Any:
    """``out + x W_res + b``."""
    if conv.res is not None:
        out = out + conv.res(x)
    return out if conv.bias is None else out + conv.bias


def _transformer(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """TransformerConv: ``attend(x W_query; x W_key, x W_value)`` plus x W_skip, or a gated mean."""
    if not is_as_shipped(conv):
        raise OtherKindError
    width = conv.heads * conv.out_channels
    _check(conv, x, 2 * width)
    rest = _rest(
        conv,
        None,
        lin_query=nn.Identity(),
        lin_key=_Columns(0, width),
        lin_value=_Columns(width, 2 * width),
        lin_skip=None,
        lin_beta=None,
    )
    rest.root_weight = False
    read = torch.cat([conv.lin_key(x), conv.lin_value(x)], dim=1)
    out = make(rest, read, conv.lin_query(x))
    if not conv.root_weight:
        return out
    own = conv.lin_skip(x)
    if conv.lin_beta is None:
        return out + own
    share = conv.lin_beta(torch.cat([out, own, out - own], dim=-1)).sigmoid()
    return share * own + (1 - share) * out


ATTENTION_RULES: dict[type[nn.Module], Rule] = {
    pyg.GATConv: _gat,
    pyg.GATv2Conv: _gat_v2,
    pyg.TransformerConv: _transformer,
}
"""``make`` as in ``EDGE_RULES``; target rows None: the same as the source rows."""


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
        if conv.out_lin.lins[name].out_channels == conv.kqv_lin.lins[name].in_channels:
            alpha = conv.skip[name].sigmoid()
            out = alpha * out + (1 - alpha) * x[name]
        results[name] = out
    return results


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


def performer(attention: Any, x: Any) -> Any:
    """Performer's attention over all vertices: ``q (sum k v) / (q sum k)`` by heads, [1, N, C].

    ``q`` and ``k`` are projected, ReLU (or another kernel) + 0.001 of the product.
    """
    projection, kernel = attention.fast_attn.projection_matrix.t(), attention.fast_attn.kernel
    shape = attention.heads, attention.head_channels
    q, k, v = (
        lin(x.squeeze(0)).unflatten(-1, shape) for lin in (attention.q, attention.k, attention.v)
    )
    q, k = kernel(q @ projection) + 0.001, kernel(k @ projection) + 0.001
    out = torch.einsum("nhm,hmd->nhd", q, torch.einsum("nhm,nhd->hmd", k, v))
    out = out / (q * k.sum(0)).sum(-1, keepdim=True)
    return attention.dropout(attention.attn_out(out.flatten(1))).unsqueeze(0)

"""PyG's convolutions over a block, without messages: GEN, GINE, GAT, GATv2, Transformer, PNA, SAGE.

``without_messages`` returns the convolution with another ``propagate``, which computes the same
rows from those of the block (``neighbour_rows``). Everything else in it, such as linear maps,
self-loops, residuals and perceptrons, stays PyG's own code. GAT without
edge features has a function of its own (``gat_attention``).

Shapes: T rows read, C target rows, E edges, F columns, H heads, D columns per head.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import aggr
from torch_geometric.utils import softmax

from gnnpipe.graph.blocks import Block, Incidence
from gnnpipe.models.edge_messages import EdgeFeatures, check_totals, message_softmax, message_sum
from gnnpipe.models.gat_attention import is_unchanged
from gnnpipe.models.neighbour_rows import (
    additive_scores,
    dot_scores,
    mean_of,
    neighbour_max,
    neighbour_mean,
    neighbour_sum,
    weighted_sum,
)

Rule = Callable[[Any, Block], dict[str, Callable[..., Any]]]
"""Returns methods that replace those of a convolution on a block."""


def can_avoid_messages(
    conv: nn.Module, is_propagate: bool = False, reads_edges: bool = False
) -> bool:
    """Whether ``without_messages`` computes a convolution.

    ``is_propagate``: only its ``propagate`` is called; ``reads_edges``: with edge features.
    """
    if not isinstance(conv, pyg.MessagePassing) or not is_unchanged(conv):
        return False
    if is_propagate and type(conv) in (pyg.GATConv, pyg.GATv2Conv):
        return False  # its weights are made by ``edge_updater``
    return type(conv) in _RULES and _RULES[type(conv)][0](conv, reads_edges)


def without_messages(conv: nn.Module, block: Block) -> pyg.MessagePassing:
    """Return a convolution, which ``can_avoid_messages``, with methods that make none on a block.

    Its call raises ``NeedsMessagesError`` where only ``conv`` itself computes the same rows.
    """
    rest: pyg.MessagePassing = copy.copy(conv)
    vars(rest).update(_RULES[type(conv)][1](conv, block))
    return rest


def is_plain_linear(module: Any) -> bool:
    """Whether a module is a Linear of torch or PyG without hooks or parametrisation."""
    is_linear = type(module) in (nn.Linear, pyg.Linear)
    return is_linear and not _has_hooks(module) and not hasattr(module, "parametrizations")


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module, or one in it, has hooks."""
    return any(
        hooks
        for one in module.modules()
        for name, hooks in vars(one).items()
        if name.endswith("_hooks")
    )


def _as_many(out: Tensor, reading: Tensor | None) -> Tensor:
    """``out`` [C, ...], followed by zeros for the other rows that ``reading`` has."""
    more = 0 if reading is None else len(reading) - len(out)
    return F.pad(out, (0, 0) * (out.dim() - 1) + (0, more)) if more else out


def _fits_gen(conv: Any, reads_edges: bool) -> bool:
    kinds = [*_PLAIN, aggr.SoftmaxAggregation]
    if reads_edges:
        kinds.remove(aggr.MaxAggregation)
    is_known = type(conv.aggr_module) in kinds and not _has_hooks(conv.aggr_module)
    return is_known and _maps_plainly(conv, "lin_edge")


def _maps_plainly(conv: Any, name: str) -> bool:
    """Whether a convolution's map of edge features, if it has one, is a plain Linear."""
    lin = getattr(conv, name, None)
    return lin is None or is_plain_linear(lin)


def _gen(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """GENConv: messages ``relu(x_j + W e_ij + b) + eps``."""
    edges, module = block.incidence, conv.aggr_module

    def propagate(edge_index: Any, x: Any, edge_attr: Any = None, size: Any = None) -> Tensor:
        if edge_attr is not None:
            given = x[0], _features(edge_attr, getattr(conv, "lin_edge", None), edges), conv.eps
            return _as_many(_of_messages(module, *given, edges), x[1])
        rows, plain = x[0].relu() + conv.eps, _PLAIN.get(type(module))
        out = plain(rows, edges) if plain else _softmax_sum(module, rows, edges)
        return _as_many(out, x[1])

    return {"propagate": propagate}


def _features(edge_attr: Tensor, lin: Any, edges: Incidence) -> EdgeFeatures:
    values = _in_order(_as_rows(edge_attr), edges)
    return EdgeFeatures(values) if lin is None else EdgeFeatures(values, lin.weight, lin.bias)


def _of_messages(
    module: Any, read: Tensor, features: EdgeFeatures, eps: float, edges: Incidence
) -> Tensor:
    """Aggregated messages that depend on edge features, [C, F]; ``read`` [T, F]."""
    if type(module) is aggr.SoftmaxAggregation:
        temperature = torch.as_tensor(module.t, dtype=read.dtype, device=read.device)
        is_semi = module.semi_grad and not module.learn
        return message_softmax(read, features, eps, temperature, edges, is_semi)
    found = message_sum(read, features, eps, edges)
    return mean_of(found, edges) if type(module) is aggr.MeanAggregation else found


def _fits_gine(conv: Any, reads_edges: bool) -> bool:
    kinds = aggr.SumAggregation, aggr.MeanAggregation
    is_known = type(conv.aggr_module) in kinds and not _has_hooks(conv.aggr_module)
    return is_known and reads_edges and _maps_plainly(conv, "lin")


def _gine(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """GINEConv: messages ``relu(x_j + W e_ij + b)``."""
    edges = block.incidence

    def propagate(edge_index: Any, x: Any, edge_attr: Any, size: Any = None) -> Tensor:
        given = x[0], _features(edge_attr, conv.lin, edges), 0.0
        return _as_many(_of_messages(conv.aggr_module, *given, edges), x[1])

    return {"propagate": propagate}


def _softmax_sum(module: Any, rows: Tensor, edges: Incidence) -> Tensor:
    """``SoftmaxAggregation`` of the neighbours' rows [T, F].

    The exponents of its sums of ``exp(t x) x`` and ``exp(t x)`` are shifted by the largest ``t x``
    of a column in the block, in place of that of each vertex's neighbours.
    """
    scaled = rows * module.t
    largest = scaled.detach().amax(0, keepdim=True) if len(rows) else 0
    weights = torch.exp(scaled - largest)
    if module.semi_grad and not module.learn:
        weights = weights.detach()
    sums, totals = neighbour_sum(torch.cat([rows * weights, weights], 1), edges).chunk(2, 1)
    return sums / check_totals(totals, edges)


def _fits_attention(conv: Any, reads_edges: bool) -> bool:
    lin = conv.lin_edge
    is_plain = lin is None or (is_plain_linear(lin) and lin.bias is None)
    return conv.aggr in ("add", "sum") and not _has_hooks(conv.aggr_module) and is_plain


def _fits_transformer(conv: Any, reads_edges: bool) -> bool:
    # Products of features and heads would take as much memory as messages.
    is_wide = reads_edges and (conv.lin_edge is None or 2 * conv.edge_dim > conv.out_channels)
    return _fits_attention(conv, reads_edges) and not is_wide


def _edges_of(conv: Any, block: Block) -> Incidence:
    return block.incidence_with_loops if conv.add_self_loops else block.incidence


def _in_order(values: Tensor, edges: Incidence) -> Tensor:
    """Values of the edges, given in the order of the block, in that of ``edges``.

    Values of self-loops of rows that are only read are left out.
    """
    if edges.order is None:
        return values[: len(edges.source)]
    return values.index_select(0, edges.order)


def _as_rows(features: Tensor) -> Tensor:
    """Edge features [E] or [E, K] as [E, K]."""
    return features[:, None] if features.dim() == 1 else features


def _weights(conv: Any, scores: Tensor, edges: Incidence, count: int) -> Tensor:
    """The softmax of ``scores`` [E, H] over the edges into each target, with dropout."""
    alpha: Tensor = softmax(scores, edges.target, num_nodes=count)
    if not (conv.training and conv.dropout):
        return alpha
    return alpha * _in_order(F.dropout(torch.ones_like(alpha), conv.dropout, True), edges)


def _gat(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """GATConv with edge features: a score is ``leaky_relu(s_j + t_i + e_ij (W att))``."""
    edges = _edges_of(conv, block)

    def edge_updater(
        edge_index: Any, alpha: Any, edge_attr: Any = None, size: Any = None
    ) -> Tensor:
        read, reading = alpha
        scores = read.index_select(0, edges.source)
        if reading is not None:
            scores = scores + reading.index_select(0, edges.target)
        # As in PyG, features without a map do not count.
        if edge_attr is not None and conv.lin_edge is not None:
            weight = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
            mapped = torch.einsum("hdk,hd->kh", weight, conv.att_edge[0])
            scores = scores + _in_order(_as_rows(edge_attr), edges) @ mapped
        return _weights(conv, F.leaky_relu(scores, conv.negative_slope), edges, block.size[1])

    return {"edge_updater": edge_updater, "propagate": _weighing(edges)}


def _weighing(edges: Incidence) -> Callable[..., Any]:
    """The ``propagate`` of GATConv and GATv2Conv; ``alpha`` [E, H] in the order of ``edges``."""

    def propagate(edge_index: Any, x: Any, alpha: Any, size: Any = None) -> Tensor:
        return _as_many(weighted_sum(x[0], alpha, edges), x[1])

    return propagate


def _gat_v2(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """GATv2Conv: a score is ``att leaky_relu(x_j + x_i + W e_ij)``."""
    edges = _edges_of(conv, block)

    def edge_updater(edge_index: Any, x: Any, edge_attr: Any = None, size: Any = None) -> Tensor:
        weight = None
        if edge_attr is not None:
            weight, edge_attr = conv.lin_edge.weight, _in_order(_as_rows(edge_attr), edges)
        reading = x[1][: block.size[1]]
        given = x[0], reading, edge_attr, weight, conv.att[0], edges, conv.negative_slope
        return _weights(conv, additive_scores(*given), edges, len(reading))

    return {"edge_updater": edge_updater, "propagate": _weighing(edges)}


def _transformer(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """TransformerConv: the map of edge features is taken out of both sums."""
    edges = block.incidence

    def propagate(
        edge_index: Any, query: Any, key: Any, value: Any, edge_attr: Any = None, size: Any = None
    ) -> Tensor:
        reading = query[: block.size[1]]
        scores = dot_scores(key, reading, edges)
        weight, features = None, None
        if conv.lin_edge is not None:
            features = _in_order(_as_rows(edge_attr), edges)
            weight = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
            mapped = torch.einsum("chd,hdk->chk", reading, weight).index_select(0, edges.target)
            scores = scores + (mapped * features[:, None]).sum(-1)
        alpha = _weights(conv, scores / math.sqrt(conv.out_channels), edges, len(reading))
        out = weighted_sum(value, alpha, edges)
        if weight is None or features is None:
            return _as_many(out, query)
        of_edges = (alpha[:, :, None] * features[:, None]).flatten(1)
        sums = torch.segment_reduce(of_edges, "sum", offsets=edges.offsets.long())
        sums = sums.view(len(reading), conv.heads, -1)
        return _as_many(out + torch.einsum("chk,hdk->chd", sums, weight), query)

    return {"propagate": propagate}


def _fits_pna(conv: Any, reads_edges: bool) -> bool:
    scaled = conv.aggr_module
    if reads_edges or conv.edge_dim is not None or _has_hooks(scaled):
        return False
    return (
        type(scaled) is aggr.DegreeScalerAggregation
        and type(scaled.aggr) is aggr.MultiAggregation
        and scaled.aggr.mode == "cat"
        and all(type(one) in _OF_SHIFTED for one in scaled.aggr.aggrs)
        and all(len(one) == 1 and is_plain_linear(one[0]) for one in conv.pre_nns)
        and not _has_hooks(conv.pre_nns)
    )


def _pna(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """PNAConv: a message is ``u_i + v_j``, a linear map of both ends' rows.

    So a mean, minimum or maximum is u_i plus that of v_j, and a variance is that of v_j.
    """

    def propagate(edge_index: Any, x: Any, edge_attr: Any = None, size: Any = None) -> Tensor:
        count, edges = block.size[1], block.incidence
        read, own = x if isinstance(x, tuple) else (x, x)
        maps, width = [one[0] for one in conv.pre_nns], conv.F_in
        v = torch.cat([read[:, i] @ m.weight[:, width:].t() for i, m in enumerate(maps)], 1)
        of_own = [(own[:count, i], m.weight[:, :width], m.bias) for i, m in enumerate(maps)]
        u = torch.cat([F.linear(*given) for given in of_own], 1)
        u = u * (edges.offsets.diff() > 0)[:, None]
        found = [
            _OF_SHIFTED[type(one)](one, v, u, edges).view(count, len(maps), -1)
            for one in conv.aggr_module.aggr.aggrs
        ]
        # PyG's own scaling by degree, of what has been aggregated here.
        scaled = copy.copy(conv.aggr_module)
        scaled._modules = {}
        joined = torch.cat(found, -1)
        scaled.aggr = lambda *given: joined
        return _as_many(scaled.forward(joined, edges.target, None, count, 0), own)

    return {"propagate": propagate}


def _variance(module: Any, read: Tensor, edges: Incidence) -> Tensor:
    mean = neighbour_mean(read, edges)
    square = read * read
    return neighbour_mean(square.detach() if module.semi_grad else square, edges) - mean * mean


def _deviation(module: Any, read: Tensor, edges: Incidence) -> Tensor:
    """Standard deviations of PyG's ``StdAggregation`` [C, F]."""
    found = _variance(module.var_aggr, read, edges).clamp(min=1e-5).sqrt()
    return found.masked_fill(found <= math.sqrt(1e-5), 0.0)


_OF_SHIFTED: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    aggr.MeanAggregation: lambda m, v, u, edges: u + neighbour_mean(v, edges),
    aggr.MaxAggregation: lambda m, v, u, edges: u + neighbour_max(v, edges),
    aggr.MinAggregation: lambda m, v, u, edges: u - neighbour_max(-v, edges),
    aggr.VarAggregation: lambda m, v, u, edges: _variance(m, v, edges),
    aggr.StdAggregation: lambda m, v, u, edges: _deviation(m, v, edges),
}
"""Aggregations of ``u_i + v_j`` from v [T, F] and u [C, F], which is 0 without a neighbour."""

_PLAIN: Mapping[type[nn.Module], Callable[[Tensor, Incidence], Tensor]] = {
    aggr.SumAggregation: neighbour_sum,
    aggr.MeanAggregation: neighbour_mean,
    aggr.MaxAggregation: neighbour_max,
}


def _fits_sage(conv: Any, reads_edges: bool) -> bool:
    is_max = type(conv.aggr_module) is aggr.MaxAggregation
    return is_max and not _has_hooks(conv.aggr_module) and not reads_edges


def _sage(conv: Any, block: Block) -> dict[str, Callable[..., Any]]:
    """SAGEConv with maxima."""

    def propagate(edge_index: Any, x: Any, size: Any = None) -> Tensor:
        return _as_many(neighbour_max(x[0], block.incidence), x[1])

    return {"propagate": propagate}


_RULES: Mapping[type[nn.Module], tuple[Callable[[Any, bool], bool], Rule]] = {
    pyg.GENConv: (_fits_gen, _gen),
    pyg.GINEConv: (_fits_gine, _gine),
    pyg.GATConv: (_fits_attention, _gat),
    pyg.GATv2Conv: (_fits_attention, _gat_v2),
    pyg.TransformerConv: (_fits_transformer, _transformer),
    pyg.PNAConv: (_fits_pna, _pna),
    pyg.SAGEConv: (_fits_sage, _sage),
}
"""Whether an instance's settings fit, and its rule."""

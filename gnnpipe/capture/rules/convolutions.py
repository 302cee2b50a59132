"""Rules for convolutions with fixed edge weights, one short function each.

A rule is the convolution's ``forward`` with ``aggregate`` instead of ``propagate``. It runs while
the model is traced, so that its calls are recorded and use the convolution's own weights. A rule
that returns None or raises ``OtherKindError`` does not support the instance's settings; the
convolution then runs unchanged on blocks.

If A (x W) = (A x) W, the rule aggregates the narrower of x W and x: aggregated rows are stored and
sent. Where they may be stale, ``rewrite.aggregate_before_maps`` puts W behind A again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.models.linkx import SparseLinear

from gnnpipe.capture.fx_names import FEATURES, is_input
from gnnpipe.capture.markers import aggregate, of_vertices
from gnnpipe.capture.stage.row_work import mixed_map
from gnnpipe.capture.stage.step_calls import HOOKS
from gnnpipe.graph.graph import EDGE_DATA
from gnnpipe.graph.operators import RELATION
from gnnpipe.models.without_messages import is_plain_linear

Rule = Callable[..., Any]
"""Maps (convolution, its arguments by name without edges) to its result. ``edge_weight`` is None or
the recording's input of that name."""


class OtherKindError(Exception):
    """The rule does not support this instance, which then runs unchanged."""


TAKES_PAIRS = (pyg.SAGEConv, pyg.GraphConv, pyg.GINConv)
"""Convolutions whose rule takes a pair (source rows, target rows)."""


def _pair(x: Any) -> tuple[Any, Any]:
    """(source rows, target rows); the same unless x is a pair."""
    source, target = x if isinstance(x, tuple | list) else (x, x)
    return source, target


def _plus_bias(conv: Any, out: Any) -> Any:
    return out if conv.bias is None else out + conv.bias


def _gcn(conv: Any, edge_weight: Any) -> Callable[[Any], Any]:
    """The product with the matrix of ``gcn_norm``, or with A if the convolution does not normalise.

    As in PyG, 'improved' has no effect without edge weights; TAGConv and LGConv add no loops.
    """
    if not getattr(conv, "normalize", True):
        structure = "sum"
    elif not getattr(conv, "add_self_loops", False):
        structure = "gcn-loopless"
    else:
        is_improved = getattr(conv, "improved", False) and edge_weight is not None
        structure = "gcn-improved" if is_improved else "gcn"
    return partial(aggregate, structure=structure, edge_weight=edge_weight)


def _reduction_name(conv: Any) -> str:
    """'sum' or 'mean'; raises ``OtherKindError`` for other reductions."""
    names = {"mean": "mean", "add": "sum", "sum": "sum"}
    if not isinstance(conv.aggr, str) or conv.aggr not in names:
        raise OtherKindError
    return names[conv.aggr]


def _reduction(conv: Any, edge_weight: Any = None) -> Callable[[Any], Any]:
    """The sum or mean over neighbours, as the convolution reduces."""
    return partial(aggregate, structure=_reduction_name(conv), edge_weight=edge_weight)


def _linear_of_aggregate(lin: Any, x: Any, aggregated: Callable[[Any], Any]) -> Any:
    """``lin(A x)``, or ``A (x W) + b`` if x W is narrower than x."""
    if lin.in_channels <= lin.out_channels:
        return lin(aggregated(x))
    return _plus_bias(lin, aggregated(nn.functional.linear(x, lin.weight)))


def gcn(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``A (x W) + b``."""
    return _plus_bias(conv, _linear_of_aggregate(conv.lin, x, _gcn(conv, edge_weight)))


def sage(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``A x W_l + b + x W_r``; ``edge_weight``: values of ``adj_t``."""
    aggregated = _reduction(conv, edge_weight)
    x, own = _pair(x)
    if conv.project:
        x = conv.lin(x).relu()
    out = _linear_of_aggregate(conv.lin_l, x, aggregated)
    if conv.root_weight and own is not None:
        out = out + conv.lin_r(own)
    return nn.functional.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def graph_conv(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``A x W + b + x W_root``."""
    x, own = _pair(x)
    out = _linear_of_aggregate(conv.lin_rel, x, _reduction(conv, edge_weight))
    return out if own is None else out + conv.lin_root(own)


def gin(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``nn(A x + (1 + eps) x)``; ``edge_weight``: values of ``adj_t``.

    If nn begins with a Linear W to fewer columns, ``A (x W) + (1 + eps) x W`` takes its place.
    """
    x, own = _pair(x)
    aggregated = _reduction(conv, edge_weight)
    modules: list[Any] = [*conv.nn] if type(conv.nn) is nn.Sequential and conv.nn else [conv.nn]
    lin, *rest = modules
    has_hooks = isinstance(conv.nn, nn.Module) and any(getattr(conv.nn, h) for h in HOOKS)
    if has_hooks or not _is_narrowing(lin, x):
        out = aggregated(x)
        return conv.nn(out if own is None else out + (1 + conv.eps) * own)
    rows = nn.functional.linear(x, lin.weight)
    out = aggregated(rows)
    if own is not None:
        mine = rows if own is x else nn.functional.linear(own, lin.weight)
        out = out + (1 + conv.eps) * mine
    out = _plus_bias(lin, out)
    for module in rest:
        out = module(out)
    return out


def _is_narrowing(module: Any, x: Any) -> bool:
    """Whether a module is a Linear to fewer columns, and x no dense features.

    Dense features are better aggregated once before training.
    """
    if not is_plain_linear(module):
        return False
    width_out, width_in = module._parameters["weight"].shape
    return width_out < width_in and not x.tracer.is_dense_features(x.node)


def gcn2(conv: Any, x: Any, x_0: Any, edge_weight: Any = None) -> Any:
    """GCNII: ``(1 - beta) m + beta m W`` with ``m = (1 - alpha) A x + alpha x_0``."""

    def mapped(m: Any, weight: Any) -> Any:
        return torch.lerp(m, nn.functional.linear(m, weight.t()), conv.beta)

    m = _gcn(conv, edge_weight)(x)
    if conv.weight2 is None:
        return mixed_map(m, x_0, conv.weight1, shares=(conv.alpha, conv.beta))
    return mapped(m * (1 - conv.alpha), conv.weight1) + mapped(conv.alpha * x_0, conv.weight2)


def _check_cached(conv: Any, x: Any) -> None:
    """Raises ``OtherKindError`` if the convolution caches the aggregate of other rows than x."""
    if conv.cached and not is_input(x.node, FEATURES):
        raise OtherKindError


def sgc(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``A^K x W + b``: K aggregations."""
    aggregated = _gcn(conv, edge_weight)
    _check_cached(conv, x)
    for _ in range(conv.K - 1):
        x = aggregated(x)
    return _linear_of_aggregate(conv.lin, x, aggregated) if conv.K else conv.lin(x)


def ssgc(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``(alpha x + (1 - alpha) / K sum A^k x) W + b``."""
    aggregated = _gcn(conv, edge_weight)
    _check_cached(conv, x)
    h = x * conv.alpha
    for _ in range(conv.K):
        x = aggregated(x)
        h = h + (1 - conv.alpha) / conv.K * x
    return conv.lin(h)


def appnp(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """K times ``x = (1 - alpha) A x + alpha h``."""
    if conv.dropout > 0 or conv.cached:
        return None
    aggregated, h = _gcn(conv, edge_weight), x
    for _ in range(conv.K):
        x = aggregated(x) * (1 - conv.alpha) + conv.alpha * h
    return x


def tag(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``sum A^k x W_k + b``, A without loops."""
    aggregated, out = _gcn(conv, edge_weight), conv.lins[0](x)
    for lin in list(conv.lins)[1:]:
        x = aggregated(x)
        out = out + lin(x)
    return _plus_bias(conv, out)


def mix_hop(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """Concatenation of ``A^p x W_p`` over p in ``powers``."""
    aggregated, powers = _gcn(conv, edge_weight), [int(p) for p in conv.powers]
    outs = {0: conv.lins[0](x)} if 0 in powers else {}
    for j in range(1, max(powers) + 1):
        x = aggregated(x)
        if j in powers:
            outs[j] = conv.lins[j](x)
    return _plus_bias(conv, torch.cat([outs[p] for p in powers], dim=-1))


def le(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``sum (x_j W_1 + b - x_i W_2) + x_i W_3``: A (x W_1 + b) - degree * (x W_2) + x W_3."""
    total = partial(aggregate, structure="sum", edge_weight=edge_weight)
    degree = total(torch.ones_like(x[:, :1]))
    return total(conv.lin1(x)) - degree * conv.lin2(x) + conv.lin3(x)


def cluster_gcn(conv: Any, x: Any) -> Any:
    """``(D^-1 (A + I) + lambda diag) x W_out + x W_root``."""
    if not conv.add_self_loops or conv.diag_lambda != 0.0:
        return None
    return conv.lin_out(aggregate(x, structure="mean-looped")) + conv.lin_root(x)


def cheb(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``sum T_k(L) x W_k + b``; L is -A here, as PyG has it for lambda_max = 2."""
    if conv.normalization != "sym":
        return None
    before, now = x, x
    out = conv.lins[0](x)
    for k, lin in enumerate(list(conv.lins)[1:]):
        spread = -aggregate(now, structure="gcn-outgoing", edge_weight=edge_weight)
        before, now = now, spread if k == 0 else 2.0 * spread - before
        out = out + lin(now)
    return _plus_bias(conv, out)


def simple(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``A x``; with combine_root, ``A x + x`` or ``[x, A x]``."""
    if conv.combine_root == "self_loop":
        return None
    out = _reduction(conv, edge_weight)(x)
    if conv.combine_root is None:
        return out
    return out + x if conv.combine_root == "sum" else torch.cat([x, out], dim=-1)


def light_gcn(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``A x``, A without loops."""
    return _gcn(conv, edge_weight)(x)


def sparse_linear(conv: Any, edge_weight: Any = None) -> Any:
    """``A W + b``: LINKX's map of the adjacency matrix; W has one row for each vertex."""
    rows = of_vertices(conv.weight, vertex_type="")
    return _plus_bias(conv, aggregate(rows, structure="sum", edge_weight=edge_weight))


def rgcn(conv: Any, x: Any, edge_type: Any = None) -> Any:
    """``sum_r A_r (x W_r) + x W_root + b``, if all x W_r are at most twice as wide as x."""
    structure, count = _reduction_name(conv), conv.num_relations
    pushed = count * conv.out_channels
    is_other = x.tracer.relation or edge_type is None or conv.num_blocks is not None
    if is_other or pushed > 2 * conv.in_channels_l:
        return None
    weight = conv.weight
    if conv.num_bases is not None:
        weight = (conv.comp @ weight.view(conv.num_bases, -1)).view(
            count, conv.in_channels_l, conv.out_channels
        )
    out: Any = None
    for r in range(count):
        # The product comes first because x may be sparse features.
        rows = nn.functional.linear(x, weight[r].t())
        part = aggregate(rows, structure=f"{structure}{RELATION}{r}")
        out = part if out is None else out + part
    if conv.root is not None:
        out = out + nn.functional.linear(x, conv.root.t())
    return _plus_bias(conv, out)


def gated_graph(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """``x = GRU(A x W_i, x)`` for each layer i."""
    aggregated = _reduction(conv, edge_weight)
    # Pads x with zeros to the width of the states.
    x = torch.cat([x, x.new_zeros(x.size(0), conv.out_channels - x.size(-1))], dim=1)
    for i in range(conv.num_layers):
        x = conv.rnn(aggregated(x @ conv.weight[i]), x)
    return x


def arma(conv: Any, x: Any, edge_weight: Any = None) -> Any:
    """Mean over stacks k of ``h_k = act(A h_k W_k + dropout(x) V_k + b_k)``, A without loops."""
    aggregated = partial(aggregate, structure="gcn-loopless", edge_weight=edge_weight)
    stacks = [x] * conv.num_stacks
    for t in range(conv.num_layers):
        place = 0 if conv.shared_weights else t
        weight = conv.weight[0 if conv.shared_weights else t - 1] if t else conv.init_weight
        root = nn.functional.dropout(x, p=conv.dropout, training=conv.training)
        for k, h in enumerate(stacks):
            h = aggregated(nn.functional.linear(h, weight[k].t()))
            h = h + nn.functional.linear(root, conv.root_weight[place][k].t())
            h = h if conv.bias is None else h + conv.bias[place][k]
            stacks[k] = h if conv.act is None else conv.act(h)
    return sum(stacks[1:], stacks[0]) / conv.num_stacks


def eg(conv: Any, x: Any) -> Any:
    """For each vertex, a combination of bases ``A (x W_b)`` with weights ``x W_c + b_c``."""
    structures = {"symnorm": "gcn" if conv.add_self_loops else "gcn-loopless"}
    structures["mean"] = "mean-looped" if conv.add_self_loops else "mean"
    if not set(conv.aggregators) <= structures.keys():
        raise OtherKindError
    bases = conv.bases_lin(x)
    found = [aggregate(bases, structure=structures[name]) for name in conv.aggregators]
    aggregated = torch.cat(found, dim=1)
    count, width = conv.num_bases * len(found), conv.out_channels // conv.num_heads
    weights = conv.comb_lin(x).view(-1, conv.num_heads, count)
    out = torch.matmul(weights, aggregated.view(-1, count, width)).flatten(1)
    return _plus_bias(conv, out)


def reversible(module: Any, x: Any, edge_index: Any, *args: Any) -> Any:
    """RevGNN's block: ``y_i = f_i(y_(i-1)) + x_i`` for groups x_i of columns, y_0 = sum of x_2 on.

    The block is an ordinary one here: its input is kept until backward. Further arguments are split
    as x is, for example a mask [N, F], but for edge data.
    """
    groups = len(module.convs)

    def split(value: Any) -> Any:
        is_whole = not isinstance(value, fx.Proxy) or is_input(value.node, *EDGE_DATA)
        return [value] * groups if is_whole else torch.chunk(value, groups, dim=module.split_dim)

    parts, given = split(x), [split(arg) for arg in args]
    y, found = sum((parts[i] for i in range(2, groups)), parts[1]), []
    for i, conv in enumerate(module.convs):
        y = parts[i] + conv(y, edge_index, *(value[i] for value in given))
        found.append(y)
    return torch.cat(found, dim=module.split_dim)


RULES: dict[type[nn.Module], Rule] = {
    pyg.GCNConv: gcn,
    pyg.SAGEConv: sage,
    pyg.GraphConv: graph_conv,
    pyg.GINConv: gin,
    pyg.GCN2Conv: gcn2,
    pyg.SGConv: sgc,
    pyg.SSGConv: ssgc,
    pyg.APPNP: appnp,
    pyg.TAGConv: tag,
    pyg.MixHopConv: mix_hop,
    pyg.LEConv: le,
    pyg.ClusterGCNConv: cluster_gcn,
    pyg.ChebConv: cheb,
    pyg.SimpleConv: simple,
    pyg.LGConv: light_gcn,
    SparseLinear: sparse_linear,
    pyg.RGCNConv: rgcn,
    pyg.FastRGCNConv: rgcn,
    pyg.GatedGraphConv: gated_graph,
    pyg.ARMAConv: arma,
    pyg.EGConv: eg,
}

"""Additive attention (GAT) over a block, without a message for any edge.

PyG gathers the row of every edge's source, weighs and adds them, and keeps all of it until
backward. Here an edge has one number a head, and all sums of rows are weighted bags, which read a
row and add it at once (docs/adr/0024).

Backward needs no product of two rows for an edge either. With p_ij = exp(e_ij - m_i) of the score
e_ij = leaky_relu(s_j + t_i), out_i = sum_j p_ij x_j / z_i and its gradient g_i, the gradient of
e_ij is p_ij / z_i (<x_j, g_i> - <out_i, g_i>). Times the leaky ReLU's slope it is summed over the
edges into i for t_i, and over those out of j for s_j. Both are linear in x_j and in g_i, so that
sums of rows come first, and then one product of two rows for a vertex.

T rows that are read, C that read, E edges, H heads, D columns a head.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, MessagePassing

from gnnpipe.graph.blocks import Block, Incidence
from gnnpipe.ops.spmm import bag_sums

__all__ = ["additive_attention", "attend", "is_additive", "is_as_shipped"]


class _AdditiveAttention(torch.autograd.Function):
    """See ``additive_attention``. Head by head: what belongs to edges is kept as [H, E]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor | None,
        reads: Tensor,
        reading: Tensor,
        keep: Tensor | None,
        edges: Incidence,
        slope: float,
    ) -> Tensor:
        count, heads, width = len(edges.offsets) - 1, x.shape[1], x.shape[2]
        out, total = x.new_empty(count, heads, width), x.new_empty(count, heads)
        signed = x.new_empty(heads, len(edges.source))
        ones = x.new_ones(len(x), 1)
        for h in range(heads):
            rows = torch.cat([x[:, h], ones], dim=1)
            mine = rows[:count, :width] if own is None else own[:, h]
            score = (rows[:, :width] @ reads[h]).index_select(0, edges.source)
            score += (mine @ reading[h]).index_select(0, edges.target)
            F.leaky_relu_(score, slope)
            largest = score.new_full((count,), -torch.inf)
            largest.scatter_reduce_(0, edges.target, score, "amax")
            weight = (score - largest.index_select(0, edges.target)).exp_()
            kept = None if keep is None else keep[h]
            sums = _bags(rows, edges.offsets, edges.source, weight, kept)
            # Rows without an edge are zero, and so are their sums.
            total[:, h] = sums[:, width].clamp_(min=1e-16)
            torch.div(sums[:, :width], sums[:, width:], out=out[:, h])
            # One number tells the weight and, by its sign, the leaky ReLU's slope, which at 0 is
            # that of what is below.
            torch.where(score > 0, weight, -weight, out=signed[h])
        ctx.save_for_backward(x, own, reads, reading, signed, keep, total, out)
        ctx.edges, ctx.slope = edges, slope
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, own, reads, reading, signed, keep, total, out = ctx.saved_tensors
        edges: Incidence = ctx.edges
        count, heads, width = grad.shape
        to_x, to_own = torch.empty_like(x), None if own is None else torch.empty_like(own)
        to_reads, to_reading = torch.empty_like(reads), torch.empty_like(reading)
        ones = x.new_ones(len(x), 1)
        for h in range(heads):
            rows, kept = torch.cat([x[:, h], ones], dim=1), None if keep is None else keep[h]
            scaled = grad[:, h] / total[:, h, None]
            common = (out[:, h] * scaled).sum(-1, keepdim=True)
            # With a last column such that a product of two whole rows is all there is to sum.
            scaled = torch.cat([scaled, -common], dim=1)
            sloped = F.leaky_relu(signed[h], -ctx.slope)
            sums = _bags(rows, edges.offsets, edges.source, sloped, kept)
            to_target = (sums * scaled).sum(-1)
            # And the other way: over the edges out of a row that is read.
            back = signed[h].index_select(0, edges.by_source)
            kept = None if kept is None else kept.index_select(0, edges.by_source)
            into, ends = edges.targets_by_source, edges.offsets_by_source
            sums = _bags(scaled, ends, into, F.leaky_relu(back, -ctx.slope), kept)
            to_source = (sums * rows).sum(-1)
            weight = back.abs_() if kept is None else back.abs_().mul_(kept)
            found = bag_sums(ends, into, weight, scaled)[:, :width]
            found.addr_(to_source, reads[h])
            to_reads[h] = rows[:, :width].t() @ to_source
            if own is None or to_own is None:
                to_reading[h] = rows[:count, :width].t() @ to_target
                found[:count].addr_(to_target, reading[h])
            else:
                to_reading[h] = own[:, h].t() @ to_target
                torch.outer(to_target, reading[h], out=to_own[:, h])
            to_x[:, h] = found
        return to_x, to_own, to_reads, to_reading, None, None, None


def _bags(
    rows: Tensor, offsets: Tensor, index: Tensor, weight: Tensor, keep: Tensor | None
) -> Tensor:
    """Sums of ``rows`` [R, D + 1] weighed by ``weight`` [E], over the bags told: [B, D + 1].

    ``offsets`` [B + 1] and ``index`` [E]. What dropout keeps, ``keep`` [E], is not of the last
    column.
    """
    if keep is None:
        return bag_sums(offsets, index, weight, rows)
    sums = bag_sums(offsets, index, weight * keep, rows)
    sums[:, -1:] = bag_sums(offsets, index, weight, rows[:, -1:].contiguous())
    return sums


def additive_attention(
    x: Tensor,
    own: Tensor | None,
    reads: Tensor,
    reading: Tensor,
    edges: Incidence,
    slope: float,
    keep: Tensor | None = None,
) -> Tensor:
    """Rows [C, H, D]: of every vertex the mean of its neighbours' ``x`` [T, H, D], by head.

    Weighed by the softmax, over the edges into it, of ``leaky_relu(s_j + t_i)`` with that negative
    ``slope``, where s = <x, reads> and t = <own, reading> by head; ``reads`` and ``reading``
    [H, D]. ``own`` [C, H, D]: none if they are the first rows of x. Weights are multiplied by
    ``keep`` [H, E], what dropout has left of ones. Rows without an edge are zero. Velickovic et
    al., arXiv 1710.10903, section 2.1.
    """
    found: Tensor = _AdditiveAttention.apply(  # type: ignore[no-untyped-call]
        x, own, reads, reading, keep, edges, slope
    )
    return found


def is_as_shipped(conv: MessagePassing) -> bool:
    """It adds messages up from source to target, and nobody watches or changes that."""
    return (
        not any(hooks for name, hooks in vars(conv).items() if name.endswith("_hooks"))
        and not conv.explain
        and not {"forward", "message", "edge_update", "propagate"} & vars(conv).keys()
        and conv.flow == "source_to_target"
        and conv.aggr in ("add", "sum")
    )


def is_additive(conv: nn.Module) -> TypeGuard[GATConv]:
    """A GATConv as PyG ships it, whose scores know nothing of the edges but their ends."""
    return (
        isinstance(conv, GATConv)
        and type(conv) is GATConv
        and is_as_shipped(conv)
        and conv.negative_slope >= 0
        and conv.edge_dim is None
    )


def attend(conv: GATConv, x: Tensor, own: Tensor | None, block: Block) -> Tensor:
    """What ``conv((x, own), block.edge_index, size=block.size)`` gives, without messages.

    ``x`` [T, F], rows that are read, and ``own`` [C, F], those that read: none if they are the
    first of x. For a convolution that ``is_additive``; step by step what its ``forward`` does.
    The result is not to be changed in place, for backward may need it.
    """
    shape = (-1, conv.heads, conv.out_channels)
    if conv.lin is not None:
        rows = conv.lin(x).view(shape)
        reader = None if own is None else conv.lin(own).view(shape)
    else:
        rows = conv.lin_src(x).view(shape)
        reader = conv.lin_dst(x[: block.size[1]] if own is None else own).view(shape)
    edges = block.incidence_with_loops if conv.add_self_loops else block.incidence
    keep = None
    if conv.training and conv.dropout:
        loops = min(block.size) if conv.add_self_loops else 0
        ones = rows.new_ones(block.edge_index.shape[1] + loops, conv.heads)
        keep = F.dropout(ones, conv.dropout, training=True).t()
        keep = keep if edges.order is None else keep.index_select(1, edges.order)
    out = additive_attention(
        rows, reader, conv.att_src[0], conv.att_dst[0], edges, conv.negative_slope, keep
    )
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(x[: block.size[1]] if own is None else own)
    return out if conv.bias is None else out + conv.bias

"""Additive attention (GAT) over a block, without materialising messages.

PyG gathers the source row of every edge and keeps the gathered rows until backward. Here an edge
has one number per head, and weighted sums of rows are embedding bags (docs/adr/0024).

Forward, for a target i and its sources j:

    ``e_ij = leaky_relu(s_j + t_i)``,  ``p_ij = exp(e_ij - max_j e_ij)``,  ``z_i = sum_j p_ij``
    ``out_i = sum_j p_ij x_j / z_i``

Backward, with g_i the gradient of out_i: the gradient of e_ij is
``p_ij / z_i (<x_j, g_i> - <out_i, g_i>)``. Times the slope of the leaky ReLU it is summed over the
edges into i for t_i, and over the edges out of j for s_j. Both sums are linear in x_j and g_i, so
rows are summed first, followed by one inner product per vertex instead of one per edge.

Shapes: T rows read, C target rows, E edges, H heads, D columns per head.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, MessagePassing

from gnnpipe.graph.blocks import Block, Incidence
from gnnpipe.ops.spmm import bag_sums


class _AdditiveAttention(torch.autograd.Function):
    """Softmax-weighted mean of the neighbours' rows, per head (arXiv 1710.10903, section 2.1).

    Computed head by head; values of edges are kept as [H, E].

    Args:
        x: [T, H, D], rows read.
        x_dst: [C, H, D], rows of the targets; ``None``: the first C rows of x.
        att_src: [H, D], attention vector, ``s_j = <x_j, att_src>``.
        att_dst: [H, D], attention vector, ``t_i = <x_dst_i, att_dst>``.
        keep: [H, E], dropout factors of the softmax weights; ``None``: no dropout.
        edges: The edges by target and by source.
        slope: Negative slope of the leaky ReLU.

    Returns:
        [C, H, D]; zero for a target without an edge.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_dst: Tensor | None,
        att_src: Tensor,
        att_dst: Tensor,
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
            rows_dst = rows[:count, :width] if x_dst is None else x_dst[:, h]
            score = (rows[:, :width] @ att_src[h]).index_select(0, edges.source)
            score += (rows_dst @ att_dst[h]).index_select(0, edges.target)
            F.leaky_relu_(score, slope)
            largest = score.new_full((count,), -torch.inf)
            largest.scatter_reduce_(0, edges.target, score, "amax")
            weight = (score - largest.index_select(0, edges.target)).exp_()
            kept = None if keep is None else keep[h]
            sums = _bags(rows, edges.offsets, edges.source, weight, kept)
            # A target without an edge has sum 0, and out = 0 / 1e-16 = 0.
            total[:, h] = sums[:, width].clamp_(min=1e-16)
            torch.div(sums[:, :width], sums[:, width:], out=out[:, h])
            # The sign encodes the slope of the leaky ReLU, which at 0 is the negative one.
            torch.where(score > 0, weight, -weight, out=signed[h])
        ctx.save_for_backward(x, x_dst, att_src, att_dst, signed, keep, total, out)
        ctx.edges, ctx.slope = edges, slope
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_dst, att_src, att_dst, signed, keep, total, out = ctx.saved_tensors
        edges: Incidence = ctx.edges
        count, heads, width = grad.shape
        grad_x, grad_x_dst = torch.empty_like(x), None if x_dst is None else torch.empty_like(x_dst)
        grad_att_src, grad_att_dst = torch.empty_like(att_src), torch.empty_like(att_dst)
        ones = x.new_ones(len(x), 1)
        for h in range(heads):
            rows, kept = torch.cat([x[:, h], ones], dim=1), None if keep is None else keep[h]
            scaled = grad[:, h] / total[:, h, None]
            common = (out[:, h] * scaled).sum(-1, keepdim=True)
            # With -common as last column, one inner product of extended rows gives both terms.
            scaled = torch.cat([scaled, -common], dim=1)
            sloped = F.leaky_relu(signed[h], -ctx.slope)
            sums = _bags(rows, edges.offsets, edges.source, sloped, kept)
            grad_t = (sums * scaled).sum(-1)
            # The same over the edges out of each source.
            back = signed[h].index_select(0, edges.by_source)
            kept = None if kept is None else kept.index_select(0, edges.by_source)
            into, ends = edges.targets_by_source, edges.offsets_by_source
            sums = _bags(scaled, ends, into, F.leaky_relu(back, -ctx.slope), kept)
            grad_s = (sums * rows).sum(-1)
            weight = back.abs_() if kept is None else back.abs_().mul_(kept)
            found = bag_sums(ends, into, weight, scaled)[:, :width]
            found.addr_(grad_s, att_src[h])
            grad_att_src[h] = rows[:, :width].t() @ grad_s
            if x_dst is None or grad_x_dst is None:
                grad_att_dst[h] = rows[:count, :width].t() @ grad_t
                found[:count].addr_(grad_t, att_dst[h])
            else:
                grad_att_dst[h] = x_dst[:, h].t() @ grad_t
                torch.outer(grad_t, att_dst[h], out=grad_x_dst[:, h])
            grad_x[:, h] = found
        return grad_x, grad_x_dst, grad_att_src, grad_att_dst, None, None, None


def _bags(
    rows: Tensor, offsets: Tensor, index: Tensor, weight: Tensor, keep: Tensor | None
) -> Tensor:
    """Sums ``rows`` [R, D + 1] with ``weight`` [E] over the bags of ``offsets``, [B, D + 1].

    ``offsets`` [B + 1], ``index`` [E]. The dropout factors ``keep`` [E] do not apply to the last
    column.
    """
    if keep is None:
        return bag_sums(offsets, index, weight, rows)
    sums = bag_sums(offsets, index, weight * keep, rows)
    sums[:, -1:] = bag_sums(offsets, index, weight, rows[:, -1:].contiguous())
    return sums


def is_unchanged(conv: MessagePassing) -> bool:
    """Whether a convolution sends from source to target, without hooks or overrides."""
    replaced = {"forward", "message", "edge_update", "edge_updater", "propagate", "aggregate"}
    replaced |= {"update", "message_and_aggregate"}
    return (
        not any(hooks for name, hooks in vars(conv).items() if name.endswith("_hooks"))
        and not conv.explain
        and not replaced & vars(conv).keys()
        and conv.flow == "source_to_target"
        and conv.decomposed_layers == 1
    )


def is_as_shipped(conv: MessagePassing) -> bool:
    """Whether a convolution is unchanged and sums its messages."""
    return is_unchanged(conv) and conv.aggr in ("add", "sum")


def is_additive(conv: nn.Module) -> TypeGuard[GATConv]:
    """Whether ``attend`` computes this convolution: an unchanged GATConv without edge features."""
    return (
        isinstance(conv, GATConv)
        and type(conv) is GATConv
        and is_as_shipped(conv)
        and conv.negative_slope >= 0
        and conv.edge_dim is None
    )


def attend(conv: GATConv, x: Tensor, x_dst: Tensor | None, block: Block) -> Tensor:
    """Computes ``conv((x, x_dst), block.edge_index, size=block.size)`` without messages.

    ``conv`` must be ``is_additive``. ``x`` [T, F]: rows read; ``x_dst`` [C, F]: target rows,
    or ``None`` for the first C rows of x. Backward may read the result: do not change the result in
    place.
    """
    shape = (-1, conv.heads, conv.out_channels)
    if conv.lin is not None:
        rows = conv.lin(x).view(shape)
        rows_dst = None if x_dst is None else conv.lin(x_dst).view(shape)
    else:
        rows = conv.lin_src(x).view(shape)
        rows_dst = conv.lin_dst(x[: block.size[1]] if x_dst is None else x_dst).view(shape)
    edges = block.incidence_with_loops if conv.add_self_loops else block.incidence
    keep = None
    if conv.training and conv.dropout:
        ones = rows.new_ones(len(edges.source), conv.heads)
        keep = F.dropout(ones, conv.dropout, training=True).t()
        keep = keep if edges.order is None else keep.index_select(1, edges.order)
    out: Tensor = _AdditiveAttention.apply(  # type: ignore[no-untyped-call]
        rows, rows_dst, conv.att_src[0], conv.att_dst[0], keep, edges, conv.negative_slope
    )
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(x[: block.size[1]] if x_dst is None else x_dst)
    return out if conv.bias is None else out + conv.bias

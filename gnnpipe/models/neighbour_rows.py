"""Sums, maxima and scores over the edges of a block, without messages [E, F].

Rows are summed and compared by embedding bags over the block's edges in both orders
(``graph.blocks.Incidence``). A score needs both ends of an edge; scores are computed for some edges
at a time, forward and once more backward, so that the rows of both ends stay in the cache.

Shapes: T rows read, C target rows, E edges in the order of ``Incidence``, F columns, H heads, D
columns per head, K edge features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnpipe.graph.blocks import Incidence
from gnnpipe.ops.spmm import bag_sums

_BLOCK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers of the rows that are computed at a time, by device: on a CPU they stay in the cache, and
a GPU needs few kernels."""


class NeedsMessagesError(Exception):
    """Raised where sums and maxima by bags would differ from those of messages."""


def neighbour_sum(rows: Tensor, edges: Incidence) -> Tensor:
    """Return the sums [C, F] of the neighbours' ``rows`` [T, F]."""
    found: Tensor = _Sum.apply(rows, edges)  # type: ignore[no-untyped-call]
    return found


def neighbour_mean(rows: Tensor, edges: Incidence) -> Tensor:
    """Return the means [C, F] of the neighbours' ``rows`` [T, F]; 0 without a neighbour."""
    return mean_of(neighbour_sum(rows, edges), edges)


def mean_of(sums: Tensor, edges: Incidence) -> Tensor:
    """Return ``sums`` [C, F] over the edges into each target divided by their number."""
    return sums / edges.offsets.diff().clamp(min=1)[:, None]


def neighbour_max(rows: Tensor, edges: Incidence) -> Tensor:
    """Return the largest of the neighbours' ``rows`` [T, F] by column, [C, F]; 0 without any.

    As in torch's ``scatter_reduce``, equal maxima share the gradient, among them the 0 that it
    begins with. Raises ``NeedsMessagesError`` for rows that are not finite: bags lose NaN.
    """
    if not bool(rows.detach().isfinite().all()):
        raise NeedsMessagesError
    found: Tensor = _Max.apply(rows, edges)  # type: ignore[no-untyped-call]
    return found


def weighted_sum(rows: Tensor, weights: Tensor, edges: Incidence) -> Tensor:
    """Return the sums [C, H, D] of the neighbours' ``rows`` [T, H, D] by ``weights`` [E, H]."""
    found: Tensor = _WeightedSum.apply(rows, weights, edges)  # type: ignore[no-untyped-call]
    return found


def dot_scores(read: Tensor, reading: Tensor, edges: Incidence) -> Tensor:
    """Return the products [E, H] of both ends' rows, ``read`` [T, H, D], ``reading`` [C, H, D]."""
    found: Tensor = _DotScores.apply(read, reading, edges)  # type: ignore[no-untyped-call]
    return found


def additive_scores(
    read: Tensor,
    reading: Tensor,
    of_edges: Tensor | None,
    weight: Tensor | None,
    attention: Tensor,
    edges: Incidence,
    slope: float,
) -> Tensor:
    """Return ``sum_d attention * leaky_relu(read_j + reading_i + weight e_ij)``, [E, H].

    Args:
        read: Rows of the sources [T, H, D].
        reading: Rows of the targets [C, H, D].
        of_edges: Edge features e [E, K], or ``None``.
        weight: Map of the edge features [H D, K], or ``None``.
        attention: [H, D].
        edges: The edges.
        slope: Negative slope of the leaky ReLU.
    """
    given = read, reading, of_edges, weight, attention, edges, slope
    found: Tensor = _AdditiveScores.apply(*given)  # type: ignore[no-untyped-call]
    return found


def _sums(rows: Tensor, offsets: Tensor, index: Tensor) -> Tensor:
    """Return the sums of ``rows`` over the bags of ``offsets``; ``index`` [E] may be empty."""
    return bag_sums(offsets, index, rows.new_ones(len(index)), rows.contiguous())


def _sums_by_source(rows: Tensor, edges: Incidence) -> Tensor:
    """Return the sums [T, F] of the targets' ``rows`` [C, F] over the edges out of each source."""
    return _sums(rows, edges.offsets_by_source, edges.targets_by_source)


def edge_blocks(edges: Incidence, width: int) -> Iterator[slice]:
    """Yield ranges of edges whose rows of ``width`` columns are computed at a time."""
    step = max(_BLOCK_NUMBERS[edges.source.device.type] // max(width, 1), 1)
    for start in range(0, len(edges.source), step):
        yield slice(start, start + step)


def add_to(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add ``rows`` [e, F] to rows ``index`` [e] of ``total``."""
    # On CPUs four times as fast as index_add_.
    total.scatter_add_(0, index.long()[:, None].expand_as(rows), rows)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, edges: Incidence) -> Tensor:
        ctx.edges = edges
        return _sums(rows, edges.offsets, edges.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sums_by_source(grad, ctx.edges), None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, edges: Incidence) -> Tensor:
        mode_max, rows = 2, rows.contiguous()
        given = edges.source, edges.offsets, False, mode_max, False, None, True
        out = torch.embedding_bag(rows, *given)[0]
        ctx.save_for_backward(rows, out)
        ctx.edges = edges
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, out = ctx.saved_tensors
        edges: Incidence = ctx.edges
        count, found = (out == 0).to(out.dtype), torch.zeros_like(rows)
        for block in edge_blocks(edges, rows.shape[1]):
            is_largest = _are_largest(rows, out, edges, block)
            add_to(count, edges.target[block], is_largest)
        share = grad / count.clamp_(min=1)
        for block in edge_blocks(edges, rows.shape[1]):
            is_largest = _are_largest(rows, out, edges, block)
            is_largest *= share.index_select(0, edges.target[block])
            add_to(found, edges.source[block], is_largest)
        return found, None


def _are_largest(rows: Tensor, out: Tensor, edges: Incidence, block: slice) -> Tensor:
    """Return 1 where the source's row is the target's maximum, [e, F]."""
    found = rows.index_select(0, edges.source[block])
    # At most 0, so that the sign plus 1 is 1 or 0; on CPUs comparisons take ten times as long.
    found -= out.index_select(0, edges.target[block])
    return found.sign_().add_(1)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, edges: Incidence) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.edges = edges
        heads = [
            bag_sums(edges.offsets, edges.source, weight.contiguous(), of_head.contiguous())
            for weight, of_head in zip(weights.unbind(1), rows.unbind(1), strict=True)
        ]
        return torch.stack(heads, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        edges: Incidence = ctx.edges
        by_source = weights.index_select(0, edges.by_source)
        ends, into = edges.offsets_by_source, edges.targets_by_source
        heads = [
            bag_sums(ends, into, weight.contiguous(), of_head.contiguous())
            for weight, of_head in zip(by_source.unbind(1), grad.unbind(1), strict=True)
        ]
        return torch.stack(heads, 1), _dots(rows, grad, edges), None


def _dots(read: Tensor, reading: Tensor, edges: Incidence) -> Tensor:
    """Return the products [E, H] of both ends' rows."""
    _, heads, width = read.shape
    found = read.new_empty(len(edges.source), heads)
    read, reading = read.flatten(1), reading.flatten(1)
    for block in edge_blocks(edges, heads * width):
        part = read.index_select(0, edges.source[block])
        part *= reading.index_select(0, edges.target[block])
        torch.sum(part.view(-1, heads, width), -1, out=found[block])
    return found


class _DotScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Tensor, reading: Tensor, edges: Incidence) -> Tensor:
        ctx.save_for_backward(read, reading)
        ctx.edges = edges
        return _dots(read, reading, edges)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        read, reading = ctx.saved_tensors
        edges: Incidence = ctx.edges
        by_source = grad.index_select(0, edges.by_source)
        ends, into = edges.offsets_by_source, edges.targets_by_source
        to_read, to_reading = torch.empty_like(read), torch.empty_like(reading)
        for h in range(grad.shape[1]):
            rows = read[:, h].contiguous(), reading[:, h].contiguous()
            weights = grad[:, h].contiguous(), by_source[:, h].contiguous()
            to_reading[:, h] = bag_sums(edges.offsets, edges.source, weights[0], rows[0])
            to_read[:, h] = bag_sums(ends, into, weights[1], rows[1])
        return to_read, to_reading, None


class _AdditiveScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        reading: Tensor,
        of_edges: Tensor | None,
        weight: Tensor | None,
        attention: Tensor,
        edges: Incidence,
        slope: float,
    ) -> Tensor:
        ctx.save_for_backward(read, reading, of_edges, weight, attention)
        ctx.edges, ctx.slope = edges, slope
        heads, width = attention.shape
        found = read.new_empty(len(edges.source), heads)
        given = read.flatten(1), reading.flatten(1), of_edges, weight
        for block in edge_blocks(edges, heads * width):
            rows = F.leaky_relu_(_both_ends(*given, edges, block), slope)
            rows *= attention.flatten()
            torch.sum(rows.view(-1, heads, width), -1, out=found[block])
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        read, reading, of_edges, weight, attention = ctx.saved_tensors
        edges: Incidence = ctx.edges
        heads, width = attention.shape
        given = read.flatten(1), reading.flatten(1), of_edges, weight
        to_read, to_reading = torch.zeros_like(given[0]), torch.zeros_like(given[1])
        to_attention = torch.zeros_like(attention)
        needs_edges = of_edges is not None and ctx.needs_input_grad[2]
        to_edges = torch.empty_like(of_edges) if needs_edges else None
        to_weight = None if weight is None else torch.zeros_like(weight.t())
        for block in edge_blocks(edges, heads * width):
            rows, scores = _both_ends(*given, edges, block), grad[block]
            sloped = F.leaky_relu(rows, ctx.slope).view(-1, heads, width)
            to_attention += torch.einsum("eh,ehd->hd", scores, sloped)
            to_rows = (scores[:, :, None] * attention).flatten(1)
            to_rows = torch.ops.aten.leaky_relu_backward(to_rows, rows, ctx.slope, False)
            add_to(to_read, edges.source[block], to_rows)
            add_to(to_reading, edges.target[block], to_rows)
            if to_weight is not None and of_edges is not None:
                # Transposed: with few edge features, torch is five times as fast.
                to_weight += of_edges[block].t() @ to_rows
            if to_edges is not None and weight is not None:
                torch.mm(to_rows, weight, out=to_edges[block])
        rows_of = to_read.view_as(read), to_reading.view_as(reading)
        to_weight = None if to_weight is None else to_weight.t()
        return (*rows_of, to_edges, to_weight, to_attention, None, None)


def _both_ends(
    read: Tensor,
    reading: Tensor,
    of_edges: Tensor | None,
    weight: Tensor | None,
    edges: Incidence,
    block: slice,
) -> Tensor:
    """Return ``read_j + reading_i + weight e_ij`` for some edges, [e, H D]."""
    rows = read.index_select(0, edges.source[block])
    rows += reading.index_select(0, edges.target[block])
    if of_edges is not None and weight is not None:
        rows.addmm_(of_edges[block], weight.t())
    return rows

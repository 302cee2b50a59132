"""Counts the numbers that a convolution without messages keeps until backward, on a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gnnpipe.capture.stage.block_conv import BlockConv
from gnnpipe.graph.blocks import Block
from gnnpipe.models.rows import Rows
from gnnpipe.ops.saved_tensors import recorded_saved_tensors, storage_address


@dataclass(frozen=True)
class BlockMemory:
    """Numbers kept until backward, beside the rows that are read."""

    per_row: int
    per_read_row: int
    per_edge: int


def block_memory(
    conv: BlockConv,
    received: Tensor,
    block: Block,
    rows: Rows,
    own: Tensor | None,
    carried: tuple[Any, ...],
) -> BlockMemory:
    """Return what ``conv`` keeps on a block whose numbers of rows and edges differ.

    The arguments are those of ``conv``.
    """
    read, count = block.size
    leaf = received.detach().clone().requires_grad_()
    mine = None if own is None else own.detach().clone().requires_grad_()
    given = {storage_address(t) for t in (*conv.parameters(), leaf) if t.numel()}
    # The values of edges are counted where they are made.
    given |= {storage_address(t) for t in (mine, *carried) if isinstance(t, Tensor) and t.numel()}
    with recorded_saved_tensors(lambda t: storage_address(t) not in given) as saved:
        conv(leaf, block, rows, mine, carried)
    found = dict.fromkeys((count, read), 0)
    of_edges, is_counted = 0, set[int]()
    for tensor in saved:
        if storage_address(tensor) in is_counted or not tensor.is_floating_point():
            continue
        is_counted.add(storage_address(tensor))
        length = len(tensor) if tensor.dim() else 0
        if length in found:
            found[length] += tensor[0].numel()
        elif tensor.dim() and length >= block.edge_index.shape[1]:  # perhaps with self-loops
            of_edges += tensor[0].numel()
    return BlockMemory(found[count], found[read] if read != count else 0, of_edges)

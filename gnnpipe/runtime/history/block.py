"""History of an aggregation that needs both ends of an edge: a convolution on blocks.

Shapes: C own rows of a chunk, H halo rows of its block, F columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnpipe.graph.blocks import Block, Blocks
from gnnpipe.runtime.history.base import History, HistorySpec, zeroed


class BlockHistory(History):
    """History whose reads are the rows of a block: the own rows of a chunk, then its halo rows.

    If sources and targets are of different vertex types, all source rows are halo rows.
    """

    def __init__(self, spec: HistorySpec, width: int, blocks: Blocks) -> None:
        super().__init__(spec, width)
        self.blocks = blocks
        # Many gradients are added to a row, so the sum is not rounded to the table's type.
        self._grads = self._grads.to(spec.dtype)

    def take(self, structure: Any) -> None:
        """Read the rows of other blocks from now on."""
        self.blocks = structure

    def block(self, chunk: int) -> Block:
        """Return the block of a chunk."""
        return self.blocks.chunks[chunk]

    def read(self, chunk: int) -> Tensor:
        """Return the rows [C + H, F] of the chunk's block."""
        self.settle()
        start, stop = self._own(chunk)
        rows = torch.cat([self.table[start:stop], self.table[self.block(chunk).halo_rows]])
        self._free_after_read()
        return rows.to(self._dtype)

    def record(self, chunk: int, grad: Tensor) -> None:
        """Add the gradient [C + H, F] of the block's rows to the sums of these rows."""
        start, stop = self._own(chunk)
        block = self.block(chunk)
        own, halo = grad[: stop - start], grad[stop - start :]
        if self.stays_in_chunk:
            self._of_chunk[chunk] = self._within(chunk, own, halo)
            return
        if self.scale != 1.0:
            halo = torch.where(block.same_chunk, halo, halo * self.scale)
        self._grads[start:stop] += own
        self._grads.index_add_(0, block.halo_rows, halo)

    def _within(self, chunk: int, own: Tensor, halo: Tensor) -> Tensor:
        """Return the gradients of the chunk's own rows and then of its halo rows, [C + h, F].

        ``own`` [C or 0, F] and ``halo`` [H, F] are the gradients of the block's rows.
        """
        (start, stop), (low, high) = self.rows(chunk), self.exchange.halo_range(chunk)
        found = own.new_zeros(stop - start + high - low, own.shape[1])
        found[: len(own)] = own
        chosen = self.block(chunk).same_chunk[:, 0].nonzero()[:, 0]
        rows = self.block(chunk).halo_rows[chosen]
        places = torch.where(rows < self.layout.num_own, rows - start, rows - low + stop - start)
        return found.index_add_(0, places, halo[chosen])

    def _own(self, chunk: int) -> tuple[int, int]:
        """Return the own rows at the beginning of the chunk's block, as (start, stop)."""
        start, stop = self.rows(chunk)
        return start, stop if self.blocks.is_square else start

    def pull(self, chunk: int) -> Tensor:
        """Return the summed gradients [C, F] of the chunk's rows, from all shards."""
        start, stop = self.rows(chunk)
        self.begin_pull(chunk)
        if self.stays_in_chunk:
            own = self._of_chunk.pop(chunk)[: stop - start]
        else:
            own = self._grads[start:stop].clone()
        return self._add_returned(chunk, own)

    def _halo_gradients(self, chunk: int) -> Tensor:
        if self.stays_in_chunk:
            start, stop = self.rows(chunk)
            return self._of_chunk[chunk][stop - start :]
        low, high = self.exchange.halo_range(chunk)
        return self._grads[low:high]

    def _clear_gradients(self) -> None:
        self._grads = zeroed(self._grads, self.layout.num_rows)

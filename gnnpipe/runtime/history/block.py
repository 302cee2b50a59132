"""The history of an aggregation that needs both ends of an edge: a convolution on blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnpipe.graph.blocks import Block, Blocks
from gnnpipe.runtime.history.base import History, HistorySpec, zeroed

__all__ = ["BlockHistory"]


class BlockHistory(History):
    """Aggregation by a convolution on a block: the own rows of a chunk, then its halo rows.

    Rows of another type than those that read are all halo rows.
    """

    def __init__(self, spec: HistorySpec, width: int, blocks: Blocks) -> None:
        super().__init__(spec, width)
        self.blocks = blocks
        # A row is given gradients many times, so that their sum must not be rounded each time.
        self._grads = self._grads.to(spec.dtype)

    def block(self, chunk: int) -> Block:
        """The edges of a chunk."""
        return self.blocks.chunks[chunk]

    def read(self, chunk: int) -> Tensor:
        """Rows [C + H, F] of the chunk's block."""
        self.settle()
        start, stop = self._own(chunk)
        rows = torch.cat([self.table[start:stop], self.table[self.block(chunk).halo_rows]])
        self._read_once()
        return rows.to(self._dtype)

    def record(self, chunk: int, grad: Tensor) -> None:
        """Gradient [C + H, F] of the block's rows, added to what each row has."""
        start, stop = self._own(chunk)
        block = self.block(chunk)
        own, halo = grad[: stop - start], grad[stop - start :]
        if self.scale != 1.0:
            halo = torch.where(block.same_chunk, halo, halo * self.scale)
        self._grads[start:stop] += own
        self._grads.index_add_(0, block.halo_rows, halo)

    def _own(self, chunk: int) -> tuple[int, int]:
        """Own rows that the chunk's block begins with."""
        start, stop = self.rows(chunk)
        return start, stop if self.blocks.is_square else start

    def pull(self, chunk: int) -> Tensor:
        """What the chunk's rows were given, here and by the other shards."""
        start, stop = self.rows(chunk)
        self.begin_pull(chunk)
        return self._add_returned(chunk, self._grads[start:stop].clone())

    def _halo_gradients(self, low: int, high: int) -> Tensor:
        return self._grads[low:high]

    def _clear_gradients(self) -> None:
        self._grads = zeroed(self._grads, self.layout.num_rows)

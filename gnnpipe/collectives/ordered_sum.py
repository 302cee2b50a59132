"""Sum over the shards in a fixed order, by two all-to-alls (docs/adr/0003).

Each shard adds up one part of the vector, in the order of the shards, and sends the sum to all
other shards. This takes as many bytes as a ring all-reduce, and gives the same bits in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnnpipe.collectives.collective import SHARD_SUMS, CollectiveWork, LinkUse, ShardGroup, ShardSum

if TYPE_CHECKING:
    from torch import Tensor


class OrderedSum(ShardSum):
    """Sum by a reduce-scatter and an all-gather: 2 (G - 1) n numbers are sent for a vector of n."""

    @property
    def phases(self) -> int:
        """Two: the parts are added up, then sent to all."""
        return 2

    def start(self, group: ShardGroup, flat: Tensor) -> CollectiveWork:
        """See ``ShardSum``."""
        return _OrderedSumTransfer(group, flat)

    def sent_bytes(self, shards: int, size_bytes: int) -> int:
        """Return 2 (G - 1) times the size of the vector."""
        return 2 * (shards - 1) * size_bytes

    def link_use(self, shards: int, size_bytes: int) -> LinkUse:
        """Return two messages to each other shard, each with one of G parts of the vector."""
        return LinkUse(2 * (shards - 1), 2 * (shards - 1) * size_bytes / shards)


class _OrderedSumTransfer:
    """An ordered sum that has been started."""

    def __init__(self, group: ShardGroup, flat: Tensor) -> None:
        shards, n = group.shards, flat.numel()
        self._group, self._flat = group, flat
        self._counts = [n * (g + 1) // shards - n * g // shards for g in range(shards)]
        self._own_counts = [self._counts[group.shard]] * shards
        self._largest_bytes = flat.nbytes // shards * (shards - 1)
        parts = flat.new_empty(sum(self._own_counts))
        self._first: CollectiveWork | None = group.all_to_all(
            parts, flat, self._own_counts, self._counts, self._largest_bytes
        )
        self._current = self._first
        self.sent_bytes = self._first.sent_bytes

    def proceed(self) -> None:
        """Add up this shard's part and send the sum to all other shards."""
        if self._first is None:
            return
        shards = self._group.shards
        total = self._first.wait().view(shards, self._own_counts[0]).sum(0)
        self._first = None
        self._current = self._group.all_to_all(
            self._flat, total.repeat(shards), self._counts, self._own_counts, self._largest_bytes
        )
        self.sent_bytes += self._current.sent_bytes

    def wait(self) -> Tensor:
        """Return the sum [n], in the memory of the vector."""
        self.proceed()
        return self._current.wait()


SHARD_SUMS.add("ordered", OrderedSum())

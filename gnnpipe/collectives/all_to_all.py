"""Row exchange by one all-to-all with split sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gnnpipe.collectives.collective import (
    ROW_EXCHANGES,
    CollectiveWork,
    LinkUse,
    RowExchange,
    ShardGroup,
)

if TYPE_CHECKING:
    from torch import Tensor


class AllToAll(RowExchange):
    """Sends each row to the other shards that read the row, and nothing else.

    These are M rows for M pairs (row, other shard that reads the row).
    """

    def start(
        self,
        group: ShardGroup,
        out: Tensor,
        data: Tensor,
        receive_counts: Sequence[int],
        send_counts: Sequence[int],
        largest_bytes: int,
    ) -> CollectiveWork:
        """See ``RowExchange``."""
        return group.all_to_all(out, data, receive_counts, send_counts, largest_bytes)

    def sent_bytes(self, shards: int, row_bytes: int) -> int:
        """Return ``row_bytes``: exactly the rows that others read are sent."""
        return row_bytes

    def link_use(self, shards: int, row_bytes: int) -> LinkUse:
        """Return one message to each other shard."""
        return LinkUse(shards - 1, row_bytes)


ROW_EXCHANGES.add("all-to-all", AllToAll())

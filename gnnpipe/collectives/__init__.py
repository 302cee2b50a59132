"""Collectives among the shards of a stage; importing the package registers them."""

from gnnpipe.collectives.all_to_all import AllToAll
from gnnpipe.collectives.collective import (
    DEFAULT_COLLECTIVES,
    LARGE_BYTES,
    ROW_EXCHANGES,
    SHARD_SUMS,
    Collectives,
    CollectiveWork,
    LinkUse,
    RowExchange,
    ShardGroup,
    ShardSum,
)
from gnnpipe.collectives.ordered_sum import OrderedSum

__all__ = [
    "DEFAULT_COLLECTIVES",
    "LARGE_BYTES",
    "ROW_EXCHANGES",
    "SHARD_SUMS",
    "AllToAll",
    "CollectiveWork",
    "Collectives",
    "LinkUse",
    "OrderedSum",
    "RowExchange",
    "ShardGroup",
    "ShardSum",
]

"""Collectives among the shards of a stage; importing the package registers them."""

from gnnpipe.collectives.all_to_all import AllToAll
from gnnpipe.collectives.collective import (
    DEFAULT_COLLECTIVES,
    ROW_EXCHANGES,
    SHARD_SUMS,
    Collectives,
    LinkUse,
    RowExchange,
    ShardGroup,
    ShardSum,
    Transfer,
)
from gnnpipe.collectives.ordered_sum import OrderedSum

__all__ = [
    "DEFAULT_COLLECTIVES",
    "ROW_EXCHANGES",
    "SHARD_SUMS",
    "AllToAll",
    "Collectives",
    "LinkUse",
    "OrderedSum",
    "RowExchange",
    "ShardGroup",
    "ShardSum",
    "Transfer",
]

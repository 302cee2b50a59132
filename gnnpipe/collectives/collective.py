"""Interface of the collectives among the shards of a stage, and their registries.

A collective is one object that holds its implementation, the bytes that it sends and its cost on a
link, so that the runtime, the closed forms of bytes and the simulator cannot disagree. There are
two kinds: a ``RowExchange`` moves boundary rows to the shards that read them (and gradients back),
a ``ShardSum`` adds up a vector over the shards. The plan names one of each (``Collectives``).

G is the number of shards of a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gnnpipe.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

LARGE_BYTES = 1 << 18
"""Bytes that a shard sends from which an all-to-all is split into two (docs/adr/0021), and which a
bucket of gradients has at least."""


class CollectiveWork(Protocol):
    """Handle of a collective that has been started and runs while other work is done."""

    sent_bytes: int
    """Bytes that this shard has sent to others so far."""

    def proceed(self) -> None:
        """Wait for the current phase and start the next one, if there is one.

        All shards must call this at the same place of their programs.
        """

    def wait(self) -> Tensor:
        """Finish all phases and return the result."""


class ShardGroup(Protocol):
    """The shards of one stage, as a collective sees them."""

    @property
    def shard(self) -> int:
        """Number of this shard."""

    @property
    def shards(self) -> int:
        """G."""

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ``torch.distributed`` group of the shards."""

    def all_to_all(
        self,
        out: Tensor,
        data: Tensor,
        receive_counts: Sequence[int],
        send_counts: Sequence[int],
        largest_bytes: int,
    ) -> CollectiveWork:
        """Start an all-to-all of rows; all shards call it in the same order.

        Args:
            out: [sum(receive_counts), ...], filled shard by shard.
            data: [sum(send_counts), ...], the rows for each shard one after another.
            receive_counts: [G], rows from each shard, this one included.
            send_counts: [G], rows to each shard, this one included.
            largest_bytes: the most that a shard sends or receives, the same number on all shards.
        """


@dataclass(frozen=True)
class LinkUse:
    """Use of a shard's link by a collective; its time is messages x latency + bytes / bandwidth."""

    messages: int
    """Messages that a shard sends one after another."""
    sent_bytes: float
    """Bytes sent by the shard that sends most."""


class RowExchange(ABC):
    """Moves rows between shards; an entry of ``ROW_EXCHANGES``."""

    @abstractmethod
    def start(
        self,
        group: ShardGroup,
        out: Tensor,
        data: Tensor,
        receive_counts: Sequence[int],
        send_counts: Sequence[int],
        largest_bytes: int,
    ) -> CollectiveWork:
        """Start to move rows; the arguments are those of ``ShardGroup.all_to_all``."""

    @abstractmethod
    def sent_bytes(self, shards: int, row_bytes: int) -> int:
        """Return the bytes that all G shards send together.

        ``row_bytes``: bytes of all rows that other shards read, each counted once per reader.
        """

    @abstractmethod
    def link_use(self, shards: int, row_bytes: int) -> LinkUse:
        """Return the use of a shard's link; ``row_bytes``: bytes of its rows for the others."""


class ShardSum(ABC):
    """Adds up a vector over the shards; an entry of ``SHARD_SUMS``.

    All shards must get the same bits, or their weights drift apart.
    """

    @property
    @abstractmethod
    def phases(self) -> int:
        """Number of phases; each starts when the one before has ended, under other work."""

    @abstractmethod
    def start(self, group: ShardGroup, flat: Tensor) -> CollectiveWork:
        """Start to sum ``flat`` [n] over the shards; ``wait`` returns the sum [n].

        ``flat`` may be overwritten until ``wait`` returns, and may be returned as the result.
        """

    @abstractmethod
    def sent_bytes(self, shards: int, size_bytes: int) -> int:
        """Return the bytes that all G shards send together for a vector of ``size_bytes``."""

    @abstractmethod
    def link_use(self, shards: int, size_bytes: int) -> LinkUse:
        """Return the use of a shard's link by all phases together."""


ROW_EXCHANGES: Registry[RowExchange] = Registry("row exchange", "plan: row_exchange")
SHARD_SUMS: Registry[ShardSum] = Registry("sum over the shards", "plan: shard_sum")


@dataclass(frozen=True)
class Collectives:
    """The collectives of a plan, by name."""

    row_exchange: str = "all-to-all"
    shard_sum: str = "ordered"

    @property
    def rows(self) -> RowExchange:
        """The row exchange; ``InputError`` for an unknown name."""
        return ROW_EXCHANGES[self.row_exchange]

    @property
    def sum(self) -> ShardSum:
        """The sum over the shards; ``InputError`` for an unknown name."""
        return SHARD_SUMS[self.shard_sum]


DEFAULT_COLLECTIVES = Collectives()

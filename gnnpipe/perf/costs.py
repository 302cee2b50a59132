"""What the simulator asks: how long each thing takes and how large it is.

This is all that passes between who measures (or states, or fits) costs and who makes a timeline of
a program. Ranks are numbered stage * shards + shard. Chunks go by their own number, not by their
place in the walk. Every time is in seconds and at least 0; compute and communication are told
apart here and overlapped by the simulator, as the executor overlaps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Costs"]


class Costs(Protocol):
    """Durations and sizes of one plan on one set of devices and links."""

    def begin_s(self, stage: int, shard: int) -> float:
        """What a rank does once an epoch, outside of all actions.

        Tables of gradients are cleared, snapshots taken and brought back. The simulator puts it in
        front of the first action.
        """

    def step_s(self, way: str, stage: int, shard: int, chunk: int, step: int) -> float:
        """One step of one chunk on one rank, 'F' or 'B', without any communication.

        'F': read the table (the sparse product of what step - 1 pushed; not for step 0), compute,
        write the pushed rows into the table; behind the last step of the last stage also the loss.
        'B': bring gradients back over the edges (not for the last step, which pushed nothing), both
        the product for the halo rows and the one for the own rows, then autograd, then record.
        Adding up what came from other shards is part of it. With recomputation 'B' has the step's
        forward in it.
        """

    def finish_s(self, stage: int, shard: int) -> float:
        """What the last backward step of an epoch takes beside what each chunk's does.

        The gradient of the weight that the features are multiplied by is made there, of all chunks.
        """

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """Of ``step_s('B', ...)`` the part that runs while halo gradients travel.

        It is the product for the own rows: the exchange starts before it and is waited for after
        it. At most ``step_s``; never asked for with one shard, nor for the last step.
        """

    def pilot_s(self, kind: str, stage: int, shard: int) -> float:
        """FORECAST, CARRY or RECALL on one rank, without any communication."""

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """Of the sums that FORECAST fits its maps from, one copy, in the order they are added up.

        Never asked for with one shard.
        """

    def update_s(self, stage: int, shard: int) -> float:
        """STEP: the optimizer on one rank."""

    def message_bytes(self, way: str, source: int, target: int, shard: int, chunk: int) -> int:
        """What ``shard`` of stage ``source`` sends to the same shard of stage ``target``.

        All values of one chunk, 'F' forward or their gradients 'B' back; with ``chunk`` PILOT or
        RECALLED the values of the pilot rows.
        """

    def has_exchange(self, stage: int, step: int) -> bool:
        """Whether the step pushes rows for neighbours, not for means over all vertices alone.

        Never asked for with one shard, nor for the last step, which pushes nothing.
        """

    def exchange_bytes(self, way: str, stage: int, shard: int, chunk: int, step: int) -> int:
        """What this rank sends to all other shards of its stage for one step of one chunk.

        'F': the boundary rows that the step pushed; 'B': the gradients of the halo rows that the
        step's push brought here. Only asked for where the step ``has_exchange``.
        """

    def mean_bytes(self, stage: int, step: int) -> Sequence[int]:
        """Of the sums for means over all vertices that the step pushes for, one copy, in order.

        Each is waited for as soon as it is started: forward behind the step, backward behind the
        one that read the mean. Asked for where ``has_exchange`` is, too.
        """

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        """Of the stage's weights whose gradients are whole behind these steps, one copy."""

    def link_s(self, source: int, target: int, size_bytes: int) -> float:
        """A message alone on its link: from when both ranks are there to when it can be read."""

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """An exchange among the shards of a stage, once all are there, nothing else on the wire.

        ``sizes_bytes``: by shard, what it sends to all others together.
        """

    def reduce_s(self, stage: int, size_bytes: int) -> float:
        """The sum of gradients of ``size_bytes`` (one copy) over a stage's shards, once all came.

        Copies into and out of one piece of memory included.
        """

    def sync_s(self) -> float:
        """A sum of a few numbers over all ranks, once all came; never asked for with one rank."""

    def link(self, source: int, target: int) -> str:
        """The name of what a message from rank to rank takes up.

        Messages on links of the same name go one after the other, first come, first served: give
        each pair its own name where they do not disturb each other, and one name to all that pass
        through the same wire.
        """

    def group(self, stage: int) -> str:
        """The same for the exchanges and the gradient sum among the shards of a stage."""

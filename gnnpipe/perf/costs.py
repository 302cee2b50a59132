"""Interface of the simulator: the duration and size of every task of a program.

The only connection between code that measures, states or fits costs and code that simulates a
program. ``chunk`` is a chunk's own number, not its
position in the order. Times are in seconds and at least 0. Compute and communication are given
apart; the simulator overlaps them as the executor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Costs"]


class Costs(Protocol):
    """Durations and sizes of one plan on one set of devices and links."""

    def begin_s(self, stage: int, shard: int) -> float:
        """Work once per epoch outside of all actions, done before the first one.

        Clearing tables of gradients, taking and restoring snapshots, drawing masks.
        """

    def step_s(self, way: str, stage: int, shard: int, chunk: int, step: int) -> float:
        """One step of one chunk on one rank, 'F' or 'B', without communication.

        'F': read the table (the sparse product of the rows that step - 1 pushed; not for step 0),
        compute, write the pushed rows into the table; after the last step of the last stage also
        the loss. 'B': bring gradients back over the edges, for halo rows and own rows (not for the
        last step, which pushes nothing), then autograd. Adding gradients of other shards is part of
        it, and with recomputation the step's forward.
        """

    def finish_s(self, stage: int, shard: int) -> float:
        """Extra time of the last backward step of an epoch.

        It computes the gradient of the weight that multiplies the features, for all chunks.
        """

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """Part of ``step_s('B', ...)`` that overlaps with the exchange of halo gradients.

        The product for the own rows: the exchange starts before it and is waited for after it. Not
        called with one shard, nor for the last step.
        """

    def probe_s(self, kind: str, stage: int, shard: int) -> float:
        """FORECAST, CARRY or RECALL on one rank, without communication."""

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """Sizes of the sums that FORECAST fits its maps to, in order; one copy.

        Not called with one shard.
        """

    def update_s(self, stage: int, shard: int) -> float:
        """STEP: the optimizer's step on one rank."""

    def message_bytes(self, way: str, source: int, target: int, shard: int, chunk: int) -> int:
        """Bytes that ``shard`` of stage ``source`` sends to the same shard of stage ``target``.

        All values of one chunk ('F') or their gradients ('B'); of the probe rows where ``chunk`` is
        one of ``schedule.PROBE_POSITIONS``.
        """

    def has_exchange(self, stage: int, step: int) -> bool:
        """Whether the step pushes rows for neighbours, and not only for means over all vertices.

        Not called with one shard, nor for the last step, which pushes nothing.
        """

    def exchange_bytes(self, way: str, stage: int, shard: int, chunk: int, step: int) -> int:
        """Bytes that a rank sends to all other shards of its stage for one step of one chunk.

        'F': the boundary rows that the step pushed; 'B': the gradients of its halo rows. Only
        called if the step ``has_exchange``.
        """

    def mean_bytes(self, stage: int, step: int) -> Sequence[int]:
        """Sizes of the sums for means over all vertices that the step pushes, in order; one copy.

        Each sum is waited for as soon as it has started: forward after the step, backward after the
        step that read the mean.
        """

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        """Bytes of the gradients that are complete after these steps, one copy."""

    def message_s(self, source: int, target: int, size_bytes: int) -> float:
        """A message alone on its link, once both ranks are ready."""

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """An exchange among the shards of a stage alone on its links, once all are ready.

        ``sizes_bytes``: bytes that each shard sends to all others together.
        """

    def all_reduce_s(self, stage: int, size_bytes: int) -> float:
        """A sum of ``size_bytes`` (one copy) over the shards of a stage, all phases.

        Copies into and out of a contiguous buffer included.
        """

    def all_reduce_bytes(self, size_bytes: int) -> int:
        """Bytes that all shards of a stage send for a sum of ``size_bytes`` (one copy)."""

    def all_reduce_phases(self) -> int:
        """Phases of a sum, which follow one another and take equally long."""

    def sync_s(self) -> float:
        """An all-reduce of a few numbers over all ranks; not called with one rank."""

    def link(self, source: int, target: int) -> str:
        """Name of the link that a message uses.

        Messages on links of one name are served one after the other, first come, first served.
        """

    def group(self, stage: int) -> str:
        """Name of the link that collectives of the stage's shards use."""

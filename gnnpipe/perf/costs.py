"""Interface of the simulator: the duration and size of every task of a program.

The simulator gets all costs through this interface, whether they are measured, fitted or assumed.
``chunk`` is a chunk's own number, not its position in the order. Times are in seconds and at least
0. Compute and communication are given separately; the simulator overlaps the two as the executor
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Costs(Protocol):
    """Durations and sizes of one plan on one set of devices and links."""

    def begin_s(self, stage: int, shard: int) -> float:
        """Time of the work before the first action of an epoch.

        Clearing tables of gradients, taking and restoring snapshots, drawing masks.
        """

    def step_s(self, way: str, stage: int, shard: int, chunk: int, step: int) -> float:
        """Time of one step of one chunk on one rank, 'F' or 'B', without communication.

        'F': aggregate the rows that step - 1 pushed (not for step 0), compute, write the pushed
        rows into the table; after the last step of the last stage also the loss. 'B': the
        transposed aggregation, for halo rows and own rows (not for the last step, which pushes
        nothing), then autograd. 'B' includes adding the gradients of other shards, and with
        recomputation the forward of the step.
        """

    def finish_s(self, stage: int, shard: int) -> float:
        """Extra time of the last backward step of an epoch.

        This step computes the gradient of the weight that multiplies the features, for all chunks.
        """

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """Part of ``step_s('B', ...)`` that overlaps with the exchange of halo gradients.

        This part is the product for the own rows: the exchange starts before and is waited for
        after the product. Not called with one shard, nor for the last step.
        """

    def probe_s(self, kind: str, stage: int, shard: int) -> float:
        """Time of FORECAST or CARRY on one rank, without communication."""

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """Bytes of each sum over the shards that FORECAST needs for its fits, in order; one copy.

        Not called with one shard.
        """

    def update_s(self, stage: int, shard: int) -> float:
        """Time of the optimizer's step on one rank (STEP)."""

    def message_bytes(self, way: str, source: int, target: int, shard: int, chunk: int) -> int:
        """Bytes that ``shard`` of stage ``source`` sends to the same shard of stage ``target``.

        All values of one chunk ('F') or their gradients ('B'). If ``chunk`` is
        ``SpecialPosition.PROBE``: the values of the probe rows, old and new.
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
        """Bytes of each sum for a mean over all vertices that the step pushes, in order; one copy.

        Each sum is waited for as soon as it has started: forward after the step, backward after the
        step that read the mean.
        """

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        """Bytes of the weight gradients that are complete after these steps; one copy."""

    def message_s(self, source: int, target: int, size_bytes: int) -> float:
        """Time of a message on an idle link, from when both ranks are ready."""

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """Time of an exchange among the shards on idle links, from when all shards are ready.

        ``sizes_bytes``: bytes that each shard sends to all others together.
        """

    def shard_sum_s(self, stage: int, size_bytes: int) -> float:
        """Time of a sum of ``size_bytes`` (one copy) over the shards of a stage, all phases.

        Includes the copies into and out of a contiguous buffer.
        """

    def shard_sum_bytes(self, size_bytes: int) -> int:
        """Bytes that all shards of a stage send for a sum of ``size_bytes`` (one copy)."""

    def shard_sum_phases(self) -> int:
        """Phases of a sum, which follow one another and take equally long."""

    def sync_s(self) -> float:
        """Time of an all-reduce of a few numbers over all ranks; not called with one rank."""

    def link(self, source: int, target: int) -> str:
        """Name of the link that a message uses.

        Messages on links of the same name are served one after another, first come, first served.
        """

    def group(self, stage: int) -> str:
        """Name of the link that collectives of the stage's shards use."""

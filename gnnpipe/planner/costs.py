"""The costs by which planners compare candidates, and the objective that they minimise.

A planner sees a model only through ``PlanningCosts``. ``perf.closed_form`` computes these costs
from a profile; tests give assumed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gnnpipe.plan import ModelGraph


class PlanningCosts(Protocol):
    """Times in seconds and bytes of parts of a plan with K chunks.

    ``ops``: indices of the ops of one stage. ``shards``: number G of equal devices of the stage.

    Planners rely on three properties: more ops of a stage never take less time or memory; G devices
    are at most G times as fast as one; and ops with equal costs, widths and aggregations can
    replace each other in any stage.
    """

    @property
    def model(self) -> ModelGraph:
        """The ops."""

    @property
    def chunks(self) -> int:
        """K."""

    def stage_s(self, ops: Sequence[int], shards: int) -> float:
        """Time of forward and backward of one chunk in a stage, with its exchange of rows."""

    def epoch_s(self, ops: Sequence[int], shards: int) -> float:
        """Time that a stage needs once an epoch: gradient sum and optimizer step."""

    def message_s(self, width: int, shards: int) -> float:
        """Time of sending ``width`` numbers of every row of one chunk to another stage, one way."""

    def memory_bytes(self, ops: Sequence[int], shards: int, in_flight: int) -> int:
        """Memory of each device of a stage that holds ``in_flight`` chunks for backward."""

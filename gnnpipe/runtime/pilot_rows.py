"""What travels of pilot rows between stages: rows when they are recalled, and then rows again.

Unless rows are rounded on their way. A forecast is made of how the pilots move, which rounded rows
would hardly tell; so then their movement since the recall travels, which both ends know.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from gnnpipe.models import Values
from gnnpipe.runtime.staleness.forecast import Forecaster

__all__ = ["PilotRows"]


class PilotRows:
    """The pilot rows of one rank's stage on their way in and out. P rows."""

    def __init__(self, forecaster: Forecaster, leaving: Collection[str], is_rounded: bool) -> None:
        """``leaving``: what goes on to other stages, by name."""
        self._forecaster, self._names, self._is_rounded = forecaster, leaving, is_rounded
        self._entered: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        """Of the last recall."""

    def recall(self, values: Values) -> Values:
        """What leaves of the rows that came in, [P, width] by name, with the last weights."""
        out = self._forecaster.recall(values)
        if self._is_rounded:
            self._entered, self._left = values, {name: out[name] for name in self._names}
        return out

    def run(self, values: Values) -> Values:
        """The same with the current weights; maps are fitted on the way."""
        if not self._is_rounded:
            return self._forecaster.run(values)
        now = {name: self._entered[name] + moved for name, moved in values.items()}
        out = self._forecaster.run(now)
        moved = {name: out[name] - was for name, was in self._left.items()}
        self._entered, self._left = {}, {}
        return moved

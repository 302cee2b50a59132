"""How far the rows of a table moved in one epoch: the error that stale readers were given.

A fixed sample of rows is kept as it stood when the epoch's first chunk was pushed, which is what
stale readers saw (after a snapshot or a forecast), and compared with what the epoch pushed in its
place. Two small gathers per layer and epoch; nothing in the way of the chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Drift"]


class Drift:
    """The drift of one layer's table on one rank."""

    def __init__(self, rows: Tensor) -> None:
        """``rows`` [s]: local numbers of this shard's sampled own rows."""
        self.rows = rows
        self._before: Tensor | None = None
        self.sums = torch.zeros(2, dtype=torch.float64, device=rows.device)
        """Squares of the change and of the rows, of the last whole epoch, over the sample."""

    def before(self, table: Tensor) -> None:
        """Called ahead of every push; keeps the rows [N, F] as they are at the first."""
        if self._before is None:
            self._before = table[self.rows]

    def after(self, table: Tensor) -> None:
        """Called at the end of the epoch."""
        if self._before is None:
            return
        now = table[self.rows].to(torch.promote_types(table.dtype, torch.float32))
        self.sums = torch.stack([x.square().sum().double() for x in (now - self._before, now)])
        self._before = None

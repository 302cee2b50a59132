"""Where rows are made that are pushed next: in the history table itself, so that they are not there
twice.

What backward needs of such rows it finds in the table, which no one writes to until the next epoch.
Autograd takes a tensor for changed when any part of what it is a view of is written, and a chunk's
rows are part of a table that all chunks write to; so a place is a tensor of its own on the same
memory. R rows, F columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Place", "room_for"]


@dataclass(frozen=True, eq=False)
class Place:
    """Memory for some rows, in no class that autograd's functions look into."""

    rows: Tensor
    """[R, F]"""

    @classmethod
    def of(cls, table: Tensor, start: int, stop: int) -> Place:
        """Rows start..stop-1 of a contiguous table [n, F]."""
        width = table.shape[1]
        rows = table.new_empty(0)
        offset = table.storage_offset() + start * width
        rows.set_(table.untyped_storage(), offset, (stop - start, width), (width, 1))
        return cls(rows)

    def holds(self, rows: Tensor) -> bool:
        """``rows`` were made here."""
        return rows.data_ptr() == self.rows.data_ptr() and rows.shape == self.rows.shape


def room_for(place: Place | None, like: Tensor, width: int) -> Tensor:
    """[R, ``width``] to be filled, for rows of ``like`` [R, ...]: the place, if there is one."""
    return like.new_empty(len(like), width) if place is None else place.rows

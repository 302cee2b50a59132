"""Where rows are made that are pushed next: in the history table itself, so that they are not there
twice.

What backward needs of such rows it finds in the table, which no one writes to until the next epoch.
Autograd takes a tensor for changed when any part of what it is a view of is written, and a chunk's
rows are part of a table that all chunks write to; so a place is a tensor of its own on the same
memory. R rows, F columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["OutputBuffer", "room_for"]


@dataclass(eq=False)
class OutputBuffer:
    """Memory for some rows, in no class that autograd's functions look into."""

    rows: Tensor
    """[R, F]"""
    _seen: int = 0
    """How often they had been written to when they were pushed."""

    @classmethod
    def of(cls, table: Tensor, start: int, stop: int) -> OutputBuffer:
        """Rows start..stop-1 of a contiguous table [n, F]."""
        width = table.shape[1]
        rows = table.new_empty(0)
        offset = table.storage_offset() + start * width
        rows.set_(table.untyped_storage(), offset, (stop - start, width), (width, 1))
        return cls(rows)

    def holds(self, rows: Tensor) -> bool:
        """``rows`` were made here."""
        return rows.data_ptr() == self.rows.data_ptr() and rows.shape == self.rows.shape

    def check(self, pushed: Mapping[str, Tensor]) -> None:
        """``TypeError`` unless all that is pushed was made here: backward looks for it here.

        From now on ``check_kept`` tells whether it was written to.
        """
        # Rows made in inference mode count no versions, and no backward reads them.
        self._seen = 0 if self.rows.is_inference() else self.rows._version
        for name, rows in pushed.items():
            if not self.holds(rows):
                raise TypeError(
                    f"{name}: the layer declares a push_maker, but pushes other rows than "
                    "rows.output_buffer.rows; return these as they are, or declare PushMaker.COPY"
                )

    def check_kept(self) -> None:
        """``TypeError`` if the rows were written to since they were pushed."""
        if self.rows._version != self._seen:
            raise TypeError(
                "a layer wrote to rows after they were pushed, and others read them from the "
                "history table; write to a copy, or declare PushMaker.COPY"
            )


def room_for(output_buffer: OutputBuffer | None, like: Tensor, width: int) -> Tensor:
    """[R, ``width``] to be filled, for rows of ``like`` [R, ...]: the place, if there is one."""
    if output_buffer is None:
        return like.new_empty(len(like), width)
    if output_buffer.rows.shape != (len(like), width):
        raise ValueError(
            f"[{len(like)}, {width}] rows do not fit into their place in the history table, "
            f"{list(output_buffer.rows.shape)}; a layer must make rows as wide as the next one "
            "pushes"
        )
    return output_buffer.rows

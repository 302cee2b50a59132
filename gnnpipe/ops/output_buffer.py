"""Output buffers inside the history table (avoids a copy on push).

Backward finds the values in the table, which is not overwritten before the next epoch. Autograd
counts writes per base tensor, and all chunks write to one table; so a buffer is a tensor of its own
that shares the table's memory. R rows, F columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class OutputBuffer:
    """Memory for pushed rows. A class hides the tensor from ``autograd.Function``."""

    rows: Tensor
    """[R, F]"""
    _pushed_version: int = 0
    """Write counter of ``rows`` at the time of the push."""

    @classmethod
    def of(cls, table: Tensor, start: int, stop: int) -> OutputBuffer:
        """Return a buffer on rows start:stop of a contiguous table [n, F]."""
        width = table.shape[1]
        rows = table.new_empty(0)
        offset = table.storage_offset() + start * width
        rows.set_(table.untyped_storage(), offset, (stop - start, width), (width, 1))
        return cls(rows)

    def check(self, pushed: Mapping[str, Tensor]) -> None:
        """Raise ``TypeError`` unless all pushed rows lie in this buffer."""
        # Rows made in inference mode have no write counter, and no backward reads them.
        self._pushed_version = 0 if self.rows.is_inference() else self.rows._version
        for name, rows in pushed.items():
            if rows.data_ptr() != self.rows.data_ptr() or rows.shape != self.rows.shape:
                raise TypeError(
                    f"{name}: the step pushes other rows than those that it computed in "
                    "rows.output_buffer.rows (StageModule.writes_output_buffer)"
                )

    def check_kept(self) -> None:
        """Raise ``TypeError`` if the rows were written to after ``check``."""
        if self.rows._version != self._pushed_version:
            raise TypeError(
                "a step wrote to rows after they were pushed, but they lie in the history table, "
                "which others read"
            )


def output_rows(output_buffer: OutputBuffer | None, like: Tensor, width: int) -> Tensor:
    """Return memory [R, ``width``] for a result with the rows of ``like`` [R, ...]."""
    if output_buffer is None:
        return like.new_empty(len(like), width)
    if output_buffer.rows.shape != (len(like), width):
        raise ValueError(
            f"[{len(like)}, {width}] rows do not fit into the output buffer, "
            f"{list(output_buffer.rows.shape)}"
        )
    return output_buffer.rows

"""Effects of a recorded call on rows, as measured on the sample (``trial.facts``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gnnpipe.capture.stage.block_conv import DropoutKind, Form
from gnnpipe.capture.trial.saved_tensors import Saved


@dataclass(frozen=True)
class Facts:
    """Properties of one recorded call."""

    is_rows: bool
    """The value has one row of floating-point numbers for each vertex."""
    shape: tuple[int, ...]
    """Shape of one row."""
    depends: bool
    """The value depends on vertices or edges, not on weights alone."""
    of_edges: bool = False
    """The value has one row for each edge; it is computed again where it is needed."""
    form: Form | None = None
    """For an unchanged convolution: how it is called on a block."""
    drops: tuple[DropoutKind, ...] = ()
    """For an unchanged convolution: kind of rows of each dropout inside."""
    vertex_type: str = ""
    """Vertex type of the rows, '' if there is only one."""
    memory: Saved = field(default=Saved(), repr=False)

    @property
    def width(self) -> int:
        """Number of entries of a row."""
        return torch.Size(self.shape).numel() if self.is_rows else 0

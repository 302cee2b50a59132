"""The rows of a chunk as a stage's steps see them: vertices, features and dropout masks.

Shapes: C rows of a chunk, F columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from gnnpipe.models.sparse_input_linear import FeatureRows
from gnnpipe.ops.hashed_dropout import Mask, MaskSource, keyed_dropout, keyed_mask
from gnnpipe.ops.output_buffer import OutputBuffer

Values = dict[str, Tensor]
"""Named activations of a chunk, each [C, width]; they cross stage boundaries. Within a stage, a
value may have more dimensions, or one row that stands for all rows."""


@dataclass(frozen=True)
class Rows:
    """The rows that a step works on: vertices, features, epoch and dropout masks."""

    keys: Tensor
    """[C] int32, dropout keys of the vertices."""
    features: FeatureRows | None
    """Input features [C, num_features], dense or sparse; ``None`` on stages that read none."""
    aggregated: Mapping[str, Tensor] = field(default_factory=dict)
    """By matrix of ``StageModule.feature_structures`` its product with all features, computed once:
    [C, num_features]."""
    seed: int = 0
    epoch: int = 0
    training: bool = False
    is_probe: bool = False
    """The rows are probe vertices of a forecast: training mode without dropout."""
    vertices: Tensor | None = None
    """[C] int64, number of each vertex in the graph as it was read."""
    masks: MaskSource | None = None
    """Dropout masks of the rows of the shard; these rows begin at ``start``."""
    start: int = 0
    output_buffer: OutputBuffer | None = None
    """Rows of the next history table, in which pushed rows can be computed."""
    may_overwrite: bool = False
    """The aggregated rows are not read again, so the step may overwrite them."""
    parts: Mapping[str, Rows] = field(default_factory=dict)
    """Rows by vertex type, for a graph with several vertex types."""

    def part(self, vertex_type: str) -> Rows:
        """Returns the rows of a vertex type; all rows for ''."""
        if not vertex_type:
            return self
        return replace(
            self.parts[vertex_type],
            seed=self.seed,
            epoch=self.epoch,
            training=self.training,
            is_probe=self.is_probe,
            output_buffer=self.output_buffer,
            may_overwrite=self.may_overwrite,
        )

    def mask(self, width: int, probability: float, site: int) -> Mask | None:
        """Returns the dropout mask of rows [C, ``width``]; ``None`` outside of training.

        ``site`` numbers the dropouts of a model: every dropout needs its own.
        """
        if not self.training:
            return None
        return keyed_mask(
            self.keys,
            width,
            probability,
            seed=self.seed,
            epoch=self.epoch,
            site=site,
            masks=self.masks,
            start=self.start,
        )

    def dropout(self, x: Tensor, probability: float, site: int) -> Tensor:
        """Applies dropout to ``x`` [C, F]; see ``mask``."""
        return keyed_dropout(x, self.mask(x.shape[1], probability, site))

"""Interface of a GNN layer: the class to subclass for a new model.

A layer is split where it aggregates. ``before`` works row by row and returns the rows to
aggregate, the runtime aggregates them, and ``after`` works row by row on the result:

    ``pushed = before(x)``,  ``received = A pushed``,  ``x' = after(received)``

The runtime writes the pushed rows into the layer's history table and multiplies the table by the
rows of A that belong to a chunk. Layers therefore do not know chunks, shards and stages, and
evaluation runs the same two methods. ``gcn.py`` is the shortest example.

Shapes: C rows of a chunk, H halo rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import ClassVar

from torch import Tensor, nn

from gnnpipe.graph.blocks import Block
from gnnpipe.graph.operators import LINEAR_KINDS
from gnnpipe.models.sparse_input_linear import FeatureLinear, FeatureRows
from gnnpipe.ops.hashed_dropout import Mask, MaskSource, keyed_dropout, keyed_mask
from gnnpipe.ops.norm_relu import NormReluOptions
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.registry import Registry

Values = dict[str, Tensor]
"""Named activations of a chunk, each [C, width]; they cross stage boundaries. Within a stage, a
value of a recorded model may have more dimensions, or one row that stands for all rows."""


@dataclass(frozen=True)
class Rows:
    """The rows that a layer works on: vertices, features, epoch, dropout masks and edges."""

    keys: Tensor
    """[C] int32, dropout keys of the vertices."""
    features: FeatureRows | None
    """Input features [C, num_features], dense or sparse; ``None`` except on the first stage."""
    seed: int = 0
    epoch: int = 0
    training: bool = False
    is_probe: bool = False
    """The rows are probe vertices of a forecast: training mode without dropout."""
    vertices: Tensor | None = None
    """[C] int64, number of each vertex in the graph as it was read."""
    block: Block | None = None
    """Edges into these rows, for layers whose aggregation is not a product with a fixed matrix."""
    masks: MaskSource | None = None
    """Dropout masks of the rows of the shard; these rows begin at ``start``."""
    start: int = 0
    output_buffer: OutputBuffer | None = None
    """Rows of the next history table, in which pushed rows can be computed (``PushMaker``)."""
    may_overwrite: bool = False
    """The rows that ``after`` receives are not read again, so ``after`` may overwrite them."""
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


@dataclass(frozen=True)
class LayerSpec:
    """Sizes and constants that all layers of one model share."""

    num_features: int
    num_classes: int
    num_layers: int
    hidden: int
    dropout: float = 0.0
    heads: int = 1
    alpha: float = 0.1
    theta: float = 0.5
    is_rounded: bool = False
    """Matrix products with weights, except those that give the logits, are computed in bf16
    (``ops.bf16_matmul``)."""


class PushMaker(Enum):
    """The method that computes the pushed rows directly in the history table, avoiding a copy.

    No code may write to these rows afterwards.
    """

    COPY = auto()
    """No method: the runtime copies the pushed rows into the table."""
    BEFORE = auto()
    """``before`` returns ``rows.output_buffer.rows`` itself if there is a buffer."""
    AFTER = auto()
    """``after`` (except of the last layer) returns ``rows.output_buffer.rows`` itself as x if there
    is a buffer, and ``before`` (except of the first layer) pushes x unchanged."""


class Layer(nn.Module, ABC):
    """One GNN layer.

    A subclass sets ``aggregation`` and defines ``before`` and ``after``. Layers that keep values
    for ``after``, or return values besides x, also override ``kept_widths``, ``out_widths`` or
    ``reads``. All other attributes allow optimisations and may be left alone.

    Args:
        index: Position in the model, from 0. The first layer reads the features, the last layer
            returns the logits [C, num_classes] as x.
        spec: Sizes and constants of the model.
    """

    aggregation: str
    """'gcn', 'mean' or 'sum': a product with a fixed matrix. 'loops': ``after`` receives the rows
    of the neighbours and of the vertex itself, and aggregates over ``rows.block``."""

    reads: ClassVar[tuple[str, ...]] = ("x",)
    """Names of the values that ``before`` reads; the first layer reads features only."""

    reads_settings: ClassVar[tuple[str, ...]] = ()
    """Fields of ``LayerSpec`` that not every layer reads, such as 'alpha'."""

    maps_features: ClassVar[bool] = False
    """``before`` of the first layer pushes ``self.encode`` of the features, a linear map without
    bias. A subclass that overrides ``before`` must declare it anew."""

    keeps_features: ClassVar[bool] = False
    """The first layer also reads a row's own features (``own_values``)."""

    push_maker: ClassVar[PushMaker] = PushMaker.COPY
    """The method that computes pushed rows in ``rows.output_buffer``. A subclass that overrides
    ``before``, ``after`` or ``from_aggregated_features`` must declare it anew."""

    cuda_graph_safe: ClassVar[bool] = False
    """This class launches the same kernels in every epoch of training, so that a CUDA graph can
    replay them. Not inherited: every subclass must declare it anew."""

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__()
        self.index = index
        self.spec = spec

    @abstractmethod
    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """Computes the rows to aggregate.

        Args:
            values: Values of the previous layer; empty for the first layer, which reads
                ``rows.features``.
            rows: The rows of the chunk.

        Returns:
            The rows to push [C, push_width], and the values kept for ``after`` (``kept_widths``).
        """

    @abstractmethod
    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """Computes the layer's values from the aggregated rows.

        Args:
            received: The aggregated rows [C, push_width]. For ``aggregation = "loops"`` the rows
                [C + H, push_width] that the block reads, the chunk's own rows first.
            values: The values that ``before`` kept.
            rows: The rows of the chunk. In training the last layer may be called for the loss rows
                of the chunk only, without features.

        Returns:
            The values of the layer (``out_widths``).
        """

    @property
    def is_first(self) -> bool:
        """Whether the layer reads the input features."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the layer's x is the logits [C, num_classes]."""
        return self.index == self.spec.num_layers - 1

    @property
    def is_linear(self) -> bool:
        """Whether the aggregation is a product with a fixed matrix."""
        return self.aggregation in LINEAR_KINDS

    @property
    def push_width(self) -> int:
        """Width of the pushed rows."""
        return self.spec.hidden

    @property
    def kept_widths(self) -> dict[str, int]:
        """Width by name of the values that ``before`` keeps for ``after``."""
        return {}

    @property
    def out_widths(self) -> dict[str, int]:
        """Width by name of the values that ``after`` returns."""
        return {"x": self.spec.num_classes if self.is_last else self.spec.hidden}

    def dropout_mask(self, rows: Rows, width: int) -> Mask | None:
        """Returns the mask of the dropout that ends the layer (site index + 1), [C, ``width``].

        Dropout ends ``after`` instead of beginning the next ``before``, so that one fused kernel
        can apply norm, activation and dropout.
        """
        return rows.mask(width, self.spec.dropout, site=self.index + 1)

    def norm_relu_options(self, rows: Rows) -> NormReluOptions:
        """Returns rounding, dropout and memory of the rows [C, hidden] that ``after`` computes."""
        mask = self.dropout_mask(rows, self.spec.hidden)
        return NormReluOptions(self.spec.is_rounded, mask, rows.output_buffer)

    @property
    def has_bf16_products(self) -> bool:
        """Whether ``spec.is_rounded`` changes a product besides the product with the features."""
        return not self.is_first and not self.is_last

    def own_values(self, rows: Rows) -> Values:
        """Returns the values that the first layer keeps of a row's own features."""
        del rows
        return {}

    def from_aggregated_features(self, aggregated: Tensor, rows: Rows) -> Values:
        """Computes the first layer's values from ``A x``, in place of ``before`` and ``after``.

        The features never change, so their aggregation [C, num_features] is computed once for all
        epochs if ``accepts_aggregated_features``. Uses ``A (x W) = (A x) W``.
        """
        encode = self._modules["encode"]
        assert isinstance(encode, FeatureLinear)
        return self.after(encode.of(aggregated), self.own_values(rows), rows)

    @property
    def accepts_aggregated_features(self) -> bool:
        """Whether ``from_aggregated_features`` can compute this layer's values."""
        encode = self._modules.get("encode")
        is_map = type(encode) is FeatureLinear and encode.bias is None
        is_declared = self._is_declared_for("maps_features", "before")
        return self.is_first and is_map and self.maps_features and is_declared

    @property
    def is_cuda_graph_safe(self) -> bool:
        """Whether a CUDA graph can replay the layer (``runtime.cuda_graph``)."""
        return bool(vars(type(self)).get("cuda_graph_safe", False))

    def push_maker_behind(self, previous: Layer | None) -> PushMaker:
        """Returns the method that computes this layer's pushed rows in the table.

        ``PushMaker.AFTER``: ``after`` of the ``previous`` layer, if both layers declare it.
        """
        declared = self._declared_push_maker
        if declared is PushMaker.AFTER and (
            previous is None or previous._declared_push_maker is not declared
        ):
            return PushMaker.COPY
        return declared

    @property
    def _declared_push_maker(self) -> PushMaker:
        is_declared = self._is_declared_for(
            "push_maker", "before", "after", "from_aggregated_features"
        )
        return self.push_maker if is_declared else PushMaker.COPY

    def _is_declared_for(self, attribute: str, *methods: str) -> bool:
        """Whether every class that overrides one of ``methods`` also declares ``attribute``."""
        definers = [self._definer(method) for method in methods]
        return all(issubclass(self._definer(attribute), definer) for definer in definers)

    def _definer(self, name: str) -> type:
        return next(c for c in type(self).__mro__ if name in vars(c))


MODELS: Registry[type[Layer]] = Registry("model")


def input_linear(spec: LayerSpec, bias: bool = False) -> FeatureLinear:
    """Returns a linear map from the (dense or sparse) features to the hidden width."""
    return FeatureLinear(spec.num_features, spec.hidden, bias, spec.is_rounded)

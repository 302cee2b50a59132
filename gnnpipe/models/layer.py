"""What a GNN layer is here: row-wise work, then an aggregation, then row-wise work.

A layer never aggregates by itself. ``before`` says which rows it pushes into the history table,
``after`` says what it makes of the rows that were aggregated for it; the runtime does what lies
between. That cut is all a model needs for any number of chunks, shards and stages, and evaluation
uses the very same two methods. C rows of a chunk, H halo rows, F width.
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
from gnnpipe.ops.hashed_dropout import KeptMasks, Mask, keyed_dropout, keyed_mask
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.registry import Registry

__all__ = ["MODELS", "Layer", "LayerSpec", "PushMaker", "Rows", "Values", "input_linear"]

Values = dict[str, Tensor]
"""Row-wise values of a chunk by name, each [C, width]: what crosses a stage boundary. Inside of a
stage a value of a recorded model may have more dimensions, or a single row that stands for all."""


@dataclass(frozen=True)
class Rows:
    """The rows a layer works on: everything about a chunk that is not a value of the model."""

    keys: Tensor
    """[C] int32, dropout keys of the vertices."""
    features: FeatureRows | None
    """Input features of the rows; only the first stage has them."""
    seed: int = 0
    epoch: int = 0
    training: bool = False
    is_probe: bool = False
    """Of a forecast: as in training, but for dropout."""
    vertices: Tensor | None = None
    """[C] int64, the number of each vertex in the graph as it was read."""
    block: Block | None = None
    """Edges into these rows, for layers that are not linear."""
    masks: KeptMasks | None = None
    """Dropout of all rows of the shard, where these are the ones from ``start`` on."""
    start: int = 0
    output_buffer: OutputBuffer | None = None
    """Memory of the rows that are pushed next, in the history table (``PushMaker``)."""
    may_overwrite: bool = False
    """The rows that ``after`` receives are not read again: they may be overwritten."""
    parts: Mapping[str, Rows] = field(default_factory=dict)
    """The rows of every type of vertices, where there are several."""

    def part(self, vertex_type: str) -> Rows:
        """The rows of a type, in the epoch and mode of these; '': all."""
        if not vertex_type:
            return self
        return replace(
            self.parts[vertex_type],
            seed=self.seed,
            epoch=self.epoch,
            training=self.training,
            is_probe=self.is_probe,
        )

    def mask(self, width: int, probability: float, site: int) -> Mask | None:
        """What keyed dropout keeps of rows [C, ``width``] while training; None: all.

        ``site`` is unique in the model.
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
        """``x`` [C, F] behind that dropout."""
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
    """Products with weights, but for the last one's, are made in bf16 (``models.products``)."""


class PushMaker(Enum):
    """The method of a layer that makes pushed rows in the history table, where they need no copy.

    Nothing may write to these rows afterwards.
    """

    COPY = auto()
    """None: pushed rows are copied into the table."""
    BEFORE = auto()
    """``before`` pushes ``rows.output_buffer.rows`` itself, if there is a buffer."""
    AFTER = auto()
    """``after``, except the last layer's, returns ``rows.output_buffer.rows`` itself as x, if there
    is a buffer; ``before``, except the first layer's, pushes x as it is."""


class Layer(nn.Module, ABC):
    """One GNN layer; ``index`` counts from 0 over the whole model."""

    aggregation: str
    """'gcn', 'mean' or 'sum' (linear, fixed weights), or 'loops': the layer gets the rows of its
    neighbours and itself and aggregates through a PyG convolution."""

    def __init__(self, index: int, spec: LayerSpec) -> None:
        super().__init__()
        self.index = index
        self.spec = spec

    @property
    def is_first(self) -> bool:
        """It reads the input features instead of values."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Its value ``x`` is the logits [C, num_classes]."""
        return self.index == self.spec.num_layers - 1

    @property
    def is_linear(self) -> bool:
        """Its aggregation is a product with a fixed matrix."""
        return self.aggregation in LINEAR_KINDS

    @property
    def push_width(self) -> int:
        """Width of the rows it pushes."""
        return self.spec.hidden

    @property
    def kept_widths(self) -> dict[str, int]:
        """Name and width of the values that ``before`` hands to ``after``."""
        return {}

    @property
    def out_widths(self) -> dict[str, int]:
        """Name and width of the values that ``after`` returns."""
        return {"x": self.spec.num_classes if self.is_last else self.spec.hidden}

    reads: ClassVar[tuple[str, ...]] = ("x",)
    """Names of the values that it reads of the layer before it; the first layer reads none."""

    maps_features: ClassVar[bool] = False
    """What ``before`` of this very class pushes in the first layer is ``encode``, a linear map of
    the features without a bias. A subclass with another ``before`` has to say so anew."""
    keeps_features: ClassVar[bool] = False
    """Its first layer needs a row's own features as well."""

    push_maker: ClassVar[PushMaker] = PushMaker.COPY
    """The method that makes the pushed rows in ``rows.output_buffer``. A subclass that overrides
    ``before``, ``after`` or ``from_aggregated_features`` must declare it anew."""

    cuda_graph_safe: ClassVar[bool] = False
    """This very class starts the same kernels in each epoch of training, but for dropout masks,
    which ``rows`` has. A subclass has to say so anew, whatever it changes."""

    @property
    def is_cuda_graph_safe(self) -> bool:
        """Epochs with it can be repeated as one (``runtime.replay``)."""
        return bool(vars(type(self)).get("cuda_graph_safe", False))

    def _is_declared_for(self, attribute: str, *methods: str) -> bool:
        """Whether no class overrides one of ``methods`` without declaring ``attribute`` anew."""
        definers = [self._definer(method) for method in methods]
        return all(issubclass(self._definer(attribute), definer) for definer in definers)

    def _definer(self, name: str) -> type:
        return next(c for c in type(self).__mro__ if name in vars(c))

    @property
    def accepts_aggregated_features(self) -> bool:
        """Its values can be made by ``from_aggregated_features`` as well."""
        encode = self._modules.get("encode")
        is_map = type(encode) is FeatureLinear and encode.bias is None
        is_declared = self._is_declared_for("maps_features", "before")
        return self.is_first and is_map and self.maps_features and is_declared

    def push_maker_behind(self, previous: Layer | None) -> PushMaker:
        """Returns the method that makes this layer's pushed rows; ``previous``: the layer before.

        ``PushMaker.AFTER`` is ``after`` of ``previous``, if both layers declare it.
        """
        declared = self._declared_push_maker
        if declared is PushMaker.AFTER:
            is_made = previous is not None and previous._declared_push_maker is declared
            return declared if is_made else PushMaker.COPY
        return declared

    @property
    def _declared_push_maker(self) -> PushMaker:
        is_declared = self._is_declared_for(
            "push_maker", "before", "after", "from_aggregated_features"
        )
        return self.push_maker if is_declared else PushMaker.COPY

    def from_aggregated_features(self, aggregated: Tensor, rows: Rows) -> Values:
        """The first layer's values, from aggregated features [C, num_features]: of A x and not x.

        In place of ``before``, which is not called; where it ``accepts_aggregated_features``.
        """
        encode = self._modules["encode"]
        assert isinstance(encode, FeatureLinear)
        return self.after(encode.of(aggregated), self.own_values(rows), rows)

    def own_values(self, rows: Rows) -> Values:
        """What the first layer keeps of a row's own features."""
        del rows
        return {}

    def dropout_mask(self, rows: Rows, width: int) -> Mask | None:
        """What dropout keeps of the rows [C, ``width``] that the layer makes for the next one.

        It belongs to ``after``, where the rows are made, and not to the next layer's ``before``, so
        that it is one step with the rest. Its site is index + 1.
        """
        return rows.mask(width, self.spec.dropout, site=self.index + 1)

    @property
    def has_bf16_products(self) -> bool:
        """It has a product with a weight that ``is_rounded`` is for, beside that of features."""
        return not self.is_first and not self.is_last

    reads_settings: ClassVar[tuple[str, ...]] = ()
    """Fields of ``LayerSpec`` that it reads and other layers need not."""

    @abstractmethod
    def before(self, values: Values, rows: Rows) -> tuple[Tensor, Values]:
        """The rows to push [C, push_width], and the values kept for ``after``."""

    @abstractmethod
    def after(self, received: Tensor, values: Values, rows: Rows) -> Values:
        """The layer's values from the aggregated rows [C, push_width].

        A layer that is not linear receives the block's rows [C + H, push_width] instead, its own
        first, and finds the edges in ``rows.block``. In training the last layer's rows may be fewer
        than those of the chunk (docs/adr/0027); their features are not among them.
        """


MODELS: Registry[type[Layer]] = Registry("model")


def input_linear(spec: LayerSpec, bias: bool = False) -> FeatureLinear:
    """The linear map from the input features to the hidden width."""
    return FeatureLinear(spec.num_features, spec.hidden, bias, spec.is_rounded)

"""A stack of ``Layer`` as a model: every layer is one op with one aggregation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gnnpipe.errors import InputError
from gnnpipe.models.layer import MODELS, Layer, LayerSpec, PushMaker, Rows, Values
from gnnpipe.models.stage_module import Aggregation, Model, Received, StageModule


def layer_name(layer: Layer) -> str:
    """Returns the name of a layer's op, such as 'gcn0'."""
    names = {MODELS[name]: name for name in MODELS}
    return f"{names.get(type(layer), type(layer).__name__)}{layer.index}"


class GNN(nn.Module, Model):
    """A stack of layers; the first reads the features, the last returns the logits."""

    def __init__(self, layers: list[Layer]) -> None:
        """``InputError`` unless ``layers`` count from 0 and each returns what the next reads."""
        super().__init__()
        _check(layers)
        self.layers = nn.ModuleList(layers)
        self._num_run = len(layers)
        self.name = layer_name(layers[0])[:-1]

    @classmethod
    def build(cls, name: str, spec: LayerSpec, seed: int, dtype: torch.dtype) -> GNN:
        """Returns the model ``name`` with weights drawn from ``seed``, equal on every rank."""
        kind = MODELS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cls([kind(i, spec) for i in range(spec.num_layers)])
        return model.to(dtype)

    @staticmethod
    def count_weights(name: str, spec: LayerSpec) -> int:
        """Counts the numbers in the weights of the model ``name`` without allocating them."""
        kind, count = MODELS[name], spec.num_layers
        # All layers except the first and the last have the same weights.
        copies_of = {0: 1, min(1, count - 1): max(1, count - 2), count - 1: 1}
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return sum(
                copies * sum(p.numel() for p in kind(i, spec).parameters())
                for i, copies in copies_of.items()
            )

    @staticmethod
    def num_classes_in(weights: Mapping[str, Tensor], num_layers: int) -> int:
        """Returns the number of classes of a built-in model's weights by name; 0: not known."""
        for name in ("decode", "lin"):
            found = weights.get(f"layers.{num_layers - 1}.{name}.weight")
            if found is not None:
                return len(found)
        return 0

    @property
    def size_text(self) -> str:
        """See ``Model``."""
        return f"{len(self.layers)} layers x {self.stack()[0].spec.hidden}"

    @property
    def module(self) -> nn.Module:
        """See ``Model``."""
        return self

    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """See ``Model``."""
        return bool(dense) or any(layer.has_bf16_products for layer in self.stack())

    def stack(self) -> list[Layer]:
        """Returns the layers that are run, in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)][: self._num_run]

    def end_at(self, index: int) -> None:
        """Makes layer ``index`` the last one that is run; its x takes the place of the logits."""
        self._num_run = index + 1

    def stage_module(self, ops: Sequence[int]) -> LayerStageModule:
        """Returns consecutive layers as a stage (see ``Model``)."""
        stack = self.stack()
        return LayerStageModule(stack[ops[0] : ops[-1] + 1], is_end=ops[-1] + 1 == len(stack))


def _check(layers: Sequence[Layer]) -> None:
    if not layers:
        raise InputError("GNN: no layers; try GNN([GCNLayer(0, spec)])")
    made: Mapping[str, int] = {}
    for i, layer in enumerate(layers):
        kind = type(layer).__name__
        if not isinstance(layer, Layer):
            raise InputError(f"GNN: layer {i} is a {kind}, not a gnnpipe.models.Layer")
        count = layer.spec.num_layers
        if layer.index != i or count != len(layers):
            raise InputError(
                f"GNN: layer {i} of {len(layers)} has index {layer.index} of {count}; try "
                f"{kind}({i}, spec) with LayerSpec(num_layers={len(layers)})"
            )
        missing = [name for name in layer.reads if i and name not in made]
        if missing:
            raise InputError(
                f"GNN: layer {i}, {kind}, reads {missing[0]}, which {type(layers[i - 1]).__name__} "
                f"does not return; try {kind} for layer {i - 1} too, or another kind for layer {i}"
            )
        is_pushed = i > 0 and layer.push_maker_behind(layers[i - 1]) is PushMaker.AFTER
        if is_pushed and made["x"] != layer.push_width:
            raise InputError(
                f"GNN: layer {i}, {kind}, pushes rows of {layer.push_width}, but layer {i - 1} "
                f"returns rows of {made['x']}; give both the same hidden"
            )
        made = layer.out_widths


class LayerStageModule(StageModule):
    """Consecutive layers of a ``GNN``: step j runs ``after`` of layer j - 1, then ``before`` of j.

    Between stages the name of a value contains its layer ('gcnii7.h0'), within a stage it does not
    ('h0').
    """

    def __init__(self, layers: Sequence[Layer], is_end: bool) -> None:
        """``is_end``: the last of ``layers`` is the last of the model."""
        self.layers, self._is_end = list(layers), is_end
        self._names = [layer_name(layer) for layer in layers]
        self.rounds = [
            (
                Aggregation(
                    name,
                    layer.aggregation,
                    layer.push_width,
                    of_features=layer.accepts_aggregated_features,
                ),
            )
            for name, layer in zip(self._names, layers, strict=True)
        ]
        self._push_makers = [
            layer.push_maker_behind(before)
            for layer, before in zip(self.layers, [None, *self.layers], strict=False)
        ]
        self._is_aggregated = False

    def use_aggregated_features(self, names: Collection[str]) -> None:
        """See ``StageModule``."""
        self._is_aggregated = self._names[0] in names

    @property
    def needs_features(self) -> bool:
        """See ``StageModule``."""
        return not self._is_aggregated or self.layers[0].keeps_features

    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """See ``StageModule``."""
        if index == 0:
            values = {name.rpartition(".")[2]: value for name, value in values.items()}
            if self._is_aggregated:
                return {}, values
        elif index == 1 and self._is_aggregated:
            layer, found = self.layers[0], received[self._names[0]]
            values = layer.from_aggregated_features(found.rows, self._for_after(index, rows))
        else:
            layer, found = self.layers[index - 1], received[self._names[index - 1]]
            read = replace(self._for_after(index, rows), block=found.block)
            values = layer.after(found.rows, values, read)
        if index < len(self.layers):
            layer = self.layers[index]
            pushed, values = layer.before(values, rows)
            return {self._names[index]: pushed}, values
        if self._is_end:
            return {}, {"x": values["x"]}
        return {}, {f"{self._names[-1]}.{name}": value for name, value in values.items()}

    def _for_after(self, index: int, rows: Rows) -> Rows:
        """Returns ``rows`` without the output buffer if the next ``before`` fills it."""
        if self.writes_output_buffer(index) and self._push_makers[index] is PushMaker.BEFORE:
            return replace(rows, output_buffer=None)
        return rows

    @property
    def is_cuda_graph_safe(self) -> bool:
        """See ``StageModule``."""
        return all(layer.is_cuda_graph_safe for layer in self.layers)

    def writes_output_buffer(self, index: int) -> bool:
        """See ``StageModule``."""
        return index < len(self.layers) and self._push_makers[index] is not PushMaker.COPY

    def to(self, device: torch.device) -> None:
        """See ``StageModule``."""
        for layer in self.layers:
            layer.to(device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``StageModule``."""
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                yield f"layers.{layer.index}.{name}", parameter

"""Runs every ``Layer`` on a few random rows before a run.

``check_layers`` checks that layers work row by row: a norm over all rows, or dropout that draws
random numbers, would silently give another result for every number of chunks. ``measure_layers``
measures the memory that each layer keeps until backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnpipe.errors import InputError
from gnnpipe.graph.blocks import Block
from gnnpipe.models.layer import Layer, Rows, Values
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.hashed_dropout import KeptMasks, row_keys
from gnnpipe.ops.saved_tensors import recorded_saved_tensors, storage_address, tensors_in

_ROWS = 12
_SPLIT = 5
"""Rows of the first of the two parts."""


def check_layers(layers: Sequence[Layer], num_vertices: int) -> None:
    """``InputError`` if a layer fails, returns undeclared widths or mixes rows.

    For a layer that is not linear, only ``before`` is run, because ``after`` reads other rows
    through the edges.
    """
    for layer, previous in zip(layers, (None, *layers), strict=False):
        with torch.random.fork_rng(devices=[]), torch.no_grad(), in_training_mode(layer):
            _Trial(layer, previous, min(_ROWS, num_vertices)).check()


@contextmanager
def in_training_mode(layer: Layer) -> Iterator[None]:
    """Puts the layer into training mode; restores its modes and buffers afterwards."""
    # Not deepcopy: it fails for a layer that keeps a non-leaf tensor.
    modes = {module: module.training for module in layer.modules()}
    buffers = {buffer: buffer.clone() for buffer in layer.buffers()}
    try:
        layer.train()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, value in buffers.items():
            buffer.copy_(value)


class _Trial:
    """One layer with random inputs."""

    def __init__(self, layer: Layer, previous: Layer | None, count: int) -> None:
        self.name = f"model: layer {layer.index}, {type(layer).__name__}"
        self.layer, self.count = layer, count
        like = next(layer.parameters(), torch.empty(0))
        dtype, device = like.dtype, like.device
        draw = torch.Generator().manual_seed(layer.index)

        def rows(width: int) -> Tensor:
            return torch.randn(count, width, generator=draw, dtype=dtype).to(device)

        widths = {} if previous is None else previous.out_widths
        self.values = {name: rows(width) for name, width in widths.items()}
        self.received = rows(layer.push_width)
        self.features: FeatureTable | None = None
        if layer.is_first:
            features = rows(layer.spec.num_features).float().cpu().numpy()
            self.features = FeatureTable(features, dtype, device)
        self.vertices = torch.arange(count, device=device)
        self.tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        if layer.spec.is_rounded:
            self.tolerance = 2**-6  # products of other sizes may be rounded otherwise

    def check(self) -> None:
        """See ``check_layers``."""
        parts = [slice(0, self.count), slice(0, _SPLIT), slice(_SPLIT, self.count)]
        results = [self._before(part) for part in parts]
        pushed, kept = results[0]
        self._check_widths("before pushes", {"rows": pushed}, {"rows": self.layer.push_width})
        self._check_widths("before keeps", kept, self.layer.kept_widths)
        self._check_parts("before", *({"": pushed} | kept for pushed, kept in results))
        if self.layer.is_linear:
            values = [
                self._after(part, kept) for part, (_, kept) in zip(parts, results, strict=True)
            ]
            self._check_widths("after returns", values[0], self.layer.out_widths)
            self._check_parts("after", *values)

    def _before(self, part: slice) -> tuple[Tensor, Values]:
        given = {name: value[part] for name, value in self.values.items()}
        found: tuple[Tensor, Values] = self._try("before", part, self.layer.before, given)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise InputError(
                f"{self.name}: before returns a {type(found).__name__}; it must return the rows to "
                "push and a dict of values for after"
            )
        return found

    def _after(self, part: slice, kept: Values) -> Values:
        found: Values = self._try("after", part, self.layer.after, self.received[part], kept)
        if not isinstance(found, Mapping):
            raise InputError(
                f"{self.name}: after returns a {type(found).__name__}; it must return a dict of "
                "values with 'x'"
            )
        return found

    def _try(self, what: str, part: slice, method: Callable[..., Any], *given: Any) -> Any:
        rows = Rows(
            row_keys(self.vertices[part]),
            self.features.rows(part.start, part.stop) if self.features else None,
            training=True,
            vertices=self.vertices[part],
        )
        try:
            return method(*given, rows)
        except Exception as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            if "FeatureRows" in text:
                text += "; rows.features may be sparse: use models.layer.input_linear(spec)"
            raise InputError(
                f"{self.name}: {what} fails on {len(rows.keys)} random rows: "
                f"{type(error).__name__}: {text}"
            ) from error

    def _check_widths(
        self, what: str, found: Mapping[str, Any], declared: Mapping[str, int]
    ) -> None:
        for name, width in declared.items():
            value = found.get(name)
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape != [self.count, width]:
                raise InputError(
                    f"{self.name}: {what} {name} as {shape} for {self.count} rows; declared is "
                    f"[{self.count}, {width}] (push_width, kept_widths, out_widths)"
                )

    def _check_parts(self, what: str, whole: Values, *halves: Values) -> None:
        for name, value in whole.items():
            joined = [half[name] for half in halves if isinstance(half.get(name), Tensor)]
            tolerances = self.tolerance, self.tolerance
            if len(joined) < len(halves) or not are_parts(joined, value, 0, *tolerances):
                raise InputError(
                    f"{self.name}: {what} mixes rows or draws random numbers: part of the rows "
                    "alone gives another result than among all rows, so results would depend on "
                    "the number of chunks. Work row by row (LayerNorm, not BatchNorm1d), and use "
                    "dropout_mask(rows, width) for dropout"
                )


def are_parts(
    parts: Sequence[Tensor], whole: Any, dim: int, relative: float, absolute: float
) -> bool:
    """Whether tensors, concatenated in a dimension, equal ``whole`` within these tolerances."""
    try:
        joined = torch.cat(list(parts), dim)
    except (RuntimeError, IndexError):
        return False
    if not isinstance(whole, Tensor) or joined.shape != whole.shape:
        return False
    return torch.equal(joined, whole) or torch.allclose(
        joined.double(), whole.double(), relative, absolute, equal_nan=True
    )


_FEW_ROWS, _DEGREE = 8, 2
_MASK_NUMBER_BYTES = 4
"""Bytes of a number, to convert tensors of other types (dropout masks) into numbers."""


@dataclass(frozen=True)
class LayerMemory:
    """Numbers that a layer keeps until backward."""

    per_row: int
    per_row_before: int
    """The part of ``per_row`` that ``before`` keeps."""
    per_row_recomputed: int
    """Numbers per row with ``--recompute``: the inputs of ``after``."""
    per_edge: int


def measure_layers(layers: Sequence[Layer]) -> list[LayerMemory]:
    """Returns the memory of every layer, in order."""
    with torch.inference_mode(False), _trainable_weights(layers):
        small = _measure(layers, _FEW_ROWS, _FEW_ROWS * _DEGREE)
        wide = _measure(layers, 2 * _FEW_ROWS, 2 * _FEW_ROWS * _DEGREE)
        dense = small
        if not all(layer.is_linear for layer in layers):
            dense = _measure(layers, _FEW_ROWS, 2 * _FEW_ROWS * _DEGREE)
    per_edge = (dense - small)[:, 0] / (_FEW_ROWS * _DEGREE)
    total, before, recomputed = (wide - small).T / _FEW_ROWS
    columns = total - _DEGREE * per_edge, before, recomputed, per_edge
    return [LayerMemory(*map(round, numbers)) for numbers in zip(*columns, strict=True)]


class _Seen:
    """Storage that is already counted."""

    def __init__(self, *known: Tensor) -> None:
        self._addresses = {storage_address(t) for t in known}
        self._alive: list[Tensor] = list(known)  # a freed address could be allocated again

    def count(self, value: object) -> float:
        """Counts the numbers in the tensors of ``value`` with new storage."""
        found = 0.0
        for tensor in tensors_in(value):
            self._alive.append(tensor)
            if storage_address(tensor) not in self._addresses:
                self._addresses.add(storage_address(tensor))
                number = tensor.element_size()
                if not tensor.is_floating_point():
                    number = _MASK_NUMBER_BYTES
                found += tensor.untyped_storage().nbytes() / number
        return found


def _measure(layers: Sequence[Layer], num_rows: int, num_edges: int) -> npt.NDArray[np.float64]:
    """Numbers kept in a training pass, [layers, 3]: all, by ``before``, with ``--recompute``."""
    weights = [p for layer in layers for p in layer.parameters()]
    like = weights[0] if weights else torch.empty(0)
    vertices = torch.arange(num_rows, device=like.device)
    features = np.ones((num_rows, layers[0].spec.num_features), dtype=np.float32)
    masks = KeptMasks(row_keys(vertices))
    rows = Rows(
        keys=row_keys(vertices),
        features=FeatureTable(features, like.dtype, like.device).rows(),
        training=True,
        vertices=vertices,
        masks=masks,
        may_overwrite=True,
    )
    on_block = replace(rows, block=_sample_block(vertices, num_edges))
    seen, seen_recomputed = _Seen(*weights), _Seen(*weights)
    found = []
    values: Values = {}
    for layer in layers:
        with in_training_mode(layer), recorded_saved_tensors() as saved:
            pushed, kept = layer.before(values, rows)
            before = seen.count([saved, masks.masks])
            received = pushed.detach().clone().requires_grad_()
            recomputed = seen_recomputed.count([received, kept])
            total = before + seen.count([received, kept])
            # The runtime also detaches values between two steps.
            leaves = {k: v.detach().requires_grad_(v.requires_grad) for k, v in kept.items()}
            values = layer.after(received, leaves, rows if layer.is_linear else on_block)
            total += seen.count([saved, masks.masks, {} if layer.is_last else values])
        found.append((total, before, recomputed))
    return np.array(found)


def _sample_block(vertices: Tensor, num_edges: int) -> Block:
    """Returns a block whose edges all lie within the sample, without self-loops."""
    count, edge = len(vertices), torch.arange(num_edges, device=vertices.device)
    target = edge % count
    source = (target + 1 + edge // count) % count
    nothing = vertices[:0]
    return Block(
        torch.stack([source, target]),
        nothing,
        torch.zeros(0, 1, dtype=torch.bool, device=vertices.device),
        (count, count),
        keys=row_keys(vertices),
        is_fused=True,
    )


@contextmanager
def _trainable_weights(layers: Sequence[Layer]) -> Iterator[None]:
    """Temporarily replaces weights created in inference mode by copies that autograd can save."""
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    for layer in layers:
        for module in layer.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.is_inference():
                    swapped.append((module, name, weight))
                    setattr(module, name, nn.Parameter(weight.detach().clone()))
    try:
        yield
    finally:
        for module, name, weight in swapped:
            setattr(module, name, weight)

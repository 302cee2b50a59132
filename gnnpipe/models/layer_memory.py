"""Measures the memory that each layer keeps until backward, on sample rows.

The layers run in order, with aggregation replaced by the identity, while saved-tensor hooks record
the tensors that autograd keeps. A tensor counts for the first layer that keeps it. Samples of
several sizes separate numbers per row and per edge from constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from gnnpipe.graph.blocks import Block
from gnnpipe.models.layer import Layer, Rows, Values
from gnnpipe.models.layer_probe import in_training_mode
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.hashed_dropout import KeptMasks, row_keys
from gnnpipe.ops.saved_tensors import recorded_saved_tensors, storage_address, tensors_in

_ROWS, _DEGREE = 8, 2
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
        small, wide, dense = (
            _measure(layers, rows, rows * degree)
            for rows, degree in ((_ROWS, _DEGREE), (2 * _ROWS, _DEGREE), (_ROWS, 2 * _DEGREE))
        )
    found = []
    for one, more_rows, more_edges in zip(small, wide, dense, strict=True):
        per_edge = (more_edges.total - one.total) / (_ROWS * _DEGREE)
        found.append(
            LayerMemory(
                per_row=round((more_rows.total - one.total) / _ROWS - _DEGREE * per_edge),
                per_row_before=round((more_rows.before - one.before) / _ROWS),
                per_row_recomputed=round((more_rows.recomputed - one.recomputed) / _ROWS),
                per_edge=round(per_edge),
            )
        )
    return found


@dataclass
class _Numbers:
    """Numbers that a layer keeps for a whole sample."""

    total: float = 0.0
    before: float = 0.0
    recomputed: float = 0.0


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


def _measure(layers: Sequence[Layer], num_rows: int, num_edges: int) -> list[_Numbers]:
    """Runs a training pass over ``num_rows`` rows."""
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
        numbers = _Numbers()
        with in_training_mode(layer), recorded_saved_tensors() as saved:
            pushed, kept = layer.before(values, rows)
            numbers.before = seen.count([saved, masks.masks])
            received = pushed.detach().clone().requires_grad_()
            numbers.recomputed = seen_recomputed.count([received, kept])
            numbers.total = numbers.before + seen.count([received, kept])
            # The runtime also detaches values between two steps.
            leaves = {k: v.detach().requires_grad_(v.requires_grad) for k, v in kept.items()}
            values = layer.after(received, leaves, rows if layer.is_linear else on_block)
            numbers.total += seen.count([saved, masks.masks, {} if layer.is_last else values])
        found.append(numbers)
    return found


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

"""What a layer written by hand does to rows, tried out on a few random ones before a run.

Of a recorded model every call is tried (``bridge.probe``). A layer is taken at its word, and a norm
over all rows, or dropout that draws, would give another result for every number of chunks, and say
nothing. So layers of the user's own are run on some rows at once, and on either part of them alone.
C rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gnnpipe.errors import InputError
from gnnpipe.models.layer import Layer, Rows, Values
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.hashed_dropout import row_keys

__all__ = ["check_layers", "in_training_mode"]

_ROWS = 12
_AT = 5
"""Where they are parted."""


def check_layers(layers: Sequence[Layer], num_vertices: int) -> None:
    """``InputError`` if one that is not ours fails, makes other widths than it says, or mixes rows.

    Of one that is not linear, ``before`` alone is tried: what it makes of edges is not row-wise.
    """
    for layer, previous in zip(layers, (None, *layers), strict=False):
        if not type(layer).__module__.startswith("gnnpipe."):
            with torch.random.fork_rng(devices=[]), torch.no_grad(), in_training_mode(layer):
                _Trial(layer, previous, min(_ROWS, num_vertices)).check()


@contextmanager
def in_training_mode(layer: Layer) -> Iterator[None]:
    """Afterwards it is in the mode that it was in, with the statistics that it had."""
    # Not a copy: torch makes none of a layer that holds on to what it has made.
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
    """One layer with what it is given."""

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
        features = rows(layer.spec.num_features).float().cpu().numpy()
        self.features = FeatureTable(features, dtype, device)
        self.vertices = torch.arange(count, device=device)
        self.near = 1e-9 if dtype == torch.float64 else 1e-4

    def check(self) -> None:
        """See ``check_layers``."""
        parts = [slice(0, self.count), slice(0, _AT), slice(_AT, self.count)]
        whole, *halves = (self._before(part) for part in parts)
        self._check_widths("before pushes", {"rows": whole[0]}, {"rows": self.layer.push_width})
        self._check_widths("before keeps", whole[1], self.layer.kept_widths)
        found = [{"": pushed} | kept for pushed, kept in (whole, *halves)]
        self._check_parts("before", *found)
        if self.layer.is_linear:
            kept = [one[1] for one in (whole, *halves)]
            made = [self._after(part, k) for part, k in zip(parts, kept, strict=True)]
            self._check_widths("after makes", made[0], self.layer.out_widths)
            self._check_parts("after", *made)

    def _before(self, part: slice) -> tuple[Tensor, Values]:
        given = {name: value[part] for name, value in self.values.items()}
        found: tuple[Tensor, Values] = self._try("before", part, self.layer.before, given)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise InputError(
                f"{self.name}: before gives a {type(found).__name__}; it must return the rows to "
                "push, and a dict of what after needs"
            )
        return found

    def _after(self, part: slice, kept: Values) -> Values:
        found: Values = self._try("after", part, self.layer.after, self.received[part], kept)
        if not isinstance(found, Mapping):
            raise InputError(
                f"{self.name}: after gives a {type(found).__name__}; it must return a dict of "
                "values, 'x' among them"
            )
        return found

    def _try(self, what: str, part: slice, method: Callable[..., Any], *given: Any) -> Any:
        rows = Rows(
            row_keys(self.vertices[part]),
            self.features.rows(part.start, part.stop) if self.layer.is_first else None,
            training=True,
            vertices=self.vertices[part],
        )
        try:
            return method(*given, rows)
        except Exception as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            if "FeatureRows" in text:
                text += "; rows.features may be sparse: map them by models.layer.input_linear(spec)"
            raise InputError(
                f"{self.name}: {what} fails on {len(rows.keys)} random rows: "
                f"{type(error).__name__}: {text}"
            ) from error

    def _check_widths(self, what: str, found: Mapping[str, Any], said: Mapping[str, int]) -> None:
        for name, width in said.items():
            value = found.get(name)
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape != [self.count, width]:
                raise InputError(
                    f"{self.name}: {what} {name} as {shape} for {self.count} rows; it says "
                    f"[{self.count}, {width}] (push_width, kept_widths, out_widths)"
                )

    def _check_parts(self, what: str, whole: Values, *halves: Values) -> None:
        for name, value in whole.items():
            joined = [half[name] for half in halves if isinstance(half.get(name), Tensor)]
            if len(joined) < len(halves) or not self._is_joined(value, joined):
                raise InputError(
                    f"{self.name}: {what} mixes rows or draws random numbers: some rows alone give "
                    "others than among all, and so would every number of chunks. Make it work row "
                    "by row (LayerNorm, not BatchNorm1d), and drop by dropout_mask(rows, width)"
                )

    def _is_joined(self, whole: Any, halves: Sequence[Tensor]) -> bool:
        try:
            joined = torch.cat(list(halves))
        except RuntimeError:
            return False
        return (
            isinstance(whole, Tensor)
            and joined.shape == whole.shape
            and torch.allclose(
                joined.double(), whole.double(), self.near, self.near, equal_nan=True
            )
        )

"""Ends a trained model at one of its layers, so that predictions are the rows of this layer."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.registry import nearest


def ends_at(model: nn.Module, layer: str) -> nn.Module:
    """Return a model whose result is what ``layer`` returns; ``model`` is changed.

    Args:
        model: Any module that takes features and edges.
        layer: Path of the layer in the model, as ``named_modules`` has it, such as 'convs.0'. Of a
            layer that is called several times, the first call counts.

    Raises:
        InputError: The model has no such layer.
    """
    known = [name for name, _ in model.named_modules() if name]
    if layer not in known:
        raise InputError(f"--layer {layer!r}: the model has no such layer; {nearest(layer, known)}")
    return _with_end(model, layer)


def without_labels(graph: Graph) -> Graph:
    """Return the graph without labels and split: hidden rows may have any width."""
    none = np.zeros(graph.num_vertices, dtype=bool)
    return replace(
        graph,
        y=np.full(graph.num_vertices, -1),
        num_classes=0,
        train_mask=none,
        val_mask=none,
        test_mask=none,
    )


class _ReachedError(BaseException):
    """Ends forward; no ``except Exception`` of the user's may catch it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _End(nn.Module):
    """The layer at which forward ends."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, and end forward of the model."""
        raise _ReachedError(self.layer(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, which forward may read."""
        if name == "layer" or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(self.layer, name)


def _with_end(model: nn.Module, layer: str) -> nn.Module:
    """Return a module with the signature of ``model`` that returns what the layer returns."""

    class LayerOutput(nn.Module):
        """Calls the model up to the layer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Call the model; return what the layer returns."""
            try:
                self.model(*args, **kwargs)
            except _ReachedError as reached:
                return reached.value
            raise InputError(f"--layer {layer!r}: forward does not call this layer; name another")

    given = list(inspect.signature(model.forward).parameters.values())
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([first, *given])
    LayerOutput.forward.__signature__ = signature  # type: ignore[attr-defined]
    parent, _, name = layer.rpartition(".")
    model.get_submodule(parent)._modules[name] = _End(model.get_submodule(layer))
    return LayerOutput()

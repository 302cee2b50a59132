"""The built-in models by name."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from gnnpipe.registry import Registry

MODELS: Registry[type[nn.Module]] = Registry("model")
"""PyG modules. ``__init__`` takes the numbers of features and classes; ``layers``, ``hidden`` and
``dropout``; and arguments of its own, which have defaults (``--model-args``). ``forward`` takes
(x, edge_index) and returns the logits [N, C]."""


def widths(num_features: int, num_classes: int, layers: int, hidden: int) -> list[tuple[int, int]]:
    """Columns before and after each layer: of the features, ``hidden``, ..., the classes."""
    return list(pairwise([num_features, *[hidden] * (layers - 1), num_classes]))

"""What is said of recordings throughout the bridge: their inputs' names, and the user's lines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

__all__ = [
    "BY_HAND", "EDGES", "FEATURES", "OUT_OF_PLACE", "attribute", "dropout_arguments", "is_input",
    "is_own", "line_of",
]  # fmt: skip

FEATURES, EDGES = "x", "edge_index"
"""Names of the recording's inputs, whatever the model calls them; others are ``EDGE_DATA``."""

BY_HAND = "or declare the layers by hand (docs/guide.md)"

OUT_OF_PLACE = "_out_of_place"
"""Ends the name of a twin that stands in for a module that would write to its input."""


def is_input(call: fx.Node, *names: str) -> bool:
    """Whether a call is one of these inputs of the recording."""
    return call.op == "placeholder" and call.target in names


def line_of(call: fx.Node) -> str:
    """The user's line that made a call: ' (model.py, line 12: x = x.mean(0))'."""
    lines = (call.stack_trace or "").strip().splitlines()
    own = [i for i, text in enumerate(lines) if text.lstrip().startswith("File") and is_own(text)]
    if not own:
        return ""
    where = lines[own[-1]].strip().removeprefix("File ").split(", in ")[0].replace('"', "")
    code = lines[own[-1] + 1].strip() if own[-1] + 1 < len(lines) else ""
    return f" ({where}: {code})"


def attribute(module: nn.Module, path: str) -> Any:
    """What a dotted path leads to: a weight, a buffer, a constant."""
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def dropout_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``F.dropout`` by name, its defaults among them."""
    given = inspect.signature(F.dropout).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def is_own(text: str) -> bool:
    """Whether a file, or a line that names one, is the user's."""
    return not any(part in text for part in ("/torch/", "/torch_geometric/", "/gnnpipe/models/"))

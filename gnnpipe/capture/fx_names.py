"""What is said of recordings throughout the bridge: their inputs' names, and the user's lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from gnnpipe.graph.graph import Graph

__all__ = [
    "BY_HAND",
    "EDGES",
    "FEATURES",
    "OUT_OF_PLACE",
    "attribute",
    "called",
    "dropout_arguments",
    "entry",
    "first_line",
    "input_name",
    "input_number",
    "is_input",
    "is_own",
    "line_of",
]

FEATURES, EDGES = "x", "edge_index"
"""Names of the recording's inputs, whatever the model calls them; others are ``EDGE_DATA``."""

BY_HAND = "or declare the layers by hand (docs/guide.md)"

OUT_OF_PLACE = "_out_of_place"
"""Ends the name of a twin that stands in for a module that would write to its input."""


def entry(model: nn.Module, graph: Graph) -> str:
    """The method that is recorded: 'forward', or 'encode' where pairs are learned and it is there.

    PyG's models for link prediction, and its ``GAE``, give the final rows by ``encode``.
    """
    encodes = inspect.ismethod(getattr(model, "encode", None))  # And no layer of that name.
    return "encode" if graph.pairs is not None and encodes else "forward"


def called(model: nn.Module, method: str) -> Callable[..., Any]:
    """What a user calls: the model itself for its forward."""
    found: Callable[..., Any] = model if method == "forward" else getattr(model, method)
    return found


def input_name(kind: str, number: int) -> str:
    """The input for a type of vertices or edges, where there are several: 'x__0'."""
    return f"{kind}__{number}"


def input_number(call: fx.Node) -> int | None:
    """The type of vertices or edges that an input is for; none if there is but one."""
    number = str(call.target).partition("__")[2]
    return int(number) if number else None


def is_input(call: fx.Node, *kinds: str) -> bool:
    """Whether a call is an input of the recording of one of these kinds."""
    return call.op == "placeholder" and str(call.target).partition("__")[0] in kinds


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


def first_line(error: Exception) -> str:
    """What an error says, without the list of all that would have been right."""
    return str(error).strip().partition("\n")[0]


def is_own(text: str) -> bool:
    """Whether a file, or a line that names one, is the user's."""
    return not any(part in text for part in ("/torch/", "/torch_geometric/", "/gnnpipe/models/"))

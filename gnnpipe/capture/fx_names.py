"""Names of a recording's inputs, and source lines of the user for error messages."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
import torch_geometric
from torch import fx, nn

from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.types import Relation, numbered_name

T = TypeVar("T")

FEATURES, EDGES = "x", "edge_index"
"""Names of a recording's inputs, whatever the model calls them; further ones: ``EDGE_DATA``."""

EDGE_VALUES = "edge_value"
"""Inputs with values of edges that the model's forward makes from the edges (``edge_work``)."""

AS_IS = "or run it as it is, in one chunk on one rank"


def refuse(wrong: str, hint: str = "", call: fx.Node | None = None) -> NoReturn:
    """Raise ``InputError`` about the model: the fault, the user's line of ``call``, and a remedy.

    Example: 'model: mean mixes vertices (model.py, line 12: x = x.mean(0)); make it ...'.
    """
    place = "" if call is None else _line_of(call)
    raise InputError(f"model: {wrong}{place}" + (f"; {hint}" if hint else "")) from None


class OpaqueConvError(InputError):
    """A convolution does not run on blocks as a whole; perhaps its calls do, one by one."""

    def __init__(self, message: str, kind: type) -> None:
        """``kind``: class of the convolution."""
        super().__init__(message)
        self.kind = kind


def refuse_conv(wrong: str, hint: str, call: fx.Node, kind: type) -> NoReturn:
    """Raise ``OpaqueConvError`` about the call of a convolution of the class ``kind``."""
    try:
        refuse(wrong, hint, call)
    except InputError as fault:
        raise OpaqueConvError(str(fault), kind) from None


def input_name(kind: str, number: int) -> str:
    """Name of the input for one of several vertex or edge types: 'x__0'."""
    return numbered_name(kind, number)


def fields_of(names: Collection[str], graph: Graph) -> set[str]:
    """The edge data of a graph that is passed to arguments of these names."""
    if graph.types is None:
        return set(names)
    kinds = {name.removesuffix("_dict") for name in names}
    return {field for field in graph.derived if field.partition("__")[0] in kinds}


def by_argument(
    names: Collection[str], graph: Graph, values: Mapping[str, T]
) -> dict[str, T | dict[Relation, T]]:
    """Edge data by argument; of several vertex types, a dict by relation for each argument.

    ``values``: by field of edge data.
    """
    if graph.types is None:
        return {name: values[name] for name in names}
    found: dict[str, T | dict[Relation, T]] = {}
    for name in names:
        kind = name.removesuffix("_dict")
        fields = {r: numbered_name(kind, i) for i, r in enumerate(graph.relations)}
        found[name] = {r: values[field] for r, field in fields.items() if field in values}
    return found


def input_number(call: fx.Node) -> int | None:
    """The number of an input's vertex or edge type; None if there is only one type."""
    number = str(call.target).partition("__")[2]
    return int(number) if number else None


def is_input(call: fx.Node, *kinds: str) -> bool:
    """Whether a call is an input of one of these kinds (names without the type's number)."""
    return call.op == "placeholder" and str(call.target).partition("__")[0] in kinds


def edges_read(call: fx.Node) -> fx.Node | None:
    """The input of edges that a call reads; None if it reads none."""
    return next((source for source in call.all_input_nodes if is_input(source, EDGES)), None)


def name_of(call: fx.Node) -> str:
    """Name of the function, method or module that is called."""
    target = call.target
    if isinstance(target, str):
        return target.removeprefix("model.")
    return str(getattr(target, "__name__", target))


def _line_of(call: fx.Node) -> str:
    """The user's source line of a call: ' (model.py, line 12: x = x.mean(0))'."""
    lines = (call.stack_trace or "").strip().splitlines()
    own = [i for i, text in enumerate(lines) if text.lstrip().startswith("File") and is_own(text)]
    if not own:
        return ""
    where = lines[own[-1]].strip().removeprefix("File ").split(", in ")[0].replace('"', "")
    code = lines[own[-1] + 1].strip() if own[-1] + 1 < len(lines) else ""
    return f" ({where}: {code})"


def place_of(error: BaseException) -> str:
    """The user's innermost line that led to an error, and the function of PyG that it calls.

    Example: 'model.py, line 12: x = self.net(x, edge_index), in PyG's GraphUNet.forward
    (graph_unet.py, line 98)'.
    """
    own, of_pyg = "", ""
    trace = traceback.walk_tb(error.__traceback__)
    for frame, line in trace:
        code = frame.f_code
        is_standard = code.co_filename.startswith(_STANDARD)
        if is_own(code.co_filename) and (not is_standard or "-packages" in code.co_filename):
            text = linecache.getline(code.co_filename, line).strip()
            own, of_pyg = f"{code.co_filename}, line {line}: {text}", ""
        elif code.co_filename.startswith(_PYG):
            of_pyg = (
                f"in PyG's {code.co_qualname} ({os.path.basename(code.co_filename)}, line {line})"
            )
    return ", ".join(filter(None, (own, of_pyg))) or "in PyG's own code"


def attribute(module: nn.Module, path: str) -> Any:
    """The weight, buffer or constant at a dotted path."""
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def dropout_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``F.dropout`` by name, with defaults filled in."""
    given = inspect.signature(F.dropout).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def first_line(error: Exception) -> str:
    """The first line of an error's message; torch lists valid alternatives below it."""
    return str(error).strip().partition("\n")[0]


_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
"""Folder of Python's own modules."""

_PYG = f"{Path(torch_geometric.__path__[0])}{os.sep}"

_LIBRARIES = (f"{Path(torch.__path__[0])}{os.sep}", _PYG, f"{Path(__file__).parents[1]}{os.sep}")
"""Folders of torch, PyG and gnnpipe."""


@lru_cache(1 << 14)
def is_own(text: str) -> bool:
    """Whether a file name, or a line with one, is outside of torch, PyG and gnnpipe."""
    return not any(folder in text for folder in _LIBRARIES)

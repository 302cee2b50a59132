"""A model that ``--model`` names by file or module: ``net.py:make_model`` or ``package.net:Net``.

The function, or class, after the colon is called with the graph and the config, or with as many of
these two as it takes, and with the keyword arguments of ``--model-args``; it returns a
``torch.nn.Module``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Collection
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.config.model_args import model_args
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.registry import nearest


def is_user_model(name: str) -> bool:
    """Whether ``--model`` names a model of the user's own."""
    return ":" in name and not name.startswith("passed-in:")


def make_user_model(config: TrainConfig, graph: Graph) -> nn.Module:
    """Import what ``config.model`` names and return the model that it makes.

    Raises:
        InputError: There is no such file, module or function, or it returns no module. An error in
            the user's code itself is raised as it is.
    """
    make = load_maker(config.model)
    inputs = (graph, config)[: num_inputs(config)]
    model = make(*inputs, **model_args(config.model_args))
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--model {config.model!r}: returned an object of type {type(model).__name__}, not a "
            "torch.nn.Module"
        )
    return model


def num_inputs(config: TrainConfig) -> int:
    """Return how many of graph and config the function that ``config.model`` names takes.

    Raises ``InputError`` as ``load_maker``, and if it cannot be called with ``config.model_args``.
    """
    make, given = load_maker(config.model), model_args(config.model_args)
    try:
        signature = inspect.signature(make)
    except ValueError:  # a class written in C
        return 2
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    count = 2
    if Parameter.VAR_POSITIONAL not in kinds.values():
        ahead = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        count = min(sum(kind in ahead for name, kind in kinds.items() if name not in given), 2)
    start = f"--model-args {config.model_args!r}: " if given else f"--model {config.model!r}: "
    for name in given:
        if name not in kinds and Parameter.VAR_KEYWORD not in kinds.values():
            raise InputError(
                f"{start}{config.model} has no argument {name!r}; {_hint(name, kinds)}"
            )
    try:
        signature.bind(*(None, None)[:count], **given)
    except TypeError as error:
        raise InputError(
            f"{start}{config.model} cannot be called with the arguments graph and config and those "
            f"in --model-args ({error}); give further arguments a default, or a value by "
            '--model-args "NAME=VALUE"'
        ) from None
    return count


def _hint(name: str, known: Collection[str]) -> str:
    return nearest(name, known) if known else "leave it out"


def absolute_name(name: str) -> str:
    """Return ``name`` with the absolute path of its file, if it names a file."""
    source, _, attribute = name.rpartition(":")
    if not is_user_model(name) or not source.endswith(".py"):
        return name
    return f"{Path(source).resolve()}:{attribute}"


def load_maker(name: str) -> Callable[..., Any]:
    """Return the function or class that ``name`` names, as ``FILE.py:NAME`` or ``MODULE:NAME``."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        module = _import_file(name, Path(source))
    else:
        module = _import_module(name, source)
    found = getattr(module, attribute, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise InputError(
            f"--model {name!r}: {source} has no {attribute!r}; {nearest(attribute, known)}"
        )
    if not callable(found):
        raise InputError(
            f"--model {name!r}: names a value of type {type(found).__name__}; name a function of "
            "graph and config that returns the model"
        )
    maker: Callable[..., Any] = found
    return maker


def _import_file(name: str, path: Path) -> ModuleType:
    """Import a file; its folder can be imported from, as if Python had started the file."""
    if not path.is_file():
        raise InputError(
            f"--model {name!r}: there is no file {path}; give a path from {Path.cwd()}, or an "
            "absolute one"
        )
    path = path.resolve()
    module_name = path.stem
    if module_name in sys.modules and not _is_module_of(sys.modules[module_name], path):
        module_name += f"_{zlib.crc32(str(path).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where pickle and torch.fx look for classes
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _is_module_of(module: ModuleType, path: Path) -> bool:
    return getattr(module, "__file__", None) == str(path)


def _import_module(name: str, source: str) -> ModuleType:
    if not all(part.isidentifier() for part in source.split(".")):
        raise InputError(
            f"--model {name!r}: {source!r} is no module; give FILE.py:NAME, such as "
            "net.py:make_model, or MODULE:NAME"
        )
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
            raise  # the user's module imports another one that is missing
        raise InputError(
            f"--model {name!r}: there is no module {source!r} (the module {error.name!r} is "
            "missing); install it, or give the path of a file, such as net.py:make_model"
        ) from None

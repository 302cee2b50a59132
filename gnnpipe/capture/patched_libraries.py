"""Makes functions and classes of Python, torch and PyG take recorded values, during a recording."""

from __future__ import annotations

import builtins
import inspect
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch_geometric.utils
from torch import fx
from torch.utils.checkpoint import CheckpointFunction
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import hetero_conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models.rev_gnn import InvertibleFunction

from gnnpipe.capture.edge_work.learned_values import of_learned_values
from gnnpipe.capture.fx_names import is_own


class RecordedValue(fx.Proxy):
    """A recorded value, to which items can be assigned.

    ``isinstance`` takes it for a tensor in the forward of an opened convolution.
    """

    _is_param = _is_buffer = False  # read by ``isinstance(value, nn.Parameter)``

    def __setitem__(self, index: Any, value: Any) -> None:
        """Record the assignment; ``make_out_of_place`` gives later readers the new value."""
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


@contextmanager
def patched_libraries(opened: Collection[type]) -> Iterator[None]:
    """Context in which aggregations, HeteroConv and checkpointed calls can be traced.

    ``isinstance`` takes values in opened convolutions for tensors. ``Aggregation`` overrides
    ``__call__``, which hides it from the tracer; HeteroConv takes the first of a result that is a
    tuple, which a traced value does not know. A call checkpointed by torch, and a reversible block
    of PyG, are recorded as the calls inside: ``--recompute`` saves memory in their place. Functions
    such as ``torch.zeros`` do not take traced sizes by themselves. ``opened``: classes of
    convolutions that are recorded call by call.
    """
    original, checkpointed = pyg.Aggregation.__call__, CheckpointFunction.apply
    reversible_call = InvertibleFunction.apply

    def traced_call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, fx.Proxy):
            tracer: Any = x.tracer
            return tracer.call_module(self, self.forward, (x, *args), kwargs)
        return original(self, x, *args, **kwargs)

    grouping = hetero_conv.group

    def traced_group(values: list[Any], how: str | None) -> Any:
        found = grouping(values, how)
        is_pair = how in ("min", "max") and len(values) > 1 and isinstance(found, fx.Proxy)
        return found[0] if is_pair else found

    def call(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)

    def call_block(function: Any, inverse: Any, passes: int, count: int, *args: Any) -> Any:
        return function(*args[:count])

    pyg.Aggregation.__call__, hetero_conv.group = traced_call, traced_group
    InvertibleFunction.apply = call_block
    CheckpointFunction.apply = call  # type: ignore[method-assign]
    replaced = [(torch, name, getattr(torch, name)) for name in _FACTORIES]
    replaced += _edge_functions(opened)
    for owner, name, function in replaced:
        setattr(owner, name, _recorded_function(function))
    check = builtins.isinstance
    builtins.isinstance = partial(_is_instance, check)
    try:
        yield
    finally:
        builtins.isinstance = check
        pyg.Aggregation.__call__, hetero_conv.group = original, grouping
        CheckpointFunction.apply = checkpointed  # type: ignore[method-assign]
        InvertibleFunction.apply = reversible_call
        for owner, name, function in replaced:
            setattr(owner, name, function)


def _is_instance(check: Callable[..., bool], value: Any, kinds: Any) -> bool:
    """``isinstance`` of Python code, to which values in an opened convolution are tensors.

    ``RecordedValue.__class__`` would also deceive torch's C++ code, which then reads memory that is
    not that of a tensor: ``torch.reshape(x, (x.size(0), -1))`` would end the process.
    """
    if check(value, kinds):
        return True
    is_opened = type(value) is RecordedValue and getattr(value.tracer, "is_in_opened", False)
    return is_opened and issubclass(torch.Tensor, kinds)


_FACTORIES = (
    *("zeros", "ones", "full", "empty", "arange", "rand", "randn", "tensor", "as_tensor"),
    *("sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_compressed_tensor"),
)
"""Functions of torch that make tensors from numbers, or that record no call by themselves."""


_QUESTIONS = (torch_geometric.utils.is_torch_sparse_tensor, torch_geometric.utils.is_sparse)
"""Functions that return False for a recorded value; the trial refuses a value that is a matrix."""


_PYTHON = sysconfig.get_paths()["stdlib"]
"""Folder of Python's own modules."""


@cache
def _is_of_user(module: str, path: str) -> bool:
    """Whether a module is neither Python's nor installed; ``path``: its file, if it has one."""
    is_python = path.startswith(_PYTHON) or module in sys.builtin_module_names
    return not is_python and "site-packages" not in path and is_own(path)


def _edge_functions(opened: Collection[type]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Modules, names and functions of ``torch_geometric.utils`` that code finds under the names.

    Modules: those of the user, and those of the convolutions ``opened``.
    """
    known = {id(f): f for f in vars(torch_geometric.utils).values() if inspect.isfunction(f)}
    known[id(gcn_norm)] = gcn_norm
    owners = [torch_geometric.utils, *(sys.modules[kind.__module__] for kind in opened)]
    for module_name, module in list(sys.modules.items()):
        is_of_user = _is_of_user(module_name, getattr(module, "__file__", None) or "")
        if is_of_user and isinstance(module, types.ModuleType):
            owners.append(module)
    return [
        (owner, name, known[id(value)])
        for owner in owners
        for name, value in list(vars(owner).items())
        if id(value) in known
    ]


def _recorded_function(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A function that records a call with traced arguments, and makes other calls at once."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        fx.node.map_aggregate(
            (args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None
        )
        if not found:
            return factory(*args, **kwargs)
        if factory in _QUESTIONS:
            return False
        made = of_learned_values(factory, args, kwargs)
        if made is not None:
            return made
        return found[0].tracer.create_proxy("call_function", factory, args, kwargs)

    return call

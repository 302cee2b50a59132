"""Keeps pickles from running code while another library reads them.

PyG stores its data sets as pickles, some written by their authors and some by PyG itself, and falls
back to reading pickles without restriction. Anybody who can put a file into the data set folder
could thus run code here. Python's audit hooks see every name that a pickle looks up, in any
library; this module refuses all names but those of arrays and plain containers.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_PLAIN = "bytearray bytes complex dict frozenset list object set tuple"
_SCIPY = "bsr coo csc csr dia dok lil"
_STORAGES = "Float Double Half BFloat16 Long Int Short Char Byte Bool"

HARMLESS = frozenset(
    {(module, name) for module in ("builtins", "__builtin__") for name in _PLAIN.split()}
    | {("collections", "OrderedDict"), ("collections", "defaultdict"), ("_codecs", "encode")}
    | {(module, "_reconstructor") for module in ("copyreg", "copy_reg")}
    | {
        (f"numpy.{core}.multiarray", name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    }
    | {("numpy", "ndarray"), ("numpy", "dtype")}
    | {
        (f"scipy.sparse.{module}", f"{kind}_{ending}")
        for kind in _SCIPY.split()
        for module in (kind, f"_{kind}")
        for ending in ("matrix", "array")
    }
    | {("torch._utils", f"_rebuild_{name}") for name in ("tensor", "tensor_v2")}
    | {("torch", f"{kind}Storage") for kind in _STORAGES.split()}
)
"""Names (module, name) in pickles of arrays, sparse matrices, tensors and plain containers."""

_is_on: ContextVar[bool] = ContextVar("only_data", default=False)


@contextmanager
def only_data() -> Iterator[None]:
    """Context in which unpickling anything but data raises ``pickle.UnpicklingError``."""
    _install()
    before = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(before)


@cache
def _install() -> None:
    """Add the hook once per process: hooks cannot be removed. It is idle outside ``only_data``."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _is_on.get() and tuple(arguments) not in HARMLESS:
        raise pickle.UnpicklingError(
            f"asks for {'.'.join(map(str, arguments))}, which is not data and may run code"
        )

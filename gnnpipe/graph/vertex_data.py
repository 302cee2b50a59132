"""Data of vertices beside their features, such as positions, which a model may read by name.

A graph keeps all such arrays in ``vertex_data``. Those that a model reads become the first columns
of the features: chunks, shards and tables of rows then need nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.errors import InputError

_LARGEST = 1 << 24
"""Whole numbers up to this one are exact as float32."""


@dataclass(frozen=True)
class VertexColumns:
    """Columns of the features that hold data of the vertices."""

    name: str
    start: int
    stop: int
    is_vector: bool
    """The data was given as [N]; else as [N, stop - start]."""
    dtype: str
    """Number type as torch names it, 'int64' or 'bool'; '' for floating-point numbers."""


def before_features(
    x: Any, vertex_data: Mapping[str, npt.NDArray[Any]], graph: str
) -> tuple[Any, tuple[VertexColumns, ...]]:
    """Features with data of the vertices in columns before them, and these columns.

    ``graph``: its name, for the ``InputError`` for numbers that features cannot hold.
    """
    columns, parts, start = [], [], 0
    for name, values in vertex_data.items():
        _check(name, values, graph)
        parts.append(values.reshape(len(values), -1).astype(np.float32))
        stop = start + parts[-1].shape[1]
        dtype = "" if values.dtype.kind == "f" else str(values.dtype)
        columns.append(VertexColumns(name, start, stop, values.ndim == 1, dtype))
        start = stop
    if sp.issparse(x):
        stacked = sp.hstack([*map(sp.csr_array, parts), x], format="csr")
        return sp.csr_array(stacked), tuple(columns)
    return np.hstack([*parts, x]), tuple(columns)


def split_columns(x: Any, columns: Sequence[VertexColumns]) -> tuple[Any, dict[str, Any]]:
    """Features [N, F] and the data of vertices by name, from rows [N, ...] that hold both."""
    import torch  # not for reading a graph, which takes seconds less without

    found = {}
    for part in columns:
        values = x[:, part.start] if part.is_vector else x[:, part.start : part.stop]
        found[part.name] = values.to(getattr(torch, part.dtype)) if part.dtype else values
    return (x[:, columns[-1].stop :] if columns else x), found


def _check(name: str, values: npt.NDArray[Any], graph: str) -> None:
    is_float = values.dtype.kind == "f"
    largest = np.finfo(np.float32).max if is_float else _LARGEST
    is_wrong = ~(np.abs(values) <= largest) if values.dtype.kind != "b" else np.zeros(0, bool)
    if is_wrong.any():
        place = np.argwhere(is_wrong)[0].tolist()
        kind = "finite numbers within float32" if is_float else f"whole numbers up to {_LARGEST:,}"
        raise InputError(
            f"graph {graph!r}: {name}{place} = {values[tuple(place)]}, which forward reads; give "
            f"{kind}"
        )


def vertex_data_in(arrays: Mapping[str, Any], num_vertices: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays that are data of the vertices: [N] or [N, D] numbers."""
    return {
        name: values
        for name, values in arrays.items()
        if values.dtype.kind in "iufb" and values.ndim in (1, 2) and len(values) == num_vertices
    }

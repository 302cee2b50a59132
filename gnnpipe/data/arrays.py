"""Converts tensors of any layout to numpy arrays, or to scipy CSR if they are sparse.

PyG's attributes are dense tensors, torch's sparse tensors or those of ``torch_sparse``; a ``Graph``
holds numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.data.messages import fail
from gnnpipe.graph.types import AdjacencyForm


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, ``SparseTensor`` or array."""
    sizes = value.sizes() if _is_sparse_tensor(value) else value.shape
    return tuple(int(s) for s in sizes)


def array_of(value: Any) -> Any:
    """A tensor, ``SparseTensor`` or array-like as numpy, or scipy CSR if it is sparse."""
    import torch

    if _is_sparse_tensor(value):
        return _csr(value)
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "as_tensor"):  # torch_geometric.EdgeIndex
        value = value.as_tensor()
    if value.layout is not torch.strided:
        return _csr(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()


def _csr(value: Any) -> sp.csr_array:
    import torch

    shape = shape_of(value)
    if _is_sparse_tensor(value):
        rowptr, col, data = value.csr()
        data = torch.ones(len(col)) if data is None else data
    elif value.layout is torch.sparse_csr:
        rowptr, col, data = value.crow_indices(), value.col_indices(), value.values()
    else:
        value = value.detach().cpu().to_sparse_coo().coalesce()
        entries = value.values().float().numpy(), tuple(value.indices().numpy())
        return sp.csr_array(entries, shape=shape)
    arrays = (data.detach().cpu().float().numpy(), col.cpu().numpy(), rowptr.cpu().numpy())
    return sp.csr_array(arrays, shape=shape)


@dataclass(frozen=True, eq=False)
class GivenEdges:
    """Edges as a ``Data`` or a store of a ``HeteroData`` holds them."""

    edge_index: Any
    """[2, E]"""
    form: AdjacencyForm
    weights: Any = None
    """[E] values of ``adj_t``; ``None`` if it has none, or ones alone."""


def edges_of(data: Any, name: str) -> GivenEdges:
    """The edges of ``edge_index``, or else of ``adj_t``; ``InputError`` if there is neither."""
    if data.get("edge_index") is not None:
        return GivenEdges(array_of(data.edge_index), AdjacencyForm.EDGE_INDEX)
    if data.get("adj_t") is None:
        fail(name, "neither edge_index nor adj_t", "data.edge_index = ...")
    # Row i of adj_t lists the sources of target i.
    rows = _csr(data.adj_t).tocoo()
    weights = None if (rows.data == 1).all() else rows.data
    return GivenEdges(np.stack([rows.col, rows.row]), _form(data.adj_t), weights)


def _form(adj_t: Any) -> AdjacencyForm:
    if _is_sparse_tensor(adj_t):
        return AdjacencyForm.SPARSE_TENSOR
    layout = str(getattr(adj_t, "layout", ""))
    # A dense or scipy matrix is no form that PyG's convolutions take.
    return AdjacencyForm(layout) if layout in set(AdjacencyForm) else AdjacencyForm.EDGE_INDEX


def check_real(values: Any, name: str, field: str) -> None:
    """``InputError`` unless an array has a type of real numbers."""
    if values.dtype.kind not in "fiub":
        fail(name, f"{field} is of type {values.dtype}", "real numbers such as float32")


def float32_array(values: Any, name: str, field: str) -> npt.NDArray[np.float32]:
    """Real numbers as float32; a number beyond float32 becomes infinite.

    A memory-mapped float32 file stays on disk.
    """
    raw = np.asarray(values)
    check_real(raw, name, field)
    with np.errstate(over="ignore"):
        return np.asarray(raw, dtype=np.float32)


def _is_sparse_tensor(value: Any) -> bool:
    return type(value).__name__ == "SparseTensor" and hasattr(value, "csr")

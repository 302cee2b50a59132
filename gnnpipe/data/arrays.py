"""Converts tensors of any layout to numpy arrays, or to scipy CSR if they are sparse.

PyG's attributes are dense tensors, torch's sparse tensors or those of ``torch_sparse``; a ``Graph``
holds numpy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.errors import InputError

__all__ = ["array_of", "csr_of", "edges_of", "shape_of"]


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, ``SparseTensor`` or array."""
    sizes = value.sizes() if _is_sparse_tensor(value) else value.shape
    return tuple(int(s) for s in sizes)


def array_of(value: Any) -> Any:
    """A tensor, ``SparseTensor`` or array-like as numpy, or scipy CSR if it is sparse."""
    import torch

    if _is_sparse_tensor(value):
        return csr_of(value)
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "as_tensor"):  # torch_geometric.EdgeIndex
        value = value.as_tensor()
    if value.layout is not torch.strided:
        return csr_of(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()


def csr_of(value: Any) -> sp.csr_array:
    """A sparse torch tensor of any layout, or torch_sparse's ``SparseTensor``, as scipy CSR."""
    import torch

    if _is_sparse_tensor(value):
        rowptr, col, data = value.csr()
        data = torch.ones(len(col)) if data is None else data
        shape = shape_of(value)
    else:
        value = value.detach().cpu()
        shape = shape_of(value)
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            index = value.indices().numpy()
            data = value.values().float().numpy()
            return sp.csr_array((data, (index[0], index[1])), shape=shape)
        if value.layout is not torch.sparse_csr:
            return csr_of(value.to_sparse_coo())
        rowptr, col, data = value.crow_indices(), value.col_indices(), value.values()
    arrays = (data.detach().cpu().float().numpy(), col.cpu().numpy(), rowptr.cpu().numpy())
    return sp.csr_array(arrays, shape=shape)


def edges_of(data: Any, name: str) -> tuple[Any, bool]:
    """Edges [2, E] of a ``Data`` or store, and whether its adj_t has values other than 1.

    ``InputError`` if it has neither ``edge_index`` nor ``adj_t``.
    """
    if data.get("edge_index") is not None:
        return array_of(data.edge_index), False
    if data.get("adj_t") is None:
        raise InputError(f"dataset {name}: neither edge_index nor adj_t; set edge_index")
    # Row i of adj_t lists the sources of target i.
    rows = csr_of(data.adj_t).tocoo()
    return np.stack([rows.col, rows.row]), not (rows.data == 1).all()


def _is_sparse_tensor(value: Any) -> bool:
    return type(value).__name__ == "SparseTensor" and hasattr(value, "csr")

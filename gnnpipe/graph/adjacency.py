"""Edges as tensors in the form in which PyG's models take them (``AdjacencyForm``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnpipe.graph.types import AdjacencyForm

_LAYOUTS = {
    AdjacencyForm.COO: torch.sparse_coo,
    AdjacencyForm.CSR: torch.sparse_csr,
    AdjacencyForm.CSC: torch.sparse_csc,
}


def adjacency_tensor(
    form: AdjacencyForm,
    edge_index: Tensor,
    weight: Tensor | None,
    size: tuple[int, int],
    dtype: torch.dtype,
) -> Any:
    """Return the edges in a form.

    Args:
        form: Of the result.
        edge_index: [2, E] int64, sorted by target and then by source.
        weight: [E] values of the matrix; ``None``: ones, or no values in a ``SparseTensor``.
        size: Numbers of sources and targets.
        dtype: Number type of the values.

    Returns:
        ``edge_index`` itself, or the matrix [targets, sources] whose row i lists the sources of i.
    """
    if form is AdjacencyForm.EDGE_INDEX:
        return edge_index
    source, target = edge_index
    shape = size[1], size[0]
    weight = None if weight is None else weight.to(dtype)
    if form is AdjacencyForm.SPARSE_TENSOR:
        from torch_sparse import SparseTensor

        return SparseTensor(
            row=target, col=source, value=weight, sparse_sizes=shape, is_sorted=True
        )
    ones = torch.ones(len(source), dtype=dtype, device=source.device)
    values = ones if weight is None else weight
    if form is AdjacencyForm.CSR:
        ends = torch.arange(shape[0] + 1, device=target.device)
        offsets = torch.searchsorted(target.contiguous(), ends)
        return torch.sparse_csr_tensor(offsets, source, values, shape, check_invariants=False)
    places = torch.stack([target, source])
    coo = torch.sparse_coo_tensor(places, values, shape, check_invariants=False)
    return coo.to_sparse(layout=_LAYOUTS[form])

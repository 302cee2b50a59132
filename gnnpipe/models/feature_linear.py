"""The first linear map, which keeps bag-of-words features sparse.

A row of Coauthor Physics has 8,415 features of which 33 are set: made dense the features take 1.1
GB, and almost all of the product would multiply zeros. So features stay CSR, forward is sparse rows
times the weight, and the weight's gradient is the transposed CSR times the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot

from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Features

__all__ = [
    "FeatureLinear", "FeatureRows", "SparseRows", "dense_features", "feature_linear",
    "feature_rows",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Sparse features of some rows: the matrix [C, F] and its transpose."""

    forward: RowCSR
    transposed: RowCSR


FeatureRows = Tensor | SparseRows


def feature_rows(x: Features, dtype: torch.dtype, device: torch.device) -> FeatureRows:
    """Features [C, F] as a layer reads them, sparse if they are sparse."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x)).to(device=device, dtype=dtype)
    turned = sp.csr_array(x.T.tocsr())
    turned.sort_indices()
    return SparseRows(RowCSR.from_scipy(x, dtype, device), RowCSR.from_scipy(turned, dtype, device))


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, rows: SparseRows) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.rows = rows
        return rows.forward.matmul(weight.t().contiguous())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.rows.transposed.matmul(grad.contiguous()).t(), None


def feature_linear(features: FeatureRows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` [C, out] of dense or sparse rows [C, in]; weight [out, in]."""
    if isinstance(features, Tensor):
        return nn.functional.linear(features, weight, bias)
    product: Tensor = _SparseLinear.apply(weight, features)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias


def dense_features(features: FeatureRows) -> Tensor:
    """Rows [C, F] as one tensor, for work that sparse rows do not know."""
    if isinstance(features, Tensor):
        return features
    rows = features.forward
    counts = (rows.indptr[1:] - rows.indptr[:-1]).long()
    number = torch.repeat_interleave(torch.arange(rows.num_rows, device=counts.device), counts)
    dense = rows.values.new_zeros(rows.num_rows, rows.num_columns)
    dense[number, rows.indices.long()] = rows.values
    return dense


class FeatureLinear(nn.Module):
    """``x @ weight.T + bias`` for dense or sparse rows; weight [out, in], bias [out] or none.

    The weight is stored column by column: its transpose, which the sparse product reads row by row,
    then needs no copy.
    """

    def __init__(self, num_features: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, width).t())
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        glorot(self.weight)

    def forward(self, features: FeatureRows | None) -> Tensor:
        """Features [C, in] to [C, out]."""
        if features is None:
            raise RuntimeError("the first layer got no features: it must sit on the first stage")
        return feature_linear(features, self.weight, self.bias)

"""The first linear map, which keeps bag-of-words features sparse.

A row of Coauthor Physics has 8,415 features of which 33 are set: made dense the features take 1.1
GB, and almost all of the product would multiply zeros. So features stay CSR, forward is sparse rows
times the weight, and the weight's gradient is the transposed CSR times the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch_geometric.nn.inits import glorot

from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Features
from gnnpipe.ops.bf16_matmul import linear, product
from gnnpipe.ops.spmm import default_kernel

__all__ = ["FeatureLinear", "FeatureRows", "FeatureTable", "feature_linear"]


class FeatureTable:
    """Features [n, in] of all rows of a shard, dense or sparse, and gradients on their way back.

    The gradient of a weight [out, in] is as wide as the features: made chunk by chunk it would be
    written and added K times. So the chunks leave the gradients of their rows here, and the last
    one back pays for all with one product.
    """

    def __init__(self, x: Features, dtype: torch.dtype, device: torch.device) -> None:
        self._transposed: RowCSR | None = None
        self._x: Tensor | RowCSR
        if isinstance(x, np.ndarray):
            self._x = torch.from_numpy(np.ascontiguousarray(x)).to(device=device, dtype=dtype)
        else:
            turned = sp.csr_array(x.T.tocsr())
            turned.sort_indices()
            kernel = default_kernel(device)
            self._x = RowCSR.from_scipy(x, dtype, device, kernel)
            self._transposed = RowCSR.from_scipy(turned, dtype, device, kernel)
        self.num_rows = int(x.shape[0])
        self._waiting: dict[int, _Waiting] = {}

    def rows(self, start: int = 0, stop: int | None = None) -> FeatureRows:
        """Those of a chunk, or all."""
        return FeatureRows(self, start, self.num_rows if stop is None else stop)

    def times(self, weight: Tensor, start: int, stop: int, is_rounded: bool) -> Tensor:
        """Rows start:stop times ``weight.T``: [stop - start, out]; dense ones may be rounded."""
        if isinstance(self._x, Tensor):
            return product(self._x[start:stop], weight.t(), is_rounded)
        return self._x.matmul(weight.t().contiguous(), start, stop)

    def dense(self, start: int, stop: int) -> Tensor:
        """Rows start:stop as one tensor."""
        if isinstance(self._x, Tensor):
            return self._x[start:stop]
        return self._x.dense(start, stop)

    def leave(
        self, weight: int | None, grad: Tensor, start: int, stop: int, is_rounded: bool
    ) -> Tensor | None:
        """Take the gradient of what ``times`` gave; that of the weight if nothing is missing.

        ``weight`` tells the weights of several linear maps apart; none: it must not wait.
        """
        if weight is None or stop - start == self.num_rows:
            return self._product(grad, start, stop, is_rounded)
        waiting = self._waiting[weight]
        waiting.expected.discard(start)
        if waiting.grads is None:
            waiting.grads = grad.new_empty(self.num_rows, grad.shape[1])
        waiting.grads[start:stop] = grad
        waiting.chunks.add(start)
        waiting.missing = (waiting.missing or self.num_rows) - (stop - start)
        if waiting.missing:
            return None
        waiting.chunks.clear()
        return self._product(waiting.grads, 0, self.num_rows, is_rounded)

    def begin(self) -> None:
        """A training pass begins: nothing is expected, nothing waits. The room is kept."""
        for waiting in self._waiting.values():
            waiting.chunks.clear()
            waiting.expected.clear()
            waiting.missing = 0

    def end(self) -> None:
        """``RuntimeError`` if gradients of the pass still wait for those of a chunk."""
        if any(waiting.chunks for waiting in self._waiting.values()):
            raise RuntimeError("a chunk's gradient of the features' weight never came back")

    def expect(self, weight: Tensor, start: int, stop: int) -> int | None:
        """The name by which the gradient of ``weight`` waits for that of the other chunks.

        None, it must not: the weight is made anew for each chunk, this one has used it before, or
        has no rows.
        """
        name = id(weight)
        is_trained = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
        if start == stop or not is_trained:
            return None
        waiting = self._waiting.setdefault(name, _Waiting())
        if start in waiting.expected or start in waiting.chunks:
            return None
        waiting.expected.add(start)
        return name

    def _product(self, grad: Tensor, start: int, stop: int, is_rounded: bool) -> Tensor:
        """[out, in], of gradients [stop - start, out]."""
        if isinstance(self._x, Tensor):
            return product(grad.t(), self._x[start:stop], is_rounded)
        assert self._transposed is not None
        if stop - start < self.num_rows:
            whole = grad.new_zeros(self.num_rows, grad.shape[1])
            whole[start:stop] = grad
            grad = whole
        return self._transposed.matmul(grad.contiguous()).t()


@dataclass(eq=False)
class _Waiting:
    """Gradients that the chunks of an epoch have left for one weight."""

    grads: Tensor | None = None
    """[n, out]; kept for the next epoch."""
    chunks: set[int] = field(default_factory=set)
    """Where those begin that have left theirs."""
    expected: set[int] = field(default_factory=set)
    """Where those begin that went forward and are not back."""
    missing: int = 0
    """Rows; 0 before the first chunk and after the last."""


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Rows start:stop of a table, C of them."""

    table: FeatureTable
    start: int
    stop: int

    def dense(self) -> Tensor:
        """[C, in] as one tensor, for work that sparse rows do not know."""
        return self.table.dense(self.start, self.stop)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows: FeatureRows, name: int | None, is_rounded: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.rows, ctx.name, ctx.is_rounded = rows, name, is_rounded
        return rows.table.times(weight, rows.start, rows.stop, is_rounded)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[no-untyped-def]
        rows = ctx.rows
        found = rows.table.leave(ctx.name, grad, rows.start, rows.stop, ctx.is_rounded)
        return found, None, None, None


def feature_linear(
    features: FeatureRows, weight: Tensor, bias: Tensor | None = None, is_rounded: bool = False
) -> Tensor:
    """``x @ weight.T + bias`` of feature rows [C, in], as [C, out]; weight [out, in].

    ``is_rounded``: of dense features, see ``models.products``.
    """
    name = features.table.expect(weight, features.start, features.stop)
    found: Tensor = _Product.apply(weight, features, name, is_rounded)  # type: ignore[no-untyped-call]
    return found if bias is None else found + bias


class FeatureLinear(nn.Module):
    """``x @ weight.T + bias`` for dense or sparse rows; weight [out, in], bias [out] or none.

    The weight is stored column by column: its transpose, which the sparse product reads row by row,
    then needs no copy.
    """

    def __init__(
        self, num_features: int, width: int, bias: bool = False, is_rounded: bool = False
    ) -> None:
        super().__init__()
        self.is_rounded = is_rounded
        self.weight = nn.Parameter(torch.empty(num_features, width).t())
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        glorot(self.weight)

    def forward(self, features: FeatureRows | None) -> Tensor:
        """Features [C, in] to [C, out]."""
        if features is None:
            raise RuntimeError("the first layer got no features: it must sit on the first stage")
        return feature_linear(features, self.weight, self.bias, self.is_rounded)

    def of(self, x: Tensor) -> Tensor:
        """Rows [C, in] that are no features, but are as wide."""
        return linear(x, self.weight, self.bias, self.is_rounded)

"""Linear map of the input features, which stay CSR if they are sparse.

A row of Coauthor Physics has 33 nonzero features of 8,415; a dense copy takes 1.1 GB and the dense
product multiplies zeros. Forward is the CSR matrix times the weight, and the weight's gradient is
the transposed CSR matrix times the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Features
from gnnpipe.ops.bf16_matmul import product
from gnnpipe.ops.spmm import default_kernel


@torch.no_grad()
def store_by_column(weights: Iterable[nn.Parameter], states: Mapping[Any, dict[str, Any]]) -> None:
    """Store maps [F, in] of sparse features by column, and what the optimizer keeps for them.

    A product with sparse features reads the transpose and makes that of the gradient, which would
    be copied in every pass if the weight were stored by row. ``states``: by weight; a fused step
    reads weight and state in one order.
    """
    for weight in weights:
        if not weight.t().is_contiguous():
            weight.data = weight.data.t().contiguous().t()
        state = states.get(weight, {})
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == weight.shape:
                state[name] = value.t().contiguous().t()


@contextmanager
def by_row_afterwards(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Store these maps by row at the end, as modules do."""
    try:
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.contiguous()


class FeatureTable:
    """Features [n, in] of all rows of a shard, dense or sparse, and pending output gradients.

    The gradient of a weight [out, in] is as wide as the features; computed chunk by chunk, K of
    these gradients would be written and added. Instead the chunks leave their output gradients
    here, and the last chunk of backward computes the weight's gradient in one product. If the
    optimizer steps after each chunk, gradients cannot wait.
    """

    def __init__(
        self,
        x: Features,
        dtype: torch.dtype,
        device: torch.device,
        num_labels: int = 0,
        by_chunk: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Convert the features.

        Args:
            x: The features.
            dtype: Type of numbers.
            device: Where products are computed.
            num_labels: Number C of last columns that hold labels (``label_columns``).
            by_chunk: Rows (start, stop) of each chunk, if the weight's gradient of a chunk is
                needed in the chunk's backward; ``None``: after the last chunk.
        """
        self._waits = by_chunk is None
        self._transposed: dict[tuple[int, int], RowCSR] = {}
        """Transposes [in, stop - start] of sparse rows start:stop, for backward: of all rows, or of
        each chunk."""
        self._x: Tensor | RowCSR
        self.label_columns: Tensor | None = None
        """[n, C], written between two passes; of dense features a view, else kept dense."""
        num_features = x.shape[1] - num_labels
        if isinstance(x, np.ndarray):
            self._x = torch.from_numpy(np.ascontiguousarray(x)).to(device=device, dtype=dtype)
            if num_labels:
                self.label_columns = self._x[:, num_features:]
        else:
            if num_labels:
                labels = torch.from_numpy(x[:, num_features:].toarray())
                self.label_columns = labels.to(device=device, dtype=dtype)
                x = x[:, :num_features]
            kernel = default_kernel(device)
            self._x = RowCSR.from_scipy(x, dtype, device, kernel)
            for start, stop in [(0, x.shape[0])] if by_chunk is None else by_chunk:
                turned = sp.csr_array(x[start:stop].T.tocsr())
                turned.sort_indices()
                part = RowCSR.from_scipy(turned, dtype, device, kernel)
                self._transposed[start, stop] = part
        self.num_rows = int(x.shape[0])
        self._waiting: dict[int, _Waiting] = {}

    def rows(self, start: int = 0, stop: int | None = None) -> FeatureRows:
        """Returns the rows start:stop; without bounds all rows."""
        return FeatureRows(self, start, self.num_rows if stop is None else stop)

    def times(self, weight: Tensor, start: int, stop: int, is_rounded: bool) -> Tensor:
        """Computes ``x[start:stop] @ weight.T``, [stop - start, out]; dense x may round to bf16."""
        if isinstance(self._x, Tensor):
            return product(self._x[start:stop], weight.t(), is_rounded)
        if self.label_columns is None:
            return self._x.matmul(weight.t().contiguous(), start, stop)
        of_x, of_labels = weight.tensor_split([self._x.num_columns], dim=1)
        found = self._x.matmul(of_x.t().contiguous(), start, stop)
        return found.addmm_(self.label_columns[start:stop], of_labels.t())

    def dense(self, start: int, stop: int) -> Tensor:
        """Returns the rows start:stop as a dense tensor."""
        if isinstance(self._x, Tensor):
            return self._x[start:stop]
        found = self._x.dense(start, stop)
        if self.label_columns is None:
            return found
        return torch.cat([found, self.label_columns[start:stop]], dim=1)

    def leave(
        self, weight: int | None, grad: Tensor, start: int, stop: int, is_rounded: bool
    ) -> Tensor | None:
        """Stores an output gradient of ``times``; returns the weight's gradient once complete.

        ``weight`` is the key from ``expect``; ``None``: do not wait for other chunks.
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
        """Begins a training pass: drops pending gradients, keeps their memory."""
        for waiting in self._waiting.values():
            waiting.chunks.clear()
            waiting.expected.clear()
            waiting.missing = 0

    def end(self) -> None:
        """``RuntimeError`` if the gradient of a chunk is missing at the end of the pass."""
        if any(waiting.chunks for waiting in self._waiting.values()):
            raise RuntimeError("a chunk's gradient of the features' weight never came back")

    def expect(self, weight: Tensor, start: int, stop: int) -> int | None:
        """Registers a forward of rows start:stop; returns the key of the weight for ``leave``.

        ``None`` if the gradient must not wait for other chunks: the weight is not a parameter, this
        chunk has used the weight before, or has no rows.
        """
        name = id(weight)
        is_trained = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
        if start == stop or not is_trained or not self._waits:
            return None
        waiting = self._waiting.setdefault(name, _Waiting())
        if start in waiting.expected or start in waiting.chunks:
            return None
        waiting.expected.add(start)
        return name

    def _product(self, grad: Tensor, start: int, stop: int, is_rounded: bool) -> Tensor:
        """Computes ``grad.T @ x[start:stop]``, [out, in], of ``grad`` [stop - start, out]."""
        if isinstance(self._x, Tensor):
            return product(grad.t(), self._x[start:stop], is_rounded)
        if (start, stop) not in self._transposed:
            # A weight that is no parameter, as of a model that normalises it in forward.
            whole = self._transposed[0, self.num_rows]
            self._transposed[start, stop] = whole.block((0, whole.num_rows), (start, stop))
        found = self._transposed[start, stop].matmul(grad.contiguous()).t()
        if self.label_columns is None:
            return found
        return torch.cat([found, grad.t() @ self.label_columns[start:stop]], dim=1)


@dataclass(eq=False)
class _Waiting:
    """Output gradients that chunks have left for one weight; a chunk is known by its first row."""

    grads: Tensor | None = None
    """[n, out]; the memory is reused in the next epoch."""
    chunks: set[int] = field(default_factory=set)
    """Chunks that have left a gradient."""
    expected: set[int] = field(default_factory=set)
    """Chunks that have done forward and not backward."""
    missing: int = 0
    """Number of rows without a gradient; 0 before the first chunk and after the last."""


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Rows start:stop of a ``FeatureTable``, C rows."""

    table: FeatureTable
    start: int
    stop: int

    def dense(self) -> Tensor:
        """Returns the rows as a dense tensor [C, in]."""
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
    """Computes ``x @ weight.T + bias`` [C, out] of feature rows x [C, in] and weight [out, in].

    ``is_rounded``: round the factors to bf16 if x is dense (``ops.bf16_matmul``).
    """
    name = features.table.expect(weight, features.start, features.stop)
    found: Tensor = _Product.apply(weight, features, name, is_rounded)  # type: ignore[no-untyped-call]
    return found if bias is None else found + bias

"""Affine map from the old to the new rows of the probe vertices, fitted by ridge regression.

The slope has a low rank (reduced-rank regression), since it is applied to a whole table. The fit
needs only sums over the rows, which the shards add up. With frozen weights, old and new rows are
equal, and the map is the identity bit by bit.

Shapes: P probe vertices on all shards, p on this shard, F columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpipe.perf.volume import FORECAST_RANK, affine_fit_sizes, shift_fit_sizes

RIDGE = 5e-2
"""Ridge penalty on the slope, relative to the mean square of the rows. The mean of the rows is not
subtracted for this: if all rows are nearly equal, only their common shift can be estimated."""


@dataclass(frozen=True)
class AffineMap:
    """The map ``row + row @ left @ right + shift``."""

    left: Tensor
    """[F, r], r = min(FORECAST_RANK, F), or 0 for a shift alone"""
    right: Tensor
    """[r, F]"""
    shift: Tensor
    """[F]"""
    moved: float
    """Change of the probe rows, relative to their size (Frobenius norms)."""
    missed: float
    """Estimated error of the map on other rows, relative to their size."""

    def apply(self, rows: Tensor, weights: Tensor | float = 1.0) -> Tensor:
        """Return the map of ``rows`` [n, F].

        Args:
            rows: Rows, or sums of rows, each row times its weight.
            weights: Sum [n, 1] of the weights in each sum.
        """
        return torch.addmm(rows, rows @ self.left, self.right).add_(weights * self.shift)


def moments(old: Tensor, new: Tensor) -> Tensor:
    """Return the sums over rows that ``fit_affine`` needs.

    Products are computed in the number type of the rows: the error of float32 is far below
    ``RIDGE``.

    Args:
        old: Rows [p, F] before the change.
        new: Rows [p, F] after the change.

    Returns:
        Float64 sums of sizes ``affine_fit_sizes(F)``: the upper triangle of old^T old, old^T (new -
        old), the sums of old and of new - old, the squares of new - old and of new.
    """
    moved = new - old
    row, column = torch.triu_indices(old.shape[1], old.shape[1], device=old.device)
    parts = [
        (old.T @ old)[row, column],
        old.T @ moved,
        old.sum(0),
        moved.sum(0),
        moved.square().sum(),
        new.square().sum(),
    ]
    return torch.cat([part.double().reshape(-1) for part in parts])


def fit_affine(
    sums: Tensor, rows: int, width: int, dtype: torch.dtype, is_whole: bool = False
) -> AffineMap:
    """Fit the change to the old rows by ridge regression, without a penalty on the intercept.

    For rows X, changes D and the ridge solution S, the slope is ``S Q Q^T``, where Q [F, r] spans
    the fitted changes best. Q comes from one step of subspace iteration with the Gram matrix of the
    fitted changes (Halko, Martinsson and Tropp, SIAM Review 2011, section 4.5).

    Args:
        sums: ``moments`` of the rows, added up over the shards.
        rows: P.
        width: F.
        dtype: Type of the map.
        is_whole: The probe vertices are all vertices; then ``missed`` is the residual itself.
            Otherwise it is the residual over 1 - (degrees of freedom / P), as in generalised
            cross-validation (Golub, Heath and Wahba, Technometrics 1979).
    """
    gram, cross, x, d, moved, size = torch.split(sums, affine_fit_sizes(width))
    row, column = torch.triu_indices(width, width, device=sums.device)
    full = sums.new_empty(width, width)
    full[row, column] = gram
    full[column, row] = gram
    ridge = RIDGE * full.diagonal().mean() + 1e-30  # not singular for rows of zeros
    full = full - torch.outer(x, x) / rows
    cross = cross.view(width, width) - torch.outer(x, d) / rows
    # Rows that are not finite have no factor, and no error here: the loss reports them. All others
    # have one, since the ridge is far above the rounding errors of the Gram matrix.
    eye = torch.eye(width, dtype=sums.dtype, device=sums.device)
    factor, _ = torch.linalg.cholesky_ex(full + ridge * eye)
    inverse_trace = torch.linalg.solve_triangular(factor, eye, upper=False).square().sum()
    freedom = 1 + width - float(ridge * inverse_trace)  # 1 + the trace of (full + ridge I)^-1 full
    start = torch.cholesky_solve(cross @ _start(width).to(sums.device), factor)
    basis, _ = torch.linalg.qr(cross.T @ start)
    wanted = cross @ basis
    left, right = torch.cholesky_solve(wanted, factor), basis.T
    shift = (d - x @ left @ right) / rows
    # Q has orthonormal columns, so of the slope S Q Q^T only S Q is needed.
    explained = 2 * (left * wanted).sum() - (left * (full @ left)).sum() + (d * d).sum() / rows
    total = max(float(size), 1e-30)
    left_freedom = 1.0 if is_whole else max(1 - freedom / rows, 1 / rows)
    return AffineMap(
        left.to(dtype),
        right.to(dtype).contiguous(),
        shift.to(dtype),
        (float(moved) / total) ** 0.5,
        (max(float(moved - explained), 0.0) / total) ** 0.5 / left_freedom,
    )


def _start(width: int) -> Tensor:
    """Return the first basis [F, r] of the subspace iteration, float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(width, min(FORECAST_RANK, width), generator=generator, dtype=torch.float64)


def mean_moments(old: Tensor, new: Tensor) -> Tensor:
    """Return the sums over rows old, new [p, F] that ``fit_shift`` needs: [F + 2] float64."""
    d = new.double() - old.double()
    return torch.cat([d.sum(0), d.square().sum()[None], new.double().square().sum()[None]])


def fit_shift(sums: Tensor, rows: int, dtype: torch.dtype) -> AffineMap:
    """Fit a shift without slope, which is enough for a mean over all vertices."""
    d, moved, size = torch.split(sums, shift_fit_sizes(len(sums) - 2))
    total = max(float(size), 1e-30)
    residual = max(float(moved - d.square().sum() / rows), 0.0)
    none = torch.zeros(len(d), 0, dtype=dtype, device=sums.device)
    return AffineMap(
        none, none.T, (d / rows).to(dtype), (float(moved) / total) ** 0.5, (residual / total) ** 0.5
    )

"""The map from old to new pilot rows: fitted from sums over the rows that all shards can add up.

P pilot rows (of all shards), F columns. With frozen weights old and new are the same numbers, and
the map is the identity to the bit (law 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RIDGE", "AffineMap", "fit_affine", "fit_shift", "gram", "mean_moments", "moments"]

RIDGE = 5e-2
"""Pull of the fitted slope towards zero, in mean squares of the pilot rows. Taken before the mean
is removed: where the rows hardly differ from one another, only their common shift can be told."""


@dataclass(frozen=True)
class AffineMap:
    """``row @ (I + slope) + shift``, how far the rows moved and how much of that it misses."""

    factor: Tensor
    """[F, F], I + slope."""
    shift: Tensor
    """[F]."""
    moved: float
    """Movement of the pilot rows relative to their size (Frobenius norms)."""
    missed: float
    """What the map leaves of it on rows that it was not fitted on, relative to their size."""


def gram(old: Tensor) -> Tensor:
    """The upper triangle of old^T old, [F (F + 1) / 2] float64, of old pilot rows [P, F]."""
    row, column = torch.triu_indices(old.shape[1], old.shape[1], device=old.device)
    return (old.T @ old)[row, column].double()


def moments(old: Tensor, new: Tensor, found: Tensor | None = None) -> Tensor:
    """All that a fit needs of pilot rows old, new [P, F]: sums over the rows, float64.

    [F (F + 1) / 2 + F F + 2 F + 2]: old^T old (its upper triangle, ``found`` by ``gram``), old^T
    moved, the sums of old and moved, the squares of moved and new. All are made in the rows' own
    type, and added up over the shards in float64: the pull of ``RIDGE`` is far above what float32
    rounds.
    """
    moved = new - old
    parts = [
        gram(old) if found is None else found,
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
    """Ridge regression of the movement on the old rows, intercept free, from ``moments``.

    ``missed`` is the residual over 1 - (degrees of freedom / rows), as generalised
    cross-validation has it (Golub, Heath and Wahba, Technometrics 1979); if the pilots are all
    the rows there are (``is_whole``), the residual itself.
    """
    half = width * (width + 1) // 2
    gram, cross, x, d, moved, size = torch.split(sums, [half, width * width, width, width, 1, 1])
    row, column = torch.triu_indices(width, width, device=sums.device)
    full = sums.new_empty(width, width)
    full[row, column] = gram
    full[column, row] = gram
    pull = RIDGE * full.diagonal().mean() + 1e-30  # rows of zeros fit no slope, and must not fail
    full = full - torch.outer(x, x) / rows
    cross = cross.view(width, width) - torch.outer(x, d) / rows
    eye = torch.eye(width, dtype=sums.dtype, device=sums.device)
    both = torch.linalg.solve(full + pull * eye, torch.cat([cross, full], dim=1))
    slope, freedom = both[:, :width], 1 + float(both[:, width:].diagonal().sum())
    shift = (d - x @ slope) / rows
    explained = 2 * (slope * cross).sum() - (slope * (full @ slope)).sum() + (d * d).sum() / rows
    total = max(float(size), 1e-30)
    left = 1.0 if is_whole else max(1 - freedom / rows, 1 / rows)
    return AffineMap(
        (eye + slope).to(dtype),
        shift.to(dtype),
        (float(moved) / total) ** 0.5,
        (max(float(moved - explained), 0.0) / total) ** 0.5 / left,
    )


def mean_moments(old: Tensor, new: Tensor) -> Tensor:
    """What ``fit_shift`` needs of pilot rows old, new [P, F]: [F + 2] float64."""
    d = new.double() - old.double()
    return torch.cat([d.sum(0), d.square().sum()[None], new.double().square().sum()[None]])


def fit_shift(sums: Tensor, rows: int, dtype: torch.dtype) -> AffineMap:
    """Of a mean over all vertices only the shift is asked for, and few pilots tell it."""
    d, moved, size = torch.split(sums, [len(sums) - 2, 1, 1])
    total = max(float(size), 1e-30)
    left = max(float(moved - d.square().sum() / rows), 0.0)
    eye = torch.eye(len(d), dtype=dtype, device=sums.device)
    return AffineMap(
        eye, (d / rows).to(dtype), (float(moved) / total) ** 0.5, (left / total) ** 0.5
    )

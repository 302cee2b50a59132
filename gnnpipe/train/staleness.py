"""How stale an epoch was, in numbers: what metrics.csv and the report say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gnnpipe.graph.quality import stale_share
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import Assembly
from gnnpipe.setup.prepare import Prepared

__all__ = ["Staleness", "measure_staleness"]


@dataclass(frozen=True)
class Staleness:
    """Of one epoch; norms are Frobenius norms over a sample of rows, relative to those rows."""

    stale_reads: float
    """Share of the edges that were read stale, the same in every layer; 0 in an exact epoch."""
    drift: tuple[float, ...]
    """By layer: how far the rows pushed in this epoch are from what stale readers saw; NaN in an
    exact epoch. Dropout, drawn anew in each epoch, is part of it, and the larger part by far."""
    moved: tuple[float, ...]
    """By layer, where a forecast was made: how far the change of weights moved the pilot rows; NaN
    in an exact epoch."""
    missed: tuple[float, ...]
    """By layer: what the forecast left of it."""

    @property
    def is_exact(self) -> bool:
        """Nothing was stale."""
        return self.stale_reads == 0 and all(map(math.isnan, self.drift))

    def cells(self) -> dict[str, float]:
        """Columns of metrics.csv."""
        found = {"stale_reads": self.stale_reads}
        for name in ("drift", "moved", "missed"):
            found |= {f"{name}_{i}": v for i, v in enumerate(getattr(self, name))}
        return found


def measure_staleness(
    prepared: Prepared, assembly: Assembly, mesh: Mesh, order: Sequence[int], exact: bool
) -> Staleness | None:
    """Of the epoch that has just been run, on every rank; ``None`` where nothing can be stale.

    ``exact``: nothing was in this epoch.
    """
    if prepared.chunk_edges is None:
        return None
    places = {op.name: i for i, op in enumerate(prepared.model_graph.aggregations)}
    num_layers = len(places)
    columns = [[0.0] * num_layers for _ in range(4)]
    for name, history in assembly.executor.stage.histories.items():
        index = places[name]
        assert history.drift is not None
        columns[0][index], columns[1][index] = history.drift.sums.tolist()
    forecaster = assembly.executor.forecaster
    if forecaster is not None and not exact and mesh.shard == 0:
        for name, found in forecaster.maps.items():
            index = places[name]
            columns[2][index], columns[3][index] = found.moved, found.missed
    totals = mesh.sum([value for column in columns for value in column])
    change, size, moved, missed = (
        totals[i * num_layers : (i + 1) * num_layers] for i in range(4)
    )  # fmt: skip
    if exact:
        moved = missed = [math.nan] * num_layers
    drift = [(c / s) ** 0.5 if s else 0.0 for c, s in zip(change, size, strict=True)]
    return Staleness(
        0.0 if exact else stale_share(prepared.chunk_edges, order),
        tuple([math.nan] * num_layers if exact else drift),
        tuple(moved) if forecaster is not None else (),
        tuple(missed) if forecaster is not None else (),
    )

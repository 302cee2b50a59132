"""What can be done about stale rows, and the presets of ``--staleness``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRESETS", "Techniques"]


@dataclass(frozen=True)
class Techniques:
    """What is done about stale rows: GNNPipe's three techniques (arXiv 2308.10087, section 4), and
    our own, the forecast (docs/adr/0011-stale-rows-are-forecast.md).
    """

    shuffle_chunks: bool
    snapshot_every: int
    scale_live_gradients: float
    exact: bool
    """Walk layer by layer, so that nothing is stale."""
    pilots_per_column: int = 0
    """Pilot rows of the forecast, for each of the F + 1 numbers in a column of an affine map on
    rows of width F; 0: no forecast."""
    exact_epochs: int = 0
    """Epochs at the start that are walked layer by layer."""
    exact_above: float = 0.0
    """So is an epoch behind one whose gradients were this many times as long as the median of the
    last epochs; 0: never."""


# GNNPipe's own code refreshes the snapshot every 23 epochs: arXiv 2308.10087, released code.
PRESETS = {
    "none": Techniques(False, 1, 1.0, False),
    "paper": Techniques(True, 23, 2.0, False),
    "auto": Techniques(True, 1, 1.5, False, pilots_per_column=16, exact_epochs=1, exact_above=3.0),
    "exact": Techniques(False, 1, 1.0, True),
}

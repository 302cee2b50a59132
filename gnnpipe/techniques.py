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
    forecast_share: float = 0.0
    """Share of the vertices that are pilot rows of the forecast; 0: no forecast."""
    exact_epochs: int = 0
    """Epochs at the start that are walked layer by layer."""


# GNNPipe's own code refreshes the snapshot every 23 epochs: arXiv 2308.10087, released code.
PRESETS = {
    "none": Techniques(False, 1, 1.0, False),
    "paper": Techniques(True, 23, 2.0, False),
    "auto": Techniques(True, 1, 1.5, False, forecast_share=0.05, exact_epochs=1),
    "exact": Techniques(False, 1, 1.0, True),
}

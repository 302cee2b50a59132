"""Presets for stale rows: GNNPipe's three techniques and the forecast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessSettings:
    """Settings that decide which rows are stale and how training compensates for stale rows.

    GNNPipe's three techniques are ``shuffle_chunks``, ``snapshot_every`` and
    ``scale_live_gradients`` (arXiv 2308.10087, section 4). The forecast and the exact epochs are
    described in docs/adr/0011-stale-rows-are-forecast.md and 0019-exact-epochs-behind-jumps.md.
    """

    shuffle_chunks: bool
    """Whether every epoch walks the chunks in a new random order."""
    snapshot_every: int
    """Epochs between two refreshes of the snapshot that stale reads come from."""
    scale_live_gradients: float
    """Factor on gradients that arrive from other chunks."""
    is_exact: bool
    """Whether every epoch is run layer by layer, so that no row is stale."""
    probes_per_column: int = 0
    """Probe vertices of the forecast for each of the F + 1 columns of an affine map on rows of
    width F; 0: no forecast."""
    exact_epochs: int = 0
    """Number of epochs at the start that are run layer by layer."""
    exact_above: float = 0.0
    """An exact epoch follows an epoch whose gradient norm exceeds this factor times the median
    gradient norm of the last epochs; 0: never."""


# The released code of arXiv 2308.10087 refreshes the snapshot every 23 epochs.
PRESETS = {
    "none": StalenessSettings(False, 1, 1.0, False),
    "paper": StalenessSettings(True, 23, 2.0, False),
    "auto": StalenessSettings(
        True, 1, 1.5, False, probes_per_column=16, exact_epochs=1, exact_above=3.0
    ),
    "exact": StalenessSettings(False, 1, 1.0, True),
}

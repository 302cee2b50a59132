"""Report about a run folder as one HTML page or as PNG files. Needs no torch."""

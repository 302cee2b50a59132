"""The number types that a config asks for."""

from __future__ import annotations

import torch

from gnnpipe.config import TrainConfig

__all__ = ["number_dtype", "row_dtype"]


def number_dtype(config: TrainConfig) -> torch.dtype:
    """Number type of weights and sums."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def row_dtype(config: TrainConfig) -> torch.dtype:
    """Number type of rows on the wire and in the tables."""
    return torch.bfloat16 if config.comm_dtype == "bf16" else number_dtype(config)

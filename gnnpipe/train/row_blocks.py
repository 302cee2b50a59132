"""One chunk walked in blocks of rows: the same numbers from smaller temporaries.

Of a large graph every temporary of a single chunk is so large that glibc takes it from the system
and gives it back each time, and to be given zeroed pages costs as much as the work
(docs/benchmarks/blocks.md). So the rows are walked in blocks, all of them through a layer before
the next layer, which is what ``--staleness exact`` does with chunks: nothing is stale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnnpipe.config import TrainConfig
from gnnpipe.plan import ModelGraph, Plan

__all__ = ["row_blocks", "walked_in"]

KEPT_BYTES = 32 << 20
"""What is smaller stays in glibc's hands when it is freed (its largest M_MMAP_THRESHOLD)."""

BLOCK_BYTES = 8 << 20
"""Of a block's rows at the model's width."""

_NO_TECHNIQUES: dict[str, Any] = dict.fromkeys(
    ("shuffle_chunks", "snapshot_every", "scale_live_gradients", "pilots_per_column",
     "exact_epochs")
)  # fmt: skip


def row_blocks(
    config: TrainConfig, model: ModelGraph, num_vertices: int, plan: Plan | None, device: str
) -> int:
    """How many blocks, 1 for none; also 1 if a ``plan`` that is given has another number.

    Only on one rank on a CPU, and only of models whose aggregations are products or means: a
    convolution on a block would copy the rows that it reads for each block.
    """
    if config.chunks * config.world_size > 1 or device != "cpu":
        return 1
    if not all(op.is_linear or op.is_mean for op in model.aggregations):
        return 1
    width = max((op.push_width for op in model.aggregations), default=0)
    size = num_vertices * width * (8 if config.dtype == "float64" else 4)
    blocks = -(-size // BLOCK_BYTES) if size > KEPT_BYTES else 1
    return blocks if plan is None or plan.chunks == blocks else 1


def walked_in(config: TrainConfig, blocks: int) -> TrainConfig:
    """The settings of a run that does with chunks what is done with ``blocks``."""
    return replace(config, chunks=blocks, staleness="exact", **_NO_TECHNIQUES)

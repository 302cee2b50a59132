"""One chunk walked in blocks of rows: the same numbers from smaller temporaries.

Of a large graph every temporary of a single chunk is so large that glibc, left to itself, takes it
from the system and gives it back each time, and to be given zeroed pages costs as much as the work
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

MESSAGE_BYTES = 16 << 20
"""Of a block's edges, where the aggregation is no product: their messages, or one number a head.
That is read and written a dozen times, so it is to stay near the cache, but the rows that a block
reads are copied for it (docs/benchmarks/blocks.md)."""

MOST_BLOCKS = 1024
"""With more of them, calls and copied rows cost more than is won."""

_NO_TECHNIQUES: dict[str, Any] = dict.fromkeys(
    ("shuffle_chunks", "snapshot_every", "scale_live_gradients", "pilots_per_column",
     "exact_epochs", "exact_above")
)  # fmt: skip


def row_blocks(
    config: TrainConfig,
    model: ModelGraph,
    sizes: tuple[int, int],
    plan: Plan | None,
    device: str,
) -> int:
    """How many blocks, 1 for none; also 1 if a ``plan`` that is given has another number.

    ``sizes``: vertices and edges. Only on one rank on a CPU. Where an aggregation is no
    product, only of vertices of one type, for a block might have none of another; and not to
    recompute messages, for the rows that a block reads are kept until backward.
    """
    if config.chunks * config.world_size > 1 or device != "cpu":
        return 1
    num_vertices, num_edges = sizes
    number_bytes = 8 if config.dtype == "float64" else 4
    blocks = 1
    for op in model.aggregations:
        on_blocks = not (op.is_linear or op.is_mean)
        if on_blocks and (op.vertex_type or op.over_pairs or config.recompute):
            return 1
        size, at_once = num_vertices * op.push_width, BLOCK_BYTES
        if on_blocks:
            message = min(op.kept_per_edge or op.push_width, op.push_width)
            size, at_once = num_edges * message, MESSAGE_BYTES
        size *= number_bytes
        if size > KEPT_BYTES:
            blocks = max(blocks, -(-size // at_once))
    blocks = min(blocks, MOST_BLOCKS)
    return blocks if plan is None or plan.chunks == blocks else 1


def walked_in(config: TrainConfig, blocks: int) -> TrainConfig:
    """The settings of a run that does with chunks what is done with ``blocks``."""
    return replace(config, chunks=blocks, staleness="exact", **_NO_TECHNIQUES)

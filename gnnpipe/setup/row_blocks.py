"""One rank's exact walk in blocks of rows that are neither too large nor too small.

Of a large graph every temporary of a single chunk is so large that glibc, left to itself, takes it
from the system and gives it back each time, and to be given zeroed pages costs as much as the work
(docs/benchmarks/blocks.md). So the rows are walked in blocks, all of them through a layer before
the next layer, which is what ``--staleness exact`` does with chunks: nothing is stale.

And where nothing is stale, it does not matter where one chunk ends and the next begins. Many small
chunks cost their calls and save next to no memory, so neighbours are walked as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gnnpipe.config import TrainConfig
from gnnpipe.graph.chunking import Chunking
from gnnpipe.plan import ModelGraph, Op, Plan

__all__ = ["walked"]

KEPT_BYTES = 32 << 20
"""What is smaller stays in glibc's hands when it is freed (its largest M_MMAP_THRESHOLD)."""

BLOCK_BYTES = 8 << 20
"""Of a block's rows at the model's width."""

JOINED_BYTES = KEPT_BYTES
"""What small chunks are joined up to: all that an op writes of their rows or edges, going forward.
With runs of that size the time hardly goes with their number any more, and a graph that is smaller
is walked as if it had no chunks (docs/adr/0029)."""

MESSAGE_BYTES = 16 << 20
"""Of a block's edges, where the aggregation is no product: their messages, or one number a head.
That is read and written a dozen times, so it is to stay near the cache, but the rows that a block
reads are copied for it (docs/benchmarks/blocks.md)."""

MOST_BLOCKS = 1024
"""With more of them, calls and copied rows cost more than is won."""

_NO_TECHNIQUES: dict[str, Any] = dict.fromkeys(
    (
        "shuffle_chunks",
        "snapshot_every",
        "scale_live_gradients",
        "probes_per_column",
        "exact_epochs",
        "exact_above",
    )
)


def walked(
    config: TrainConfig,
    model: ModelGraph,
    sizes: tuple[int, int],
    chunking: Chunking,
    plan: Plan | None,
    device: str,
    joins: bool,
) -> tuple[Chunking, TrainConfig]:
    """What is walked, and the settings of a run that does so with chunks.

    ``sizes``: vertices and edges. On one rank on a CPU, where nothing is stale; as it is cut if a
    ``plan`` that is given has another number, and several chunks without ``joins``.
    """
    if config.world_size > 1 or device != "cpu":
        return chunking, config
    if config.chunks == 1:
        blocks = _blocks(config, model, sizes)
        if blocks == 1 or (plan is not None and plan.chunks != blocks):
            return chunking, config
        settings = {"chunks": blocks, "staleness": "exact", **_NO_TECHNIQUES}
        return chunking.split(blocks), replace(config, **settings)
    joined = _joined(config, model, sizes) if joins else config.chunks
    if joined == config.chunks or (plan is not None and plan.chunks != joined):
        return chunking, config
    return chunking.joined(joined), replace(config, chunks=joined)


def _blocks(config: TrainConfig, model: ModelGraph, sizes: tuple[int, int]) -> int:
    """How many of one chunk, 1 for none.

    Where an aggregation is no product, only of vertices of one type, for a block might have none of
    another; and not to recompute messages, for the rows that a block reads are kept until backward.
    """
    blocks = 1
    for op in model.aggregations:
        on_blocks = _is_on_blocks(op)
        if on_blocks and (op.vertex_type or op.over_pairs or config.recompute):
            return 1
        size = _size_bytes(config, op, sizes)
        if size > KEPT_BYTES:
            blocks = max(blocks, -(-size // (MESSAGE_BYTES if on_blocks else BLOCK_BYTES)))
    return min(blocks, MOST_BLOCKS)


def _joined(config: TrainConfig, model: ModelGraph, sizes: tuple[int, int]) -> int:
    """How many runs of whole chunks are walked, K where each is by itself."""
    # How many pairs a chunk scores is another matter.
    if not config.staleness_settings.is_exact or any(op.over_pairs for op in model.ops):
        return config.chunks
    num_vertices, num_edges = sizes
    largest = 1
    for op in model.ops:
        numbers = num_vertices * max(op.push_width, op.written_per_row, op.kept_per_row_recomputed)
        if op.aggregates and _is_on_blocks(op):
            numbers = max(numbers, num_edges * (op.kept_per_edge or op.push_width))
        largest = max(largest, numbers * _number_bytes(config))
    together = max(1, config.chunks * JOINED_BYTES // largest)  # in the longest run
    return -(-config.chunks // together)


def _is_on_blocks(op: Op) -> bool:
    """It is no product: it makes something of every edge, or reads both its ends."""
    return not (op.is_linear or op.is_mean)


def _size_bytes(config: TrainConfig, op: Op, sizes: tuple[int, int]) -> int:
    """Of all rows that are pushed, or of the messages or numbers of all edges."""
    num_vertices, num_edges = sizes
    numbers = num_vertices * op.push_width
    if _is_on_blocks(op):
        numbers = num_edges * min(op.kept_per_edge or op.push_width, op.push_width)
    return numbers * _number_bytes(config)


def _number_bytes(config: TrainConfig) -> int:
    return 8 if config.dtype == "float64" else 4

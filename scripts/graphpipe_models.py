"""The paper's workloads as files of ops, for scripts/graphpipe_table.py: shapes and V100 times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

FLOPS_PER_S = 11e12
"""A V100 in float32, as frameworks reach it (data sheet: 15.7e12)."""
MEMORY_BYTES_PER_S = 750e9
MEMORY_BYTES = 14 * 10**9
"""Of the 16 GB: the rest is for embeddings (7 x 256 MB) and buffers."""
CALL_S = 12e-6
"""Launching the kernels of an op."""
TRANSFORMER_BASE_ROWS = 0.45
"""A transformer layer takes the time of b + 0.45 samples, so that a micro-batch of 4 is 10 % faster
a sample than one of 2, as in GraphPipe's case study."""
LINK = {"latency_s": 15e-6, "bandwidth_bytes_per_s": 11e9}
UPDATE_NUMBERS = 3
"""Numbers that SGD reads or writes for a parameter."""
FC, TOKENS, HIDDEN = 4096, 256, 1024
ENTRIES, EMBEDDING, LOOKUPS = 1_000_000, 64, 100


def op(
    name: str, inputs: list[str], width: int, parameters: int, kept: int, times: tuple[float, float]
) -> dict[str, Any]:
    """An op whose backward takes twice its forward; ``times``: of a call, and of a sample."""
    base_s, row_s = times
    return {
        "name": name,
        "inputs": inputs,
        "outputs": {f"{name}.y": width},
        "num_parameters": parameters,
        "kept_per_row": kept,
        "forward": {"base_s": base_s, "per_row_s": row_s},
        "backward": {"base_s": 2 * base_s, "per_row_s": 2 * row_s},
    }


def dense(name: str, inputs: list[str], wide: int, out: int) -> dict[str, Any]:
    """A fully connected layer, limited by its products."""
    return op(name, inputs, out, wide * out, 2 * out, (CALL_S, 2 * wide * out / FLOPS_PER_S))


def transformer(name: str, inputs: list[str]) -> dict[str, Any]:
    """A layer of 256 tokens and hidden width 1024, with 16 heads."""
    flops = 24 * TOKENS * HIDDEN**2 + 4 * TOKENS**2 * HIDDEN
    row_s = flops / FLOPS_PER_S
    kept = 16 * TOKENS * HIDDEN + 2 * 16 * TOKENS**2
    times = CALL_S + TRANSFORMER_BASE_ROWS * row_s, row_s
    return op(name, inputs, TOKENS * HIDDEN, 12 * HIDDEN**2, kept, times)


def embedding(name: str, inputs: list[str]) -> dict[str, Any]:
    """A table of a million rows of 64 numbers; a sample adds up 100 rows."""
    row_s = 4 * LOOKUPS * EMBEDDING / MEMORY_BYTES_PER_S
    return op(name, inputs, EMBEDDING, 0, EMBEDDING, (CALL_S, row_s))


def branched(
    layer: Any, branches: int, length: int, chained: bool = False, first: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """Branches of equal layers; ``chained``: each reads the end of the one before."""
    end = ""
    for b in range(first, first + branches):
        found: list[dict[str, Any]] = []
        for i in range(length):
            inputs = [f"b{b}_{i - 1}.y"] if i else [end] if chained and end else []
            found.append(layer(f"b{b}_{i}", inputs))
        end = f"b{b}_{length - 1}.y"
        yield found


def fc(name: str, inputs: list[str]) -> dict[str, Any]:
    """A square fully connected layer."""
    return dense(name, inputs, FC, FC)


def joined(branches: list[list[dict[str, Any]]], wide: int, out: int) -> list[dict[str, Any]]:
    """The branches and a light layer that reads all their ends."""
    ends = [f"{branch[-1]['name']}.y" for branch in branches]
    return [*(one for branch in branches for one in branch), dense("join", ends, wide, out)]


def mmt(chained: bool = False) -> list[dict[str, Any]]:
    """Four branches of 8 transformer layers; the join reads one token of each."""
    return joined(list(branched(transformer, 4, 8, chained)), 4 * HIDDEN, HIDDEN)


def uno(branches: int, chained: bool = False) -> list[dict[str, Any]]:
    """Branches of 4 fully connected layers."""
    return joined(list(branched(fc, branches, 4, chained)), branches * FC, 16)


def dlrm(chained: bool = False) -> list[dict[str, Any]]:
    """Seven dense branches of 4 fully connected layers and 7 embeddings."""
    towers = [*branched(fc, 7, 4, chained)]
    tables = [*branched(embedding, 7, 1, chained, first=7)]
    if chained:
        tables[0][0]["inputs"] = [f"{towers[-1][-1]['name']}.y"]
    return joined([*towers, *tables], 7 * (FC + EMBEDDING), 16)


def sequential() -> list[dict[str, Any]]:
    """32 transformer layers."""
    return next(branched(transformer, 1, 32))


def file_of(name: str, ops: list[dict[str, Any]]) -> str:
    """The JSON of a model."""
    update_s = UPDATE_NUMBERS * 4 / MEMORY_BYTES_PER_S
    content = {"name": name, "link": LINK, "update_s_per_parameter": update_s, "ops": ops}
    return json.dumps(content)

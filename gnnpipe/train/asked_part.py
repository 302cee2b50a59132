"""What a rank of the last stage makes of the rows that the loss asks for, if not of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from gnnpipe.graph.blocks import Blocks
from gnnpipe.graph.layout import ShardLayout, restrict
from gnnpipe.graph.operators import Everyone, LinearOperator
from gnnpipe.models import Piece
from gnnpipe.runtime.stage import AskedRows
from gnnpipe.train.chunk_rows import ChunkRows
from gnnpipe.setup.prepare import Prepared

__all__ = ["AskedPart", "asked_part"]


@dataclass(frozen=True, eq=False)
class AskedPart:
    """The last step of training; other ranks have none."""

    rows: AskedRows | None
    """None: all are made."""
    operators: Mapping[str, LinearOperator]
    """By aggregation."""


def asked_part(
    prepared: Prepared,
    piece: Piece,
    layouts: Mapping[str, ShardLayout],
    structures: Mapping[tuple[str, str, str], LinearOperator | Blocks | Everyone],
    device: torch.device,
) -> AskedPart:
    """Of a stage's piece, cut out of the ``structures`` of its aggregations."""
    reading = [a for a in piece.aggregations if a.name in prepared.asked.ops]
    if not reading:
        return AskedPart(None, {})
    layout = layouts[prepared.graph.target]
    asked = restrict(layout, prepared.asked_mask)
    number = np.searchsorted(layout.own, asked.own)
    rows, pointer = torch.from_numpy(number).to(device), asked.own_ptr.tolist()
    operators: dict[tuple[str, str, str], LinearOperator] = {}
    for a in reading:
        whole = structures[a.over]
        assert isinstance(whole, LinearOperator)
        if a.over not in operators:
            operators[a.over] = whole.of_rows(rows, pointer)
    places = [
        rows[first:last] - start
        for (first, last), start in zip(pairwise(pointer), layout.own_ptr.tolist(), strict=False)
    ]
    of_chunks = ChunkRows(prepared, False, device).chunks({prepared.graph.target: asked})
    return AskedPart(AskedRows(of_chunks, places), {a.name: operators[a.over] for a in reading})

"""Dropout inside unchanged convolutions, for example of attention weights.

Masks are keyed by the vertex of a row or by both ends of an edge (``ops.hashed_dropout``), so that
they do not depend on chunks and shards. The sample graph has different numbers of vertices and
edges, which tells what a dropped tensor has rows for.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnpipe.capture.fx_names import dropout_arguments
from gnnpipe.graph.blocks import Block
from gnnpipe.models.layer import Rows
from gnnpipe.ops.hashed_dropout import edge_keys


class DropoutKind(StrEnum):
    """Owner of the rows of a dropped tensor."""

    ROWS = "rows"
    """Target vertices."""
    READ_ROWS = "read rows"
    """Source vertices of another type."""
    EDGES = "edges"
    EDGES_AND_LOOPS = "edges and loops"


class _Dropout(TorchFunctionMode, ABC):
    """Context in which ``F.dropout`` calls ``drop``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces ``F.dropout`` alone."""
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        found = dropout_arguments(args, kwargs or {})
        if not (found["training"] and found["p"]):
            return found["input"]
        return self.drop(found["input"], found["p"])

    @abstractmethod
    def drop(self, x: Tensor, probability: float) -> Tensor:
        """Dropout of ``x`` [R, ...] in training."""


class KeyedDropout(_Dropout):
    """Dropout with masks keyed by vertices or edges."""

    def __init__(self, kinds: Sequence[DropoutKind], block: Block, rows: Rows, site: int) -> None:
        """``kinds``: rows of each call in turn; ``site``: key of the first call, then site + 1."""
        super().__init__()
        self._kinds, self._block, self._rows = iter(kinds), block, rows
        self._sites = itertools.count(site)

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """Dropout with the keys of the vertices or edges of ``x``."""
        kind, site = next(self._kinds), next(self._sites)
        if not self._rows.training:
            return x
        rows = replace(self._rows, keys=self._keys(kind, len(x)), masks=None)
        flat = x.flatten(1) if x.dim() > 1 else x[:, None]
        return rows.dropout(flat, probability, site).reshape(x.shape)

    def _keys(self, kind: DropoutKind, count: int) -> Tensor:
        keys = self._block.keys
        assert keys is not None, "the probe pass has no dropout"
        into = keys if self._block.into_keys is None else self._block.into_keys
        if kind in (DropoutKind.ROWS, DropoutKind.READ_ROWS):
            return (into if kind is DropoutKind.ROWS else keys)[:count]
        source, target = self._block.edge_index
        if kind is DropoutKind.EDGES_AND_LOOPS:
            loops = torch.arange(count - len(source), device=keys.device)
            source, target = torch.cat([source, loops]), torch.cat([target, loops])
        return edge_keys(keys[source], into[target])


class NoDropout(_Dropout):
    """Dropout that does nothing."""

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """``x`` itself."""
        return x


class DropoutKinds(_Dropout):
    """Dropout that does nothing and notes the kind of rows of every call."""

    def __init__(self, num_read: int, num_rows: int, num_edges: int) -> None:
        """Numbers of source vertices, target vertices and edges."""
        super().__init__()
        self._names = {
            num_edges + num_read: DropoutKind.EDGES_AND_LOOPS,
            num_edges + num_rows: DropoutKind.EDGES_AND_LOOPS,
            num_edges: DropoutKind.EDGES,
            num_read: DropoutKind.READ_ROWS,
            num_rows: DropoutKind.ROWS,
        }
        self.found: list[DropoutKind] = []

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """``x``; raises ``TypeError`` if it has rows for neither vertices nor edges."""
        if len(x) not in self._names:
            raise TypeError(f"its dropout is of {len(x)} rows, neither of vertices nor of edges")
        self.found.append(self._names[len(x)])
        return x

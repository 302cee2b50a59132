"""Dropout inside of a convolution that runs unchanged: of attention, mostly.

It is keyed by what is dropped, as all dropout here (``models.dropout``): a row by its vertex, an
edge by both its ends, so that no shape changes it. What a tensor has a row for is found out on the
sample, where the number of vertices and that of edges differ.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnpipe.capture.fx_names import dropout_arguments
from gnnpipe.graph.blocks import Block
from gnnpipe.models.layer import Rows
from gnnpipe.ops.hashed_dropout import edge_keys

__all__ = ["DropoutKinds", "KeyedDropout", "NoDropout"]

ROWS, READ_ROWS, EDGES, EDGES_AND_LOOPS = "rows", "read rows", "edges", "edges and loops"
"""What dropout is of; of the rows that are read only where they are of another type."""


class _Dropout(TorchFunctionMode, ABC):
    """In its reach ``F.dropout`` is what ``drop`` says."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Everything else is left alone."""
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        found = dropout_arguments(args, kwargs or {})
        if not (found["training"] and found["p"]):
            return found["input"]
        return self.drop(found["input"], found["p"])

    @abstractmethod
    def drop(self, x: Tensor, probability: float) -> Tensor:
        """Of ``x`` [R, ...], in training."""


class KeyedDropout(_Dropout):
    """Every mask belongs to edges or rows, not to the call."""

    def __init__(self, kinds: Sequence[str], block: Block, rows: Rows, site: int) -> None:
        """``kinds``: of every call in turn; ``site``, and those behind it, tell them apart."""
        super().__init__()
        self._kinds, self._block, self._rows = iter(kinds), block, rows
        self._sites = itertools.count(site)

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """By the keys of what ``x`` has rows for."""
        kind, site = next(self._kinds), next(self._sites)
        if not self._rows.training:
            return x
        rows = replace(self._rows, keys=self._keys(kind, len(x)), masks=None)
        flat = x.flatten(1) if x.dim() > 1 else x[:, None]
        return rows.dropout(flat, probability, site).reshape(x.shape)

    def _keys(self, kind: str, count: int) -> Tensor:
        keys = self._block.keys
        assert keys is not None, "nothing of the pilots is dropped"
        into = keys if self._block.into_keys is None else self._block.into_keys
        if kind in (ROWS, READ_ROWS):
            return (into if kind == ROWS else keys)[:count]
        source, target = self._block.edge_index
        if kind == EDGES_AND_LOOPS:
            loops = torch.arange(count - len(source), device=keys.device)
            source, target = torch.cat([source, loops]), torch.cat([target, loops])
        return edge_keys(keys[source], into[target])


class NoDropout(_Dropout):
    """Every call does nothing."""

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """``x`` itself."""
        return x


class DropoutKinds(_Dropout):
    """Notes what every call drops, and lets it do nothing."""

    def __init__(self, num_read: int, num_rows: int, num_edges: int) -> None:
        """Vertices that are read, vertices that read (the same, of one type), and edges."""
        super().__init__()
        self._names = {
            num_edges + num_read: EDGES_AND_LOOPS,
            num_edges + num_rows: EDGES_AND_LOOPS,
            num_edges: EDGES,
            num_read: READ_ROWS,
            num_rows: ROWS,
        }
        self.found: list[str] = []

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """``TypeError`` for a tensor that has rows for neither vertices nor edges."""
        if len(x) not in self._names:
            raise TypeError(f"its dropout is of {len(x)} rows, neither of vertices nor of edges")
        self.found.append(self._names[len(x)])
        return x

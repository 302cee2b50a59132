"""Unchanged PyG convolutions on a chunk's block: own rows C, then halo rows H.

A convolution is called in one of two forms (``Form``); ``trial.run`` finds the form that gives the
same rows as the whole graph. Dropout inside a convolution, for example of attention weights, is
keyed by the vertex of a row or by both ends of an edge (``ops.hashed_dropout``), so that masks do
not depend on chunks and shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from gnnpipe.capture.edge_work.modules import Propagate
from gnnpipe.capture.fx_names import EDGES, dropout_arguments, is_input
from gnnpipe.capture.rules.attention import is_mapped
from gnnpipe.capture.stage.step_calls import flat
from gnnpipe.graph.blocks import Block
from gnnpipe.models.gat_attention import attend, is_additive
from gnnpipe.models.neighbour_rows import NeedsMessagesError
from gnnpipe.models.rows import Rows
from gnnpipe.models.without_messages import can_avoid_messages, without_messages
from gnnpipe.ops.hashed_dropout import edge_keys


class DropoutKind(StrEnum):
    """Owner of the rows of a dropped tensor."""

    ROWS = "rows"
    """Target vertices."""
    READ_ROWS = "read rows"
    """Source vertices of another type."""
    EDGES = "edges"
    EDGES_AND_LOOPS = "edges and loops"
    """Edges without self-loops, then a self-loop for each of the first target vertices."""


class DropoutMode(TorchFunctionMode):
    """Context in which ``F.dropout`` does nothing; subclasses override ``drop``.

    A mask drawn by ``bernoulli_(p)`` is p everywhere.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bernoulli_ and len(args) == 2 and isinstance(args[1], float):
            return args[0].fill_(args[1])
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        found = dropout_arguments(args, kwargs or {})
        if not (found["training"] and found["p"]):
            return found["input"]
        return self.drop(found["input"], found["p"])

    def drop(self, x: Tensor, probability: float) -> Tensor:
        """Dropout of ``x`` [R, ...] in training."""
        del probability
        return x


class KeyedDropout(DropoutMode):
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
        return rows.dropout(flat(x), probability, site).reshape(x.shape)

    def _keys(self, kind: DropoutKind, count: int) -> Tensor:
        keys = self._block.keys
        assert keys is not None, "the probe pass has no dropout"
        into = keys if self._block.into_keys is None else self._block.into_keys
        if kind in (DropoutKind.ROWS, DropoutKind.READ_ROWS):
            return (into if kind is DropoutKind.ROWS else keys)[:count]
        source, target = self._block.edge_index
        if kind is DropoutKind.EDGES_AND_LOOPS:
            is_edge = source != target
            source, target = source[is_edge], target[is_edge]
            loops = torch.arange(count - len(source), device=keys.device)
            source, target = torch.cat([source, loops]), torch.cat([target, loops])
        return edge_keys(keys[source], into[target])


class DropoutKinds(DropoutMode):
    """Dropout that does nothing and notes the kind of rows of every call."""

    def __init__(
        self, num_read: int, num_rows: int, num_edges: int, num_self_loops: int = 0
    ) -> None:
        """Numbers of source vertices, target vertices, edges, and self-loops among the edges."""
        super().__init__()
        self._names = {
            num_edges - num_self_loops + num_read: DropoutKind.EDGES_AND_LOOPS,
            num_edges - num_self_loops + num_rows: DropoutKind.EDGES_AND_LOOPS,
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


class Form(StrEnum):
    """How a convolution is called on a block."""

    PAIR = "pair"
    """With (all rows, own rows), which PyG calls bipartite."""
    SQUARE = "square"
    """On a graph of all C + H rows; the results of the own rows are kept."""


@dataclass(frozen=True)
class _Slot:
    """Placeholder in the arguments: number of a value among those of a kind."""

    kind: Literal["edges", "rows", "edge values"]
    index: int


class BlockConv(nn.Module):
    """A recorded call of a convolution, to be run on blocks."""

    def __init__(
        self,
        conv: nn.Module,
        call: fx.Node,
        shapes: Mapping[fx.Node, tuple[int, ...]],
        form: Form,
        drops: Sequence[DropoutKind] = (),
        site: int = 0,
        of_edges: Collection[fx.Node] = (),
    ) -> None:
        """``shapes``: shape of one row, by value; ``drops``: kind of rows of each dropout inside
        the convolution; ``site``: key of the first dropout; ``of_edges``: values with one row for
        each edge. Raises ``TypeError`` if the call does not have this form.
        """
        super().__init__()
        self.conv, self.form, self.drops, self.site = conv, form, tuple(drops), site
        self.pushed: list[fx.Node] = []
        """Values whose rows are read over the edges; they are concatenated and pushed."""
        self.own: fx.Node | None = None
        """The second value of a pair, read for the own rows alone."""
        self.carried: list[fx.Node] = []
        """Edge values that the convolution reads."""
        args = list(call.args)
        if args and isinstance(args[0], tuple | list):
            if form is Form.SQUARE:
                raise TypeError("it is called with a pair of features")
            source, self.own = args[0]
            args[0] = source

        def slot(n: fx.Node) -> Any:
            if is_input(n, EDGES):
                return _Slot("edges", 0)
            if n not in of_edges and n not in shapes:
                raise TypeError(f"its argument {n} is neither rows nor edges")
            values = self.carried if n in of_edges else self.pushed
            if n not in values:
                values.append(n)
            return _Slot("edge values" if n in of_edges else "rows", values.index(n))

        self._args: Any = fx.node.map_arg(tuple(args), slot)
        self._kwargs: Any = fx.node.map_arg(dict(call.kwargs), slot)
        self._shapes = [shapes[n] for n in self.pushed]
        self._widths = [math.prod(shape) for shape in self._shapes]
        given = [one for one in (*args, *call.kwargs.values()) if one is not None]
        self._is_plain = form is Form.PAIR and not self.carried and len(given) == 2
        """Whether the convolution is called on rows and edges alone."""
        self.can_avoid_messages = can_avoid_messages(*self._parts, reads_edges=bool(self.carried))
        """Whether ``without_messages`` computes the convolution."""
        if form is Form.PAIR and len(self.pushed) != 1:
            raise TypeError("it reads several values of each vertex")

    @property
    def width(self) -> int:
        """Number of pushed columns."""
        return sum(self._widths)

    @property
    def attention_memory(self) -> tuple[int, int, int, int] | None:
        """Memory of GAT attention without messages; None for other convolutions.

        Numbers kept for backward for each own row (attended row, and the sum of the weights of each
        head), edge (weight of each head, also before dropout) and row of the block (mapped row),
        and bytes for each edge beyond its two ends (``graph.blocks.Incidence``).
        """
        if not (self._is_plain and is_additive(self.conv)):
            return None
        heads = int(self.conv.heads)
        per_edge = 2 * heads if self.conv.dropout else heads
        width = heads * int(self.conv.out_channels)
        per_read_row = 0 if is_mapped(self.conv) else width
        return width + heads, per_edge, per_read_row, _structure_per_edge(self.conv)

    @property
    def structure_per_edge(self) -> int:
        """Bytes for each edge beyond its two ends."""
        return _structure_per_edge(self._parts[0]) if self.can_avoid_messages else 0

    @property
    def _parts(self) -> tuple[nn.Module, bool]:
        """The user's convolution, and whether only its ``propagate`` is called."""
        is_propagate = isinstance(self.conv, Propagate)
        conv: Any = self.conv
        return (conv.conv if is_propagate else conv), is_propagate

    def forward(
        self,
        received: Tensor,
        block: Block,
        rows: Rows,
        own: Tensor | None = None,
        carried: Sequence[Any] = (),
    ) -> Tensor:
        """Results [C, ...] from the block's rows [C + H, F] and values of its edges [E_c, ...]."""
        count = block.size[1]
        parts = torch.split(received, self._widths, dim=1)
        values: list[Any] = [
            part.reshape(len(part), *shape) for part, shape in zip(parts, self._shapes, strict=True)
        ]
        if self.form is Form.PAIR:
            values[0] = (values[0], values[0][:count] if own is None else own)

        given = {"edges": [block.edge_index], "rows": values, "edge values": carried}

        def fill(argument: Any) -> Any:
            is_slot = isinstance(argument, _Slot)
            return given[argument.kind][argument.index] if is_slot else argument

        args: Any = fx.node.map_aggregate(self._args, fill)
        kwargs: Any = fx.node.map_aggregate(self._kwargs, fill)
        mode: AbstractContextManager[Any] = nullcontext()
        if self.drops:
            mode = KeyedDropout(self.drops, block, rows, self.site)
        with mode:
            out: Tensor
            if block.is_fused and self._is_plain and is_additive(self.conv):
                out = attend(self.conv, values[0][0], own, block)
            else:
                out = self._convolve(block, args, kwargs)
        return out[:count]

    def _convolve(self, block: Block, args: Any, kwargs: Any) -> Any:
        """Call the convolution, without messages where possible."""
        conv, is_propagate = self._parts
        if block.is_fused and self.can_avoid_messages:
            rest = without_messages(conv, block)
            with suppress(NeedsMessagesError):
                return (Propagate(rest) if is_propagate else rest)(*args, **kwargs)
        return self.conv(*args, **kwargs)


def _structure_per_edge(conv: Any) -> int:
    """Bytes of ``graph.blocks.Incidence`` for each edge, beyond its two ends."""
    return 24 if getattr(conv, "add_self_loops", False) else 8

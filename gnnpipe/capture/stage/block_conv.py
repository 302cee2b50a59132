"""Convolutions that run unchanged, on the block of a chunk: its own rows C, then its halo rows H.

Nothing is known of such a convolution but how it is called. It is given the block in one of two
forms: as the pair (all rows, own rows), which PyG calls bipartite and which wastes nothing; or, if
it does not take that, as a graph of C + H vertices of which the own rows are kept. ``probe`` finds
out which form gives the same rows as the whole graph does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import GATConv

from gnnpipe.capture.fx_names import EDGES, is_input
from gnnpipe.capture.rules.attention import is_mapped
from gnnpipe.capture.stage.conv_dropout import KeyedDropout
from gnnpipe.graph.blocks import Block
from gnnpipe.models.gat_attention import attend, is_additive
from gnnpipe.models.layer import Rows

__all__ = ["FORMS", "BlockConv"]

FORMS = ("pair", "square")


@dataclass(frozen=True)
class _Slot:
    """Stands in the arguments for the value with this number that was pushed."""

    index: int


@dataclass(frozen=True)
class _EdgeSlot:
    """Stands for the value with this number that edges carry."""

    index: int


_EDGES = _Slot(-1)


class BlockConv(nn.Module):
    """A convolution as the recording calls it, to be run on blocks."""

    def __init__(
        self,
        conv: nn.Module,
        call: fx.Node,
        shapes: Mapping[fx.Node, tuple[int, ...]],
        form: str,
        drops: Sequence[str] = (),
        site: int = 0,
        of_edges: Collection[fx.Node] = (),
    ) -> None:
        """``shapes``: of one row, for every value that has rows; ``drops``: what each dropout of
        the convolution drops; ``site`` tells it from others; ``of_edges``: values that have a row
        for each edge. ``TypeError``: not in this form.
        """
        super().__init__()
        self.conv, self.form, self.drops, self.site = conv, form, tuple(drops), site
        self.pushed: list[fx.Node] = []
        """Values whose rows it reads over the edges; they are pushed side by side."""
        self.own: fx.Node | None = None
        """A value that it reads of its own rows alone, if there is one: the second of a pair."""
        self.carried: list[fx.Node] = []
        """Values of the edges that it reads."""
        args = list(call.args)
        if args and isinstance(args[0], tuple | list):
            if form == "square":
                raise TypeError("it is given a pair of features")
            source, self.own = args[0]
            args[0] = source

        def slot(n: fx.Node) -> Any:
            if is_input(n, EDGES):
                return _EDGES
            if n in of_edges:
                if n not in self.carried:
                    self.carried.append(n)
                return _EdgeSlot(self.carried.index(n))
            if n not in shapes:
                raise TypeError(f"its argument {n} is neither rows nor edges")
            if n not in self.pushed:
                self.pushed.append(n)
            return _Slot(self.pushed.index(n))

        self._args: Any = fx.node.map_arg(tuple(args), slot)
        self._kwargs: Any = fx.node.map_arg(dict(call.kwargs), slot)
        self._shapes = [shapes[n] for n in self.pushed]
        self._widths = [_count(shape) for shape in self._shapes]
        given = [one for one in (*args, *call.kwargs.values()) if one is not None]
        self._is_plain = form == "pair" and not self.carried and len(given) == 2
        """It is called on rows and edges alone."""
        if form == "pair" and len(self.pushed) != 1:
            raise TypeError("it reads several values of each vertex")

    @property
    def width(self) -> int:
        """Numbers that are pushed for a row."""
        return sum(self._widths)

    @property
    def kept(self) -> tuple[int, int, int] | None:
        """Numbers kept of a row beyond what it reads and gives, of an edge, and of a row it reads.

        Of attention without messages: rows attended; a weight for each head (and what was dropped);
        rows mapped, if it maps them. Of others the sample tells.
        """
        if not (isinstance(self.conv, GATConv) and self._makes_no_messages):
            return None
        heads = int(self.conv.heads)
        per_edge = 2 * heads if self.conv.dropout else heads
        width = heads * int(self.conv.out_channels)
        return width, per_edge, 0 if is_mapped(self.conv) else width

    @property
    def structure_per_edge(self) -> int:
        """Bytes for an edge beyond its two ends: ``graph.incidence``."""
        if not (isinstance(self.conv, GATConv) and self._makes_no_messages):
            return 0
        return 24 if self.conv.add_self_loops else 8

    @property
    def _makes_no_messages(self) -> bool:
        return self._is_plain and is_additive(self.conv)

    def forward(
        self,
        received: Tensor,
        block: Block,
        rows: Rows,
        own: Tensor | None = None,
        carried: Sequence[Any] = (),
    ) -> Tensor:
        """The own rows' results [C, ...] from the block's rows [C + H, F].

        ``carried`` [E_c, ...]: the values of the block's edges.
        """
        count = block.size[1]
        parts = torch.split(received, self._widths, dim=1)
        values: list[Any] = [
            part.reshape(len(part), *shape) for part, shape in zip(parts, self._shapes, strict=True)
        ]
        if self.form == "pair":
            values[0] = (values[0], values[0][:count] if own is None else own)

        given = block.edge_index, values, carried
        args = [_filled(a, *given) for a in self._args]
        kwargs = {k: _filled(v, *given) for k, v in self._kwargs.items()}
        mode: AbstractContextManager[Any] = nullcontext()
        if self.drops:
            mode = KeyedDropout(self.drops, block, rows, self.site)
        with mode:
            out: Tensor
            if block.is_fused and self._makes_no_messages:
                out = attend(self.conv, values[0][0], own, block)
            else:
                out = self.conv(*args, **kwargs)
        return out[:count]


# Not within ``forward``: a function that calls itself there would keep the rows of every call until
# the cycle collector comes by.
def _filled(
    argument: Any, edge_index: Tensor, values: Sequence[Any], carried: Sequence[Any]
) -> Any:
    """An argument of the recorded call with the block's values in it."""
    if isinstance(argument, _Slot):
        return edge_index if argument == _EDGES else values[argument.index]
    if isinstance(argument, _EdgeSlot):
        return carried[argument.index]
    if isinstance(argument, tuple | list):
        return type(argument)(_filled(a, edge_index, values, carried) for a in argument)
    return argument


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

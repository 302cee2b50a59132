"""Modules that stand in a recording for work on edges; they run on blocks, as convolutions do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing


class EdgeModule(nn.Module):
    """Work on the edges: called with edges, rows of vertices and values of edges."""


class Propagate(EdgeModule):
    """``propagate`` of a user's convolution, whose other calls are recorded one by one."""

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, edge_index: Tensor, **given: Any) -> Any:
        """The convolution's ``propagate`` [targets, ...]."""
        return self.conv.propagate(edge_index, size=None, **given)


class EdgeUpdate(EdgeModule):
    """``edge_updater`` of a user's convolution."""

    def __init__(self, conv: MessagePassing) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, edge_index: Tensor, **given: Any) -> Any:
        """The convolution's ``edge_updater`` [E, ...]."""
        return self.conv.edge_updater(edge_index, size=None, **given)


class EdgeFragment(EdgeModule):
    """Calls of a user's forward from rows of vertices over values of edges to rows of vertices.

    Such as ``scatter(x[source] * norm, target)``.
    """

    def __init__(self, calls: fx.GraphModule) -> None:
        """``calls``: of the edges, the number of rows, the first rows, then all rows and data."""
        super().__init__()
        self.calls = calls

    def forward(self, edge_index: Tensor, *values: Tensor) -> Any:
        """Result [n, ...] from rows [n, ...] and values of the edges [E, ...]."""
        if not isinstance(values[0], Tensor):
            raise TypeError("it is called with a pair of rows")
        # Not by a call of the module, for which fx prints the traceback of an error.
        return self.calls.forward(edge_index, len(values[0]), values[0], *values)

"""GATConv taken apart where its map makes rows no wider: mapped once, and pushed as that.

Unchanged on a block it would map every row that is read, a vertex's again for each chunk that reads
it; of wide features each would be pushed and kept whole, sparse ones as dense rows, with a gradient
that nobody asks for. What is left of it attends over rows that are mapped already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.attention import is_additive
from gnnpipe.models.bridge.recording import FEATURES, is_input
from gnnpipe.models.bridge.rules import OtherKindError, Rule

__all__ = ["ATTENTION_RULES", "is_mapped"]


def is_mapped(conv: nn.Module) -> bool:
    """It is what is left of a GATConv behind its map."""
    return isinstance(conv, pyg.GATConv) and isinstance(conv.lin, nn.Identity)


def _gat(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """``attend(x W) + x W_res + b``, as its ``forward`` has it."""
    # Of two types of vertices either has a map of its own; and what is left has none.
    if not is_additive(conv) or not isinstance(conv.lin, Linear):
        raise OtherKindError
    made, given = conv.heads * conv.out_channels, conv.lin.in_channels
    # As wide as they were, features are better pushed as they are: those are never stale.
    if made > given or (made == given and is_input(x.node, FEATURES)):
        raise OtherKindError
    # Its weights for the scores are those of the user's; maps and bias stay where they are. What
    # the user sets on the convolution from here on, it does not see.
    rest = copy.copy(conv)
    rest._modules = {**conv._modules, "lin": nn.Identity(), "res": None}
    rest._parameters = {**conv._parameters, "bias": None}
    out = make(rest, conv.lin(x), None)
    if conv.res is not None:
        out = out + conv.res(x)
    return out if conv.bias is None else out + conv.bias


ATTENTION_RULES: dict[type[nn.Module], Rule] = {pyg.GATConv: _gat}
"""``make`` as in ``EDGE_RULES``; None for rows that read: they are those that are read."""

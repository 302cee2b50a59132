"""Attention taken apart where its maps make rows no wider: mapped once, and pushed as that.

Unchanged on a block it would map every row that is read, a vertex's again for each chunk that reads
it; of wide features each would be pushed and kept whole, sparse ones as dense rows, with a gradient
that nobody asks for. What is left of it attends over rows that are mapped already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.capture.fx_names import FEATURES, is_input
from gnnpipe.capture.rules.convolutions import OtherKindError, Rule
from gnnpipe.models.gat_attention import is_additive, is_as_shipped

__all__ = ["ATTENTION_RULES", "is_mapped"]

_MAPS: dict[type[nn.Module], tuple[str, ...]] = {
    pyg.GATConv: ("lin",),
    pyg.GATv2Conv: ("lin_l", "lin_r"),
    pyg.TransformerConv: ("lin_query", "lin_key", "lin_value"),
}
"""What rows go through before they are read."""


class _Columns(nn.Module):
    """Some columns of rows [n, F]: there a map has been made already."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        """[n, last - first]."""
        return x[:, self.first : self.last]


def is_mapped(conv: nn.Module) -> bool:
    """It is what is left of an attention behind its maps."""
    return any(
        isinstance(conv._modules.get(name), nn.Identity) for name in _MAPS.get(type(conv), ())
    )


def _check(conv: Any, x: Any, made: int) -> None:
    """``OtherKindError`` where its maps are none of PyG's, or what they have made is wider.

    Of two types of vertices either has a map of its own; and what is left has none.
    """
    maps = [conv._modules[name] for name in _MAPS[type(conv)]]
    if not all(isinstance(lin, Linear) for lin in maps):
        raise OtherKindError
    given = maps[0].in_channels
    # As wide as they were, features are better pushed as they are: those are never stale.
    if made > given or (made == given and is_input(x.node, FEATURES)):
        raise OtherKindError


def _rest(conv: Any, bias: str | None, **modules: nn.Module | None) -> Any:
    """The convolution with other modules and without its bias.

    Its weights for the scores are those of the user's; maps and bias stay where they are. What the
    user sets on the convolution from here on, it does not see.
    """
    rest = copy.copy(conv)
    rest._modules = {**conv._modules, **modules}
    rest._parameters = {**conv._parameters, **({bias: None} if bias else {})}
    return rest


def _gat(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """``attend(x W) + x W_res + b``, as its ``forward`` has it."""
    if not is_additive(conv):
        raise OtherKindError
    _check(conv, x, conv.heads * conv.out_channels)
    rest = _rest(conv, "bias", lin=nn.Identity(), res=None)
    return _plus(conv, make(rest, conv.lin(x), None), x)


def _gat_v2(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """``attend(x W_l + b_l, x W_r + b_r) + x W_res + b``."""
    if not is_as_shipped(conv):
        raise OtherKindError
    _check(conv, x, conv.heads * conv.out_channels)
    rest = _rest(conv, "bias", lin_l=nn.Identity(), lin_r=nn.Identity(), res=None)
    reading = None if conv.share_weights else conv.lin_r(x)
    return _plus(conv, make(rest, conv.lin_l(x), reading), x)


def _plus(conv: Any, out: Any, x: Any) -> Any:
    """``out + x W_res + b``."""
    if conv.res is not None:
        out = out + conv.res(x)
    return out if conv.bias is None else out + conv.bias


def _transformer(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """``attend(x W_query; x W_key, x W_value)``, and its own rows beside it or mixed in."""
    if not is_as_shipped(conv):
        raise OtherKindError
    width = conv.heads * conv.out_channels
    _check(conv, x, 2 * width)
    rest = _rest(
        conv,
        None,
        lin_query=nn.Identity(),
        lin_key=_Columns(0, width),
        lin_value=_Columns(width, 2 * width),
        lin_skip=None,
        lin_beta=None,
    )
    rest.root_weight = False
    read = torch.cat([conv.lin_key(x), conv.lin_value(x)], dim=1)
    out = make(rest, read, conv.lin_query(x))
    if not conv.root_weight:
        return out
    own = conv.lin_skip(x)
    if conv.lin_beta is None:
        return out + own
    share = conv.lin_beta(torch.cat([out, own, out - own], dim=-1)).sigmoid()
    return share * own + (1 - share) * out


ATTENTION_RULES: dict[type[nn.Module], Rule] = {
    pyg.GATConv: _gat,
    pyg.GATv2Conv: _gat_v2,
    pyg.TransformerConv: _transformer,
}
"""``make`` as in ``EDGE_RULES``; None for rows that read: they are those that are read."""

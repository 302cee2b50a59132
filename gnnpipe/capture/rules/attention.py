"""Rules that move an attention's linear maps out of the convolution.

Each row is then mapped once, before it is pushed; on a block, the unchanged convolution would map
the row again for every chunk that reads it, and push wide or sparse features as dense rows. The
rules apply if the mapped rows are no wider than the input.
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

_MAPS: dict[type[nn.Module], tuple[str, ...]] = {
    pyg.GATConv: ("lin",),
    pyg.GATv2Conv: ("lin_l", "lin_r"),
    pyg.TransformerConv: ("lin_query", "lin_key", "lin_value"),
}
"""Linear maps of an attention by name."""


class _Columns(nn.Module):
    """Columns first..last-1 of rows [n, F]; replaces a map that was computed before."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        """[n, last - first]."""
        return x[:, self.first : self.last]


def is_mapped(conv: nn.Module) -> bool:
    """Whether an attention's linear maps were moved out by a rule."""
    return any(
        isinstance(conv._modules.get(name), nn.Identity) for name in _MAPS.get(type(conv), ())
    )


def _check(conv: Any, x: Any, made: int) -> None:
    """Raises ``OtherKindError`` if a map is not PyG's ``Linear`` or makes rows wider.

    ``made``: width of the mapped rows.
    """
    maps = [conv._modules[name] for name in _MAPS[type(conv)]]
    if not all(isinstance(lin, Linear) for lin in maps):
        raise OtherKindError
    given = maps[0].in_channels
    # Features of the same width are better pushed unmapped, because they are never stale.
    if made > given or (made == given and is_input(x.node, FEATURES)):
        raise OtherKindError


def _rest(conv: Any, bias: str | None, **modules: nn.Module | None) -> Any:
    """A shallow copy of the convolution with other modules and without its bias.

    The copy shares the user's weights for the scores. Attributes set on the original later have no
    effect on it.
    """
    rest = copy.copy(conv)
    rest._modules = {**conv._modules, **modules}
    rest._parameters = {**conv._parameters, **({bias: None} if bias else {})}
    return rest


def _gat(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """GATConv: ``attend(x W) + x W_res + b``."""
    if not is_additive(conv):
        raise OtherKindError
    _check(conv, x, conv.heads * conv.out_channels)
    rest = _rest(conv, "bias", lin=nn.Identity(), res=None)
    return _plus(conv, make(rest, conv.lin(x), None), x)


def _gat_v2(conv: Any, x: Any, make: Callable[..., Any]) -> Any:
    """GATv2Conv: ``attend(x W_l + b_l, x W_r + b_r) + x W_res + b``."""
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
    """TransformerConv: ``attend(x W_query; x W_key, x W_value)`` plus x W_skip, or a gated mean."""
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
"""``make`` as in ``EDGE_RULES``; target rows None: the same as the source rows."""

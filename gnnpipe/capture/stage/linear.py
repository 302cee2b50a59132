"""Linear maps of sparse features, and linear maps computed in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.layer import Rows
from gnnpipe.models.sparse_input_linear import feature_linear
from gnnpipe.ops.bf16_matmul import linear

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_linear(recording: fx.GraphModule, call: fx.Node) -> bool:
    """Whether a call is ``F.linear`` or a Linear of torch or PyG without hooks."""
    if call.op == "call_module":
        module = recording.get_submodule(str(call.target))
        hooks = any(getattr(module, name) for name in HOOKS)
        return isinstance(module, nn.Linear | Linear) and len(call.args) == 1 and not hooks
    return call.target is F.linear


class LinearBy(nn.Module):
    """The user's linear layer, computed by another function than ``F.linear``."""

    def __init__(self, linear: Any, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.function = linear, function

    def forward(self, input: Any) -> Tensor:
        """``function(input, weight, bias)``; the weight may be parametrised."""
        return self.function(input, self.linear.weight, self.linear.bias)


def linear_of_features(
    rows: Rows, weight: Tensor, bias: Tensor | None = None, *, is_rounded: bool
) -> Tensor:
    """``torch.nn.functional.linear`` of the features of ``rows``, which may be sparse."""
    assert rows.features is not None
    if weight.dim() != 2:
        return F.linear(rows.features.dense(), weight, bias)
    return feature_linear(rows.features, weight, bias, is_rounded)


def rounded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` computed in bf16."""
    return linear(input, weight, bias, is_rounded=True)

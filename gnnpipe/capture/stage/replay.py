"""Which recorded calls a CUDA graph can replay: they launch the same kernels in every epoch.

A call that is not listed may read a number that was computed, or Python state that changes.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.capture.markers import aggregate, drop, is_mean
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.stage.row_work import PRODUCTS, ROW_WORK
from gnnpipe.capture.stage.step_calls import HOOKS

_FUNCTIONS = {
    *(*ROW_WORK, *PRODUCTS, aggregate, drop, F.linear, F.layer_norm, torch.cat, torch.lerp),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pos),
    *(torch.add, torch.sub, torch.mul, torch.relu, F.relu, F.elu, F.gelu, F.leaky_relu, F.silu),
    *(torch.tanh, torch.sigmoid),
}
_METHODS = {"add", "sub", "mul", "relu", "tanh", "sigmoid"}
_MODULES = (nn.Linear, Linear, nn.LayerNorm, nn.ReLU, nn.ELU, nn.GELU, nn.LeakyReLU, nn.SiLU)


def can_replay(recording: Recording, op: fx.Node) -> bool:
    """Whether an op and its helpers launch the same kernels in every epoch of training."""
    calls = (*recording.helpers(op), op)
    return not recording.facts[op].form and all(_is_known(recording, call) for call in calls)


def _is_known(recording: Recording, call: fx.Node) -> bool:
    if call.op == "call_module":
        module = recording.graph_module.get_submodule(str(call.target))
        return type(module) in _MODULES and not any(getattr(module, name) for name in HOOKS)
    if call.op == "call_method":
        return call.target in _METHODS
    return call.op == "get_attr" or (call.target in _FUNCTIONS and not is_mean(call))

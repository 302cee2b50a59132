"""Compares a recording with the model itself on the sample: results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.fx_names import BY_HAND, refuse
from gnnpipe.capture.stage.conv_dropout import NoDropout
from gnnpipe.capture.trial.perturb import names_of_weights, perturb_weights
from gnnpipe.capture.trial.run import SampleRun
from gnnpipe.capture.vertex_parameters import cut_vertex_weights, vertex_weights


def check_equals_model(
    model: nn.Module, method: str, call: fx.Node, run: SampleRun, names: Mapping[str, str]
) -> None:
    """Raises ``InputError`` unless recording and model give equal results and gradients.

    ``names``: names of the recording's weights in the model, by path.
    """
    result: Any = call.args[0]
    sample = run.sample
    plain = copy.deepcopy(model).double().train()
    paths = {path.removeprefix("model."): t for path, t in vertex_weights(run.module).items()}
    cut_vertex_weights(plain, paths, sample.counts)
    perturb_weights(plain, names_of_weights(model, model))
    with torch.enable_grad():
        with NoDropout():
            truth = sample.call(plain, method, torch.float64)
        if isinstance(truth, Mapping):
            truth = truth[sample.graph.target]
        again = SampleRun(run.graph, run.module, sample)
        for other in run.graph.nodes:
            if other.op != "output":
                again.follow(other)
        found = again.whole[result]
        towards = torch.linspace(-1.0, 1.0, truth.numel(), dtype=truth.dtype).view_as(truth)
        for out in (truth, found):
            if out.requires_grad:
                (out * towards).sum().backward()
    # Some PyG convolutions compute edge weights in float32 for rows of any dtype.
    if not torch.allclose(truth, found, 1e-6, 1e-6):
        refuse(
            "its recording gives other numbers than the model on a sample (by "
            f"{float((truth - found).abs().max()):.1e})",
            f"forward depends on something that a recording cannot hold, {BY_HAND}",
        )
    every = run.module.named_parameters(remove_duplicate=False)
    recorded = {names[path]: p for path, p in every if path in names}
    for name, parameter in plain.named_parameters():
        if not _same_gradient(parameter, recorded.get(name)):
            hint = "forward holds gradients back or makes its own (no_grad, autograd.Function)"
            refuse(f"the gradient of {name} is another in its recording", f"{hint}, {BY_HAND}")


def _same_gradient(truth: Tensor, found: Tensor | None) -> bool:
    a = torch.zeros_like(truth) if truth.grad is None else truth.grad
    b = torch.zeros_like(truth) if found is None or found.grad is None else found.grad
    return torch.allclose(a, b, 1e-5, 1e-5 * float(a.abs().max() + 1e-6))

"""Is a shape the same as one device? Train both from the same seed and compare.

The distributed run trains as it always does; the references are single autograd graphs on rank 0.
One trains on its own from the same seed: its loss is compared. The other starts every epoch from
the run's weights: its gradients are compared, weight by weight, and show the run's own error alone.
(Adam divides by the gradient's size, so where a gradient is zero up to rounding two free runs step
apart by as much as the learning rate, in any program.) For the same reason a difference is set
against the larger of the weight's own gradient norm and a thousandth of the model's typical one.

In float64 only a fault of the program is left to see, so that is the default of ``gnnpipe verify``.
In float32 two right programs may differ by more than 1e-5: GCNII with 8 layers on debian is 3e-5
away from its own float64 gradients, on one device as on many, for ReLUs flip where rows are nearly
zero. So in float32 a third reference, in float64, tells how far rounding alone takes the second.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpipe.config.validation import check_verifiable
from gnnpipe.optim.lr_schedule import LearningRate
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import RankRuntime, build_rank
from gnnpipe.setup.prepared import Prepared
from gnnpipe.train.evaluate import train_epoch
from gnnpipe.verify.reference import Reference

__all__ = ["TOLERANCE", "Comparison", "relative_difference", "verdict", "verify"]

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative difference that counts as equal, by number type."""

GRANTED = 4.0
"""How often a float32 gradient may be off by what float32 does to the reference's own."""


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences of one epoch."""

    epoch: int
    """From 0."""
    loss: float
    gradient: float
    worst: str
    """The weight that the gradient's difference is of; '' where there is none (in float32: none
    beyond what rounding does to one device)."""
    is_exact: bool
    """Nothing was read stale in this epoch."""

    @property
    def largest(self) -> float:
        """The larger of the two."""
        return max(self.loss, self.gradient)

    def text(self) -> str:
        """For a person."""
        which = f"epoch {self.epoch + 1}" + (" (exact)" if self.is_exact else "")
        worst = f" ({self.worst})" if self.worst else ""
        return f"{which}: loss {self.loss:.2e}  gradient {self.gradient:.2e}{worst}"


def relative_difference(
    a: dict[str, Tensor], b: dict[str, Tensor], exact: dict[str, Tensor] | None = None
) -> tuple[float, str]:
    """Largest relative difference between gradients by name, and its name ('' if none differs).

    ``b`` is the truth. ``exact``: the same in float64. Where terms cancel, as they do for
    attention, float32 is off by more than its precision; what it does to ``b`` is ``GRANTED`` so
    many times.
    """
    floor = 1e-3 * (sum(float(t.norm()) ** 2 for t in b.values()) / len(b)) ** 0.5
    found = []
    for name, t in b.items():
        difference = float((a[name].to(t.dtype) - t).norm())
        if exact is not None and not math.isnan(difference):
            granted = GRANTED * float((t.to(exact[name].dtype) - exact[name]).norm())
            difference = max(difference - granted, 0.0)
        found.append((_apart(difference, max(float(t.norm()), floor)), name))
    largest, name = max(found)
    return largest, name if largest else ""


def _apart(difference: float, size: float) -> float:
    """Difference over size; what is not a number is as far apart as can be."""
    if math.isnan(difference) or math.isnan(size):
        return math.inf
    return 0.0 if difference == 0.0 else difference / max(size, 1e-30)


def verdict(prepared: Prepared, found: list[Comparison], tolerance: float) -> str:
    """What they come to, for a person."""
    largest = max(c.largest for c in found)
    same = "equal to" if largest <= tolerance else "DIFFERENT from"
    walk = "" if prepared.program.is_exact else " that walks the same chunks"
    text = f"largest relative difference {largest:.2e}, tolerance {tolerance:g}: {same} one device"
    text += walk
    if _has_float64(prepared):
        text += (
            f"; of gradients, what they are off by beyond {GRANTED:g} times what float32 does to "
            "one device's"
        )
    return text


def verify(prepared: Prepared, mesh: Mesh, epochs: int) -> list[Comparison]:
    """Train both for some epochs; the comparisons, on every rank.

    ``InputError`` where the run rounds to bf16.
    """
    check_verifiable(prepared.config)
    speaks = mesh.rank == 0
    free = Reference(prepared) if speaks else None
    led = Reference(prepared) if speaks else None
    exact = Reference(_in_float64(prepared)) if speaks and _has_float64(prepared) else None
    rank_runtime = build_rank(prepared, mesh)
    kept = _Kept(prepared, rank_runtime, mesh)
    assert rank_runtime.executor.optimizer is not None
    learning_rate = LearningRate(rank_runtime.executor.optimizer, prepared.config)
    exact_epochs, grad_clip = ExactEpochs(prepared), rank_runtime.executor.grad_clip
    found = []
    for epoch in range(epochs):
        order = prepared.chunk_order(epoch)
        program = exact_epochs.begin(epoch, grad_clip)
        loss = train_epoch(rank_runtime, mesh, program, order, epoch)
        exact_epochs.end(program, grad_clip.norm, rank_runtime.executor.has_stepped)
        walk = epoch, program.is_exact, grad_clip.longest
        learning_rate.step(None)
        weights, grads = kept.gather(mesh)
        if free is not None and led is not None:
            led.take(weights)
            rounding = None
            if exact is not None:
                exact.take(weights)
                rounding = exact.train_epoch(*walk).grads
            worst, name = relative_difference(grads, led.train_epoch(*walk).grads, rounding)
            truth = free.train_epoch(*walk).loss
            apart = _apart(abs(loss - truth), abs(truth))
            found.append(Comparison(epoch, apart, worst, name, program.is_exact))
    comparisons: list[Comparison] = mesh.share(found)
    return comparisons


def _has_float64(prepared: Prepared) -> bool:
    # A loss of the user's own may hold numbers of its own type.
    return prepared.dtype == torch.float32 and prepared.loss_fn is None


def _in_float64(prepared: Prepared) -> Prepared:
    model = copy.deepcopy(prepared.model)
    model.module.double()
    config = replace(prepared.config, dtype="float64")
    return replace(prepared, config=config, inputs=replace(prepared.inputs, model=model))


class _Kept:
    """This rank's weights and gradients of an epoch by name, as they are just before its step."""

    def __init__(self, prepared: Prepared, rank_runtime: RankRuntime, mesh: Mesh) -> None:
        stage_module = prepared.model.stage_module(prepared.plan.stages[mesh.stage].ops)
        self._parameters = dict(stage_module.named_parameters())
        self._weights: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        optimizer = rank_runtime.executor.optimizer
        assert optimizer is not None
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        for name, p in self._parameters.items():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._weights[name] = p.detach().cpu().clone()
            self._grads[name] = grad.detach().cpu().clone()

    def gather(self, mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Those of all stages, on every rank."""
        weights: dict[str, Tensor] = {}
        grads: dict[str, Tensor] = {}
        mine = (self._weights, self._grads) if mesh.shard == 0 else ({}, {})
        for part in mesh.gather(mine):
            weights |= part[0]
            grads |= part[1]
        return weights, grads

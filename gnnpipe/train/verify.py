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
zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpipe.runtime.mesh import Mesh
from gnnpipe.train.assemble import Assembly, assemble
from gnnpipe.train.learning_rate import LearningRate
from gnnpipe.train.metrics import train_epoch
from gnnpipe.train.prepare import Prepared, chunk_order
from gnnpipe.train.reference import Reference

__all__ = ["TOLERANCE", "Comparison", "relative_difference", "verify"]

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative difference that counts as equal, by number type."""

FLOOR = {torch.float64: 1e-3, torch.float32: 5e-2}
"""Share of the root mean square over the weights' gradients at which a smaller one is compared.

Sums are rounded at the size of their terms, and the gradients of attention cancel: of a tensor at
1.3 % even the reference's float32 gradient is 4e-6 away from its float64 one (gat, K = 8, on an AMD
EPYC). With this floor and tolerance it may be 5e-7 of the root mean square away, 4 units in the
last place.
"""


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences of one epoch, and the weight that the gradient's is of."""

    epoch: int
    loss: float
    gradient: float
    worst: str

    @property
    def largest(self) -> float:
        """The larger of the two."""
        return max(self.loss, self.gradient)


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference between gradients by name, and its name. ``b`` is the truth."""
    rms = (sum(float(t.norm()) ** 2 for t in b.values()) / len(b)) ** 0.5
    floor = max(FLOOR[t.dtype] for t in b.values()) * rms
    return max(
        (_apart(float((a[name].to(t.dtype) - t).norm()), max(float(t.norm()), floor)), name)
        for name, t in b.items()
    )


def _apart(difference: float, size: float) -> float:
    """Difference over size; what is not a number is as far apart as can be."""
    if math.isnan(difference) or math.isnan(size):
        return math.inf
    return 0.0 if difference == 0.0 else difference / max(size, 1e-30)


def verify(prepared: Prepared, mesh: Mesh, epochs: int) -> list[Comparison]:
    """Train both for some epochs; the comparisons, on every rank."""
    speaks = mesh.rank == 0
    free = Reference(prepared) if speaks else None
    led = Reference(prepared) if speaks else None
    assembly = assemble(prepared, mesh)
    kept = _Kept(prepared, assembly, mesh)
    assert assembly.executor.optimizer is not None
    learning_rate = LearningRate(assembly.executor.optimizer, prepared.config)
    found = []
    for epoch in range(epochs):
        order = chunk_order(prepared.config, epoch)
        loss = train_epoch(assembly, mesh, prepared.program_of(epoch), order, epoch)
        learning_rate.step(None)
        weights, grads = kept.gather(mesh)
        if free is not None and led is not None:
            led.take(weights)
            worst, name = relative_difference(grads, led.train_epoch(epoch).grads)
            truth = free.train_epoch(epoch).loss
            apart = _apart(abs(loss - truth), abs(truth))
            found.append(Comparison(epoch, apart, worst, name))
    comparisons: list[Comparison] = mesh.share(found)
    return comparisons


class _Kept:
    """This rank's weights and gradients of an epoch by name, as they are just before its step."""

    def __init__(self, prepared: Prepared, assembly: Assembly, mesh: Mesh) -> None:
        piece = prepared.model.piece(*prepared.plan.stages[mesh.stage])
        self._parameters = dict(piece.named_parameters())
        self._weights: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        optimizer = assembly.executor.optimizer
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

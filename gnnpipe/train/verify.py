"""Is a shape the same as one device? Train both from the same seed and compare.

The distributed run trains as it always does; the reference is one autograd graph on rank 0. Each
epoch's loss is compared, and the gradient of every weight: the norm of the difference over the
larger of the weight's and the model's typical gradient norm, so that a gradient which is zero up to
rounding (a bias in front of a norm, say) does not count as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpipe.runtime.mesh import Mesh
from gnnpipe.train.compose import Assembly, Prepared, assemble, chunk_order
from gnnpipe.train.metrics import train_epoch
from gnnpipe.train.reference import Reference

__all__ = ["Comparison", "relative_difference", "verify"]


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
    floor = 1e-3 * (sum(float(t.norm()) ** 2 for t in b.values()) / len(b)) ** 0.5
    return max(
        (float((a[name].to(t) - t).norm()) / max(float(t.norm()), floor, 1e-30), name)
        for name, t in b.items()
    )


def verify(prepared: Prepared, mesh: Mesh, epochs: int) -> list[Comparison]:
    """Train both for some epochs; the comparisons, on every rank."""
    reference = Reference(prepared) if mesh.rank == 0 else None
    assembly = assemble(prepared, mesh)
    kept = _keep_gradients(prepared, assembly, mesh)
    found = []
    for epoch in range(epochs):
        order = chunk_order(prepared.config, epoch)
        loss = train_epoch(assembly, mesh, prepared.program, order, epoch)
        grads: dict[str, Tensor] = {}
        for part in mesh.gather(dict(kept) if mesh.shard == 0 else {}):
            grads |= part
        if reference is not None:
            truth = reference.train_epoch(epoch)
            worst, name = relative_difference(grads, truth.grads)
            apart = abs(loss - truth.loss) / abs(truth.loss)
            found.append(Comparison(epoch, apart, worst, name))
    comparisons: list[Comparison] = mesh.share(found)
    return comparisons


def _keep_gradients(prepared: Prepared, assembly: Assembly, mesh: Mesh) -> dict[str, Tensor]:
    """A dict that holds, after each epoch, the gradients of this rank's weights by name."""
    first, last = prepared.plan.stages[mesh.stage]
    names = {
        id(p): name
        for name, p in prepared.model.named_parameters()
        if first <= int(name.split(".")[1]) < last
    }
    optimizer = assembly.executor.optimizer
    assert optimizer is not None
    kept: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                kept[names[id(p)]] = grad.detach().cpu().clone()

    optimizer.register_step_pre_hook(keep)
    return kept

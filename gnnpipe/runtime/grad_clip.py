"""Clips the gradient norm, and detects gradients and losses that are not finite.

Two numbers are summed over all ranks, so every rank comes to the same decision. With optimizer
steps by chunk such a sum would stop the pipeline in every step: each stage then decides on its own,
by the norm of its own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gnnpipe.runtime.comm.mesh import Mesh


class GradClip:
    """Clips and checks the gradients of one rank before the optimizer step."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        mesh: Mesh,
        clip_norm: float,
        gather: Callable[[], Tensor] | None = None,
    ) -> None:
        """Set up the check.

        Args:
            named_parameters: Weights of this rank.
            mesh: The ranks.
            clip_norm: Clip the global gradient norm to this value; 0: off.
            gather: Returns all gradients as one tensor, of which each ``.grad`` is a view then.
        """
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self._mesh, self._clip_norm = mesh, clip_norm or math.inf
        self._gather = gather
        self.step_limit = math.inf
        """Further limit on the gradient norm of the next step; infinity: none."""
        self.norm = 0.0
        """2-norm of the last gradients over all stages that decide together, before clipping."""
        self.faulty: list[str] = []
        """Names of this stage's weights in the first gradients that were not finite, since the list
        was last emptied."""

    @torch.no_grad()
    def clip(self, loss: float) -> bool:
        """Clip the gradients; return ``False`` if they or the loss are not finite.

        ``loss``: this rank's part of the loss.
        """
        grads = self._gradients()
        # All shards of a stage hold the same gradients, and the sum runs over all ranks.
        mine = sum(_squares(grads)) / self._mesh.shards
        wait_start_s = self._mesh.recorder.clock()
        total, whole_loss = self._mesh.sum([mine, loss])
        if self._mesh.world_size > 1:
            self._mesh.recorder.add_step_sync(wait_start_s)
        return self._finish(grads, total, whole_loss)

    @torch.no_grad()
    def clip_in_stage(self) -> bool:
        """Clip this stage's gradients by their own norm; all shards of the stage decide alike."""
        grads = self._gradients()
        total = math.nan
        if self._gather is not None:
            # There are many steps, and a sum in float64 of many numbers takes as long as a step.
            total = float(torch.dot(grads[0], grads[0]))
        if not math.isfinite(total):  # the sum may overflow the number type
            total = sum(_squares(grads))
        return self._finish(grads, total, 0.0)

    def _gradients(self) -> list[Tensor]:
        if self._gather is not None:
            return [self._gather()]
        return [p.grad for _, p in self._named if p.grad is not None]

    def _finish(self, grads: list[Tensor], total: float, whole_loss: float) -> bool:
        self.norm = math.sqrt(total) if total >= 0 else math.nan
        if not (math.isfinite(total) and math.isfinite(whole_loss)):
            self.faulty = self.faulty or self._faults()
            return False
        limit = min(self._clip_norm, self.step_limit)
        if limit < self.norm:
            for grad in grads:
                grad.mul_(limit / self.norm)
        return True

    def _faults(self) -> list[str]:
        """Return the names of the weights whose gradients are not finite."""
        named = [(name, p.grad) for name, p in self._named if p.grad is not None]
        squares = _squares([grad for _, grad in named])
        return [n for (n, _), s in zip(named, squares, strict=True) if not math.isfinite(s)]


def _squares(grads: list[Tensor]) -> list[float]:
    """Return the sum of squares of each gradient, in float64; waits for a GPU once."""
    if not grads:
        return []
    lengths = torch._foreach_norm(grads, 2, dtype=torch.float64)
    return torch.stack(lengths).square().tolist()

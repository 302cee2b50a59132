"""Clips the gradient norm, and detects gradients and losses that are not finite.

Two numbers are summed over all ranks, so every rank comes to the same decision. With optimizer
steps by chunk such a sum would stop the pipeline in every step: each stage then decides on its own,
by the norm of its own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnnpipe.runtime.comm.mesh import Mesh


class GradClip:
    """Clips and checks the gradients of one rank before the optimizer step."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, clip_norm: float
    ) -> None:
        """``clip_norm``: clip the global gradient norm to this value; 0: off."""
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self._mesh, self._clip_norm = mesh, clip_norm or math.inf
        self.step_limit = math.inf
        """Further limit on the gradient norm of the next step; infinity: none."""
        self.norm = 0.0
        """2-norm of the last gradients over all stages that decide together, before clipping."""
        self.faulty: list[str] = []
        """Names of this stage's weights in the first gradients that were not finite, since the list
        was last emptied."""

    @torch.no_grad()
    def passes(self, loss: float) -> bool:
        """Clip the gradients; return ``False`` if they or the loss are not finite.

        ``loss``: this rank's part of the loss.
        """
        grads = [(name, p.grad) for name, p in self._named if p.grad is not None]
        squares = _squares([g for _, g in grads])
        # All shards of a stage hold the same gradients, and the sum runs over all ranks.
        mine = sum(squares) / self._mesh.shards
        wait_start_s = self._mesh.recorder.clock()
        total, whole_loss = self._mesh.sum([mine, loss])
        if self._mesh.world_size > 1:
            self._mesh.recorder.add_step_sync(wait_start_s)
        return self._finish(grads, squares, total, whole_loss)

    @torch.no_grad()
    def passes_in_stage(self) -> bool:
        """Do the same for the gradients of this stage alone; all its shards decide alike."""
        grads = [(name, p.grad) for name, p in self._named if p.grad is not None]
        squares = _squares([g for _, g in grads])
        return self._finish(grads, squares, sum(squares), 0.0)

    def _finish(
        self, grads: list[tuple[str, Tensor]], squares: list[float], total: float, whole_loss: float
    ) -> bool:
        self.norm = math.sqrt(total) if total >= 0 else math.nan
        if not (math.isfinite(total) and math.isfinite(whole_loss)):
            self.faulty = self.faulty or [
                n for (n, _), s in zip(grads, squares, strict=True) if not math.isfinite(s)
            ]
            return False
        limit = min(self._clip_norm, self.step_limit)
        if limit < self.norm:
            for _, grad in grads:
                grad.mul_(limit / self.norm)
        return True


def _squares(grads: list[Tensor]) -> list[float]:
    """Return the sum of squares of each gradient, in float64; waits for a GPU once."""
    if not grads:
        return []
    lengths = torch._foreach_norm(grads, 2, dtype=torch.float64)
    return torch.stack(lengths).square().tolist()

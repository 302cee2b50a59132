"""Looks at the gradients of all stages before the weights change, and clips them.

One sum of two numbers over all ranks; every rank comes to the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["GradClip"]


class GradClip:
    """Of one rank."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, clip_norm: float
    ) -> None:
        """``clip_norm``: gradients longer than that, over all weights, are made so long; 0: no."""
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self._mesh, self._clip_norm = mesh, clip_norm or math.inf
        self.longest = math.inf
        """A shorter limit, of the coming step."""
        self.norm = 0.0
        """Length (2-norm) of the last gradients, over all stages, before clipping."""
        self.faulty: list[str] = []
        """Weights of this stage whose last gradients were not all numbers."""

    @torch.no_grad()
    def passes(self, loss: float) -> bool:
        """Whether the step may be made; ``loss``: this rank's part of it."""
        grads = [(name, p.grad) for name, p in self._named if p.grad is not None]
        squares = _squares([g for _, g in grads])
        # The shards of a stage have the same gradients by now.
        mine = sum(squares) / self._mesh.shards
        wait_start_s = self._mesh.recorder.clock()
        total, whole_loss = self._mesh.sum([mine, loss])
        if self._mesh.world_size > 1:
            self._mesh.recorder.add_step_sync(wait_start_s)
        self.norm = math.sqrt(total) if total >= 0 else math.nan
        if not (math.isfinite(total) and math.isfinite(whole_loss)):
            self.faulty = [
                n for (n, _), s in zip(grads, squares, strict=True) if not math.isfinite(s)
            ]
            return False
        limit = min(self._clip_norm, self.longest)
        if limit < self.norm:
            for _, grad in grads:
                grad.mul_(limit / self.norm)
        return True


def _squares(grads: list[Tensor]) -> list[float]:
    """Of every gradient the sum of its squares, in float64; a GPU is waited for once."""
    if not grads:
        return []
    if grads[0].is_cuda:  # in a few kernels, and not three for each
        lengths = torch._foreach_norm(grads, 2, dtype=torch.float64)
        return torch.stack(lengths).square().tolist()
    return torch.stack([g.double().square().sum() for g in grads]).tolist()

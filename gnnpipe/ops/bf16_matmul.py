"""Matrix products with weights in bfloat16 (``--matmul-dtype bf16``).

Both factors and the result are rounded to bf16; sums inside a product are made in float32 (on GPUs
as set in ``torch.backends.cuda.matmul``). Rows, weights, summed gradients and the optimizer keep
their own type. Backward rounds the saved rows again instead of keeping a second copy.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_REPEATS, _MAX_ROWS = 7, 20_000


def rounded(x: Tensor, is_rounded: bool) -> Tensor:
    """Return a factor of a product: ``x`` in bf16, or ``x`` itself unless ``is_rounded``."""
    return x.to(torch.bfloat16) if is_rounded else x


def product(a: Tensor, b: Tensor, is_rounded: bool) -> Tensor:
    """Return ``a @ b``, [R, K] x [K, F], in the type of ``a``."""
    return (rounded(a, is_rounded) @ rounded(b, is_rounded)).to(a.dtype)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), is_rounded=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.to(torch.bfloat16)
        wants_x, wants_weight = ctx.needs_input_grad
        to_x = (rows @ weight.to(torch.bfloat16)).to(x.dtype) if wants_x else None
        to_weight = None
        if wants_weight:
            to_weight = (rows.t() @ x.to(torch.bfloat16)).to(weight.dtype)
        return to_x, to_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_rounded: bool) -> Tensor:
    """Return ``x @ weight.T + bias``, [..., K] to [..., F]; weight [F, K], bias [F]."""
    if not is_rounded or weight.dim() != 2:
        return F.linear(x, weight, bias)
    found: Tensor = _RoundedLinear.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    found = found.reshape(*x.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


def is_worth_rounding(device: torch.device, rows: int, width: int) -> bool:
    """Return whether ``device`` computes [rows, width] x [width, width] faster in bf16.

    Both variants are timed.
    """
    x = torch.ones(min(rows, _MAX_ROWS), width, device=device)
    weight = torch.ones(width, width, device=device)

    def shortest_s(is_rounded: bool) -> float:
        times = []
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            product(x, weight, is_rounded).sum().item()
            times.append(time.perf_counter() - start_s)
        return min(times)

    return shortest_s(True) < shortest_s(False)

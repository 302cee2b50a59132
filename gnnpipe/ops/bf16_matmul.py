"""Products of rows with weights, rounded to bf16 where a run asks for it (``--matmul-dtype bf16``).

CPUs and GPUs that compute in bf16 make such a product in a third of the time, in half of it with
the rounding. Both factors and the result have 8 bits of precision then, sums within a product are
made in float32 (on GPUs as ``torch.backends.cuda.matmul`` says), and all else stays as it was:
rows, weights, their gradients as they are added up, and what the optimizer keeps. Rows are rounded
again in backward rather than kept twice.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["is_worth_rounding", "linear", "product", "rounded"]

LOW = torch.bfloat16
REPEATS, MOST_ROWS = 7, 20_000


def rounded(x: Tensor, is_rounded: bool) -> Tensor:
    """A factor of a product as it is multiplied; what is made of two such has their type."""
    return x.to(LOW) if is_rounded else x


def product(a: Tensor, b: Tensor, is_rounded: bool) -> Tensor:
    """``a @ b``, [R, K] x [K, F], in the type of ``a``."""
    return (rounded(a, is_rounded) @ rounded(b, is_rounded)).to(a.dtype)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), is_rounded=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.to(LOW)
        to_x = (rows @ weight.to(LOW)).to(x.dtype) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = (rows.t() @ x.to(LOW)).to(weight.dtype)
        return to_x, to_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_rounded: bool) -> Tensor:
    """``x @ weight.T + bias``, [..., K] to [..., F]; weight [F, K], bias [F]."""
    if not is_rounded or weight.dim() != 2:
        return F.linear(x, weight, bias)
    found: Tensor = _RoundedLinear.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    found = found.reshape(*x.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


def is_worth_rounding(device: torch.device, rows: int, width: int) -> bool:
    """Whether ``device`` makes a product of such rows faster in bf16 than not, by trying it."""
    x = torch.ones(min(rows, MOST_ROWS), width, device=device)
    weight = torch.ones(width, width, device=device)

    def least_s(is_rounded: bool) -> float:
        times = []
        for _ in range(REPEATS):
            start_s = time.perf_counter()
            product(x, weight, is_rounded).sum().item()
            times.append(time.perf_counter() - start_s)
        return min(times)

    return least_s(True) < least_s(False)

"""The edges of a block in both orders, for sums over those into a row and those out of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Incidence"]


@dataclass(frozen=True, eq=False)
class Incidence:
    """E edges from T rows that are read into C that read, bag by bag; all on one device."""

    source: Tensor
    """[E], by target; of the type of ``offsets``."""
    target: Tensor
    """[E] int64, ascending."""
    offsets: Tensor
    """[C + 1], where the edges into a row begin and end."""
    order: Tensor | None
    """[E], which edge stands there: of the block's, and behind them the loops; none if they
    stood so."""
    by_source: Tensor
    """[E], the edges by source."""
    targets_by_source: Tensor
    """[E], their targets."""
    offsets_by_source: Tensor
    """[T + 1]."""

    @classmethod
    def build(cls, edge_index: Tensor, size: tuple[int, int], with_loops: bool) -> Incidence:
        """Of ``edge_index`` [2, E], sources below ``size[0]`` and targets below ``size[1]``.

        ``with_loops``: with one loop for every row that reads, and no other, as PyG adds them.
        """
        source, target = edge_index
        order = None
        if with_loops:
            loops = torch.arange(min(size), device=source.device)
            order = torch.cat([
                torch.nonzero(source != target)[:, 0],
                torch.arange(len(source), len(source) + len(loops), device=source.device),
            ])  # fmt: skip
            source, target = torch.cat([source, loops])[order], torch.cat([target, loops])[order]
        if bool((target[1:] < target[:-1]).any()):
            target, place = torch.sort(target, stable=True)
            source = source[place]
            order = place if order is None else order[place]
        # Half as large: these are what it keeps beyond the edges.
        small = torch.int32 if max(len(source), *size) < 2**31 else torch.int64
        by_source = torch.argsort(source, stable=True)
        back = target[by_source].to(small), _offsets(source[by_source], size[0]).to(small)
        offsets = _offsets(target, size[1])
        if order is not None:
            source, offsets, order = source.to(small), offsets.to(small), order.to(small)
        return cls(source, target, offsets, order, by_source.to(small), *back)


def _offsets(ascending: Tensor, count: int) -> Tensor:
    ends = torch.arange(count + 1, device=ascending.device)
    return torch.searchsorted(ascending.contiguous(), ends)

"""What the graph-parallel peer of ``network_speed.py`` gets beyond what gnnpipe does by itself.

``give_everything()`` changes this process alone:

* a product with the rows of a rank's own shard runs while the rows of other shards arrive, and
  their part is added afterwards (gnnpipe waits for them first);
* shards are balanced by the rows they receive (partitioner ``balanced-rows``), since an exchange
  ends when the shard that receives most has everything.

The losses stay those of plain graph parallelism up to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PARTITIONER = "balanced-rows"
SEEDS, SWEEPS, SLACK = 5, 10, 1.06
"""METIS runs to choose from; sweeps of the refinement; largest work over the mean, as METIS's."""


def give_everything() -> None:
    """Register the partitioner and replace the read of an aggregation with fixed weights."""
    import torch

    from gnnpipe.graph.partition import PARTITIONERS
    from gnnpipe.runtime.history.linear import LinearHistory

    PARTITIONERS.add(PARTITIONER, balanced_rows)
    waiting_read = LinearHistory.read
    parts: dict[int, tuple[Any, Any, Any, Any]] = {}

    def split(operator: Any, num_own: int) -> tuple[Any, Any, Any]:
        """The matrix of own columns, that of others' columns, and the rows of the second."""
        if id(operator) not in parts:
            whole = operator.forward
            is_other = (torch.arange(whole.num_columns) >= num_own).int()
            own, other = (
                whole.keep_columns(0, whole.num_rows, is_other, torch.tensor(kept))
                for kept in ([True, False], [False, True])
            )
            rows = other.indptr.diff().nonzero().flatten()
            parts[id(operator)] = own, other.select(rows), rows, operator
        return parts[id(operator)][:3]

    def read(self: Any, chunk: int) -> Any:
        if self.layout.num_chunks > 1 or not self._arriving:
            return waiting_read(self, chunk)
        own, other, rows = split(self.operator, self.layout.num_own)
        found = own.matmul(self.table).to(self._dtype)
        self.settle()
        return found.index_add_(0, rows, other.matmul(self.table).to(self._dtype))

    LinearHistory.read = read  # type: ignore[method-assign]


def balanced_rows(task: Any) -> npt.NDArray[np.int32]:
    """METIS's parts with the smallest largest number of received rows, refined greedily."""
    from dataclasses import replace

    from gnnpipe.graph.partition import PARTITIONERS

    metis = PARTITIONERS["metis"]
    found = [metis(replace(task, seed=task.seed + i)) for i in range(SEEDS)]
    return refined(task, min(found, key=lambda part: received(task, part).max()))


def received(task: Any, part: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """[parts], the rows that each part reads from others."""
    a = task.adjacency
    into = np.repeat(part, np.diff(a.indptr)).astype(np.int64)
    pairs = np.unique(
        into[part[a.indices] != into] * len(part) + a.indices[part[a.indices] != into]
    )
    return np.bincount(pairs // len(part), minlength=task.parts)


def refined(task: Any, part: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Move single vertices out of, or to, the part that receives most while that helps it.

    A move must lower the largest number of received rows, or keep it and lower the sum.
    """
    indptr, indices, work = task.adjacency.indptr, task.adjacency.indices, task.work
    n, parts = len(part), task.parts
    part, degree = part.copy(), np.diff(indptr)
    seen = np.zeros((n, parts), dtype=np.int32)  # neighbours of each vertex in each part
    np.add.at(seen, (np.repeat(np.arange(n), degree), part[indices]), 1)
    reads, load = received(task, part), np.bincount(part, work, minlength=parts)
    room = SLACK * work.sum() / parts

    def change(v: int, to: int) -> npt.NDArray[np.int64]:
        near, home = indices[indptr[v] : indptr[v + 1]], part[v]
        found = np.zeros(parts, dtype=np.int64)
        found[home] -= ((seen[near, home] == 1) & (part[near] != home)).sum()
        found[to] += ((seen[near, to] == 0) & (part[near] != to)).sum()
        found[home] += seen[v, home] > 0
        found[to] -= seen[v, to] > 0
        return found

    for _ in range(SWEEPS):
        before, top = (reads.max(), reads.sum()), int(reads.argmax())
        members = np.flatnonzero(part == top)
        others = np.flatnonzero((part != top) & (seen[:, top] > 0))
        order = members[np.argsort(-degree[members], kind="stable")]
        order = np.append(order, others[np.argsort(degree[others], kind="stable")])
        for v in order.tolist():
            home = int(part[v])
            targets = [to for to in range(parts) if to != home] if home == top else [top]
            choices = [(to, change(v, to)) for to in targets if load[to] + work[v] <= room]
            choices = [
                (to, moved)
                for to, moved in choices
                if ((reads + moved).max(), (reads + moved).sum()) < (reads.max(), reads.sum())
            ]
            if not choices:
                continue
            to, moved = min(choices, key=lambda c: float(((reads + c[1]) ** 4.0).sum()))
            near = indices[indptr[v] : indptr[v + 1]]
            seen[near, home] -= 1
            seen[near, to] += 1
            part[v], reads = to, reads + moved
            load[home] -= work[v]
            load[to] += work[v]
            if reads.max() > reads[top]:
                break
        if (reads.max(), reads.sum()) == before:
            break
    return part

"""The same training on one device in one autograd graph: what every shape is held against.

Nothing of the runtime is used: no histories, no tapes, no product with a transposed matrix. Rows
are gathered edge by edge, stale rows are constants, and autograd finds the gradients of a whole
epoch at once. Slow and hungry; it is the oracle of ``gnnpipe verify`` and of the tests.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnpipe.graph.blocks import Block, EdgeData, edge_data_of
from gnnpipe.graph.operators import EVERYONE, edges_into, weighted_rows
from gnnpipe.models import Aggregation, Received, Values
from gnnpipe.ops.hashed_dropout import row_keys
from gnnpipe.optim.lr_schedule import LearningRate
from gnnpipe.runtime.staleness.affine_map import RIDGE
from gnnpipe.schedule import EXACT_SCHEDULE, SCHEDULES
from gnnpipe.setup.build import ChunkRows
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import labels_of

__all__ = ["Reference", "ReferenceEpoch"]


@dataclass(frozen=True)
class ReferenceEpoch:
    """Loss of an epoch and the gradient of every weight by its name in the model."""

    loss: float
    grads: dict[str, Tensor]


class Reference:
    """Trains a copy of a prepared run's model on the whole graph, chunk semantics included."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.model = copy.deepcopy(prepared.model)
        self.stage_module = self.model.stage_module(range(prepared.plan.num_ops))
        graph, config, dtype = prepared.graph, prepared.config, prepared.dtype
        self.staleness = prepared.staleness
        self.chosen = graph.table_rows
        chunk = prepared.chunking.chunk_of_row()
        counts = {
            name: np.bincount(chunk[of], minlength=config.chunks)
            for name, of in self.chosen.items()
        }
        self.bounds = {name: [0, *np.cumsum(count).tolist()] for name, count in counts.items()}
        self.make_rows = ChunkRows(prepared, True, torch.device("cpu"))
        every_row = np.arange(graph.num_vertices)
        self.rows = [self.make_rows.of(every_row[chunk == c]) for c in range(config.chunks)]
        keys = row_keys(torch.from_numpy(prepared.chunking.perm))
        self.keys = {name: keys[torch.from_numpy(of)] for name, of in self.chosen.items()}
        self.y, self.train_mask, self.answered = self._answers(chunk)
        every = self.stage_module.aggregations
        self.edges = {a.over: self._edges(a) for a in every if not a.is_mean}
        self.edge_data = edge_data_of(graph, dtype)
        self.tables = {
            a.name: torch.zeros(self.bounds[a.pushed_type][-1], a.width, dtype=dtype) for a in every
        }
        self.snapshots = {name: t.clone() for name, t in self.tables.items()}
        self.before = copy.deepcopy(self.stage_module)
        self.optimizer = torch.optim.Adam(
            self.stage_module.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self.learning_rate = LearningRate(self.optimizer, config)

    def _answers(self, chunk: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor, list[int]]:
        """What is learned, whether in training, and where each chunk's part starts and ends."""
        graph, pairs = self.prepared.graph, self.prepared.graph.pairs
        if pairs is not None:
            starts = np.searchsorted(chunk, np.arange(self.prepared.plan.chunks + 1))
            label = torch.from_numpy(pairs.label)[:, None]
            return label, torch.from_numpy(pairs.part == 0), pairs.indptr[starts].tolist()
        target = self.chosen[graph.target]
        y = labels_of(graph, target, self.prepared.dtype)
        return y, torch.from_numpy(graph.train_mask[target]), self.bounds[graph.target]

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights, by name."""
        self.model.load(weights)

    def _ranges(self, vertex_type: str) -> list[tuple[int, int]]:
        """Rows of each chunk among those of a type."""
        return list(pairwise(self.bounds[vertex_type]))

    def _edges(self, a: Aggregation) -> tuple[Tensor, Tensor, Tensor]:
        """Source, target and weight of each edge, the ends by their numbers in their types."""
        whole = weighted_rows(self.prepared.graph, a.structure)
        matrix = whole[self.chosen[a.vertex_type]][:, self.chosen[a.pushed_type]]
        target = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        return (
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(target.astype(np.int64)),
            torch.from_numpy(matrix.data).to(self.prepared.dtype)[:, None],
        )

    def _data_of(self, structure: str, mine: Tensor) -> EdgeData:
        """What some edges of a structure carry."""
        return {k: v[mine] for k, v in self.edge_data.items()} if structure == "edges" else {}

    def train_epoch(
        self, epoch: int, is_exact: bool | None = None, longest: float = math.inf
    ) -> ReferenceEpoch:
        """One epoch with its optimizer step.

        ``is_exact``: nothing stale; by default those at the start. ``longest``: of gradients.
        """
        every = self.staleness.snapshot_every
        if every > 1:
            self.tables = {name: s.clone() for name, s in self.snapshots.items()}
        is_first = epoch < self.prepared.exact_epochs
        exact = self.staleness.is_exact or (is_first if is_exact is None else is_exact)
        if not exact and len(self.prepared.probes):
            self._forecast()
        logits = self._forward(epoch, exact)
        ranges = list(pairwise(self.answered))
        order = torch.cat([torch.arange(*ranges[c]) for c in logits])
        merged = torch.cat(list(logits.values()))
        keep = self.train_mask[order]
        loss = self._loss(merged[keep], self.y[order][keep])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._shorten(min(longest, self.prepared.config.clip_norm or math.inf))
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.stage_module.named_parameters()
        }
        self.before = copy.deepcopy(self.stage_module)
        self.optimizer.step()
        self.learning_rate.step(None)
        if every > 1 and ((epoch + 1) % every == 0 or exact):
            self.snapshots = {name: t.clone() for name, t in self.tables.items()}
        return ReferenceEpoch(float(loss.detach()), grads)

    def _shorten(self, longest: float) -> None:
        """Cut the gradients to a length (2-norm) over all weights."""
        grads = [p.grad for p in self.stage_module.parameters() if p.grad is not None]
        length = float(torch.cat([grad.double().flatten() for grad in grads]).norm())
        if length > longest:
            for grad in grads:
                grad.mul_(longest / length)

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean over what is labelled."""
        if self.prepared.loss_fn is not None:
            if self.prepared.graph.pairs is not None:
                logits, y = logits[:, 0], y[:, 0].to(logits.dtype)
            known = ~y.isnan() if y.is_floating_point() else y >= 0
            return self.prepared.loss_fn(logits, y) / int(known.sum())
        if y.is_floating_point():
            known = ~y.isnan()
            return nn.functional.mse_loss(logits[known], y[known])
        if y.dim() == 1:
            return nn.functional.cross_entropy(logits, y)
        known = y >= 0
        return nn.functional.binary_cross_entropy_with_logits(
            logits[known], y[known].to(logits.dtype)
        )

    @torch.no_grad()
    def _forecast(self) -> None:
        """Fit, on the pilot rows, where the rows of every table go with the current weights."""
        rows = replace(self.make_rows.of(self.prepared.probes), is_probe=True)
        is_probe = np.isin(np.arange(self.prepared.graph.num_vertices), self.prepared.probes)
        probes = {
            name: torch.from_numpy(np.flatnonzero(is_probe[of])) for name, of in self.chosen.items()
        }
        old: Values = {}
        new: Values = {}
        read_old: dict[str, Received] = {}
        read_new: dict[str, Received] = {}
        for step in range(self.stage_module.num_steps):
            before, old = self.before.step(step, old, read_old, rows)
            after, new = self.stage_module.step(step, new, read_new, rows)
            read_old, read_new = {}, {}
            for a in self._pushed(step):
                x, y = before[a.name], after[a.name]
                table = self.tables[a.name]
                self.tables[a.name] = moved = _moved(table, x.double(), y.double(), a.is_mean)
                read_old[a.name] = self._read(a, probes[a.vertex_type], x, table)
                read_new[a.name] = self._read(a, probes[a.vertex_type], y, moved)

    def _mean(self, a: Aggregation, table: Tensor) -> Tensor:
        """The mean over all vertices, or over all edges into them [F]."""
        if a.structure == EVERYONE:
            return table.mean(0)
        counts = edges_into(self.prepared.graph, a.structure)[self.chosen[a.pushed_type]]
        weights = torch.from_numpy(counts / max(counts.sum(), 1.0)).to(table.dtype)
        return weights @ table

    def _pushed(self, step: int) -> tuple[Aggregation, ...]:
        """What the end of a step pushes."""
        return self.stage_module.rounds[step] if step < self.stage_module.num_steps - 1 else ()

    def _read(self, a: Aggregation, rows: Tensor, own: Tensor, table: Tensor) -> Received:
        """What some rows [P] get from a table [N, F], every neighbour read from the table."""
        if a.is_mean:
            return Received(self._mean(a, table).expand(len(rows), -1))
        source, target, weight = self.edges[a.over]
        place = torch.full((self.bounds[a.vertex_type][-1],), -1)
        place[rows] = torch.arange(len(rows))
        mine = place[target] >= 0
        source, target = source[mine], place[target[mine]]
        if a.is_linear:
            received = table.new_zeros(len(rows), table.shape[1])
            return Received(received.index_add(0, target, table[source] * weight[mine]))
        nothing = torch.empty(0, dtype=torch.int64)
        before = own if a.pushed_type == a.vertex_type else own[:0]
        edges = torch.stack([source + len(before), target])
        size = (len(before) + len(table), len(rows))
        data = self._data_of(a.structure, mine)
        block = Block(edges, nothing, nothing.bool()[:, None], size, edge_data=data)
        return Received(torch.cat([before, table]), block)

    def _forward(self, epoch: int, exact: bool) -> dict[int, Tensor]:
        """Logits [C, classes] by chunk."""
        order = self.prepared.chunk_order(epoch)
        scale = 1.0 if exact else self.staleness.scale_live_gradients
        live: dict[str, dict[int, Tensor]] = {name: {} for name in self.tables}
        values: dict[int, Values] = {c: {} for c in order}
        rows = {c: replace(self.rows[c], epoch=epoch, training=True) for c in order}

        def run(step: int, c: int) -> None:
            received = {
                a.name: self._received(a, c, live[a.name], scale)
                for a in (self._pushed(step - 1) if step else ())
            }
            pushed, values[c] = self.stage_module.step(step, values[c], received, rows[c])
            for name, value in pushed.items():
                live[name][c] = value

        schedule = SCHEDULES[EXACT_SCHEDULE if exact else self.prepared.plan.schedule]
        for action in schedule.forward(0, self.stage_module.num_steps, len(order)):
            for step in range(*action.steps):
                run(step, order[action.position])
        for a in self.stage_module.aggregations:
            for c, value in live[a.name].items():
                self.tables[a.name][slice(*self._ranges(a.pushed_type)[c])] = value.detach()
        return {c: values[c]["x"] for c in order}

    def _received(self, a: Aggregation, c: int, live: dict[int, Tensor], scale: float) -> Received:
        """What chunk c gets: neighbours in ``live`` chunks with gradient, the others without."""
        parts = []
        for b, (start, stop) in enumerate(self._ranges(a.pushed_type)):
            part = live.get(b, self.tables[a.name][start:stop])
            if b != c and scale != 1.0:
                # The same numbers, with `scale` times the gradient.
                part = part.detach() + scale * (part - part.detach())
            parts.append(part)
        table = torch.cat(parts)
        start, stop = self._ranges(a.vertex_type)[c]
        count = stop - start
        if a.is_mean:
            return Received(self._mean(a, table).expand(count, -1))
        source, target, weight = self.edges[a.over]
        mine = (target >= start) & (target < stop)
        source, target = source[mine], target[mine] - start
        if a.is_linear:
            received = table.new_zeros(count, table.shape[1])
            return Received(received.index_add(0, target, table[source] * weight[mine]))
        nothing = torch.empty(0, dtype=torch.int64)
        data = self._data_of(a.structure, mine)
        keys, into_keys = self.keys[a.pushed_type], None
        if a.pushed_type == a.vertex_type:
            own = (source >= start) & (source < stop)
            source = torch.where(own, source - start, source + count)
            keys = torch.cat([keys[start:stop], keys])
            table = torch.cat([table[start:stop], table])
        else:
            into_keys = self.keys[a.vertex_type][start:stop]
        edges, size = torch.stack([source, target]), (len(table), count)
        block = Block(edges, nothing, nothing.bool()[:, None], size, keys, into_keys, data)
        return Received(table, block)


def _moved(table: Tensor, old: Tensor, new: Tensor, is_mean: bool) -> Tensor:
    """The table [N, F] after the affine map that ridge regression finds from old to new [P, F]."""
    d = new - old
    if is_mean:
        return (table.double() + d.mean(0)).to(table.dtype)
    centred = old - old.mean(0)
    gram = centred.T @ centred
    gram += (RIDGE * old.square().sum(0).mean() + 1e-30) * torch.eye(len(gram)).double()
    slope = torch.linalg.solve(gram, centred.T @ (d - d.mean(0)))
    shift = d.mean(0) - old.mean(0) @ slope
    wide = table.double()
    moved: Tensor = wide + wide @ slope + shift
    return moved.to(table.dtype)

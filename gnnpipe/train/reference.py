"""The same training on one device in one autograd graph: what every shape is held against.

Nothing of the runtime is used: no histories, no tapes, no product with a transposed matrix. Rows
are gathered edge by edge, stale rows are constants, and autograd finds the gradients of a whole
epoch at once. Slow and hungry; it is the oracle of ``gnnpipe verify`` and of the tests.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from gnnpipe.graph.operators import Block, weighted_rows
from gnnpipe.models import Layer, Rows, Values
from gnnpipe.models.dropout import row_keys
from gnnpipe.models.feature_linear import feature_rows
from gnnpipe.runtime.forecast import RIDGE
from gnnpipe.train.learning_rate import LearningRate
from gnnpipe.train.prepare import Prepared, chunk_order

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
        self.layers: list[Layer] = self.model.stack()
        graph, config, dtype = prepared.graph, prepared.config, prepared.dtype
        self.techniques = config.techniques
        bounds = [prepared.chunking.rows(c, 0)[0] for c in range(config.chunks)]
        self.bounds = [*bounds, graph.num_vertices]
        device = torch.device("cpu")
        self.rows = [
            Rows(
                keys=row_keys(torch.from_numpy(prepared.chunking.perm[a:b])),
                features=feature_rows(graph.x[a:b], dtype, device),
                seed=config.seed,
            )
            for a, b in self._ranges()
        ]
        self.y = torch.from_numpy(graph.y)
        self.train_mask = torch.from_numpy(graph.train_mask)
        self.edges = {kind: self._edges(kind) for kind in {x.aggregation for x in self.layers}}
        self.tables = [
            torch.zeros(graph.num_vertices, layer.push_width, dtype=dtype) for layer in self.layers
        ]
        self.snapshots = [t.clone() for t in self.tables]
        self.before = copy.deepcopy(self.layers)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self.learning_rate = LearningRate(self.optimizer, config)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights, by name."""
        self.model.load_state_dict(weights)

    def _ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    def _edges(self, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        matrix = weighted_rows(self.prepared.graph, kind)
        target = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        return (
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(target.astype(np.int64)),
            torch.from_numpy(matrix.data).to(self.prepared.dtype)[:, None],
        )

    def train_epoch(self, epoch: int) -> ReferenceEpoch:
        """One epoch with its optimizer step."""
        every = self.techniques.snapshot_every
        if every > 1:
            self.tables = [s.clone() for s in self.snapshots]
        exact = self.techniques.exact or epoch < self.prepared.exact_epochs
        if not exact and len(self.prepared.pilots):
            self._forecast()
        logits = self._forward(epoch, exact)
        order = torch.cat([torch.arange(*self._ranges()[c]) for c in logits])
        merged = torch.cat(list(logits.values()))
        keep = self.train_mask[order]
        loss = self._loss(merged[keep], self.y[order][keep])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
        }
        self.before = copy.deepcopy(self.layers)
        self.optimizer.step()
        self.learning_rate.step(None)
        if every > 1 and ((epoch + 1) % every == 0 or epoch + 1 == self.prepared.exact_epochs):
            self.snapshots = [t.clone() for t in self.tables]
        return ReferenceEpoch(float(loss.detach()), grads)

    @staticmethod
    def _loss(logits: Tensor, y: Tensor) -> Tensor:
        """Mean over what is labelled."""
        if y.dim() == 1:
            return nn.functional.cross_entropy(logits, y)
        known = y >= 0
        return nn.functional.binary_cross_entropy_with_logits(
            logits[known], y[known].to(logits.dtype)
        )

    @torch.no_grad()
    def _forecast(self) -> None:
        """Fit, on the pilot rows, where the rows of every table go with the current weights."""
        graph, pilots = self.prepared.graph, torch.from_numpy(self.prepared.pilots)
        dtype = self.prepared.dtype
        rows = Rows(
            keys=row_keys(torch.from_numpy(self.prepared.chunking.perm)[pilots]),
            features=feature_rows(graph.x[pilots.numpy()], dtype, torch.device("cpu")),
        )
        old: Values = {}
        new: Values = {}
        for index, (before, layer) in enumerate(zip(self.before, self.layers, strict=True)):
            x, old = before.before(old, rows)
            y, new = layer.before(new, rows)
            x, d = x.double(), y.double() - x.double()
            centred, moved = x - x.mean(0), d - d.mean(0)
            gram = centred.T @ centred
            gram += (RIDGE * x.square().sum(0).mean() + 1e-30) * torch.eye(len(gram)).double()
            slope = torch.linalg.solve(gram, centred.T @ moved)
            shift = d.mean(0) - x.mean(0) @ slope
            table = self.tables[index].double()
            was, now = table.to(dtype), (table + table @ slope + shift).to(dtype)
            self.tables[index] = now
            read, block = self._read(index, pilots, x.to(dtype), was)
            old = before.after(read, old, replace(rows, block=block))
            read, _ = self._read(index, pilots, y, now)
            new = layer.after(read, new, replace(rows, block=block))

    def _read(
        self, index: int, rows: Tensor, own: Tensor, table: Tensor
    ) -> tuple[Tensor, Block | None]:
        """What some rows [P] get from a table [N, F], every neighbour read from the table."""
        layer = self.layers[index]
        source, target, weight = self.edges[layer.aggregation]
        place = torch.full((len(table),), -1)
        place[rows] = torch.arange(len(rows))
        mine = place[target] >= 0
        source, target = source[mine], place[target[mine]]
        if layer.is_linear:
            received = table.new_zeros(len(rows), table.shape[1])
            return received.index_add(0, target, table[source] * weight[mine]), None
        nothing = torch.empty(0, dtype=torch.int64)
        edges = torch.stack([source + len(rows), target])
        size = (len(rows) + len(table), len(rows))
        return torch.cat([own, table]), Block(edges, nothing, nothing.bool()[:, None], size)

    def _forward(self, epoch: int, exact: bool) -> dict[int, Tensor]:
        """Logits [C, classes] by chunk."""
        order = chunk_order(self.prepared.config, epoch)
        scale = self.techniques.scale_live_gradients
        live: list[dict[int, Tensor]] = [{} for _ in self.layers]
        values: dict[int, Values] = {c: {} for c in order}
        rows = {c: replace(self.rows[c], epoch=epoch, training=True) for c in order}

        def push(index: int, c: int) -> None:
            pushed, values[c] = self.layers[index].before(values[c], rows[c])
            live[index][c] = pushed

        def aggregate(index: int, c: int) -> None:
            received, block = self._received(index, c, live[index], 1.0 if exact else scale)
            values[c] = self.layers[index].after(received, values[c], replace(rows[c], block=block))

        if exact:
            for index in range(len(self.layers)):
                for c in order:
                    push(index, c)
                for c in order:
                    aggregate(index, c)
        else:
            for c in order:
                for index in range(len(self.layers)):
                    push(index, c)
                    aggregate(index, c)
        for table, pushed in zip(self.tables, live, strict=True):
            for c, value in pushed.items():
                table[slice(*self._ranges()[c])] = value.detach()
        return {c: values[c]["x"] for c in order}

    def _received(
        self, index: int, c: int, live: dict[int, Tensor], scale: float
    ) -> tuple[Tensor, Block | None]:
        """What chunk c gets: neighbours in ``live`` chunks with gradient, the others without."""
        parts = []
        for b, (start, stop) in enumerate(self._ranges()):
            part = live.get(b, self.tables[index][start:stop])
            if b != c and scale != 1.0:
                # The same numbers, with `scale` times the gradient.
                part = part.detach() + scale * (part - part.detach())
            parts.append(part)
        table = torch.cat(parts)
        layer = self.layers[index]
        source, target, weight = self.edges[layer.aggregation]
        start, stop = self._ranges()[c]
        mine = (target >= start) & (target < stop)
        source, target = source[mine], target[mine] - start
        if layer.is_linear:
            received = table.new_zeros(stop - start, table.shape[1])
            return received.index_add(0, target, table[source] * weight[mine]), None
        own = (source >= start) & (source < stop)
        count = stop - start
        source = torch.where(own, source - start, source + count)
        size = (count + len(table), count)
        nothing = torch.empty(0, dtype=torch.int64)
        block = Block(torch.stack([source, target]), nothing, nothing.bool()[:, None], size)
        return torch.cat([table[start:stop], table]), block

"""Walks the chunks in the reference: composes live and stale rows for every aggregation.

For every chunk the model runs once on ALL vertices. Each aggregation reads a table composed of the
chunk's own rows, the rows of chunks that came earlier in this epoch (live, with gradient) and the
rows of earlier epochs (stale, constant). Of the outputs only the chunk's own rows count, and
autograd computes the gradients. K chunks cost K passes an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.config import TrainConfig
from gnnpipe.verification.reference_models import Pass, Read, WholeModel

RIDGE = 0.05
"""Weight of the ridge in the forecast's regression (docs/adr/0011)."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Chunks and probe vertices; N vertices in the order of the given graph."""

    chunk: npt.NDArray[np.integer]
    """[N], the chunk of every vertex."""
    probes: npt.NDArray[np.int64]
    """Probe vertices; empty without a forecast."""
    types: Mapping[str, npt.NDArray[np.bool_]]
    """[N] by vertex type, the vertices that push to the tables of that type."""
    output_chunk: npt.NDArray[np.integer]
    """Chunk of every output row: a vertex of the target type or a pair."""
    positions: Sequence[int]
    """Order in which the schedule visits the positions of an epoch's chunk order."""
    schedule: str
    """Of the plan."""


class ChunkWalk:
    """Computes the outputs of an epoch and keeps the tables between epochs."""

    def __init__(self, model: WholeModel, cut: Cut, config: TrainConfig) -> None:
        self._num_chunks, self._positions = int(cut.chunk.max()) + 1, cut.positions
        self.model, self.config = model, config
        self.staleness = config.staleness_settings_for(self._num_chunks, cut.schedule)
        self._chunk = {name: torch.from_numpy(cut.chunk[of]) for name, of in cut.types.items()}
        self._members = {
            name: [torch.nonzero(chunk == c)[:, 0] for c in range(self._num_chunks)]
            for name, chunk in self._chunk.items()
        }
        """Vertices of every chunk, by vertex type."""
        is_probe = np.isin(np.arange(len(cut.chunk)), cut.probes)
        self._probes = {
            name: torch.from_numpy(np.flatnonzero(is_probe[of])) for name, of in cut.types.items()
        }
        self._forecasts = bool(len(cut.probes))
        self._output_chunk = torch.from_numpy(cut.output_chunk)
        self.tables: dict[str, Tensor] = {}
        """Stale rows [N_t, F] by aggregation."""
        self._snapshots: dict[str, Tensor] = {}
        self._before = _weights_of(model)

    @property
    def has_stale_epochs(self) -> bool:
        """Whether some epochs of the run may read stale rows."""
        return self._num_chunks > 1 and not self.staleness.is_exact

    def order(self, epoch: int) -> list[int]:
        """Returns the chunks in the order of an epoch (from 0)."""
        chunks = np.arange(self._num_chunks)
        if self.staleness.shuffle_chunks:
            generator = np.random.default_rng([self.config.seed, epoch])
            chunks = generator.permutation(self._num_chunks)
        return [int(chunks[position]) for position in self._positions]

    def outputs(self, epoch: int, is_exact: bool) -> Tensor:
        """Returns the outputs of all vertices or pairs in a training epoch (from 0)."""
        every = self.staleness.snapshot_every
        if every > 1:
            self.tables = {name: rows.clone() for name, rows in self._snapshots.items()}
        if self._forecasts and not is_exact:
            self.forecast(epoch)
        found = self.walk_exact(epoch) if is_exact else self._walk(epoch)
        if every > 1 and ((epoch + 1) % every == 0 or is_exact):
            self._snapshots = {name: rows.clone() for name, rows in self.tables.items()}
        return found

    def keep_weights(self) -> None:
        """Keeps the weights of this epoch for the forecast of the next epoch."""
        if self._forecasts:
            self._before = _weights_of(self.model)

    def walk_exact(self, epoch: int) -> Tensor:
        """Runs one pass in which every vertex reads current rows."""

        def read(name: str, rows: Tensor, _: str) -> Tensor:
            self.tables[name] = rows.detach()
            return rows

        return self.model.outputs(self._pass(read, epoch))

    def exact_pass(self, epoch: int) -> Pass:
        """Returns a pass for a model that reads current rows by itself."""
        return self._pass(lambda _name, rows, _kind: rows, epoch)

    def _pass(self, read: Read, epoch: int, current: int | None = None) -> Pass:
        """Returns a pass in which the rows of one chunk (``None``: of all chunks) are current."""

        def is_current(kind: str) -> Tensor:
            chunk = self._chunk[kind]
            return torch.ones_like(chunk, dtype=torch.bool) if current is None else chunk == current

        return Pass(read, is_current, self.config.seed, epoch, is_probe=current == _NO_CHUNK)

    def _walk(self, epoch: int) -> Tensor:
        """Runs one pass per chunk, then writes the tables."""
        live: dict[str, dict[int, Tensor]] = {}
        kinds: dict[str, str] = {}
        found: dict[int, Tensor] = {}
        scale = self.staleness.scale_live_gradients
        for chunk in self.order(epoch):
            own: dict[str, Tensor] = {}
            read = self._reader(chunk, own, live, kinds)
            found[chunk] = self.model.outputs(self._pass(read, epoch, chunk))
            for name, rows in own.items():
                # Equal values, with `scale` times the gradient.
                scaled = rows.detach() + scale * (rows - rows.detach())
                live.setdefault(name, {})[chunk] = scaled
        for name, by_chunk in live.items():
            table = self.tables[name].clone()
            for chunk, rows in by_chunk.items():
                table[self._members[kinds[name]][chunk]] = rows.detach()
            self.tables[name] = table
        outputs = torch.stack([found[chunk] for chunk in range(self._num_chunks)])
        return outputs[self._output_chunk, torch.arange(outputs.shape[1])]

    def _reader(
        self,
        chunk: int,
        own: dict[str, Tensor],
        live: Mapping[str, Mapping[int, Tensor]],
        kinds: dict[str, str],
    ) -> Read:
        """Returns the reader of a chunk's pass: own rows, ``live`` rows of others, stale rows.

        The reader stores the chunk's own rows in ``own`` and vertex types in ``kinds``, by
        aggregation.
        """

        def read(name: str, rows: Tensor, kind: str) -> Tensor:
            members = self._members[kind]
            kinds[name], own[name] = kind, rows[members[chunk]]
            table = self.tables.setdefault(name, torch.zeros_like(rows))
            fresh = {**live.get(name, {}), chunk: own[name]}
            parts = [fresh.get(c, table[of]) for c, of in enumerate(members)]
            return torch.cat(parts)[torch.argsort(torch.cat(members))]

        return read

    @torch.no_grad()
    def forecast(self, epoch: int) -> None:
        """Forecasts every table: applies the map fitted to the change of the probe vertices' rows.

        The probe vertices pass without dropout and read the tables: first with the weights of the
        last epoch and the old tables, then with the current weights and the forecast tables.
        """
        old: dict[str, Tensor] = {}
        moved: dict[str, Tensor] = {}

        def read_old(name: str, rows: Tensor, kind: str) -> Tensor:
            old[name] = rows[self._probes[kind]]
            return self.tables.setdefault(name, torch.zeros_like(rows))

        def read_new(name: str, rows: Tensor, kind: str) -> Tensor:
            new = rows[self._probes[kind]]
            is_mean = name in self.model.means
            moved[name] = _move(self.tables[name], old[name].double(), new.double(), is_mean)
            return moved[name]

        now = _weights_of(self.model)
        self.model.module.load_state_dict(self._before)
        self.model.outputs(self._pass(read_old, epoch, _NO_CHUNK))
        self.model.module.load_state_dict(now)
        self.model.outputs(self._pass(read_new, epoch, _NO_CHUNK))
        self.tables |= moved


_NO_CHUNK = -1
"""``current`` of a pass that reads every row from the tables."""


def _weights_of(model: WholeModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def _projector(fitted: Tensor) -> Tensor:
    """Projector [F, F] onto the columns that the forecast keeps (docs/adr/0060)."""
    width = len(fitted)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(width, min(16, width), dtype=torch.float64, generator=generator)
    basis = torch.linalg.svd(fitted @ start, full_matrices=False).U
    projector: Tensor = basis @ basis.T
    return projector


def _move(table: Tensor, old: Tensor, new: Tensor, is_mean: bool) -> Tensor:
    """Applies to a table [N, F] the ridge-regression map from old to new rows [P, F]."""
    d = new - old
    if is_mean:
        return (table.double() + d.mean(0)).to(table.dtype)
    centred = old - old.mean(0)
    gram = centred.T @ centred
    gram += (RIDGE * old.square().sum(0).mean() + 1e-30) * torch.eye(len(gram)).double()
    change = d - d.mean(0)
    slope = torch.linalg.solve(gram, centred.T @ change)
    slope @= _projector(change.T @ centred @ slope)
    shift = d.mean(0) - old.mean(0) @ slope
    wide = table.double()
    moved: Tensor = wide + wide @ slope + shift
    return moved.to(table.dtype)

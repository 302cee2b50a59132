"""Walk of the reference over the chunks: which rows are live, which are stale.

For every chunk the model runs once on ALL vertices. In each aggregation it reads a table that is
put together from the chunk's own rows, the rows of chunks that were walked earlier in this epoch
(live, with gradient) and the rows that the last epochs left (stale, constants); of the outputs only
the chunk's own count. Autograd does the rest. The cost is K passes an epoch for K chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.config import TrainConfig
from gnnpipe.verify.reference_models import Pass, Read, WholeModel

__all__ = ["ChunkWalk", "Cut"]

RIDGE = 0.05
"""Weight of the ridge in the forecast's regression (docs/adr/0011)."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Chunks and probe vertices; N vertices in the order of the graph as it was given."""

    chunk: npt.NDArray[np.integer]
    """[N], the chunk of every vertex."""
    probes: npt.NDArray[np.int64]
    """Vertices of the forecast; none where nothing is forecast."""
    types: Mapping[str, npt.NDArray[np.bool_]]
    """[N] by the name of a type, which vertices push to the tables of that type."""
    output_chunk: npt.NDArray[np.integer]
    """The chunk of every row of outputs, which is a labelled vertex or a pair."""
    positions: Sequence[int]
    """Order in which the schedule visits the positions of an epoch's chunk order."""


class ChunkWalk:
    """Trains nothing; gives the outputs of an epoch and keeps the tables between two epochs."""

    def __init__(self, model: WholeModel, cut: Cut, config: TrainConfig) -> None:
        self._num_chunks, self._positions = int(cut.chunk.max()) + 1, cut.positions
        self.model, self.config = model, config
        self.staleness = config.staleness_settings_for(self._num_chunks)
        self._chunk = {name: torch.from_numpy(cut.chunk[of]) for name, of in cut.types.items()}
        self._members = {
            name: [torch.nonzero(chunk == c)[:, 0] for c in range(self._num_chunks)]
            for name, chunk in self._chunk.items()
        }
        """By type, the vertices of every chunk."""
        is_probe = np.isin(np.arange(len(cut.chunk)), cut.probes)
        self._probes = {
            name: torch.from_numpy(np.flatnonzero(is_probe[of])) for name, of in cut.types.items()
        }
        self._forecasts = bool(len(cut.probes))
        self._output_chunk = torch.from_numpy(cut.output_chunk)
        self.tables: dict[str, Tensor] = {}
        """By aggregation, the rows [N_t, F] that stale readers see."""
        self._snapshots: dict[str, Tensor] = {}
        self._before = _weights_of(model)

    @property
    def has_stale_epochs(self) -> bool:
        """Whether some epochs of the run may read stale rows."""
        return self._num_chunks > 1 and not self.staleness.is_exact

    def order(self, epoch: int) -> list[int]:
        """The chunks in the order in which an epoch (from 0) walks them."""
        chunks = np.arange(self._num_chunks)
        if self.staleness.shuffle_chunks:
            generator = np.random.default_rng([self.config.seed, epoch])
            chunks = generator.permutation(self._num_chunks)
        return [int(chunks[position]) for position in self._positions]

    def outputs(self, epoch: int, is_exact: bool) -> Tensor:
        """Outputs of all vertices or pairs in an epoch (from 0) of training."""
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
        """Keep the weights of this epoch for the forecast of the next."""
        if self._forecasts:
            self._before = _weights_of(self.model)

    def walk_exact(self, epoch: int) -> Tensor:
        """One pass in which every vertex reads the current rows."""

        def read(name: str, rows: Tensor, _: str) -> Tensor:
            self.tables[name] = rows.detach()
            return rows

        return self.model.outputs(self._pass(read, epoch))

    def exact_pass(self, epoch: int) -> Pass:
        """A pass without tables, of a model that reads the current rows by itself."""
        return self._pass(lambda _name, rows, _kind: rows, epoch)

    def _pass(self, read: Read, epoch: int, current: int | None = None) -> Pass:
        """A pass in which the rows of the chunk ``current`` (none: of all chunks) are current."""

        def is_current(kind: str) -> Tensor:
            chunk = self._chunk[kind]
            return torch.ones_like(chunk, dtype=torch.bool) if current is None else chunk == current

        return Pass(read, is_current, self.config.seed, epoch, is_probe=current == _NO_CHUNK)

    def _walk(self, epoch: int) -> Tensor:
        """One pass for every chunk; the tables are written at the end."""
        live: dict[str, dict[int, Tensor]] = {}
        kinds: dict[str, str] = {}
        found: dict[int, Tensor] = {}
        scale = self.staleness.scale_live_gradients
        for chunk in self.order(epoch):
            own: dict[str, Tensor] = {}
            read = self._reader(chunk, own, live, kinds)
            found[chunk] = self.model.outputs(self._pass(read, epoch, chunk))
            for name, rows in own.items():
                # The same numbers, with `scale` times the gradient.
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
        """The table of a chunk's pass: its ``own`` rows, ``live`` rows of others, stale rows.

        Notes the chunk's own rows and the vertex type of every aggregation.
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
        """Moves every table by the map that fits how the probe vertices' rows have moved.

        The probe vertices pass without dropout and read the tables: with the last epoch's weights
        the tables as they are, then with the current weights the moved tables.
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
"""Current chunk of a pass in which every row is read from the tables."""


def _weights_of(model: WholeModel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def _move(table: Tensor, old: Tensor, new: Tensor, is_mean: bool) -> Tensor:
    """Table [N, F] after the affine map that ridge regression fits from old to new [P, F]."""
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

"""The main job: train a model on a whole graph in the shape that the config asks for.

The same script runs on one device and under torchrun; every rank makes a ``Trainer`` and calls
``fit``. Evaluation is exact and its time is kept out of the epoch's.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.models import GNN
from gnnpipe.plan import Plan
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.train.assemble import Assembly, assemble
from gnnpipe.train.metrics import Scores, evaluate, logits_by_chunk, train_epoch
from gnnpipe.train.prepare import Prepared, chunk_order, prepare
from gnnpipe.train.progress import Progress
from gnnpipe.train.record import EpochRow, RunFolder, run_path, versions
from gnnpipe.train.report import head_lines, result_lines
from gnnpipe.train.staleness import measure_staleness

__all__ = ["RunResult", "Trainer"]


@dataclass(frozen=True)
class RunResult:
    """What came out; the fields are those of result.json. Accuracies of the last epoch."""

    dataset: str
    model: str
    layers: int
    hidden: int
    stages: int
    shards: int
    chunks: int
    world_size: int
    epochs: int
    seed: int
    exact: bool
    loss: float
    train_acc: float
    val_acc: float
    test_acc: float
    best_val_acc: float
    test_acc_at_best_val: float
    best_epoch: int
    epoch_time_s: float
    """Median, without the first epochs (warm-up) where there are others."""
    stale_reads: float
    """Share of the edges read stale, mean over the epochs."""
    drift: list[float]
    """By layer, of the last epoch: error of the stale rows relative to their size (see
    ``Staleness``); empty where nothing is stale."""
    comm_bytes_per_epoch: dict[str, int]
    comm_bytes_closed_form: dict[str, int]
    peak_memory_bytes: list[int]
    """Per rank; on a CPU of the whole process, on a GPU of torch's allocations."""
    versions: dict[str, str]
    history: list[EpochRow] = field(default_factory=list, repr=False)
    """The rows of metrics.csv."""
    path: Path | None = None
    """The run's folder."""

    def to_dict(self) -> dict[str, Any]:
        """As it stands in result.json: without history and path."""
        return {k: v for k, v in asdict(self).items() if k not in ("history", "path")}


class Trainer:
    """Trains on one device, or on one of S * G ranks.

    >>> config = TrainConfig(dataset="karate", epochs=3, out="off", quiet=True)
    >>> result = Trainer(config).fit()
    >>> len(result.history)
    3
    """

    def __init__(
        self,
        config: TrainConfig,
        graph: Graph | None = None,
        model: GNN | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Parts that are not given are made from ``config``: graph, model, plan."""
        self.config = config
        self._graph, self._model, self._plan = graph, model, plan
        self._mesh: Mesh | None = None
        self._prepared: Prepared | None = None
        self._assembly: Assembly | None = None
        self._fitted = False

    @property
    def model(self) -> GNN:
        """The model; after ``fit`` with the trained weights of all stages, on every rank."""
        return self._setup()[1].model

    @property
    def plan(self) -> Plan:
        """Which layers, shards and chunks go where."""
        return self._setup()[1].plan

    def _join(self) -> Mesh:
        """Meet the other ranks; done once."""
        if self._mesh is None:
            config = self.config
            self._mesh = Mesh.join(config.stages, config.shards, config.device, config.timeout_s)
        return self._mesh

    def _setup(self) -> tuple[Mesh, Prepared]:
        """Read, cut and plan; done once."""
        mesh = self._join()
        if self._prepared is None:
            self._prepared = prepare(self.config, mesh, self._graph, self._model, self._plan)
        return mesh, self._prepared

    def fit(self) -> RunResult:
        """Train for ``epochs`` epochs and write the run's folder (``out="off"`` writes none).

        Raises ``InputError`` before any work if something in the config, the data or the folder
        cannot be used, ``FloatingPointError`` when the loss is no longer a number.
        """
        config = self.config
        if self._fitted:
            raise InputError("Trainer: fit() was called before; make a new Trainer with model=...")
        self._fitted = True
        # The folder first: a run that cannot be written must not read and cut for an hour.
        folder = _claim(config, self._join())
        mesh, prepared = self._setup()
        progress = Progress(config.epochs, speaks=mesh.rank == 0 and not config.quiet)
        for line in head_lines(prepared):
            progress.say(line)
        assembly = self._ready()[2]
        if folder is not None:
            written = config
            if self._graph is not None:
                # A name that no reader knows: repeating the run must not train another graph.
                written = replace(config, dataset=f"passed-in:{prepared.graph.name}")
            folder.open(written, prepared.plan, prepared.program.text())
            progress.say(f"run folder: {folder.path}")
        with progress:
            rows = self._loop(mesh, prepared, assembly, folder, progress)
        result = self._finish(mesh, prepared, rows, folder)
        for line in result_lines(result):
            progress.say(line)
        return result

    def evaluate(self) -> Scores:
        """Exact accuracies with the current weights, on every rank."""
        mesh, _, assembly = self._ready()
        return evaluate(assembly, mesh)

    def predict(self) -> Tensor:
        """Logits [N, classes] of every vertex, in the graph's own order, on every rank."""
        mesh, prepared, assembly = self._ready()
        layout = assembly.executor.layout
        parts = {
            chunk: (layout.own[layout.own_ptr[chunk] : layout.own_ptr[chunk + 1]], v.cpu().numpy())
            for chunk, v in logits_by_chunk(assembly).items()
        }
        graph = prepared.graph
        logits = torch.empty(graph.num_vertices, graph.num_classes, dtype=prepared.dtype)
        for found in mesh.gather(parts):
            for rows, values in found.values():
                logits[torch.from_numpy(prepared.chunking.perm[rows])] = torch.from_numpy(values)
        return logits

    def close(self) -> None:
        """Part from the other ranks; nothing can be trained or evaluated afterwards."""
        if self._mesh is not None:
            self._mesh.leave()

    def _ready(self) -> tuple[Mesh, Prepared, Assembly]:
        """Everything allocated; done once."""
        mesh, prepared = self._setup()
        if self._assembly is None:
            self._assembly = assemble(prepared, mesh)
        return mesh, prepared, self._assembly

    def _loop(
        self,
        mesh: Mesh,
        prepared: Prepared,
        assembly: Assembly,
        folder: RunFolder | None,
        progress: Progress,
    ) -> list[EpochRow]:
        config = self.config
        rows = []
        for epoch in range(config.epochs):
            start = time.perf_counter()
            order = chunk_order(config, epoch)
            loss = train_epoch(assembly, mesh, prepared.program_of(epoch), order, epoch)
            stale = measure_staleness(prepared, assembly, mesh, order, epoch)
            trained = time.perf_counter()
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"epoch {epoch + 1}: the loss is {loss}; try a smaller --lr (now {config.lr})"
                )
            last = epoch + 1 == config.epochs
            due = config.eval_every and (epoch + 1) % config.eval_every == 0
            scores = evaluate(assembly, mesh) if last or due else None
            row = EpochRow(
                epoch + 1, loss, scores, trained - start, time.perf_counter() - trained, stale
            )
            rows.append(row)
            if folder is not None:
                folder.add(row)
            progress.epoch(row)
        return rows

    def _finish(
        self, mesh: Mesh, prepared: Prepared, rows: list[EpochRow], folder: RunFolder | None
    ) -> RunResult:
        config, assembly = self.config, self._assembly
        assert assembly is not None
        sent = assembly.executor.epoch_bytes
        counted = [int(v) for v in mesh.sum(list(astuple(sent)))]
        names = [f.name for f in fields(sent)]
        per_epoch = dict(zip(names, counted, strict=True)) | {"total": sum(counted)}
        weights = self._collect(mesh, prepared)
        scored = [(row.epoch, row.scores) for row in rows if row.scores is not None]
        last = scored[-1][1]
        # Ties go to the earlier epoch, as everywhere in this field.
        best_epoch, best = max(scored, key=lambda pair: _rank(pair[1].val_acc))
        times = [r.epoch_time_s for r in rows]
        stale = [r.staleness for r in rows if r.staleness is not None]
        spec = prepared.model.stack()[0].spec
        result = RunResult(
            dataset=prepared.graph.name, model=prepared.model_graph.name, layers=config.layers,
            hidden=spec.hidden, stages=config.stages, shards=config.shards,
            chunks=config.chunks, world_size=mesh.world_size, epochs=config.epochs,
            seed=config.seed, exact=prepared.report.exact, loss=rows[-1].loss,
            train_acc=last.train_acc, val_acc=last.val_acc, test_acc=last.test_acc,
            best_val_acc=best.val_acc, test_acc_at_best_val=best.test_acc, best_epoch=best_epoch,
            epoch_time_s=statistics.median(times[min(3, len(times) - 1) :]),
            stale_reads=statistics.mean(s.stale_reads for s in stale) if stale else 0.0,
            drift=list(stale[-1].drift) if stale else [],
            comm_bytes_per_epoch=per_epoch, comm_bytes_closed_form=prepared.volume.to_dict(),
            peak_memory_bytes=mesh.gather(_peak_memory(mesh)), versions=versions(),
            history=rows, path=folder.path if folder else None,
        )  # fmt: skip
        if folder is not None:
            folder.close(result.to_dict(), weights)
        return result

    def _collect(self, mesh: Mesh, prepared: Prepared) -> dict[str, Tensor]:
        """The weights of all stages, loaded into the model on every rank."""
        first, last = prepared.plan.stages[mesh.stage]
        mine = {
            name: tensor.detach().cpu()
            for name, tensor in prepared.model.state_dict().items()
            if first <= int(name.split(".")[1]) < last
        }
        if mesh.world_size == 1:
            return mine
        weights: dict[str, Tensor] = {}
        for part in mesh.gather(mine if mesh.shard == 0 else {}):
            weights |= part
        prepared.model.load_state_dict(weights)
        return weights


def _claim(config: TrainConfig, mesh: Mesh) -> RunFolder | None:
    """The run's folder on rank 0, checked; an error there ends every rank."""
    folder, error = None, None
    if mesh.rank == 0 and config.out != "off":
        try:
            folder = RunFolder(run_path(config))
        except InputError as fault:
            error = str(fault)
    failed = mesh.share(error)
    if failed:
        raise InputError(failed)
    return folder


def _rank(accuracy: float) -> float:
    """NaN (no such part of the split) ranks last."""
    return -math.inf if math.isnan(accuracy) else accuracy


def _peak_memory(mesh: Mesh) -> int:
    if mesh.device.type == "cuda":
        return torch.cuda.max_memory_allocated(mesh.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""The main job: train a model on a whole graph in the shape that the config asks for.

The same script runs on one device and under torchrun; every rank makes a ``Trainer`` and calls
``fit``. Evaluation is exact and its time is kept out of the epoch's.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor, nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.plan import Plan
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.runtime.probe import receive_bandwidth
from gnnpipe.train.assemble import Assembly, assemble
from gnnpipe.train.best import BestEpoch
from gnnpipe.train.learning_rate import LearningRate
from gnnpipe.train.metrics import Scores, evaluate, results_by_chunk, train_epoch
from gnnpipe.train.prepare import Prepared, chunk_order, prepare
from gnnpipe.train.progress import Progress
from gnnpipe.train.record import EpochRow, RunFolder, claim_folder
from gnnpipe.train.report import head_lines, result_lines
from gnnpipe.train.result import RunResult, gather_result
from gnnpipe.train.staleness import measure_staleness
from gnnpipe.train.task import ERRORS, LossFn

__all__ = ["Trainer"]


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
        model: nn.Module | None = None,
        plan: Plan | None = None,
        mesh: Mesh | None = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        """Parts that are not given are made from ``config``: graph, model, plan.

        ``model`` is a ``torch_geometric`` model that takes (x, edge_index), or a ``GNN``; its own
        weights are trained (those of rank 0, if the ranks differ), and ``--model``, ``--layers``
        and what else describes a model have no meaning then. ``fit`` raises ``InputError`` naming
        the line of ``forward`` that cannot be cut into chunks.

        ``mesh`` if the ranks have met before, for another run of this process. ``loss_fn`` maps
        logits [R, C] and labels [R] of some training vertices to the SUM of their losses; it is
        divided by the number of training labels.
        """
        self.config = config
        self._graph, self._model, self._plan = graph, model, plan
        self._mesh, self._loss_fn = mesh, loss_fn
        self._prepared: Prepared | None = None
        self._assembly: Assembly | None = None
        self._fitted = False

    @property
    def model(self) -> nn.Module:
        """The model; after ``fit`` with the trained weights of all stages, on every rank."""
        return self._setup()[1].model.module

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
            self._prepared = prepare(
                self.config, mesh, self._graph, self._model, self._plan, self._loss_fn
            )
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
        folder = claim_folder(config, self._join())
        mesh, prepared = self._setup()
        progress = Progress(
            config.epochs, prepared.metric, speaks=mesh.rank == 0 and not config.quiet
        )
        for line in head_lines(prepared):
            progress.say(line)
        assembly = self._ready()[2]
        if folder is not None:
            written = config
            if self._graph is not None:
                # A name that no reader knows: repeating the run must not train another graph.
                written = replace(config, dataset=f"passed-in:{prepared.graph.name}")
            if self._model is not None:
                written = replace(written, model=f"passed-in:{prepared.model.name}")
            folder.open(written, prepared.plan, prepared.program_text())
            progress.say(f"run folder: {folder.path}")
        link_bytes_per_s = receive_bandwidth(mesh)
        with progress:
            rows, best = self._loop(mesh, prepared, assembly, folder, progress)
        best.restore()
        weights = self._collect(mesh, prepared)
        path = folder.path if folder else None
        result = gather_result(mesh, prepared, assembly, rows, best, path, link_bytes_per_s)
        if folder is not None:
            folder.close(result.to_dict(), weights)
        for line in result_lines(result):
            progress.say(line)
        return result

    def evaluate(self) -> Scores:
        """Exact scores with the current weights, on every rank."""
        mesh, _, assembly = self._ready()
        return evaluate(assembly, mesh)

    def predict(self) -> Tensor:
        """Logits [N, classes] of every vertex, in the graph's own order, on every rank.

        Of a heterogeneous graph those of the type that has labels. Where links are learned, the
        final rows [N, d], of which any pair can be scored.
        """
        mesh, prepared, assembly = self._ready()
        layout = assembly.target
        parts = {
            chunk: (
                layout.own[layout.own_ptr[chunk] : layout.own_ptr[chunk + 1]],
                values.get("rows", values["x"]).cpu().numpy(),
            )
            for chunk, values in results_by_chunk(assembly).items()
        }
        graph = prepared.graph
        number = prepared.chunking.perm if graph.types is None else graph.types.number
        count = int(graph.row_types[graph.target].sum())
        everyone = [part for found in mesh.gather(parts) for part in found.values()]
        logits = torch.empty(count, everyone[0][1].shape[1], dtype=prepared.dtype)
        for rows, values in everyone:
            logits[torch.from_numpy(number[rows])] = torch.from_numpy(values)
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
    ) -> tuple[list[EpochRow], BestEpoch]:
        config, executor = self.config, assembly.executor
        assert executor.optimizer is not None
        learning_rate = LearningRate(executor.optimizer, config)
        state = [tensor for _, tensor in executor.stage.piece.named_state()]
        is_error = prepared.metric in ERRORS
        best = BestEpoch(state, config.kept_epoch == "best", config.patience, is_error)
        rows = []
        for epoch in range(config.epochs):
            start = time.perf_counter()
            order = chunk_order(prepared.config, epoch)
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
                epoch + 1, loss, scores, trained - start, time.perf_counter() - trained,
                learning_rate.value, stale,
            )  # fmt: skip
            rows.append(row)
            if folder is not None:
                folder.add(row)
            progress.epoch(row)
            sign = -1.0 if is_error else 1.0
            learning_rate.step(sign * scores.val_metric if scores else None)
            if scores is not None and best.see(epoch + 1, scores) and not last:
                progress.say(
                    f"stopped after epoch {epoch + 1}: validation {prepared.metric} has not become "
                    f"better since epoch {best.epoch}"
                )
                break
        return rows, best

    def _collect(self, mesh: Mesh, prepared: Prepared) -> dict[str, Tensor]:
        """The weights of all stages, loaded into the model on every rank."""
        model = prepared.model
        if mesh.world_size > 1:
            piece = model.piece(*prepared.plan.stages[mesh.stage])
            mine = {name: tensor.detach().cpu() for name, tensor in piece.named_state()}
            for part in mesh.gather(mine if mesh.shard == 0 else {}):
                model.load(part)
        return {name: t.detach().cpu() for name, t in model.module.state_dict().items()}

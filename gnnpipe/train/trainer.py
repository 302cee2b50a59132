"""The main job: train a model on a whole graph in the shape that the config asks for.

The same script runs on one device and under torchrun; every rank makes a ``Trainer`` and calls
``fit``. Evaluation is exact and its time is kept out of the epoch's.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gnnpipe.checkpoint.retention import remove_unfinished
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError, StoppedError
from gnnpipe.graph.graph import Graph
from gnnpipe.heap import give_back
from gnnpipe.perf import Trace, write_trace
from gnnpipe.plan import Plan
from gnnpipe.planner import GivenPlan
from gnnpipe.profile.links import receive_bandwidth
from gnnpipe.profile.predict import Predictor, check_profile_file
from gnnpipe.run.folder import RunFolder, claim_folder
from gnnpipe.run.progress import Progress
from gnnpipe.run.rank_log import RankLog, is_lost_peer, lost_rank
from gnnpipe.run.result import RunResult, TrainingRecord, gather_result
from gnnpipe.run.resume import Start, find_start, identity_of, restarted, seconds_so_far
from gnnpipe.run.signals import Stopping
from gnnpipe.run.summary import head_lines, result_lines
from gnnpipe.runtime.comm.heartbeat import SILENCE_SHARE, Heartbeat
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.runtime.memory_use import count_peaks_anew, held_bytes, held_memory
from gnnpipe.setup.build import RankRuntime, build_rank
from gnnpipe.setup.inputs import check_can_fit, check_parts, warn_of_vain_rounding
from gnnpipe.setup.prepare import join_world, prepare
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import LossFn
from gnnpipe.train.evaluate import Scores, evaluate, results_by_chunk
from gnnpipe.train.loop import Loop

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
        world: World | None = None,
        loss_fn: LossFn | None = None,
        resume: str | Path | None = None,
    ) -> None:
        """Parts that are not given are made from ``config``: graph, model, plan.

        ``model`` is a ``torch_geometric`` model that takes (x, edge_index), or a ``GNN``; its own
        weights are trained (those of rank 0, if the ranks differ), and ``--model``, ``--layers``
        and what else describes a model have no meaning then. ``fit`` raises ``InputError`` naming
        the line of ``forward`` that cannot be cut into chunks.

        ``world`` if the ranks have met before, for another run of this process. ``loss_fn`` maps
        logits [R, C] and labels [R] of some training vertices to the SUM of their losses; it is
        divided by the number of training labels.

        ``resume``: the folder of a run to go on with from its newest whole checkpoint; ``config``
        is then what ``resumed_config`` gives. ``InputError`` where a part is of another kind, or
        a setting cannot be right.
        """
        check_parts(config, graph, model)
        self.config = config
        self._graph, self._model = graph, model
        self._planner = None if plan is None else GivenPlan(plan)
        self._world, self._loss_fn = world, loss_fn
        self._resume = None if resume is None else Path(resume)
        self._prepared: Prepared | None = None
        self._mesh: Mesh | None = None
        self._rank_runtime: RankRuntime | None = None
        self._fitted = False
        self._stopping = Stopping(config.time_limit_s)

    @property
    def model(self) -> nn.Module:
        """The model; after ``fit`` with the trained weights of all stages, on every rank."""
        return self._setup()[1].model.module

    @property
    def plan(self) -> Plan:
        """Which layers, shards and chunks go where."""
        return self._setup()[1].plan

    def _join(self) -> World:
        """Meet the other ranks; done once."""
        if self._world is None:
            self._world = join_world(self.config, self._planner)
        return self._world

    def _setup(self, start: Start | None = None) -> tuple[Mesh, Prepared]:
        """Read, plan and partition; done once."""
        world = self._join()
        if self._prepared is None:
            self._prepared = prepare(
                self.config,
                world,
                self._graph,
                self._model,
                self._planner,
                self._loss_fn,
                refill_epochs=0 if start is None else start.refill_epochs,
            )
            self._mesh = Mesh.of(
                world, self._prepared.plan.placement, self._prepared.plan.collectives
            )
        assert self._mesh is not None
        return self._mesh, self._prepared

    def fit(self) -> RunResult:
        """Train for ``epochs`` epochs and write the run's folder (``out="off"`` writes none).

        Raises ``InputError`` before any work if something in the config, the data or the folder
        cannot be used, ``FloatingPointError`` when the loss is no longer a number,
        ``LostRankError`` when another rank has gone.
        """
        config = self.config
        check_can_fit(self._fitted, self._model)
        self._fitted = True
        world = self._join()
        # The folder first: a run that cannot be written must not read and cut for an hour.
        again = restarted(config, world)
        if again is not None:
            self._stopping.began(seconds_so_far(again))
        resumed = [run for run in (again, self._resume) if run is not None]
        folder, path = claim_folder(config, world, resumed[0] if resumed else None)
        log = RankLog(path, world.rank)
        try:
            with world.on_own_cores():
                return self._fit(world, folder, path, resumed, log)
        except InputError:
            raise  # nothing has been touched, and so it shall be
        except StoppedError as error:
            log.say(str(error))
            raise
        except BaseException as error:
            log.failed(error)
            if is_lost_peer(error) and world.world_size > 1:
                self._stopping.hear_out()
                raise lost_rank(error, world.rank, path) from error
            raise
        finally:
            if folder is not None:
                folder.release()

    def _fit(
        self,
        world: World,
        folder: RunFolder | None,
        path: Path | None,
        resumed: Sequence[Path],
        log: RankLog,
    ) -> RunResult:
        config = self.config
        start, told = None, ""
        for run in resumed:
            # A run that was gone on with in a new folder, and has none there yet, starts as before.
            if start is None:
                start, told = find_start(run, config, world, run == self._resume)
        check_profile_file(config, world)
        mesh, prepared = self._setup(start)
        warn_of_vain_rounding(config, prepared.plan, prepared.model, prepared.graph, mesh)
        progress = Progress(
            config.epochs, prepared.metric, is_visible=mesh.rank == 0 and not config.quiet
        )
        for line in [*filter(None, told.splitlines()), *head_lines(prepared)]:
            progress.say(line)
        done = 0 if start is None else start.epoch
        count_peaks_anew(mesh.device)
        memory_before_bytes = held_bytes(mesh.device)
        with held_memory(mesh.device):  # measured with the heap settings of the epochs
            predictor = Predictor.of_run(prepared, mesh, config.epochs - done)
        if predictor is not None:
            progress.say(f"predicted: {predictor.epoch().epoch_time_s:.3g} s an epoch")
        # What a profile leaves in the heap must not count as the graph's.
        rank_runtime = replace(self._ready()[2], memory_before_bytes=memory_before_bytes)
        loop = Loop(
            config,
            mesh,
            prepared,
            rank_runtime,
            folder,
            path,
            progress,
            identity_of(config, prepared),
        )
        if start is not None:
            loop.take(start)
            progress.start_at(start.epoch)
        if folder is not None:
            remove_unfinished(folder.path)
            folder.open(self._written(prepared), prepared.plan, prepared.program_text())
            if start is not None:
                folder.rewrite(start.rows)
            progress.say(f"run folder: {folder.path}")
        mesh.share(None)  # now there is a folder for what a rank logs
        link_bytes_per_s = receive_bandwidth(mesh)
        log.say(f"process {os.getpid()} on {platform.node()}: {rank_runtime.executor.doing}")
        silence_s = config.timeout_s * SILENCE_SHARE
        heartbeat = Heartbeat(mesh, silence_s, lambda: rank_runtime.executor.doing, log.gave_up)
        with held_memory(mesh.device), progress, self._stopping, heartbeat:
            try:
                loop.run(self._stopping)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(loop.interrupted()) from None
        log.say(f"{len(loop.rows)} epochs are done")
        give_back()  # or what follows comes on top of what an epoch takes
        loop.best.restore()
        weights = self._collect(mesh, prepared)
        result = gather_result(
            mesh,
            prepared,
            rank_runtime,
            TrainingRecord(loop.rows, loop.best, loop.sent_bytes),
            path,
            link_bytes_per_s,
            predictor,
        )
        if folder is not None:
            if result.timeline or result.predicted_timeline:
                trace = Trace(result.timeline, result.predicted_timeline)
                write_trace(folder.path / "trace.json", trace)
            folder.close(result.to_dict(), weights)
        for line in result_lines(result):
            progress.say(line)
        return result

    def _written(self, prepared: Prepared) -> TrainConfig:
        """The config as the run's folder keeps it."""
        written = self.config
        if self._graph is not None:
            # A name that no reader knows: repeating the run must not train another graph.
            written = replace(written, dataset=f"passed-in:{prepared.graph.name}")
        if self._model is not None:
            written = replace(written, model=f"passed-in:{prepared.model.name}")
        return written

    def evaluate(self) -> Scores:
        """Exact scores with the current weights, on every rank."""
        mesh, _, rank_runtime = self._ready()
        with held_memory(mesh.device):
            return evaluate(rank_runtime, mesh)

    def predict(self) -> Tensor:
        """Logits [N, classes] of every vertex, in the graph's own order, on every rank.

        Of a heterogeneous graph those of the type that has labels. Where links are learned, the
        final rows [N, d], of which any pair can be scored.
        """
        mesh, prepared, rank_runtime = self._ready()
        layout = rank_runtime.target
        with held_memory(mesh.device):
            results = results_by_chunk(rank_runtime)
        parts = {
            chunk: (
                layout.own[layout.own_ptr[chunk] : layout.own_ptr[chunk + 1]],
                values.get("rows", values["x"]).cpu().numpy(),
            )
            for chunk, values in results.items()
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
        met = self._mesh or self._world
        if met is not None:
            met.leave()

    def _ready(self) -> tuple[Mesh, Prepared, RankRuntime]:
        """Everything allocated; done once."""
        with torch.inference_mode(False):  # for ``fit``, which may come later
            mesh, prepared = self._setup()
            if self._rank_runtime is None:
                self._rank_runtime = build_rank(prepared, mesh)
        return mesh, prepared, self._rank_runtime

    def _collect(self, mesh: Mesh, prepared: Prepared) -> dict[str, Tensor]:
        """The weights of all stages, loaded into the model on every rank."""
        model = prepared.model
        if mesh.world_size > 1:
            stage_module = model.stage_module(prepared.plan.stages[mesh.stage].ops)
            mine = {name: tensor.detach().cpu() for name, tensor in stage_module.named_state()}
            for part in mesh.gather(mine if mesh.shard == 0 else {}):
                model.load(part)
        return {name: t.detach().cpu() for name, t in model.module.state_dict().items()}

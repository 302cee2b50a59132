"""Trains a model on a whole graph, on one device or on many ranks.

The same script runs on one device and under torchrun: every rank creates a ``Trainer`` and calls
``fit``. Evaluation is exact, and epoch times do not include evaluation.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gnnpipe.callbacks.callback import Callback, Callbacks
from gnnpipe.callbacks.loggers import with_loggers
from gnnpipe.checkpoint.retention import remove_unfinished
from gnnpipe.config import TrainConfig
from gnnpipe.errors import IdleRank, InputError, StoppedError
from gnnpipe.graph.graph import Graph
from gnnpipe.heap import give_back
from gnnpipe.models.sparse_input_linear import by_row_afterwards
from gnnpipe.optim.lr_schedule import SchedulerFactory, check_scheduler
from gnnpipe.optim.optimizers import OptimizerChoice, check_optimizer
from gnnpipe.output import say, warn
from gnnpipe.perf import Trace, write_trace
from gnnpipe.plan import Plan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import GivenPlan, Planner
from gnnpipe.profiling.links import receive_bandwidth
from gnnpipe.profiling.predict import Predictor, check_profile_file
from gnnpipe.profiling.search import check_search, planned_speeds, ranks_of_plan, run_planner
from gnnpipe.run.folder import RunFolder, claim_folder, in_its_folder, reclaim_folder
from gnnpipe.run.predictions import check_new_file, write_predictions
from gnnpipe.run.progress import Progress
from gnnpipe.run.rank_log import RankLog, is_lost_peer, lost_rank
from gnnpipe.run.result import RunResult, TrainingRecord, gather_result
from gnnpipe.run.resume import Start, find_start, identity_of, last_run, restarted, seconds_so_far
from gnnpipe.run.signals import SIGINT, Stopping
from gnnpipe.run.straggler import straggler_watch
from gnnpipe.run.summary import head_lines, result_lines
from gnnpipe.run.trained import read_trained
from gnnpipe.runtime.comm.heartbeat import SILENCE_SHARE, Heartbeat
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.runtime.memory_use import held_bytes, held_memory, reset_peak
from gnnpipe.setup.build import RankRuntime, build_rank
from gnnpipe.setup.inputs import (
    check_can_fit,
    check_exact_epochs,
    check_labels,
    check_parts,
    last_epoch_of,
    passed_graph,
    warn_of_vain_settings,
)
from gnnpipe.setup.label_inputs import with_label_inputs
from gnnpipe.setup.layer_output import without_labels
from gnnpipe.setup.prepare import join_world, prepare, warn_of_stale_rows
from gnnpipe.setup.prepared import Prepared
from gnnpipe.setup.user_model import absolute_name
from gnnpipe.tasks.loss import ERRORS, LossFn
from gnnpipe.tasks.scoring import Scores
from gnnpipe.train.evaluate import evaluate, predicted_rows
from gnnpipe.train.loop import Loop

if TYPE_CHECKING:
    from torch_geometric.data import Dataset


class Trainer:
    """Trains on one device, or on one of S x G ranks.

    >>> config = TrainConfig(dataset="karate", epochs=3, out="off", quiet=True)
    >>> result = Trainer(config).fit()
    >>> len(result.history)
    3
    """

    def __init__(
        self,
        config: TrainConfig,
        graph: Graph | Dataset | None = None,
        model: nn.Module | None = None,
        plan: Plan | None = None,
        world: World | None = None,
        loss_fn: LossFn | None = None,
        optimizer: OptimizerChoice | None = None,
        scheduler: SchedulerFactory | None = None,
        callbacks: Sequence[Callback] = (),
        resume: str | Path | None = None,
        cluster: Cluster | None = None,
        replan: bool = False,
    ) -> None:
        """Checks the arguments; nothing is read before ``fit``, ``plan`` or ``model`` is used.

        Args:
            config: The settings. Parts that are not given are made from the settings.
            graph: The graph, in place of ``config.dataset``; or a PyG ``Dataset`` of one graph.
            model: A PyG model that takes (x, edge_index), in place of ``config.model`` and its
                settings. Its own weights are trained (those of rank 0 if ranks differ).
            plan: The plan, in place of ``config.plan``.
            world: The ranks, if they have been joined for another run of this process. A searched
                plan may keep fewer of these; ``Trainer.world`` has the ranks for the next run.
            loss_fn: Maps logits [R, C] and labels [R] of some training vertices to the SUM of their
                losses. The sum is divided by the number of training labels. Several labels [R, T]
                are floats, NaN where missing. With parameters ``vertices`` or ``epoch`` the
                function also gets the numbers [R] of the vertices and of the epoch, from 0. For a
                graph without labels, maps the model's rows [R, d] alone; the sum is divided by the
                number of training vertices, and there are no scores.
            optimizer: An optimizer class, which gets lr, weight_decay and momentum of ``config``;
                or a function of the whole model that returns an optimizer, with any parameter
                groups; or an optimizer of the model's parameters.
            scheduler: A function of the optimizer that returns a learning-rate scheduler, which
                steps once an epoch (``ReduceLROnPlateau``: after each evaluation, with the
                validation metric). A resumed run calls it again and repeats the steps.
            callbacks: Run in this order; see ``Callback``.
            resume: Folder of a run to continue from its newest complete checkpoint, by default in
                the same folder; ``config`` is then the result of ``resumed_config``.
            cluster: Devices of the ranks and links, for ``plan="auto"``; ``None``: measured.
            replan: Search a plan anew for a resumed run, in place of the run's own.

        Raises:
            InputError: An argument has a wrong type or value. ``fit`` also raises ``InputError``,
                naming the line of ``forward``, for a model that cannot be split into chunks.
        """
        given = check_parts(config, graph, model)
        check_optimizer(config, optimizer)
        check_scheduler(config, scheduler)
        self.config = config = in_its_folder(config, resume)
        self._graph, self._model = given, model
        self._planner: Planner | None = None if plan is None else GivenPlan(plan)
        of_search = {"replan": replan} | ({} if cluster is None else {cluster.source: True})
        check_search(config, plan, of_search)
        self._cluster, self._replan = cluster, replan
        self._world, self._loss_fn = world, loss_fn
        self._optimizer, self._scheduler = optimizer, scheduler
        self._callbacks = Callbacks(with_loggers(config, callbacks))
        self._resume = None if resume is None else Path(resume)
        self._prepared: Prepared | None = None
        self._mesh: Mesh | None = None
        self._rank_runtime: RankRuntime | None = None
        self._loop: Loop | None = None
        self._predictor: Predictor | None = None
        self._is_fitting = False
        self._stopping = Stopping(config.time_limit_s)

    @classmethod
    def load(
        cls,
        run: str | Path,
        graph: Graph | Dataset | None = None,
        model: nn.Module | None = None,
        layer: str = "",
        **settings: Any,
    ) -> Trainer:
        """Returns a trainer with the weights of a run, for ``predict`` and ``evaluate``.

        Args:
            run: The folder of the run. Of a run that has not ended, the weights are those of its
                newest complete checkpoint, with a warning.
            graph: The graph, in place of the run's dataset: needed if the run's graph was passed
                in, and any other graph with features of the same width.
            model: The model, if the run's model was passed in; gets the weights of the run.
            layer: Path of a layer in the model, such as 'convs.0':
                ``predict`` returns what this layer returns, in place of the logits.
            settings: Any of dataset, data_dir, stages, shards, chunks, cache_dir, device, timeout_s
                and quiet, in place of those of the run. A ``dataset`` is read without its labels
                and split, and otherwise as the run read its own.

        Raises:
            InputError: The run has no weights, or they are damaged or do not fit.
        """
        graph = passed_graph(graph)
        trained = read_trained(run, launched_world_size(), settings)
        trained.check_parts(graph, model)
        config, world = trained.config, None
        # A run on a dataset without labels, which training alone may read, has no classes.
        is_bare = not trained.num_classes and config.task != "links"
        if "dataset" in settings or (graph is None and (layer or is_bare)):
            world = join_world(config)
            graph = trained.read_graph(world, "dataset" not in settings)
        elif graph is not None:
            graph = trained.with_classes(graph)
        if graph is not None:
            # They say how the run's own dataset was read.
            own = ("split", "symmetrize", "remove_self_loops", "coalesce", "task")
            config = replace(config, **{name: getattr(TrainConfig, name) for name in own})
        if layer and graph is not None:
            graph = with_label_inputs(graph, config)
            model = trained.model_ending_at(layer, graph, model)
            config = replace(config, label_inputs=0.0)  # the labels are features now
            trainer = cls(config, graph=without_labels(graph), model=model, world=world)
        else:
            trainer = cls(config, graph=graph, model=model, world=world)
            trained.load_into(trainer.model)
        if trained.note and trainer._join().rank == 0:
            warn(trained.note)
        return trainer

    @property
    def model(self) -> nn.Module:
        """The model; after ``fit`` with the trained weights of all stages on every rank."""
        return self._setup()[1].model.module

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self._setup()[1].plan

    @property
    def path(self) -> Path | None:
        """The run folder; ``None`` before ``fit`` and without a folder."""
        return None if self._loop is None else self._loop.path

    @property
    def world(self) -> World:
        """The ranks of the run; of a searched plan those that it uses, once it is found."""
        return self._join()

    def _join(self) -> World:
        """Joins the other ranks, once."""
        if self._world is None:
            settings = {"--resume": self._resume is not None}
            self._world = join_world(self.config, self._planner, **settings)
        if self._world.has_left:
            advice = "pass Trainer.world of the run that was planned, or make a new Trainer"
            raise InputError(f"world: its process group is closed; {advice}")
        return self._world

    def _setup(
        self, start: Start | None = None, resumed: Sequence[Path] = ()
    ) -> tuple[Mesh, Prepared]:
        """Reads, plans and partitions, once; a run that goes on in ``resumed`` keeps its plan.

        Ranks that the plan does not use end here (``IdleRank``).
        """
        world = self._join()
        if self._planner is None:
            found = *last_run(resumed), self._replan
            self._planner = run_planner(self.config, world, self._cluster, *found)
        if self._prepared is None:
            with _without_autocast(world):
                self._prepared = prepare(
                    self.config,
                    world,
                    self._graph,
                    self._model,
                    self._planner,
                    self._loss_fn,
                    self._optimizer,
                    refill_epochs=0 if start is None else start.refill_epochs,
                )
            plan = self._prepared.plan
            self._world = ranks_of_plan(self.config, plan, world)
            self._mesh = Mesh.of(self._world, plan.placement, plan.collectives)
        assert self._mesh is not None
        return self._mesh, self._prepared

    def fit(self, epochs: int | None = None) -> RunResult:
        """Trains and writes the run's folder (``out="off"``: no folder).

        A second call trains more epochs in the same folder, with the same optimizer, scheduler and
        history tables. Its result has all epochs so far.

        Args:
            epochs: Number of epochs that this call trains; ``None``: ``config.epochs``, which for a
                resumed run includes the epochs of its checkpoint.

        Raises:
            InputError: Before training, if the config, the data or the folder cannot be used.
            FloatingPointError: The loss is NaN or infinite.
            LostRankError: Another rank has ended or is silent.
            StoppedError: SIGTERM or the time limit has stopped the run.
            KeyboardInterrupt: Ctrl-C, after the epoch and a checkpoint; a second one: at once.
        """
        check_can_fit(self._model, self._graph, self._loss_fn)
        last_epoch = self._last_epoch(epochs)
        world = self._join()
        if len(set(world.gather(last_epoch))) > 1:
            raise InputError("fit: epochs differs between ranks; call it with the same on each")
        folder, path, resumed = self._claim(world)
        log = RankLog(path, world.rank)
        try:
            with _without_autocast(world):
                found: tuple[Start | None, str] = None, ""
                if self._loop is None:
                    with world.on_own_cores():
                        found = self._plan(world, resumed)
                    world = self._join()  # the ranks that the plan uses
                with world.on_own_cores():
                    if self._loop is None:
                        self._loop = self._begin(folder, path, found, last_epoch)
                    else:
                        self._go_on(self._loop, last_epoch)
                    return self._fit(self._loop, log)
        except (InputError, IdleRank):
            raise  # the folder stays as it was
        except (StoppedError, KeyboardInterrupt) as error:
            log.say(str(error) or "interrupted")
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

    def _last_epoch(self, epochs: int | None) -> int:
        """Returns the epoch up to which ``fit(epochs)`` trains."""
        if self._is_fitting:
            raise InputError(
                "Trainer: fit() was called while it runs, or after it ended with an error; go on "
                "with a new Trainer(..., resume=RUN)"
            )
        loop, config = self._loop, self.config
        if loop is None and self._resume is not None and epochs is not None:
            raise InputError(
                f"fit: epochs = {epochs!r}: a resumed run is trained up to config.epochs; leave it "
                'out, and set this number by resumed_config(run, {"epochs": ...})'
            )
        # A restart by torchrun may have begun at a checkpoint of a later call.
        done = 0 if loop is None else min(len(loop.rows), loop.last_epoch)
        last_epoch = last_epoch_of(config, epochs, done, self._scheduler is not None)
        if loop is not None and (setting := loop.stopped_by):
            raise InputError(
                f"{setting}: has stopped the run after epoch {done}; go on with "
                f"{'less' if config.metric in ERRORS else 'more'}: Trainer(..., resume=RUN)"
            )
        return last_epoch

    def _claim(self, world: World) -> tuple[RunFolder | None, Path | None, list[Path]]:
        """Returns the locked folder, its path, and the folders of runs to resume from."""
        if self._loop is not None:
            reclaim_folder(self._loop.folder, world)
            return self._loop.folder, self._loop.path, []
        # The folder first, to fail before a long read and partition.
        again = restarted(self.config, world)
        if again is not None:
            self._stopping.began(seconds_so_far(again))
        resumed = [run for run in (again, self._resume) if run is not None]
        return *claim_folder(self.config, world, self._graph, self._model, *resumed[:1]), resumed

    def _plan(self, world: World, resumed: Sequence[Path]) -> tuple[Start | None, str]:
        """Plans the run; returns the checkpoint that it is resumed from, and messages."""
        found = self._find_start(world, resumed)
        check_profile_file(self.config, world)
        self._setup(found[0], resumed)
        return found

    def _begin(
        self,
        folder: RunFolder | None,
        path: Path | None,
        found: tuple[Start | None, str],
        last_epoch: int,
    ) -> Loop:
        """Builds the run, at the checkpoint that it is resumed from."""
        start, message = found
        mesh, prepared = self._setup()
        config = prepared.config
        check_exact_epochs(config, prepared.plan, last_epoch)
        warn_of_stale_rows(prepared, mesh)
        warn_of_vain_settings(config, prepared.plan, prepared.model, prepared.graph, mesh)
        progress = self._progress(last_epoch)
        for line in [*message.splitlines(), *head_lines(prepared)]:
            progress.say(line)
        epochs = last_epoch - (0 if start is None else start.epoch)
        self._predictor, rank_runtime = self._predict_and_build(progress, epochs)
        optimizer = rank_runtime.executor.optimizer
        assert optimizer is not None
        identity = identity_of(config, prepared, optimizer, self._scheduler is not None)
        parts = (config, mesh, prepared, rank_runtime, folder, path, progress, identity, last_epoch)
        loop = Loop(
            *parts,
            watch=straggler_watch(prepared, self._predictor),
            scheduler=self._scheduler,
            epoch_end=partial(self._callbacks.epoch_end, self),
            checkpoint_end=partial(self._callbacks.checkpoint, self),
        )
        if start is not None:
            loop.take(start)
            loop.progress.start_at(start.epoch)
        return loop

    def _go_on(self, loop: Loop, last_epoch: int) -> None:
        """Makes the loop of an earlier ``fit`` ready for more epochs."""
        check_exact_epochs(self.config, loop.prepared.plan, last_epoch)
        loop.extend(last_epoch, self._progress(last_epoch))
        loop.progress.start_at(len(loop.rows))

    def _progress(self, last_epoch: int) -> Progress:
        mesh, prepared = self._setup()
        return Progress(last_epoch, prepared.metric, mesh.rank == 0, self.config.quiet)

    def _fit(self, loop: Loop, log: RankLog) -> RunResult:
        """Trains with the callbacks up to the loop's last epoch and writes the result."""
        self._is_fitting = True
        by_row = by_row_afterwards(loop.rank_runtime.executor.sparse_maps)
        with by_row, self._callbacks.of_rank(self, loop.mesh.rank):
            result = self._train(loop, log)
        if SIGINT in loop.mesh.gather(self._stopping.reason):  # heard in the last epoch
            raise KeyboardInterrupt(f"the run has ended; its folder is {loop.path}")
        self._is_fitting = False
        return result

    def _train(self, loop: Loop, log: RankLog) -> RunResult:
        """Trains, writes the result, and calls the callbacks of start and end."""
        mesh, prepared, folder, progress = loop.mesh, loop.prepared, loop.folder, loop.progress
        self._open(loop)
        mesh.share(None)  # the folder exists from here on, so ranks can write their logs
        self._callbacks.fit_start(self)
        link_bytes_per_s = receive_bandwidth(mesh)
        self._run(loop, log)
        give_back()  # otherwise the memory of an epoch and of the result add up
        loop.best.swap()
        weights = self._collect(mesh, prepared)
        record = TrainingRecord(loop.rows, loop.best, loop.sent_bytes, loop.watch.found)
        result = gather_result(
            mesh, prepared, loop.rank_runtime, record, loop.path, link_bytes_per_s, self._predictor
        )
        if folder is not None:
            if result.timeline or result.predicted_timeline:
                trace = Trace(result.timeline, result.predicted_timeline)
                write_trace(folder.path / "trace.json", trace)
            folder.close(result.to_dict(), weights)
        for line in result_lines(result):
            progress.say(line)
        self._callbacks.fit_end(self, result)
        return result

    def _find_start(self, world: World, resumed: Sequence[Path]) -> tuple[Start | None, str]:
        """Returns the checkpoint to start from, of the first folder that has one, and messages."""
        start, message = None, ""
        for run in resumed:
            if start is None:
                start, message = find_start(run, self.config, world, run == self._resume)
        return start, message

    def _predict_and_build(
        self, progress: Progress, epochs: int
    ) -> tuple[Predictor | None, RankRuntime]:
        """Predicts the time of an epoch if the config asks for it, and allocates this rank."""
        mesh, prepared = self._setup()
        reset_peak(mesh.device)
        memory_before_bytes = held_bytes(mesh.device)
        with held_memory(mesh.device):  # measured with the heap settings of the epochs
            speeds = planned_speeds(self._planner, mesh)
            predictor = Predictor.of_run(prepared, mesh, epochs, speeds)
        if predictor is not None:
            progress.say(f"predicted: {predictor.usual.epoch_time_s:.3g} s an epoch")
        # Memory that the prediction leaves in the heap must not count as memory of the graph.
        return predictor, replace(self._ready()[2], memory_before_bytes=memory_before_bytes)

    def _open(self, loop: Loop) -> None:
        """Opens the run's folder, and writes the rows of the epochs so far."""
        if loop.folder is None:
            return
        remove_unfinished(loop.folder.path)
        prepared = loop.prepared
        written = self._written(prepared, loop.last_epoch)
        loop.folder.open(written, prepared.plan, prepared.program_text())
        if loop.rows:
            loop.folder.rewrite(loop.rows)
        loop.progress.say(f"run folder: {loop.folder.path}")

    def _run(self, loop: Loop, log: RankLog) -> None:
        """Runs the epochs, with a heartbeat between the ranks."""
        executor, device = loop.rank_runtime.executor, loop.mesh.device
        log.say(f"process {os.getpid()} on {platform.node()}: {executor.doing}")
        silence_s = self.config.timeout_s * SILENCE_SHARE
        heartbeat = Heartbeat(loop.mesh, silence_s, lambda: executor.doing, log.gave_up)
        # Without a folder there is nothing to save, so Ctrl-C ends the run at once.
        self._stopping.tell = None if loop.path is None else loop.progress.say
        with held_memory(device), loop.progress, self._stopping, heartbeat:
            try:
                loop.run(self._stopping)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(loop.interrupted()) from None
        log.say(f"{len(loop.rows)} epochs are done")

    def _written(self, prepared: Prepared, last_epoch: int) -> TrainConfig:
        """Returns the config that is written to the run's folder."""
        # A relative path would be another file for a resume from another folder.
        model, epochs = absolute_name(self.config.model), max(self.config.epochs, last_epoch)
        written = replace(prepared.config, model=model, epochs=epochs)
        if self._graph is not None:
            # Not a dataset name, so that repeating the run cannot train another graph.
            written = replace(written, dataset=f"passed-in:{prepared.graph.name}")
        if self._model is not None:
            written = replace(written, model=f"passed-in:{prepared.model.name}")
        return written

    def evaluate(self) -> Scores:
        """Returns exact scores with the current weights, on every rank."""
        self._check_together("evaluate()")
        with _without_autocast(self._join()):
            mesh, prepared, rank_runtime = self._ready()
            check_labels(prepared.graph, "evaluate()")
            with held_memory(mesh.device):
                return evaluate(rank_runtime, mesh)

    def predict(self) -> Tensor:
        """Returns logits [N, classes] in the order of the given graph, on every rank.

        For a heterogeneous graph: of the vertex type with labels. For link prediction: the final
        rows [N, d], from which any pair can be scored.
        """
        self._check_together("predict()")
        with _without_autocast(self._join()):
            mesh, prepared, rank_runtime = self._ready()
            parts = predicted_rows(prepared, rank_runtime)
        everyone = [part for found in mesh.gather(parts) for part in found]
        count = prepared.graph.vertex_counts[prepared.graph.target]
        logits = torch.empty(count, everyone[0][1].shape[1], dtype=prepared.dtype)
        for rows, values in everyone:
            logits[torch.from_numpy(rows)] = torch.from_numpy(values)
        return logits

    def save_predictions(self, path: str | Path) -> None:
        """Writes the rows that ``predict`` returns to a new .npy file.

        Every rank writes the rows of its own shard, so no rank holds all of them, and all ranks
        must see the folder. The file gets its name when it is complete.
        """
        self._check_together("save_predictions()")
        check_new_file(path, self._join())
        with _without_autocast(self._join()):
            mesh, prepared, rank_runtime = self._ready()
            count = prepared.graph.vertex_counts[prepared.graph.target]
            compute = partial(predicted_rows, prepared, rank_runtime)
            width = write_predictions(Path(path), mesh, count, compute)
        if mesh.rank == 0:
            say(f"{path}: {count:,} rows of {width}", self.config.quiet)

    def close(self) -> None:
        """Leaves the other ranks; nothing can be trained or evaluated afterwards."""
        met = self._mesh or self._world
        if met is not None:
            met.leave()

    def _check_together(self, call: str) -> None:
        """Raises ``InputError`` in a callback that other ranks do not run."""
        if self._callbacks.is_alone and self._join().world_size > 1:
            raise InputError(
                f"callbacks: {call} needs all ranks, and this callback runs on rank 0 alone; set "
                "on_all_ranks = True in its class"
            )

    def _ready(self) -> tuple[Mesh, Prepared, RankRuntime]:
        """Allocates this rank's part, once."""
        with torch.inference_mode(False):  # ``fit`` may follow ``predict``
            mesh, prepared = self._setup()
            if self._rank_runtime is None:
                self._rank_runtime = build_rank(prepared, mesh)
        return mesh, prepared, self._rank_runtime

    def _collect(self, mesh: Mesh, prepared: Prepared) -> dict[str, Tensor]:
        """Loads copies of the weights of all stages into the model, on every rank."""
        model = prepared.model
        if mesh.world_size > 1:
            stage_module = model.stage_module(prepared.plan.stages[mesh.stage].ops)
            mine = {name: t.detach().cpu().clone() for name, t in stage_module.named_state()}
            for stage in prepared.plan.stages:  # together, they may be more than an epoch takes
                model.load(mesh.share(mine, stage.ranks[0]))
        return {k: t.detach().cpu().contiguous() for k, t in model.module.state_dict().items()}


@contextmanager
def _without_autocast(world: World) -> Iterator[None]:
    """Turns torch.autocast off inside the block; warns on rank 0 if the caller has turned it on.

    A model's own autocast inside forward still works, without torch's cache of rounded weights:
    inside the caller's autocast, all epochs would compute with the weights of the first.
    """
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if active and world.rank == 0:
        warn(
            "torch.autocast: has no effect on a Trainer, which computes in --dtype; try "
            "--matmul-dtype bf16"
        )
    had_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with ExitStack() as stack:
            for device in active:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_autocast_cache_enabled(had_cache)

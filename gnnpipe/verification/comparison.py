"""Compares the training of a run with a reference on one device, epoch by epoch.

The run trains as usual; the references run on rank 0 (``reference``). The free reference trains on
its own from the same seed, and its loss is compared. The led reference starts every epoch from the
run's weights, and its gradients are compared weight by weight. (Adam divides by the size of the
gradient, so two correct free runs differ by the learning rate if a gradient is zero up to
rounding.) For the same reason a difference is relative to the larger of the weight's gradient norm
and a thousandth of the model's typical gradient norm.

In float64 a difference is a fault of the program, so float64 is the default of ``gnnpipe verify``.
In float32 two correct programs may differ by more than 1e-5, since a ReLU of a value near zero may
round to either side. A third reference, in float64, then measures the rounding of the second.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gnnpipe.capture.link_decoder import without_pairs
from gnnpipe.capture.markers import drop
from gnnpipe.capture.recorded_model import RecordedModel
from gnnpipe.capture.stage.row_work import drops_rows
from gnnpipe.config.validation import check_verifiable
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.operators import SUM
from gnnpipe.optim.lr_schedule import LearningRate
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.schedule import ActionKind
from gnnpipe.setup.build import RankRuntime, build_rank
from gnnpipe.setup.inputs import edges_are_random, reason_not_recorded
from gnnpipe.setup.prepared import Prepared
from gnnpipe.train.evaluate import train_epoch
from gnnpipe.verification.reference import Reference
from gnnpipe.verification.reference_graph import WholeGraph
from gnnpipe.verification.reference_models import UserModel
from gnnpipe.verification.reference_walk import ChunkWalk, Cut
from gnnpipe.verification.stage_model import StageModel

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative difference that counts as equal, by number type."""

ROUNDING_FACTOR = 4.0
"""A float32 gradient may differ by this many times the rounding error of the reference."""


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences of one epoch."""

    epoch: int
    """From 0."""
    loss: float
    gradient: float
    worst: str
    """The weight with the largest gradient difference; '' if no gradient differs (in float32: by
    more than rounding)."""
    is_exact: bool
    """No row was read stale in this epoch."""

    @property
    def largest(self) -> float:
        """The larger of the two differences."""
        return max(self.loss, self.gradient)

    def text(self) -> str:
        """Returns the printed line."""
        which = f"epoch {self.epoch + 1}" + (" (exact)" if self.is_exact else "")
        worst = f" ({self.worst})" if self.worst else ""
        return f"{which}: loss {self.loss:.2e}  gradient {self.gradient:.2e}{worst}"


def relative_difference(
    a: dict[str, Tensor], b: dict[str, Tensor], exact: dict[str, Tensor] | None = None
) -> tuple[float, str]:
    """Returns the largest relative difference of gradients by name, and its name ('' if equal).

    ``b``: the reference. ``exact``: the reference in float64; ``ROUNDING_FACTOR`` times the
    rounding error of ``b`` is subtracted, since cancellation (as in attention) makes that error
    larger than the precision of float32.
    """
    floor = 1e-3 * (sum(float(t.norm()) ** 2 for t in b.values()) / len(b)) ** 0.5
    found = []
    for name, t in b.items():
        found_grad = a[name].to(t.dtype) if name in a else torch.zeros_like(t)
        difference = float((found_grad - t).norm())
        if exact is not None and not math.isnan(difference):
            rounding = ROUNDING_FACTOR * float((t.to(exact[name].dtype) - exact[name]).norm())
            difference = max(difference - rounding, 0.0)
        found.append((_relative(difference, max(float(t.norm()), floor)), name))
    largest, name = max(found)
    return largest, name if largest else ""


def _relative(difference: float, size: float) -> float:
    """Difference over size; infinite for NaN."""
    if math.isnan(difference) or math.isnan(size):
        return math.inf
    return 0.0 if difference == 0.0 else difference / max(size, 1e-30)


def verdict(prepared: Prepared, found: list[Comparison], tolerance: float) -> str:
    """Returns the printed summary of the comparisons."""
    largest = max(c.largest for c in found)
    same = "equal to" if largest <= tolerance else "DIFFERENT from"
    walk = "" if prepared.program.is_exact else " that processes the same chunks in the same order"
    text = f"largest relative difference {largest:.2e}, tolerance {tolerance:g}: {same} one device"
    text += walk
    if _has_float64(prepared):
        text += (
            f"; gradient differences count beyond {ROUNDING_FACTOR:g} times the float32 rounding "
            "error of one device"
        )
    return text


def reference_line(prepared: Prepared) -> str:
    """Returns the printed line about what the run is compared with."""
    if prepared.program.is_exact:
        return (
            "reference: the module as plain PyG, on one device (its recorded steps, if plain PyG "
            "cannot repeat a dropout)"
        )
    return (
        "reference: the recorded steps of the module, on one device; without stale rows they were "
        "compared with the module as plain PyG (unless plain PyG cannot repeat a dropout)"
    )


def compare_epochs(
    graph: Graph | None, prepared: Prepared, mesh: Mesh, epochs: int
) -> list[Comparison]:
    """Trains a run and its references for some epochs.

    Args:
        graph: The graph of the run as it was given; only rank 0 needs the graph.
        prepared: The run.
        mesh: The ranks of the run.
        epochs: Number of epochs.

    Returns:
        The comparison of every epoch, on every rank.

    Raises:
        InputError: The run rounds to bf16, the model runs as it is, or sums over all vertices are
            stale.
    """
    check_verifiable(prepared.config)
    if reason_not_recorded(prepared.model):
        raise InputError(
            f"model: {prepared.model.name} runs as it is, as in plain PyG, so there is nothing to "
            f"compare; it cannot be recorded: {reason_not_recorded(prepared.model)}"
        )
    if prepared.spans_epochs or (prepared.program.steps_by_chunk and not prepared.program.is_exact):
        raise InputError(
            f"--schedule {prepared.plan.schedule}: gradients stay in their chunk, which the "
            "reference does not follow; verify with --schedule fill-drain"
        )
    has_sums = any(op.structure == SUM for op in prepared.model_graph.ops)
    if has_sums and not prepared.program.is_exact:
        raise InputError(
            f"model: {prepared.model.name} sums over all vertices, and the reference cannot follow "
            "stale parts of a sum; try --staleness exact or --chunks 1"
        )
    references = None
    if mesh.rank == 0:
        assert graph is not None
        references = _References(graph, prepared)
    rank_runtime = build_rank(prepared, mesh)
    kept = _Kept(prepared, rank_runtime, mesh)
    assert rank_runtime.executor.optimizer is not None
    learning_rate = LearningRate(rank_runtime.executor.optimizer, prepared.config)
    exact_epochs, grad_clip = ExactEpochs(prepared), rank_runtime.executor.grad_clip
    found = []
    for epoch in range(epochs):
        order = prepared.chunk_order(epoch)
        program = exact_epochs.begin(epoch, grad_clip)
        loss = train_epoch(rank_runtime, mesh, program, order, epoch)
        exact_epochs.end(program, grad_clip.norm, rank_runtime.executor.has_stepped)
        learning_rate.step(None)
        weights, grads = kept.gather(mesh)
        if references is not None:
            is_exact = program.is_exact
            walk = epoch, is_exact, grad_clip.step_limit
            found.append(references.compare(walk, loss, weights, grads))
    comparisons: list[Comparison] = mesh.share(found)
    return comparisons


class _References:
    """The free and the led reference, and in float32 the one that measures rounding."""

    def __init__(self, graph: Graph, prepared: Prepared) -> None:
        self._free = reference_of(graph, prepared)
        self._led = reference_of(graph, prepared)
        in_float64 = _in_float64(prepared) if _has_float64(prepared) else None
        self._float64 = None if in_float64 is None else reference_of(graph, in_float64)
        self._recording = (0.0, "")
        if self._free.walk.has_stale_epochs:  # which follow the recorded steps
            found = reference_of(graph, in_float64 or prepared).exact_gradients()
            self._recording = (0.0, "") if found is None else relative_difference(*found)

    def compare(
        self,
        walk: tuple[int, bool, float],
        loss: float,
        weights: dict[str, Tensor],
        grads: dict[str, Tensor],
    ) -> Comparison:
        """Trains the epoch of ``walk`` (number, is exact, largest norm) from the run's weights.

        The first epoch also counts the difference of the recorded steps to the module.
        """
        self._led.take(weights)
        rounded = None
        if self._float64 is not None:
            self._float64.take(weights)
            rounded = self._float64.train_epoch(*walk).grads
        worst, name = relative_difference(grads, self._led.train_epoch(*walk).grads, rounded)
        if walk[0] == 0:
            worst, name = max((worst, name), self._recording)
        truth = self._free.train_epoch(*walk).loss
        difference = _relative(abs(loss - truth), abs(truth))
        return Comparison(walk[0], difference, worst, name, walk[1])


def reference_of(graph: Graph, prepared: Prepared) -> Reference:
    """Returns the reference of a prepared run; ``graph``: the graph as given."""
    config, model, dtype = prepared.config, prepared.model, prepared.dtype
    graph = graph.with_vertex_columns([part.name for part in prepared.graph.vertex_columns])
    whole = WholeGraph.read(graph, model.edge_inputs, dtype)
    chunk = np.empty(graph.num_vertices, dtype=np.int64)
    chunk[prepared.chunking.perm] = prepared.chunking.chunk_of_row()
    if whole.pairs is not None:
        output_chunk = chunk[whole.pairs[1].numpy()]
    else:
        output_chunk = chunk[graph.row_types[graph.target]]
    probes = prepared.chunking.perm[prepared.probes]
    forward = [a for a in prepared.program.stages[0] if a.kind is ActionKind.FORWARD]
    positions = list(dict.fromkeys(a.position for a in forward))
    cut = Cut(chunk, probes, graph.table_rows, output_chunk, positions, prepared.plan.schedule)
    inner = without_pairs(model)
    assert isinstance(inner, RecordedModel)
    kept = [one for found in inner.recording.assignments.values() for one in found]
    if kept:
        raise InputError(
            f"--model {inner.name}: assigns the buffer {kept[0].buffer} in forward, which verify "
            "does not follow; verify the model with the buffer left as it is"
        )
    read = inner.graph_to_run(graph.reduced_to(model.edge_inputs), dtype, config.seed)
    staged = StageModel(model, prepared.plan.num_ops, read, config.seed, dtype)
    user, walk = _user_model(staged, inner, whole, graph), ChunkWalk(staged, cut, config)
    if edges_are_random(model) and (user is None or walk.has_stale_epochs):
        reason = "follows in exact runs alone; try --staleness exact"
        if user is None:
            reason = "does not follow together with dropout on edges; set the random part to 0"
        raise InputError(
            f"--model {inner.name}: draws other edges in every epoch, which verify {reason}"
        )
    return Reference(config, whole, walk, user, prepared.loss_fn)


def _user_model(
    staged: StageModel, model: RecordedModel, whole: WholeGraph, graph: Graph
) -> UserModel | None:
    """Returns the module with the weights of ``staged``, or ``None``.

    ``None`` if the sites of the dropout calls are unknown: the recording alone knows the sites of
    dropout in convolutions and on several vertex types.
    """
    drops = [
        (int(call.kwargs["site"]), float(call.kwargs["probability"]))
        for call in model.recording.graph_module.graph.nodes
        if (call.target is drop or drops_rows(call)) and call.kwargs["probability"]
    ]
    if drops and graph.types is not None:
        return None
    user = UserModel(staged.module, whole, graph.target, [site for site, _ in drops])
    return user if user.dropouts() == [probability for _, probability in drops] else None


def _has_float64(prepared: Prepared) -> bool:
    # A user's loss may hold tensors of a fixed number type.
    return prepared.dtype == torch.float32 and prepared.loss_fn is None


def _in_float64(prepared: Prepared) -> Prepared:
    model = copy.deepcopy(prepared.model)
    model.module.double()
    config = replace(prepared.config, dtype="float64")
    return replace(prepared, config=config, model=model)


class _Kept:
    """Copies this rank's weights and gradients by name, just before each optimizer step."""

    def __init__(self, prepared: Prepared, rank_runtime: RankRuntime, mesh: Mesh) -> None:
        stage_module = prepared.model.stage_module(prepared.plan.stages[mesh.stage].ops)
        self._parameters = dict(stage_module.named_parameters())
        self._weights: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        optimizer = rank_runtime.executor.optimizer
        assert optimizer is not None
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        for name, p in self._parameters.items():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._weights[name] = p.detach().cpu().clone()
            self._grads[name] = grad.detach().cpu().clone()

    def gather(self, mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gathers the weights and gradients of all stages, on every rank."""
        weights: dict[str, Tensor] = {}
        grads: dict[str, Tensor] = {}
        mine = (self._weights, self._grads) if mesh.shard == 0 else ({}, {})
        for part in mesh.gather(mine):
            weights |= part[0]
            grads |= part[1]
        return weights, grads

"""Records a user's PyG model and cuts it into stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import scipy.sparse as sp
import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.call import method_of
from gnnpipe.capture.call_facts import Facts
from gnnpipe.capture.edge_work.kinds import refuse_positions
from gnnpipe.capture.edge_work.modules import EdgeModule
from gnnpipe.capture.edge_work.program import EdgeSets, EdgeWork, graph_of_sets, random_numbers_of
from gnnpipe.capture.edge_work.separate import separate, works_on_edges
from gnnpipe.capture.fx_names import EDGES, OpaqueConvError
from gnnpipe.capture.markers import aggregate, is_mean
from gnnpipe.capture.preserve import unchanged, without_caches
from gnnpipe.capture.recording import Recording, digest_of, inputs_are_fixed
from gnnpipe.capture.rewrite import aggregate_before_maps, aggregate_features_first
from gnnpipe.capture.signature import edge_inputs
from gnnpipe.capture.stage.block_conv import DropoutMode
from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.capture.trace import trace
from gnnpipe.capture.trial.facts import probe
from gnnpipe.capture.trial.run import values_on_sample
from gnnpipe.capture.trial.sample_graph import Sample, make_sample
from gnnpipe.errors import InputError
from gnnpipe.garbage_collector import collector_paused
from gnnpipe.graph.adjacency import adjacency_tensor
from gnnpipe.graph.blocks import edge_data_of
from gnnpipe.graph.graph import Graph
from gnnpipe.models.stage_module import Model


class RecordedModel(Model):
    """A user's model, recorded."""

    def __init__(self, recording: Recording, digest: str, aggregates_first: bool = False) -> None:
        """``aggregates_first``: linear maps were put behind aggregations."""
        self.recording, self.digest = recording, digest
        self.aggregates_first = aggregates_first
        self.name = type(recording.model).__name__

    @property
    def module(self) -> nn.Module:
        """The user's own module, whose weights are trained."""
        return self.recording.model

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.recording.facts[self.recording.result].width

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.recording.ops)

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Fields of ``Graph`` with edge data that the model reads."""
        return self.recording.edge_inputs

    @property
    def size_text(self) -> str:
        """Numbers of ops and of aggregations, and whether edges are random."""
        ops = self.recording.ops
        once = sum(map(self.recording.aggregates_features, ops))
        # For example the means and variances of BatchNorm.
        over_all = sum(op.target is aggregate and is_mean(op) for op in ops)
        count = sum(map(self.recording.aggregates, ops)) + once - over_all
        of_features = f" ({once} of the features, computed once)" if once else ""
        random = ", random edges in every epoch" if self.edges_are_random else ""
        of_all = f", {over_all} over all vertices" if over_all else ""
        return f"{len(ops)} ops, {count} aggregations{of_features}{of_all}{random}"

    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """Whether bf16 products apply to some linear map (see ``Model``)."""
        return self.recording.has_bf16_products(dense)

    @property
    def edges_are_random(self) -> bool:
        """Whether forward makes other edges in every epoch, or in evaluation."""
        return self.recording.edges_are_random

    def graph_to_run(self, graph: Graph, dtype: torch.dtype, seed: int) -> Graph:
        """The graph whose edges the recorded calls read in evaluation; in training unless random.

        ``dtype``: number type of the run; ``seed``: of edges that are random in evaluation, too.
        """
        if self.recording.edge_work is None:
            return graph
        with random_numbers_of(seed, -1):
            sets = self._sets(graph, dtype, False)
        for name, value in sets.of_vertices.items():
            self.recording.graph_module.register_buffer(name, value)
        return graph_of_sets(graph, sets)

    def graph_of_epoch(
        self, graph: Graph, dtype: torch.dtype, seed: int, epoch: int
    ) -> tuple[Graph, Mapping[str, Tensor]]:
        """The graph whose edges the calls read in a training epoch, and values of vertices."""
        with random_numbers_of(seed, epoch):
            sets = self._sets(graph, dtype, True)
        return graph_of_sets(graph, sets), sets.of_vertices

    def _sets(self, graph: Graph, dtype: torch.dtype, is_training: bool) -> EdgeSets:
        work = self.recording.edge_work
        assert work is not None
        ends, data = torch.from_numpy(graph.edge_index), edge_data_of(graph, dtype)
        n = graph.num_vertices
        edges = adjacency_tensor(graph.adjacency, ends, data.get("edge_weight"), (n, n), dtype)
        return work.sets(edges, data, n, dtype, is_training)

    def stage_module(self, ops: Sequence[int]) -> RecordedStageModule:
        """These ops as a stage runs them."""
        return RecordedStageModule(self.recording, ops)


@collector_paused()
def capture(
    model: nn.Module,
    graph: Graph,
    is_rounded: bool = False,
    features_change: bool = False,
    reads_stale_rows: bool = False,
) -> RecordedModel:
    """Record a PyG model whose forward takes (x, edge_index).

    Edge data of ``graph`` is passed to forward's parameters of the same name, and of single
    relations as 'edge_attr_dict' and 'edge_weight_dict'. For link prediction,
    ``encode`` is recorded instead if the model has it, as PyG's models do. The recorded model
    shares weights and buffers with ``model``, which is left as it was, except that lazy weights are
    initialised. ``is_rounded``: linear maps are computed in bf16, except the ones that give the
    logits. ``features_change``: from epoch to epoch. ``reads_stale_rows``: aggregations may read
    rows of an earlier epoch, so linear maps are applied behind them. Raises ``InputError`` if the
    model cannot be recorded.
    """
    method = method_of(model, graph)
    names = edge_inputs(model, method, graph)
    sample = make_sample(model, graph, names)
    initialise_lazy(model, method, sample)
    with unchanged(model):
        found = _record(model, method, graph, sample, features_change, reads_stale_rows)
    settings = found.sample.ends, graph.relations, is_rounded, found.work, features_change
    recording = Recording(model, found.calls, found.facts, *settings)
    return RecordedModel(recording, found.digest, found.aggregates_first)


@dataclass(frozen=True)
class _Recorded:
    calls: fx.GraphModule
    digest: str
    """The same for both orders of maps and aggregations."""
    aggregates_first: bool
    facts: dict[fx.Node, Facts]
    sample: Sample
    """With the edges that ``work`` makes."""
    work: EdgeWork | None


def _record(
    model: nn.Module,
    method: str,
    graph: Graph,
    sample: Sample,
    features_change: bool,
    reads_stale_rows: bool,
) -> _Recorded:
    """The recording; a convolution that does not run on blocks is recorded call by call."""
    opened: set[type] = set()
    first: InputError | None = None
    while True:
        try:
            recording = trace(model, method, sample, graph, opened)
            if graph.edge_order is not None:
                refuse_positions(recording)
            work, samples = _edge_work(recording, sample)
            has_dense_features = graph.types is None and not sp.issparse(graph.x)
            if has_dense_features and inputs_are_fixed(work, features_change):
                aggregate_features_first(recording)
            digest = digest_of(model, recording, work)
            is_moved = reads_stale_rows and aggregate_before_maps(
                recording, graph.types is not None
            )
            facts = probe(model, method, recording, samples, graph.vertex_counts)
            return _Recorded(recording, digest, is_moved, facts, samples[0], work)
        except OpaqueConvError as error:
            first = first or error
            if error.kind in opened or issubclass(error.kind, EdgeModule):
                raise first from None
            opened.add(error.kind)
        except InputError as error:
            raise first or error from None


def _edge_work(
    recording: fx.GraphModule, sample: Sample
) -> tuple[EdgeWork | None, tuple[Sample, Sample]]:
    """Take the work on edges out of a recording.

    Returns the work, and the sample with the edges that it makes in training and in evaluation.
    """
    if sample.graph.types is not None or not works_on_edges(recording):
        return None, (sample, sample)
    edges = sample.form(EDGES, torch.float64)
    found_values = values_on_sample(recording, replace(sample, edges={EDGES: edges}))
    if found_values is None:
        return None, (sample, sample)
    values, random_calls = found_values
    work = separate(recording, values, sample.counts[""], random_calls)
    if sample.graph.has_weighted_adjacency:
        work = replace(work, values=sample.graph.weight_fields)
    given = edges, sample.edge_data, sample.counts[""], torch.float64
    found = []
    for is_training in (True, False):
        with random_numbers_of(0, 0), DropoutMode():
            found.append(sample.with_sets(work.sets(*given, is_training)))
    return work, (found[0], found[1])


def initialise_lazy(model: nn.Module, method: str, sample: Sample) -> None:
    """Call a model with lazy weights on a sample: they take their shapes from the first input.

    Raises:
        InputError: The call fails.
    """
    if not any(nn.parameter.is_lazy(p) for p in model.parameters()):
        return
    was_training = model.training
    model.eval()  # dropout would draw random numbers
    with torch.no_grad(), without_caches(model):
        sample.call(model, method, next(p.dtype for p in model.parameters()))
    model.train(was_training)

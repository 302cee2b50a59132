"""Records a user's PyG model and cuts it into stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from gnnpipe.capture.preserve import unchanged, without_caches
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.signature import edge_inputs, method_of
from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.capture.trace import trace
from gnnpipe.capture.trial.facts import probe
from gnnpipe.capture.trial.sample_graph import Sample, make_sample
from gnnpipe.graph.graph import Graph
from gnnpipe.models.stage_module import Model


class RecordedModel(Model):
    """A user's model, recorded."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
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
        """Numbers of ops and of aggregations."""
        ops = self.recording.ops
        return f"{len(ops)} ops, {sum(map(self.recording.aggregates, ops))} aggregations"

    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """Whether bf16 products apply to some linear map (see ``Model``)."""
        return self.recording.has_bf16_products(dense)

    def stage_module(self, ops: Sequence[int]) -> RecordedStageModule:
        """These ops as a stage runs them."""
        return RecordedStageModule(self.recording, ops)


def capture(model: nn.Module, graph: Graph, is_rounded: bool = False) -> RecordedModel:
    """Record a PyG model whose forward takes (x, edge_index).

    Edge data of ``graph`` is passed to forward's parameters of the same name. For link prediction,
    ``encode`` is recorded instead if the model has it, as PyG's models do. The recorded model
    shares weights and buffers with ``model``, which is left as it was, except that lazy weights are
    initialised. ``is_rounded``: linear maps are computed in bf16, except the ones that give the
    logits. Raises ``InputError`` if the model cannot be recorded.
    """
    method = method_of(model, graph)
    names = edge_inputs(model, method, graph)
    read = [*names, "edge_weight"] if graph.has_weighted_adjacency else names
    sample = make_sample(model, graph.reduced_to(read))
    initialise_lazy(model, method, sample)
    with unchanged(model):
        recording = trace(model, method, names, graph)
        facts = probe(model, method, recording, sample, graph.vertex_counts)
    return RecordedModel(
        Recording(model, recording, facts, sample.ends, graph.relations, is_rounded)
    )


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

"""Records a user's PyG model and cuts it into stages."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.capture.fx_names import refuse
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.capture.trace import trace
from gnnpipe.capture.trial.facts import probe
from gnnpipe.capture.trial.sample_graph import make_sample
from gnnpipe.graph.graph import Graph
from gnnpipe.models.stage_module import Model

_EDGE_NAMES = ("edge_index", "adj_t", "adj", "edges", "edge_index_dict", "adj_t_dict")


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
    shares weights and buffers with ``model``. ``is_rounded``: linear maps are computed in bf16,
    except the ones that give the logits. Raises ``InputError`` if the model cannot be recorded.
    """
    encodes = inspect.ismethod(getattr(model, "encode", None))  # False for a layer named encode.
    method = "encode" if graph.pairs is not None and encodes else "forward"
    names = _edge_inputs(model, method, graph.edge_data if graph.types is None else {})
    sample = make_sample(model, graph.reduced_to(names))
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        with torch.no_grad():
            # Lazy weights take their shape from the first input.
            sample.call(model, method, next(p.dtype for p in model.parameters()))
    recording = trace(model, method, names, graph)
    facts = probe(model, method, recording, sample)
    return RecordedModel(
        Recording(model, recording, facts, sample.ends, graph.relations, is_rounded)
    )


def _edge_inputs(model: nn.Module, method: str, known: Collection[str]) -> list[str]:
    """Names in ``known`` (fields of edge data) that are parameters of a method of the model.

    Raises ``InputError`` unless the method takes features, then edges, and has defaults for all
    other parameters.
    """
    owner = model
    if method == "encode" and isinstance(model, pyg.GAE):
        owner, method = model.encoder, "forward"  # GAE.encode passes its arguments on.
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())
    name = f"{type(owner).__name__}.{method}"
    # A second argument without a default takes the edges, whatever its name.
    second = parameters[1] if len(parameters) > 1 else None
    if (
        second is None
        or parameters[0].name in _EDGE_NAMES
        or (second.name not in _EDGE_NAMES and second.default is not second.empty)
    ):
        refuse(
            f"{name}({', '.join(p.name for p in parameters)}) should take features and then "
            "edge_index (or adj_t)",
            "wrap it in a module that does",
        )
    named = [p for p in parameters[2:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty and p.name not in known:
            refuse(
                f"{name} needs {p.name!r}, which the graph lacks",
                "give it a default, or wrap the model in a module that passes it",
            )
    return [p.name for p in named if p.name in known]

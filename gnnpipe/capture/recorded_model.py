"""Records a user's PyG model and cuts it into stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gnnpipe.capture.fx_names import called, entry, first_line
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.signature import edge_inputs
from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.capture.trace import trace
from gnnpipe.capture.trial.facts import probe
from gnnpipe.capture.trial.sample_graph import make_sample
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.models.stage_module import Model

__all__ = ["RecordedModel", "capture"]


class RecordedModel(Model):
    """A user's model, recorded."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.name = type(recording.model).__name__

    @property
    def module(self) -> nn.Module:
        """The user's own module; its weights are those that are trained."""
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

    Edge data of ``graph`` is passed to forward's parameters of the same name. The recorded model
    shares weights and buffers with ``model``. ``is_rounded``: linear maps are computed in bf16,
    except the ones that give the logits. Raises ``InputError`` if the model cannot be recorded.
    """
    method = entry(model, graph)
    names = edge_inputs(model, method, graph.edge_data if graph.types is None else {})
    sample = make_sample(model, graph.reduced_to(names))
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        try:
            with torch.no_grad():
                # Lazy weights take their shape from the first input.
                dtype = _dtype(model)
                carried = {
                    k: v.to(dtype) if v.is_floating_point() else v
                    for k, v in sample.edge_data.items()
                }
                called(model, method)(*_floating(sample.arguments, dtype), **carried)
        except Exception as error:
            raise InputError(
                f"model: fails on a sample in plain PyG: {first_line(error)}"
            ) from None
    recording = trace(model, method, names, graph)
    facts = probe(model, method, recording, sample)
    return RecordedModel(
        Recording(model, recording, facts, sample.ends, graph.relations, is_rounded)
    )


def _floating(arguments: tuple[Any, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """The model's arguments with features of another dtype."""
    x, edges = arguments
    return {k: v.to(dtype) for k, v in x.items()} if isinstance(x, Mapping) else x.to(dtype), edges


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.get_default_dtype())

"""The stages of a plan for one model, as a DAG: their steps, and the values that pass between them.

Steps and transfers follow from plan and model; a plan does not store them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gnnpipe.errors import InputError
from gnnpipe.plan.model_graph import ModelGraph
from gnnpipe.plan.plan import Plan


@dataclass(frozen=True)
class Transfer:
    """Values that stage ``source`` sends to stage ``target`` for every chunk; gradients return."""

    source: int
    target: int
    widths: Mapping[str, int]
    """Columns of each value, by name."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The vertex type of each value, in a graph of several types."""


@dataclass(frozen=True)
class StageDag:
    """A plan, the steps of its stages (see ``schedule.program``), and their transfers."""

    plan: Plan
    steps: tuple[int, ...]
    """Steps of every stage."""
    transfers: tuple[Transfer, ...]
    """Each value goes once to every other stage that reads the value."""
    feature_stages: tuple[int, ...] = (0,)
    """The stages that read input features."""

    @classmethod
    def of(cls, plan: Plan, model: ModelGraph) -> StageDag:
        """Return the stages of ``plan`` for ``model``.

        Raises:
            InputError: A stage reads a value that a later stage computes.
        """
        source: dict[str, tuple[int, int]] = {}
        types: dict[str, str] = {}
        sent: dict[tuple[int, int], dict[str, int]] = {}
        for i, stage in enumerate(plan.stages):
            for op in model.select(stage.ops):
                for value in op.inputs:
                    if value not in source:
                        raise InputError(
                            f"plan: stage {i} reads {value!r}, which a later stage computes; order "
                            "the stages, or move ops between them, so that every value is computed "
                            "before a stage reads it"
                        )
                    maker, width = source[value]
                    if maker != i:
                        sent.setdefault((maker, i), {})[value] = width
                source |= {value: (i, width) for value, width in op.outputs.items()}
                types |= dict.fromkeys(op.outputs, op.vertex_type)
        transfers = (
            Transfer(*ends, widths, {value: types[value] for value in widths if types[value]})
            for ends, widths in sorted(sent.items())
        )
        steps = (model.num_steps(stage.ops) for stage in plan.stages)
        reading = (
            i
            for i, stage in enumerate(plan.stages)
            if any(op.reads_features for op in model.select(stage.ops))
        )
        return cls(plan, tuple(steps), tuple(transfers), tuple(reading))

    def sends(self, stage: int) -> list[Transfer]:
        """The transfers that ``stage`` sends forward."""
        return [t for t in self.transfers if t.source == stage]

    def receives(self, stage: int) -> list[Transfer]:
        """The transfers that ``stage`` receives from earlier stages."""
        return [t for t in self.transfers if t.target == stage]

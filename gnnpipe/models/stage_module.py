"""A piece of a model: what one stage computes, cut into steps where rows are pushed.

A model is a DAG of ops. Some aggregate over the graph's edges; all others work row by row. The ops
of a stage are therefore run in steps: step 0 ends with the rows that the first aggregations push,
step j gets what they aggregated, and ends with the next pushes; aggregations that do not wait for
each other share a step. The runtime does what lies between two steps, and needs to know no more of
a model than this. C rows of a chunk, H halo rows, F columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpipe.graph.blocks import Block
from gnnpipe.graph.operators import BY_EDGES, EVERYONE, LINEAR_KINDS, RELATION
from gnnpipe.models.layer import Rows, Values

__all__ = ["Aggregation", "Model", "Received", "StageModule"]


@dataclass(frozen=True)
class Aggregation:
    """One aggregation of a model; it has a history table of its own."""

    name: str
    """The op that aggregates, unique in the model."""
    structure: str
    """What it aggregates over: a matrix ('gcn', 'mean', 'sum' and others, see ``graph.operators``),
    blocks ('edges', 'loops') or all vertices ('everyone', 'everyone-by-edges')."""
    width: int
    """F of the rows that are pushed."""
    pushed_type: str = ""
    """The type of the vertices that push, '' if there is but one."""
    vertex_type: str = ""
    """That of the vertices that read."""
    kept_per_edge: int = 0
    """Numbers that are kept of an edge until backward: its message, if one is made."""
    kept_per_row: int = 0
    """Of a row that reads, beyond what is read and what is made."""
    kept_per_read_row: int = 0
    """Of a row that is read, beyond that row."""
    structure_per_edge: int = 0
    """Bytes of structure for an edge, beyond the edge itself."""
    moves: bool = True
    """Its pushed rows move with the weights: they are not made of the features alone."""
    of_features: bool = False
    """Its pushed rows are the features, or a linear map of them."""

    @property
    def structure_key(self) -> tuple[str, str, str]:
        """What tells it from aggregations over something else."""
        return self.structure, self.pushed_type, self.vertex_type

    @property
    def is_linear(self) -> bool:
        """It is a product with a fixed matrix."""
        return self.structure.partition(RELATION)[0] in LINEAR_KINDS

    @property
    def is_mean(self) -> bool:
        """It is the mean over all vertices, or all edges."""
        return self.structure.partition(RELATION)[0] in (EVERYONE, BY_EDGES)


@dataclass(frozen=True, eq=False)
class Received:
    """What a step gets of one aggregation."""

    rows: Tensor
    """[C, F], aggregated, of a mean [1, F] or as many alike; or, not linear, the rows [C + H, F]
    of the block, the own ones first.
    Valid until the backward of this step; the memory is reused afterwards, or earlier if the step
    itself writes to the rows (``Rows.may_overwrite``)."""
    block: Block | None = None


class StageModule(ABC):
    """The ops of one stage."""

    rounds: Sequence[tuple[Aggregation, ...]]
    """By step, what its end pushes; a piece of n rounds has n + 1 steps."""

    @property
    def aggregations(self) -> tuple[Aggregation, ...]:
        """Those of all rounds, in order."""
        return tuple(a for one in self.rounds for a in one)

    @property
    def num_steps(self) -> int:
        """Rounds + 1."""
        return len(self.rounds) + 1

    @abstractmethod
    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Run one step.

        ``values``: what the step before (or an earlier stage) handed on, by name (``Values``);
        ``received``: the last round's aggregations by name. Returns the rows [C, F] to push, by
        aggregation, and the values that go on.
        """

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of these ops, by their names in the whole model."""

    @abstractmethod
    def use_aggregated_features(self, names: Collection[str]) -> None:
        """From now on the features arrive aggregated, by these aggregations ``of_features``.

        Nothing is asked of what they push, and ``step`` receives A x for them.
        """

    @property
    @abstractmethod
    def needs_features(self) -> bool:
        """They are read in other ways, too, than as they arrive aggregated."""

    @property
    def is_cuda_graph_safe(self) -> bool:
        """In training every epoch starts the same kernels on a GPU, but for dropout masks.

        It depends on no number that was computed, and on nothing of Python's that changes.
        """
        return False

    def writes_output_buffer(self, index: int) -> bool:
        """What step ``index`` pushes is ``rows.output_buffer.rows``, if there is a place.

        Only of a step that pushes for one aggregation alone, which is no mean.
        """
        del index
        return False

    def observe(self, name: str, mean: Tensor, count: int) -> None:
        """The mean [F] of what an aggregation pushed of ``count`` vertices or edges, in an epoch.

        For pieces that keep moving statistics of it.
        """
        del name, mean, count  # Hand-made layers keep none.

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, and what else a checkpoint holds of these ops, by their names in the model."""
        yield from self.named_parameters()

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the weights of these ops."""

    def parameters(self) -> list[nn.Parameter]:
        """The weights of these ops that are trained: frozen ones are not."""
        return [p for _, p in self.named_parameters() if p.requires_grad]


class Model(ABC):
    """A whole model, to be cut into pieces. Its ops are numbered from 0 in the order they run."""

    name: str

    @property
    def edge_inputs(self) -> frozenset[str]:
        """What it reads of what edges carry, by the field of ``Graph``; hand-made layers none."""
        return frozenset()

    @property
    @abstractmethod
    def size_text(self) -> str:
        """How large it is, for a person: '4 layers x 64'."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What holds the weights."""

    @abstractmethod
    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """It has products that ``models.products`` rounds, where that is asked for.

        ``dense``: the types of vertices whose features are no sparse matrix.
        """

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, by name; what is not named stays as it is."""
        own = self.module.state_dict(keep_vars=True)
        for name, value in weights.items():
            own[name].copy_(value)

    @abstractmethod
    def stage_module(self, ops: Sequence[int]) -> StageModule:
        """These ops, ascending, as a stage runs them; the weights stay the model's own."""

"""The interface between a model and the runtime: a stage's ops, run in steps.

A model is a DAG of ops. Some aggregate over the graph; all others work row by row. A stage runs its
ops in steps: step 0 returns the rows that the first aggregations push, step j receives the
aggregated rows of step j - 1 and returns the next rows to push. Aggregations that do not depend on
each other share a step. The runtime aggregates between two steps, and uses no other part of a
model.

Shapes: C rows of a chunk, H halo rows, F columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnpipe.graph.blocks import Block
from gnnpipe.graph.operators import BY_EDGES, EVERYONE, LINEAR_KINDS, RELATION, SUM
from gnnpipe.models.rows import Rows, Values


@dataclass(frozen=True)
class Aggregation:
    """One aggregation of a model, with a history table of its own."""

    name: str
    """The aggregating op, unique in the model."""
    structure: str
    """The kind of the aggregation: a matrix ('gcn', 'mean', 'sum' and others, see
    ``graph.operators``), blocks ('edges', 'loops') or a mean over all vertices ('everyone',
    'everyone-by-edges')."""
    width: int
    """F of the pushed rows."""
    pushed_type: str = ""
    """Type of the vertices that push; '' if the graph has one type."""
    vertex_type: str = ""
    """Type of the vertices that receive."""
    kept_per_edge: int = 0
    """Numbers kept until backward for every edge, such as its message."""
    kept_per_row: int = 0
    """Numbers kept for every receiving row, without the rows read and returned."""
    kept_per_read_row: int = 0
    """Numbers kept for every row read, without the row itself."""
    structure_per_edge: int = 0
    """Bytes of structure for every edge, without the edge itself."""
    moves: bool = True
    """The pushed rows depend on weights, not on the features alone, and can be forecast."""

    @property
    def structure_key(self) -> tuple[str, str, str]:
        """Equal for aggregations over the same matrix or blocks."""
        return self.structure, self.pushed_type, self.vertex_type

    @property
    def is_linear(self) -> bool:
        """Whether the aggregation is a product with a fixed matrix."""
        return self.structure.partition(RELATION)[0] in LINEAR_KINDS

    @property
    def is_mean(self) -> bool:
        """Whether the aggregation is a mean or a sum over all vertices or all edges."""
        return self.structure.partition(RELATION)[0] in (EVERYONE, BY_EDGES, SUM)


@dataclass(frozen=True, eq=False)
class Received:
    """The aggregated rows that a step receives of one aggregation."""

    rows: Tensor
    """Linear: [C, F]. A mean: [1, F], or C equal rows. Else the rows [C + H, F] that the block
    reads, the chunk's own rows first.
    Valid until this step's backward; reused afterwards, or overwritten earlier by the step itself
    (``Rows.may_overwrite``)."""
    block: Block | None = None


@dataclass(frozen=True, eq=False)
class MeanOfRows:
    """The mean or the sum over all vertices or edges of the rows that an aggregation pushed."""

    value: Tensor
    """[F] float64."""
    count: int
    """Number of vertices or edges in the mean; 1 for a sum."""


class StageModule(ABC):
    """The ops of one stage."""

    rounds: Sequence[tuple[Aggregation, ...]]
    """Round j: the aggregations whose rows step j pushes. n rounds make n + 1 steps."""

    @property
    def aggregations(self) -> tuple[Aggregation, ...]:
        """The aggregations of all rounds, in order."""
        return tuple(a for one in self.rounds for a in one)

    @property
    def num_steps(self) -> int:
        """Number of rounds + 1."""
        return len(self.rounds) + 1

    def set_vertex_values(self, values: Mapping[str, Tensor] | None) -> None:
        """Sets values of vertices [N, ...] that the model makes of an epoch's random edges.

        ``None``: those of evaluation.
        """
        del values

    @abstractmethod
    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Runs one step.

        Args:
            index: Number of the step.
            values: Values of the previous step, or of earlier stages, by name.
            received: The aggregated rows of the previous round, by aggregation.
            rows: The rows of the chunk.

        Returns:
            The rows [C, F] to push, by aggregation, and the values for the next step or stage.
        """

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the weights of these ops by their names in the whole model."""

    @property
    def feature_structures(self) -> tuple[str, ...]:
        """Matrices whose product with the features the steps read (``Rows.aggregated``)."""
        return ()

    def maps_of_features(self, types: Collection[str]) -> list[nn.Parameter]:
        """Returns the weights [F, in] of linear maps of the features of these vertex types."""
        del types
        return []

    @property
    def is_cuda_graph_safe(self) -> bool:
        """Whether every epoch of training launches the same kernels, apart from dropout masks.

        No kernel may depend on a computed number or on Python state that changes.
        """
        return False

    def writes_output_buffer(self, index: int) -> bool:
        """Whether step ``index`` computes its pushed rows in ``rows.output_buffer``, if given.

        Only for a step that pushes for a single aggregation that is not a mean.
        """
        del index
        return False

    def observe(self, means: Mapping[str, MeanOfRows]) -> None:
        """Updates running statistics and other buffers after a training pass and its step.

        ``means``: by aggregation over all vertices.
        """
        del means

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields weights and buffers of these ops, as a checkpoint stores them."""
        yield from self.named_parameters()

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Moves the weights of these ops."""

    def parameters(self) -> list[nn.Parameter]:
        """Returns the trainable weights of these ops."""
        return [p for _, p in self.named_parameters() if p.requires_grad]


class Model(ABC):
    """A whole model, to be split into stages. Ops are numbered from 0 in topological order."""

    name: str
    digest: str = ""
    """Checksum of the recorded operations and their constants; '' if the model is not recorded."""

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Fields of ``Graph.edge_data`` that the model reads."""
        return frozenset()

    @property
    @abstractmethod
    def size_text(self) -> str:
        """The size as printed: '8 ops, 4 aggregations'."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that holds the weights."""

    @abstractmethod
    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """Whether ``--matmul-dtype bf16`` changes a product of this model.

        ``dense``: the vertex types whose features are dense.
        """

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the given weights, by name; other weights stay unchanged."""
        own = self.module.state_dict(keep_vars=True)
        for name, value in weights.items():
            own[name].copy_(value)

    @abstractmethod
    def stage_module(self, ops: Sequence[int]) -> StageModule:
        """Returns ascending ``ops`` as a stage module that shares the model's weights."""

"""A stage of a recorded model: steps, weights and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnpipe.capture.recording import Recording
from gnnpipe.capture.rules.norms import update_running_statistics
from gnnpipe.capture.stage.codegen import StepFunction
from gnnpipe.capture.stage.split import Cut
from gnnpipe.models.layer import Rows, Values
from gnnpipe.models.stage_module import Received, StageModule


class RecordedStageModule(StageModule):
    """Some ops of a recorded model."""

    def __init__(self, recording: Recording, ops: Sequence[int]) -> None:
        cut = Cut(recording, ops)
        self._recording, self._ops = recording, ops
        self.rounds = cut.rounds
        self._weights: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        for op in cut.ops:
            self._weights |= dict(recording.weights(op))
            self._buffers |= recording.buffers(op)
        self._steps = [StepFunction(cut, step) for step in range(cut.num_steps)]
        self._observers = {
            op.name: (recording.model.get_submodule(path.removeprefix("model.")), what)
            for op in cut.ops
            for path, _, what in [str(op.kwargs.get("observed_by", "")).partition(":")]
            if path
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedStageModule:
        """A copy with its own weights for its ops; weights of other stages are shared.

        The linked list of calls is shared: copying it recursively would exhaust the stack.
        """
        own = {id(value) for _, value in self.named_state()}
        for value in self._recording.model.state_dict(keep_vars=True).values():
            if id(value) not in own:
                memo[id(value)] = value
        return RecordedStageModule(copy.deepcopy(self._recording, memo), self._ops)

    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Run one step (see ``StageModule``)."""
        return self._steps[index](values, received, rows)

    def use_aggregated_features(self, names: Collection[str]) -> None:
        """Nothing to do: these aggregations push the features and receive A x in any case."""

    @property
    def needs_features(self) -> bool:
        """True: recorded calls may read the features elsewhere."""
        return True

    def to(self, device: torch.device) -> None:
        """Move the weights and buffers of these ops."""
        for kept in self._buffers.values():
            # In place, because the user's module and the steps share the buffers.
            kept.data = kept.data.to(device)
        for step in self._steps:
            step.function.to(device)

    def observe(self, name: str, mean: Tensor, count: int) -> None:
        """Update the running statistics of a normalisation (see ``StageModule``)."""
        if name in self._observers:
            update_running_statistics(*self._observers[name], mean, count)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers, by the user's names."""
        yield from self._weights.items()
        yield from self._buffers.items()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Weights, by the user's names."""
        yield from self._weights.items()

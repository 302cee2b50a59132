"""Asynchronous training by chunk, action by action in one process, in plain torch.

An oracle for ranks: it uses nothing of gnnpipe. Every stage has a list of actions: forward F of a
pass, backward B, optimizer step S. Actions run one after another, in the order of each stage, as
soon as their inputs exist. A pass is one chunk in one epoch. Its forward writes the chunk's rows
into the tables and reads the rows of other chunks from there as constants; its backward follows
only edges inside the chunk.

The weights of a pass are tensors of their own. Where autograd saves one of them, or a view, for
backward, the same view of the weights of the policy's backward is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

POLICIES = ("latest", "stash", "2bw", "predict", "spectrain", "xpipe")
Actions = list[tuple[str, int]]
"""Of one stage: ("F" | "B" | "S", pass)."""


@dataclass
class Chunk:
    """Rows of one chunk. ``inside`` [C, C] and ``outside`` [C, N] are dense or sparse."""

    rows: Tensor
    inside: Mapping[str, Tensor]
    outside: Mapping[str, Tensor]
    data: Mapping[str, Tensor] = field(default_factory=dict)
    """Anything else that stages read, such as features, by name."""


def dense_chunks(matrices: Mapping[str, Tensor], parts: Sequence[Tensor], **data: Tensor):
    """Chunks of dense matrices [N, N]; ``parts``: rows of each chunk; ``data`` [N, ...]."""
    chunks = []
    for rows in parts:
        inside = {name: a[rows][:, rows] for name, a in matrices.items()}
        outside = {name: a[rows].index_fill(1, rows, 0.0) for name, a in matrices.items()}
        own = {name: value[rows] for name, value in data.items()}
        chunks.append(Chunk(rows, inside, outside, own))
    return chunks


def step_means(walk: Sequence[tuple[int, int]], every: int, counts: Sequence[int]):
    """Factor by pass: losses by the number of all labels become means over those of a step.

    ``counts``: labels by chunk; ``every``: passes of a step.
    """

    def scale_of(number: int) -> float:
        first = number // every * every
        count = sum(counts[chunk] for _, chunk in walk[first : first + every])
        return sum(counts) / count if count else 1.0

    return scale_of


class Pass:
    """One chunk in one epoch, at one stage."""

    def __init__(self, number: int, epoch: int, index: int, chunk: Chunk, tables: dict) -> None:
        self.number, self.epoch = number, epoch
        self.index, self.chunk = index, chunk
        self._tables = tables
        self.weights: dict[str, Tensor] = {}
        self.saved_as: dict[str, Tensor] = {}
        """Weights that backward reads."""
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def aggregate(self, matrix: str, name: str, h: Tensor) -> Tensor:
        """Write rows h [C, F] into the table ``name``; return the products with a matrix."""
        if name not in self._tables:
            outside = self.chunk.outside[matrix]
            self._tables[name] = torch.zeros(outside.shape[1], h.shape[1], dtype=h.dtype)
        table = self._tables[name]
        found = self.chunk.inside[matrix] @ h + self.chunk.outside[matrix] @ table
        table[self.chunk.rows] = h.detach()
        return found

    def _pack(self, tensor: Tensor):
        if tensor.is_sparse:
            return tensor
        for name, weight in self.weights.items():
            if tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
                return name, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed):
        if isinstance(packed, Tensor):
            return packed
        name, *view = packed
        return self.saved_as[name].as_strided(*view)

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)


@dataclass
class RefStage:
    """A stage: ``function(values, weights, pass)`` returns values, of the last stage the loss."""

    function: Callable[[dict[str, Tensor], dict[str, Tensor], Pass], dict[str, Tensor]]
    weights: dict[str, Tensor]
    reads: dict[str, int] = field(default_factory=dict)
    """Stage that makes each value that is read."""


class AsyncReference:
    """Trains stages under a weight policy; ``policy`` is one of POLICIES."""

    def __init__(
        self,
        stages: Sequence[RefStage],
        chunks: Sequence[Chunk],
        policy: str,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        assert policy in POLICIES
        self.stages, self.chunks, self.policy = list(stages), list(chunks), policy
        for stage in self.stages:
            stage.weights = {
                name: w.detach().clone().requires_grad_() for name, w in stage.weights.items()
            }
        # An optimizer must be given a weight, also of a stage that has none.
        self.optimizers = [
            optimizer(list(stage.weights.values()) or [torch.zeros(0)]) for stage in self.stages
        ]
        self.tables: list[dict[str, Tensor]] = [{} for _ in self.stages]
        self.steps = [0 for _ in self.stages]
        """Steps since the start, by stage."""
        self.losses: dict[int, float] = {}
        """Loss by pass, of the last run."""
        self.rate: Callable[[int], float] | None = None
        """Learning rate by step; by default that of the optimizer."""
        self.scale_of: Callable[[int], float] = lambda number: 1.0
        """Factor of the gradients of a pass, not of ``losses``."""
        self.before_step: Callable[[int], None] | None = None
        """Called with a stage before each of its steps, whose gradients are in ``.grad``."""
        self._depths = [self._depth(k) for k in range(len(self.stages))]

    def _depth(self, k: int) -> int:
        """Number of stages before stage k, on the longest path."""
        return max((1 + self._depth(j) for j in self.stages[k].reads.values()), default=0)

    def run(self, orders: Sequence[Actions], walk: Sequence[tuple[int, int]]) -> None:
        """Execute the actions of all stages, from one flush to the next.

        ``walk``: (epoch, chunk) by pass.
        """
        self._walk, self.losses = walk, {}
        self._passes: list[dict[int, Pass]] = [{} for _ in self.stages]
        self._grads: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.stages]
        self._gaps = [gaps_of(order) for order in orders]
        self._since_flush = [0 for _ in self.stages]
        self._history = [[self._copies(k)] for k in range(len(self.stages))]
        self._last_grads: list[dict[str, Tensor]] = [{} for _ in self.stages]
        self._guesses: list[tuple[int, dict[str, Tensor]]] = [(-1, {}) for _ in self.stages]
        places = [0 for _ in orders]
        while any(place < len(order) for place, order in zip(places, orders, strict=True)):
            is_stuck = True
            for k, order in enumerate(orders):
                while places[k] < len(order) and self._is_ready(k, *order[places[k]]):
                    kind, number = order[places[k]]
                    {"F": self._forward, "B": self._backward, "S": self._step}[kind](k, number)
                    places[k] += 1
                    is_stuck = False
            assert not is_stuck, f"stages wait for each other at {places}"

    def _readers(self, k: int) -> list[int]:
        return [j for j, stage in enumerate(self.stages) if k in stage.reads.values()]

    def _is_ready(self, k: int, kind: str, number: int) -> bool:
        if kind == "F":
            return all(number in self._passes[j] for j in self.stages[k].reads.values())
        if kind == "B":
            return all(number in self._grads[j] for j in self._readers(k))
        return True

    def _forward(self, k: int, number: int) -> None:
        epoch, index = self._walk[number]
        stage, one = self.stages[k], Pass(number, epoch, index, self.chunks[index], self.tables[k])
        one.weights = {n: w.requires_grad_() for n, w in self._for_forward(k, number).items()}
        for name, source in stage.reads.items():
            value = self._passes[source][number].outputs[name]
            one.inputs[name] = value.detach().clone().requires_grad_()
        with one.hooks():
            one.outputs = stage.function(one.inputs, one.weights, one)
        if "loss" in one.outputs:
            self.losses[number] = float(one.outputs["loss"].detach())
        self._passes[k][number] = one

    def _backward(self, k: int, number: int) -> None:
        one = self._passes[k][number]
        one.saved_as = self._for_backward(k, number)
        if "loss" in one.outputs:
            (self.scale_of(number) * one.outputs["loss"]).backward()
        else:
            grads: dict[str, Tensor] = {}
            for reader in self._readers(k):
                for name, grad in self._grads[reader][number].items():
                    if self.stages[reader].reads[name] == k:
                        grads[name] = grads[name] + grad if name in grads else grad
            # Sums of the features alone have no gradient.
            outputs = {n: x for n, x in one.outputs.items() if n in grads and x.requires_grad}
            if outputs:
                torch.autograd.backward(list(outputs.values()), [grads[n] for n in outputs])
        self._grads[k][number] = {
            name: torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in one.inputs.items()
        }
        for name, weight in one.weights.items():
            real = self.stages[k].weights[name]
            if weight.grad is not None:
                real.grad = weight.grad if real.grad is None else real.grad + weight.grad
        one.weights, one.inputs, one.outputs = {}, {}, {}

    def _step(self, k: int, number: int) -> None:
        weights, optimizer = self.stages[k].weights, self.optimizers[k]
        if self.before_step is not None:
            self.before_step(k)
        if self.rate is not None:
            optimizer.param_groups[0]["lr"] = self.rate(self.steps[k])
        optimizer.step()
        self._last_grads[k] = {n: w.grad for n, w in weights.items() if w.grad is not None}
        for weight in weights.values():
            weight.grad = None
        self.steps[k] += 1
        self._since_flush[k] += 1
        self._history[k].append(self._copies(k))

    def _copies(self, k: int) -> dict[str, Tensor]:
        return {name: w.detach().clone() for name, w in self.stages[k].weights.items()}

    def _for_forward(self, k: int, number: int) -> dict[str, Tensor]:
        gap, version = self._gaps[k][number], self._since_flush[k]
        if self.policy == "2bw":
            return self._version(k, version + gap - 1)
        if self.policy == "predict":
            return self._predicted(k, gap)
        if self.policy == "spectrain":
            return self._predicted(k, gap + self._depths[k] // 2)
        if self.policy == "xpipe":
            if self._guesses[k][0] != version + gap:
                self._guesses[k] = version + gap, self._predicted(k, gap)
            return {name: w.detach().clone() for name, w in self._guesses[k][1].items()}
        return self._copies(k)

    def _for_backward(self, k: int, number: int) -> dict[str, Tensor]:
        if self.policy == "stash":
            forward = self._passes[k][number].weights
            return {name: w.detach() for name, w in forward.items()}
        if self.policy == "2bw":
            return self._version(k, self._since_flush[k] - 1)
        if self.policy == "spectrain":
            return self._predicted(k, self._depths[k] // 2)
        return self._copies(k)

    def _version(self, k: int, number: int) -> dict[str, Tensor]:
        return {name: w.clone() for name, w in self._history[k][max(number, 0)].items()}

    def _predicted(self, k: int, steps: int) -> dict[str, Tensor]:
        optimizer = self.optimizers[k]
        group = optimizer.param_groups[0]
        found = self._copies(k)
        for name, weight in self.stages[k].weights.items():
            grad = self._last_grads[k].get(name)
            direction = direction_of(optimizer, weight, grad)
            if direction is None:
                continue
            for ahead in range(steps):
                lr = group["lr"] if self.rate is None else self.rate(self.steps[k] + ahead)
                found[name] = found[name] - lr * (direction + own_decay(optimizer) * found[name])
        return found


def own_decay(optimizer) -> float:
    """Decay that a step takes from the weights themselves."""
    group = optimizer.param_groups[0]
    is_own = isinstance(optimizer, torch.optim.AdamW) or group.get("momentum", 1) == 0
    return group["weight_decay"] if is_own and "alpha" not in group else 0.0


def direction_of(optimizer, weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """Direction of the last step of a weight, before the learning rate; ``None`` if unknown."""
    state, group = optimizer.state.get(weight, {}), optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.Adam):
        if not state:
            return None
        (b1, b2), t = group["betas"], float(state["step"])
        mean, square = state["exp_avg"] / (1 - b1**t), state["exp_avg_sq"] / (1 - b2**t)
        return mean / (square.sqrt() + group["eps"])
    if group["momentum"]:
        buffer = state.get("momentum_buffer")
        return None if buffer is None else buffer.clone()
    if isinstance(optimizer, torch.optim.SGD) or grad is None:
        return grad
    decayed = grad + group["weight_decay"] * weight.detach()
    return decayed / (state["square_avg"].sqrt() + group["eps"])


def one_f_one_b(depths: Sequence[int], passes: int, every: int = 1) -> list[Actions]:
    """1F1B without a flush in between; a stage ``depth`` stages before the last leads by ``depth``.

    One step behind ``every`` passes.
    """
    assert passes % every == 0
    orders = []
    for depth in depths:
        order: Actions = []
        for number in range(passes + depth):
            if number < passes:
                order.append(("F", number))
            if number >= depth:
                order.append(("B", number - depth))
                if (number - depth + 1) % every == 0:
                    order.append(("S", number - depth))
        orders.append(order)
    return orders


def gaps_of(order: Actions) -> dict[int, int]:
    """Number of steps between forward and backward, by pass."""
    steps, first, gaps = 0, {}, {}
    for kind, number in order:
        if kind == "S":
            steps += 1
        elif kind == "F":
            first[number] = steps
        else:
            gaps[number] = steps - first[number]
    return gaps

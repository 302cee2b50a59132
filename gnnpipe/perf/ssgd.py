"""The DAG model of S-SGD itself (arXiv 1805.03812), as tasks for the same simulator.

N devices hold the same model and each takes samples of its own: read, copied to the device, forward
layer by layer, backward from the last layer down, the gradients of each layer added up over all
devices, update. Three variants: naive, where each waits for the one before; input overlap, where
the next samples come in meanwhile; wait-free backward, where on top of that a layer's gradients are
added up while the layers in front of it are still at work.

The closed forms here are derived from the order of the tasks alone. What belongs to the paper's
release is the cost of an all-reduce over n devices of M bytes, 2 n alpha + 2 (n-1)/n M beta +
(n-1)/n M gamma: a ring of 2 (n-1) steps and its start-up, M/n bytes a step, each added up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnpipe.perf.simulate import collector_paused
from gnnpipe.perf.tasks import Task, Tasks

__all__ = ["VARIANTS", "AllReduce", "Layer", "Training", "iteration_s", "ssgd_tasks"]

VARIANTS = ("naive", "input overlap", "wait-free backward")


@dataclass(frozen=True)
class Layer:
    """One layer on one device."""

    forward_s: float
    backward_s: float
    gradient_bytes: int


@dataclass(frozen=True)
class AllReduce:
    """What adding up over n devices costs."""

    latency_s: float
    """alpha, of a message."""
    bandwidth_bytes_per_s: float
    """1 / beta."""
    add_bytes_per_s: float
    """1 / gamma."""

    def time_s(self, devices: int, size_bytes: int) -> float:
        """For ``size_bytes`` on each device; a single one has nothing to add."""
        if devices == 1:
            return 0.0
        n, share = devices, (devices - 1) / devices
        per_byte_s = 2 / self.bandwidth_bytes_per_s + 1 / self.add_bytes_per_s
        return 2 * n * self.latency_s + share * size_bytes * per_byte_s


@dataclass(frozen=True)
class Training:
    """What every device does in each iteration."""

    layers: Sequence[Layer]
    read_s: float
    copy_s: float
    update_s: float
    all_reduce: AllReduce


def iteration_s(training: Training, variant: str, devices: int) -> float:
    """The closed form: seconds between the ends of two iterations, once all run alike.

    naive: read + copy + forward + backward + all-reduces + update. Input overlap: the input of the
    next iteration or the rest of this one, whichever takes longer. Wait-free backward: the same,
    but of the all-reduces only what ends behind backward; from the last layer down each starts when
    the one behind it is over and its own layer's backward is.
    """
    layers = training.layers
    come_s = training.read_s + training.copy_s
    forward_s = sum(layer.forward_s for layer in layers)
    backward_s = sum(layer.backward_s for layer in layers)
    added_s = [training.all_reduce.time_s(devices, layer.gradient_bytes) for layer in layers]
    done_s = forward_s + backward_s + sum(added_s)
    if variant == "wait-free backward":
        over_s = at_s = forward_s
        for layer, time_s in zip(reversed(layers), reversed(added_s), strict=True):
            at_s += layer.backward_s
            over_s = max(over_s, at_s) + time_s
        done_s = over_s
    rest_s = done_s + training.update_s
    return come_s + rest_s if variant == "naive" else max(come_s, rest_s)


@collector_paused()
def ssgd_tasks(training: Training, variant: str, devices: int, iterations: int) -> Tasks:
    """The tasks of some iterations on N equal devices.

    ``shard`` is the device, ``position`` the iteration, ``step`` the layer. One set of samples
    may wait while another is at work. All layers of all devices share one wire, which the
    all-reduces pass one by one, the last layer first.
    """
    tasks = Tasks()
    wire = tasks.open("all-reduce", in_order=True)
    walks = [_DeviceWalk(tasks, training, variant, device) for device in range(devices)]
    layers = range(len(training.layers))
    times_s = [training.all_reduce.time_s(devices, x.gradient_bytes) for x in training.layers]
    for iteration in range(iterations):
        for walk in walks:
            walk.compute(iteration)
        added = 0
        for layer in reversed(layers):
            size = training.layers[layer].gradient_bytes
            what = Task("REDUCE_GRAD", 0, -1, iteration, step=layer, size_bytes=size)
            behind = layer if variant == "wait-free backward" else 0
            before = tuple(walk.backward[behind] for walk in walks)
            added = tasks.add(what, wire, times_s[layer], before)
        for walk in walks:
            walk.update(iteration, added)
    return tasks


class _DeviceWalk:
    """The iterations of one device."""

    def __init__(self, tasks: Tasks, training: Training, variant: str, device: int) -> None:
        self.tasks, self.training, self.device = tasks, training, device
        self.backward = [0] * len(training.layers)
        """By layer its task of this iteration."""
        self._is_ahead = variant != "naive"
        self._on = tasks.open(f"device {device}", in_order=True)
        self._input = tasks.open(f"input of device {device}", in_order=True)
        self._updates: list[int] = []

    def compute(self, iteration: int) -> None:
        """Input, forward and backward."""
        training, tasks = self.training, self.tasks
        # Ahead: once the samples before these are at work, that is, those before them done with.
        room = iteration - (2 if self._is_ahead else 1)
        before = (self._updates[room],) if room >= 0 else ()
        tasks.add(self._task("READ", iteration), self._input, training.read_s, before)
        here = (tasks.add(self._task("COPY", iteration), self._input, training.copy_s),)
        for number, layer in enumerate(training.layers):
            what = self._task("F", iteration, number)
            tasks.add(what, self._on, layer.forward_s, here if number == 0 else ())
        for number in reversed(range(len(training.layers))):
            what, time_s = self._task("B", iteration, number), training.layers[number].backward_s
            self.backward[number] = tasks.add(what, self._on, time_s)

    def update(self, iteration: int, added: int) -> None:
        """The step behind the all-reduce ``added``."""
        what = self._task("STEP", iteration)
        self._updates.append(self.tasks.add(what, self._on, self.training.update_s, (added,)))

    def _task(self, kind: str, iteration: int, layer: int = -1) -> Task:
        return Task(kind, 0, self.device, iteration, step=layer)

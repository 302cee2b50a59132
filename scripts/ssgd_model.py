"""DAG model of synchronous SGD (arXiv 1805.03812), as tasks for the same simulator.

N devices hold the same model, and each has its own samples. The tasks of an iteration are: read,
copy to the device, forward layer by layer, backward from the last layer, all-reduce of each layer's
gradients, update. There are three variants. Naive: each task waits for the task before. Input
overlap: the next samples are read meanwhile. Wait-free backward: in addition, a layer's gradients
are reduced while earlier layers still compute.

The closed forms are derived from the order of the tasks alone. The cost of an all-reduce over n
devices of M bytes is that of the paper, 2 n alpha + 2 (n-1)/n M beta + (n-1)/n M gamma: a ring of
2 (n-1) steps of M/n bytes and its start-up; every byte is added once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnpipe.garbage_collector import collector_paused
from gnnpipe.perf.simulate import Task, TaskKind, Tasks

VARIANTS = ("naive", "input overlap", "wait-free backward")


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer on one device."""

    forward_s: float
    backward_s: float
    gradient_bytes: int


@dataclass(frozen=True)
class AllReduce:
    """Cost of an all-reduce over n devices."""

    latency_s: float
    """alpha, the latency of a message."""
    bandwidth_bytes_per_s: float
    """1 / beta."""
    add_bytes_per_s: float
    """1 / gamma."""

    def time_s(self, devices: int, size_bytes: int) -> float:
        """Return the seconds of an all-reduce of ``size_bytes``; 0 on a single device."""
        if devices == 1:
            return 0.0
        n, share = devices, (devices - 1) / devices
        per_byte_s = 2 / self.bandwidth_bytes_per_s + 1 / self.add_bytes_per_s
        return 2 * n * self.latency_s + share * size_bytes * per_byte_s


@dataclass(frozen=True)
class Training:
    """Work of every device in each iteration."""

    layers: Sequence[LayerTimes]
    read_s: float
    copy_s: float
    update_s: float
    all_reduce: AllReduce


def iteration_s(training: Training, variant: str, devices: int) -> float:
    """Return the seconds between the ends of two iterations in the steady state, in closed form.

    Naive: read + copy + forward + backward + all-reduces + update. Input overlap: the input of the
    next iteration or the rest of this one, whichever takes longer. Wait-free backward: the same,
    with only the part of the all-reduces that ends after backward; from the last layer down, each
    all-reduce starts when the previous one and its own layer's backward have ended.
    """
    layers = training.layers
    input_s = training.read_s + training.copy_s
    forward_s = sum(layer.forward_s for layer in layers)
    backward_s = sum(layer.backward_s for layer in layers)
    reduce_s = [training.all_reduce.time_s(devices, layer.gradient_bytes) for layer in layers]
    done_s = forward_s + backward_s + sum(reduce_s)
    if variant == "wait-free backward":
        reduced_s = backward_end_s = forward_s
        for layer, time_s in zip(reversed(layers), reversed(reduce_s), strict=True):
            backward_end_s += layer.backward_s
            reduced_s = max(reduced_s, backward_end_s) + time_s
        done_s = reduced_s
    rest_s = done_s + training.update_s
    return input_s + rest_s if variant == "naive" else max(input_s, rest_s)


@collector_paused()
def ssgd_tasks(training: Training, variant: str, devices: int, iterations: int) -> Tasks:
    """Return the tasks of some iterations on N equal devices.

    ``shard`` is the device, ``position`` the iteration, ``step`` the layer. The next samples may
    wait while the current ones are computed. All devices share one link, which serves the
    all-reduces one by one, the last layer first.
    """
    tasks = Tasks()
    link = tasks.open("all-reduce", in_order=True)
    on_devices = [_DeviceTasks(tasks, training, variant, device) for device in range(devices)]
    layers = range(len(training.layers))
    times_s = [training.all_reduce.time_s(devices, x.gradient_bytes) for x in training.layers]
    for iteration in range(iterations):
        for device in on_devices:
            device.compute(iteration)
        reduced = 0
        for layer in reversed(layers):
            size = training.layers[layer].gradient_bytes
            what = Task(TaskKind.REDUCE_GRADIENTS, 0, -1, iteration, step=layer, size_bytes=size)
            behind = layer if variant == "wait-free backward" else 0
            before = tuple(device.backward[behind] for device in on_devices)
            reduced = tasks.add(what, link, times_s[layer], before)
        for device in on_devices:
            device.update(iteration, reduced)
    return tasks


class _DeviceTasks:
    """Adds the tasks of one device."""

    def __init__(self, tasks: Tasks, training: Training, variant: str, device: int) -> None:
        self.tasks, self.training, self.device = tasks, training, device
        self.backward = [0] * len(training.layers)
        """Tasks of this iteration by layer."""
        self._is_ahead = variant != "naive"
        self._on = tasks.open(f"device {device}", in_order=True)
        self._input = tasks.open(f"input of device {device}", in_order=True)
        self._updates: list[int] = []

    def compute(self, iteration: int) -> None:
        """Add input, forward and backward."""
        training, tasks = self.training, self.tasks
        # With overlap, samples are read once the iteration before the previous one has ended.
        earlier = iteration - (2 if self._is_ahead else 1)
        before = (self._updates[earlier],) if earlier >= 0 else ()
        tasks.add(self._task(TaskKind.READ, iteration), self._input, training.read_s, before)
        here = (tasks.add(self._task(TaskKind.COPY, iteration), self._input, training.copy_s),)
        for number, layer in enumerate(training.layers):
            what = self._task(TaskKind.FORWARD, iteration, number)
            tasks.add(what, self._on, layer.forward_s, here if number == 0 else ())
        for number in reversed(range(len(training.layers))):
            what = self._task(TaskKind.BACKWARD, iteration, number)
            time_s = training.layers[number].backward_s
            self.backward[number] = tasks.add(what, self._on, time_s)

    def update(self, iteration: int, reduced: int) -> None:
        """Add the step after the all-reduce ``reduced``."""
        what = self._task(TaskKind.STEP, iteration)
        self._updates.append(self.tasks.add(what, self._on, self.training.update_s, (reduced,)))

    def _task(self, kind: TaskKind, iteration: int, layer: int = -1) -> Task:
        return Task(kind, 0, self.device, iteration, step=layer)

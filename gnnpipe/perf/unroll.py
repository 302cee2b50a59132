"""From a program to tasks: what the executor would do, written down instead of done.

One task on the device of each rank for every F or B (for every step of it where there are shards,
since rows are exchanged between steps), and one on a wire for every message and exchange. It
follows ``runtime.executor`` closely:

- a message is under way once it is sent AND its receive is posted (a gloo send only completes
  then), and nobody waits for it but the first step that takes it;
- boundary rows leave behind the step that pushed them and are waited for by the next step that
  reads the table; gradients of halo rows leave before the product for the own rows and are waited
  for behind it. Where a chunk goes back over the same single step next, its gradients leave before
  this one's autograd;
- sums over the shards are waited for at once: of what maps are fitted from, and of means over all
  vertices; of gradients, which travel there and back, the way there where the next bucket begins,
  the way back by the step;
- all ranks meet before the step, for the norm of the gradients, and behind it, for the loss.

Sends and receives themselves take no time on a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnpipe.perf.costs import Costs
from gnnpipe.perf.simulate import collector_paused
from gnnpipe.perf.tasks import Task, Tasks
from gnnpipe.schedule import Action, ActionKind, Program

__all__ = ["BucketTasks", "program_tasks"]


class BucketTasks:
    """Of the shards of one stage."""

    def __init__(
        self, half: Callable[[int, int, tuple[int, ...]], int], wait: Callable[..., None]
    ) -> None:
        """``half`` makes the task of one way: size in bytes, step, and the task that it follows;
        ``wait``: the shards wait for these tasks.
        """
        self._half, self._wait = half, wait
        self._gathered: list[tuple[int, int, int]] = []
        self._summed: list[int] = []

    def begin(self, size: int, step: int) -> None:
        """A bucket's parts travel to those who add them up; nothing does of one without weights."""
        self._hand_out()
        if size:
            self._gathered.append((self._half(size, step, ()), size, step))

    def finish(self) -> None:
        """All sums are there."""
        self._hand_out()
        self._wait(*self._summed)

    def _hand_out(self) -> None:
        for task, size, step in self._gathered:
            self._wait(task)
            self._summed.append(self._half(size, step, (task,)))
        self._gathered.clear()


@collector_paused()
def program_tasks(
    program: Program, costs: Costs, order: Sequence[int] | None = None, overlap: bool = True
) -> Tasks:
    """The tasks of one epoch; ``order[position]`` is the chunk that stands there (default: itself).

    Without ``overlap`` a rank waits for everything that it sends before it goes on, and there is
    always room where it goes. Devices are resources 0 .. ranks - 1, rank = stage * shards + shard.
    """
    order = range(program.chunks) if order is None else order
    tasks = Tasks()
    for rank in range(len(program.stages) * program.shards):
        tasks.open(f"rank {rank}", in_order=True)
    messages: dict[tuple[str, int, int, int], list[int]] = {}
    syncs: list[int] = []
    for stage in range(len(program.stages)):
        walk = _StageWalk(program, costs, order, overlap, tasks, messages, syncs, stage)
        walk.run()
    return tasks


class _StageWalk:
    """The actions of one stage, for all its shards at once. Lists go by shard."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        order: Sequence[int],
        overlap: bool,
        tasks: Tasks,
        messages: dict[tuple[str, int, int, int], list[int]],
        syncs: list[int],
        stage: int,
    ) -> None:
        """``messages`` by (way, source, target, position); both are shared by all stages."""
        self.program, self.costs, self.order, self.overlap = program, costs, order, overlap
        self.tasks, self.stage = tasks, stage
        self.messages, self.syncs = messages, syncs
        self.shards = range(program.shards)
        self.num_steps = program.num_steps[stage]
        self._last: list[int] = []
        """The last task on each device."""
        self._waits: list[list[int]] = [[] for _ in self.shards]
        """What the next task on each device waits for."""
        self._arriving: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
        self._pushed: list[list[int]] = [[] for _ in range(self.num_steps)]
        self._returning: dict[tuple[int, int], list[int]] = {}
        self._buckets = BucketTasks(self._half_a_sum, self._wait)

    def run(self) -> None:
        """Add all tasks."""
        actions = self.program.stages[self.stage]
        last = max((i for i, a in enumerate(actions) if a.kind is ActionKind.BACKWARD), default=-1)
        self._last = [-1] * len(self.shards)
        self._device("BEGIN", [self.costs.begin_s(self.stage, shard) for shard in self.shards])
        for index, action in enumerate(actions):
            following = actions[index + 1] if index + 1 < len(actions) else None
            if action.kind is ActionKind.FORWARD:
                self._forward(action)
            elif action.kind is ActionKind.BACKWARD:
                self._backward(action, following, index == last)
            elif action.kind.is_receive:
                self._receive(action)
            elif action.kind.is_send:
                self._send(action)
            elif action.kind is ActionKind.REDUCE_GRADIENTS:
                self._sum_gradients(action)
            elif action.kind is ActionKind.STEP:
                self._buckets.finish()
                self._sync(0)
                updates = [self.costs.update_s(self.stage, shard) for shard in self.shards]
                self._device("STEP", updates)
                self._sync(1)
            else:
                self._pilot(action)

    def _device(
        self, kind: str, durations_s: list[float], position: int = -1, step: int = -1
    ) -> None:
        chunk = self.order[position] if position >= 0 else position
        for shard in self.shards:
            rank = self.stage * len(self.shards) + shard
            what = Task(kind, self.stage, shard, position, chunk, step)
            before = tuple(self._waits[shard])
            self._waits[shard].clear()
            self._last[shard] = self.tasks.add(what, rank, durations_s[shard], before)

    def _wait(self, *tasks: int) -> None:
        for waits in self._waits:
            waits += tasks

    def _pilot(self, action: Action) -> None:
        if action.kind.is_pass:
            self._take("F", action.position)
        each = [self.costs.pilot_s(action.kind, self.stage, shard) for shard in self.shards]
        has_sums = action.kind is ActionKind.FORECAST and len(self.shards) > 1
        sums = self.costs.fit_bytes(self.stage) if has_sums else ()
        # Work and sums take turns: of each aggregation's map, which the next one builds on.
        parts = [time_s / (len(sums) + 1) for time_s in each]
        for size in sums:
            self._device(action.kind, parts, action.position)
            self._reduce("REDUCE_FIT", size, action.position, action.position)
        self._device(action.kind, parts, action.position)

    def _forward(self, action: Action) -> None:
        chunk = self.order[action.position]
        if action.steps[0] == 0:
            self._take("F", action.position)
        if len(self.shards) == 1:
            self._whole(action)
            return
        for step in range(*action.steps):
            if step:
                self._wait(*self._pushed[step - 1])
                self._pushed[step - 1].clear()
            each = [self.costs.step_s("F", self.stage, shard, chunk, step) for shard in self.shards]
            self._device("F", each, action.position, step)
            if step < self.num_steps - 1:
                self._sum_means(action.position, step)
                pushed = self._exchange("F", action.position, step)
                if self.overlap:
                    self._pushed[step] += pushed
                else:
                    self._wait(*pushed)

    def _whole(self, action: Action, is_last: bool = False) -> None:
        """All steps at once: there is nobody to exchange rows with between them."""
        chunk = self.order[action.position]
        steps = range(*action.steps)
        time_s = sum(self.costs.step_s(action.kind, self.stage, 0, chunk, step) for step in steps)
        if is_last:
            time_s += self.costs.finish_s(self.stage, 0)
        self._device(action.kind, [time_s], action.position, steps[0] if len(steps) == 1 else -1)

    def _backward(self, action: Action, following: Action | None, is_last: bool) -> None:
        chunk = self.order[action.position]
        if action.steps[1] == self.num_steps:
            self._take("B", action.position)
        if len(self.shards) == 1:
            self._whole(action, is_last)
            return
        is_same = following is not None and replace(following, position=action.position) == action
        for step in reversed(range(*action.steps)):
            each = [self.costs.step_s("B", self.stage, shard, chunk, step) for shard in self.shards]
            if step < self.num_steps - 1:
                place = action.position, step
                arriving = self._returning.pop(place, None)
                if arriving is None:
                    arriving = self._exchange("B", *place)
                if not self.overlap:
                    self._wait(*arriving)
                own = [self.costs.pull_s(self.stage, shard, chunk, step) for shard in self.shards]
                self._device("PULL", own, *place)
                each = [whole - part for whole, part in zip(each, own, strict=True)]
                if self.overlap:
                    self._wait(*arriving)
                    if is_same and following is not None and len(range(*action.steps)) == 1:
                        comes = following.position, step
                        self._returning[comes] = self._exchange("B", *comes)
            if is_last and step == action.steps[0]:
                each = [e + self.costs.finish_s(self.stage, s) for s, e in enumerate(each)]
            self._device("B", each, action.position, step)
            if step:
                self._sum_means(action.position, step - 1)

    def _exchange(self, way: str, position: int, step: int) -> list[int]:
        """The task; none where the step pushes for means alone."""
        if not self.costs.has_exchange(self.stage, step):
            return []
        chunk = self.order[position]
        sizes = [
            self.costs.exchange_bytes(way, self.stage, shard, chunk, step) for shard in self.shards
        ]
        what = Task(f"EXCHANGE_{way}", self.stage, -1, position, chunk, step, size_bytes=sum(sizes))
        wire = self.tasks.open(self.costs.group(self.stage), in_order=False)
        time_s = self.costs.exchange_s(self.stage, sizes)
        return [self.tasks.add(what, wire, time_s, tuple(self._last))]

    def _sum_means(self, position: int, step: int) -> None:
        for size in self.costs.mean_bytes(self.stage, step):
            self._reduce("REDUCE_MEAN", size, position, self.order[position], step)

    def _sum_gradients(self, action: Action) -> None:
        size = self.costs.gradient_bytes(self.stage, action.steps)
        if self.overlap:
            self._buckets.begin(size, action.steps[0])
        elif size:
            self._reduce("REDUCE_GRAD", size, step=action.steps[0])

    def _half_a_sum(self, size: int, step: int, before: tuple[int, ...]) -> int:
        sent = (len(self.shards) - 1) * size
        what = Task("REDUCE_GRAD", self.stage, step=step, size_bytes=sent)
        wire = self.tasks.open(self.costs.group(self.stage), in_order=False)
        time_s = self.costs.reduce_s(self.stage, size) / 2
        return self.tasks.add(what, wire, time_s, (*self._last, *before))

    def _reduce(
        self, kind: str, size: int, position: int = -1, chunk: int = -1, step: int = -1
    ) -> None:
        sent = 2 * (len(self.shards) - 1) * size
        what = Task(kind, self.stage, -1, position, chunk, step, size_bytes=sent)
        wire = self.tasks.open(self.costs.group(self.stage), in_order=False)
        time_s = self.costs.reduce_s(self.stage, size)
        self._wait(self.tasks.add(what, wire, time_s, tuple(self._last)))

    def _sync(self, position: int) -> None:
        """Wait for all ranks; the first stage that comes makes the task."""
        if len(self.program.stages) * self.program.shards == 1:
            return
        if len(self.syncs) == position:
            what = Task("SYNC", -1, position=position)
            place = self.tasks.open("all ranks", in_order=False)
            self.syncs.append(self.tasks.add(what, place, self.costs.sync_s()))
        task = self.syncs[position]
        # The gradient sum comes first.
        pending = dict.fromkeys(other for waits in self._waits for other in waits)
        self.tasks.before[task] = (*self.tasks.before[task], *self._last, *pending)
        self._wait(task)

    def _take(self, way: str, position: int) -> None:
        """The next task on each device waits for the messages posted for this chunk."""
        for message in self._arriving.pop((way, position), ()):
            for waits, task in zip(self._waits, message, strict=True):
                waits.append(task)

    def _receive(self, action: Action) -> None:
        message = self._message(action.kind.direction, action.peer, self.stage, action.position)
        # Who waits for what it sends must not wait for room, too: stages that skip others would
        # wait for each other for ever.
        if self.overlap:
            for task, posted in zip(message, self._last, strict=True):
                self.tasks.before[task] = (*self.tasks.before[task], posted)
        self._arriving[action.kind.direction, action.position].append(message)

    def _send(self, action: Action) -> None:
        message = self._message(action.kind.direction, self.stage, action.peer, action.position)
        for task, made in zip(message, self._last, strict=True):
            self.tasks.before[task] = (made, *self.tasks.before[task])
        if not self.overlap:
            for waits, task in zip(self._waits, message, strict=True):
                waits.append(task)

    def _message(self, way: str, source: int, target: int, position: int) -> list[int]:
        """By shard the task of a message, made when one of its ends is seen first."""
        key = way, source, target, position
        if key not in self.messages:
            chunk = self.order[position] if position >= 0 else position
            self.messages[key] = [
                self._on_the_wire(way, source, target, shard, position, chunk)
                for shard in self.shards
            ]
        return self.messages[key]

    def _on_the_wire(
        self, way: str, source: int, target: int, shard: int, position: int, chunk: int
    ) -> int:
        size = self.costs.message_bytes(way, source, target, shard, chunk)
        ranks = source * len(self.shards) + shard, target * len(self.shards) + shard
        wire = self.tasks.open(self.costs.link(*ranks), in_order=False)
        time_s = self.costs.link_s(ranks[0], ranks[1], size)
        what = Task(f"SEND_{way}", source, shard, position, chunk, peer=target, size_bytes=size)
        return self.tasks.add(what, wire, time_s)

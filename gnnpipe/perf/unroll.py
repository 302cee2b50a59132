"""Unrolls a program into the tasks that the executor would run.

Every F or B is a task on the device of each rank (with several shards, every step is a task,
because rows are exchanged between steps). Every message and collective is a task on a link. The
rules follow ``runtime.executor``:

- a message starts once it is sent AND its receive is posted (a gloo send only completes then);
  only the first step that reads the message waits for it;
- the exchange of boundary rows starts after the step that pushed them; the next step that reads the
  table waits for the exchange. The exchange of halo gradients starts before the product for the own
  rows and is waited for after the product. If the next backward action is the same single step of
  another chunk, its exchange starts before this step's autograd;
- sums over the shards for forecasts and means are waited for at once. Sums of gradients have phases
  (``collectives.ShardSum``): the next one starts where the next bucket starts, or before the step;
- all ranks wait for one another before the optimizer's step (norm of the gradients) and after the
  step (loss).

Sends and receives take no time on a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from gnnpipe.perf.costs import Costs
from gnnpipe.perf.simulate import collector_paused
from gnnpipe.perf.tasks import Task, Tasks
from gnnpipe.schedule import Action, ActionKind, Program


class BucketTasks:
    """Tasks of the gradient sums of one stage's shards."""

    def __init__(
        self,
        phases: int,
        add: Callable[[int, int, tuple[int, ...]], int],
        wait: Callable[..., None],
    ) -> None:
        """Prepare the sums.

        Args:
            phases: Phases of a sum.
            add: Adds the task of one phase; arguments: bytes, step, dependencies.
            wait: Makes the shards wait for tasks.
        """
        self._phases, self._add, self._wait = phases, add, wait
        self._under_way: list[tuple[int, int, int, int]] = []
        """Current task, bytes, step and number of remaining phases of every bucket."""

    def begin(self, size: int, step: int) -> None:
        """Start the first phase of a bucket, if the bucket has weights."""
        self._proceed()
        if size:
            self._under_way.append((self._add(size, step, ()), size, step, self._phases - 1))

    def finish(self) -> None:
        """Wait for all sums."""
        while any(phases for *_, phases in self._under_way):
            self._proceed()
        self._wait(*(task for task, *_ in self._under_way))
        self._under_way.clear()

    def _proceed(self) -> None:
        """Start the next phase of every bucket that has one, after its current phase."""
        for place, (task, size, step, phases) in enumerate(self._under_way):
            if phases:
                self._wait(task)
                started = self._add(size, step, (task,))
                self._under_way[place] = started, size, step, phases - 1


@collector_paused()
def program_tasks(
    program: Program, costs: Costs, order: Sequence[int] | None = None, overlap: bool = True
) -> Tasks:
    """Return the tasks of one epoch; ``order[position]`` is the chunk (default: the position).

    Without ``overlap`` a rank waits for all that it sends, and receives are always posted. The
    devices are resources 0 to ranks - 1, by rank.
    """
    order = range(program.chunks) if order is None else order
    tasks = Tasks()
    for rank in range(program.placement.num_ranks):
        tasks.open(f"rank {rank}", in_order=True)
    messages: dict[tuple[str, int, int, int], list[int]] = {}
    syncs: list[int] = []
    for stage in range(len(program.stages)):
        stage_tasks = _StageTasks(program, costs, order, overlap, tasks, messages, syncs, stage)
        stage_tasks.run()
    return tasks


class _StageTasks:
    """Adds the tasks of one stage, for all its shards at once. Lists are by shard."""

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
        """``messages``, by (way, source, target, position), and ``syncs``, by position, are shared.

        All stages add to these two and read from them.
        """
        self.program, self.costs, self.order, self.overlap = program, costs, order, overlap
        self.tasks, self.stage = tasks, stage
        self.messages, self.syncs = messages, syncs
        self.ranks = program.placement.stages[stage]
        self.shards = range(len(self.ranks))
        self.num_steps = program.num_steps[stage]
        self._last: list[int] = []
        """Last task on each device."""
        self._waits: list[list[int]] = [[] for _ in self.shards]
        """Tasks that the next task on each device waits for."""
        self._arriving: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
        self._pushed: list[list[int]] = [[] for _ in range(self.num_steps)]
        self._returning: dict[tuple[int, int], list[int]] = {}
        self._buckets = BucketTasks(costs.shard_sum_phases(), self._sum_phase, self._wait)

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
                self._probe(action)

    def _device(
        self, kind: str, durations_s: list[float], position: int = -1, step: int = -1
    ) -> None:
        chunk = self.order[position] if position >= 0 else position
        for shard in self.shards:
            what = Task(kind, self.stage, shard, position, chunk, step)
            before = tuple(self._waits[shard])
            self._waits[shard].clear()
            self._last[shard] = self.tasks.add(what, self.ranks[shard], durations_s[shard], before)

    def _wait(self, *tasks: int) -> None:
        for waits in self._waits:
            waits += tasks

    def _probe(self, action: Action) -> None:
        if action.kind.is_pass:
            self._wait_for_messages("F", action.position)
        each = [self.costs.probe_s(action.kind, self.stage, shard) for shard in self.shards]
        has_sums = action.kind is ActionKind.FORECAST and len(self.shards) > 1
        sums = self.costs.fit_bytes(self.stage) if has_sums else ()
        # Work and sums alternate: the fit of each aggregation needs the one before.
        parts = [time_s / (len(sums) + 1) for time_s in each]
        for size in sums:
            self._device(action.kind, parts, action.position)
            self._reduce("REDUCE_FIT", size, action.position, action.position)
        self._device(action.kind, parts, action.position)

    def _forward(self, action: Action) -> None:
        chunk = self.order[action.position]
        if action.steps[0] == 0:
            self._wait_for_messages("F", action.position)
        if len(self.shards) == 1:
            self._all_steps(action)
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

    def _all_steps(self, action: Action, is_last: bool = False) -> None:
        """Run all steps as one task: with one shard no rows are exchanged between them."""
        chunk = self.order[action.position]
        steps = range(*action.steps)
        time_s = sum(self.costs.step_s(action.kind, self.stage, 0, chunk, step) for step in steps)
        if is_last:
            time_s += self.costs.finish_s(self.stage, 0)
        self._device(action.kind, [time_s], action.position, steps[0] if len(steps) == 1 else -1)

    def _backward(self, action: Action, following: Action | None, is_last: bool) -> None:
        chunk = self.order[action.position]
        if action.steps[1] == self.num_steps:
            self._wait_for_messages("B", action.position)
        if len(self.shards) == 1:
            self._all_steps(action, is_last)
            return
        repeat = following if action.is_repeated_by(following) else None
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
                    if repeat is not None:
                        comes = repeat.position, step
                        self._returning[comes] = self._exchange("B", *comes)
            if is_last and step == action.steps[0]:
                each = [e + self.costs.finish_s(self.stage, s) for s, e in enumerate(each)]
            self._device("B", each, action.position, step)
            if step:
                self._sum_means(action.position, step - 1)

    def _exchange(self, way: str, position: int, step: int) -> list[int]:
        """Add and return the exchange of a step; nothing if the step pushes only for means."""
        if not self.costs.has_exchange(self.stage, step):
            return []
        chunk = self.order[position]
        sizes = [
            self.costs.exchange_bytes(way, self.stage, shard, chunk, step) for shard in self.shards
        ]
        what = Task(f"EXCHANGE_{way}", self.stage, -1, position, chunk, step, size_bytes=sum(sizes))
        link = self.tasks.open(self.costs.group(self.stage), in_order=False)
        time_s = self.costs.exchange_s(self.stage, sizes)
        return [self.tasks.add(what, link, time_s, tuple(self._last))]

    def _sum_means(self, position: int, step: int) -> None:
        for size in self.costs.mean_bytes(self.stage, step):
            self._reduce("REDUCE_MEAN", size, position, self.order[position], step)

    def _sum_gradients(self, action: Action) -> None:
        size = self.costs.gradient_bytes(self.stage, action.steps)
        if self.overlap:
            self._buckets.begin(size, action.steps[0])
        elif size:
            self._reduce("REDUCE_GRAD", size, step=action.steps[0])

    def _sum_phase(self, size: int, step: int, before: tuple[int, ...]) -> int:
        phases = self.costs.shard_sum_phases()
        sent = self.costs.shard_sum_bytes(size) // phases
        what = Task("REDUCE_GRAD", self.stage, step=step, size_bytes=sent)
        link = self.tasks.open(self.costs.group(self.stage), in_order=False)
        time_s = self.costs.shard_sum_s(self.stage, size) / phases
        return self.tasks.add(what, link, time_s, (*self._last, *before))

    def _reduce(
        self, kind: str, size: int, position: int = -1, chunk: int = -1, step: int = -1
    ) -> None:
        sent = self.costs.shard_sum_bytes(size)
        what = Task(kind, self.stage, -1, position, chunk, step, size_bytes=sent)
        link = self.tasks.open(self.costs.group(self.stage), in_order=False)
        time_s = self.costs.shard_sum_s(self.stage, size)
        self._wait(self.tasks.add(what, link, time_s, tuple(self._last)))

    def _sync(self, position: int) -> None:
        """Wait for all ranks; the first stage adds the task."""
        if self.program.placement.num_ranks == 1:
            return
        if len(self.syncs) == position:
            what = Task("SYNC", -1, position=position)
            place = self.tasks.open("all ranks", in_order=False)
            self.syncs.append(self.tasks.add(what, place, self.costs.sync_s()))
        task = self.syncs[position]
        # Gradient sums end before the all-reduce starts.
        pending = dict.fromkeys(other for waits in self._waits for other in waits)
        self.tasks.before[task] = (*self.tasks.before[task], *self._last, *pending)
        self._wait(task)

    def _wait_for_messages(self, way: str, position: int) -> None:
        """Make the next task on each device wait for the messages posted for this chunk."""
        for message in self._arriving.pop((way, position), ()):
            for waits, task in zip(self._waits, message, strict=True):
                waits.append(task)

    def _receive(self, action: Action) -> None:
        message = self._message(action.kind.direction, action.peer, self.stage, action.position)
        # Without overlap this dependency would deadlock stages that skip others.
        if self.overlap:
            for task, posted in zip(message, self._last, strict=True):
                self.tasks.before[task] = (*self.tasks.before[task], posted)
        self._arriving[action.kind.direction, action.position].append(message)

    def _send(self, action: Action) -> None:
        message = self._message(action.kind.direction, self.stage, action.peer, action.position)
        for task, sender in zip(message, self._last, strict=True):
            self.tasks.before[task] = (sender, *self.tasks.before[task])
        if not self.overlap:
            for waits, task in zip(self._waits, message, strict=True):
                waits.append(task)

    def _message(self, way: str, source: int, target: int, position: int) -> list[int]:
        """Return the tasks of a message by shard; the first of its send and receive adds them."""
        key = way, source, target, position
        if key not in self.messages:
            chunk = self.order[position] if position >= 0 else position
            self.messages[key] = [
                self._message_task(way, source, target, shard, position, chunk)
                for shard in self.shards
            ]
        return self.messages[key]

    def _message_task(
        self, way: str, source: int, target: int, shard: int, position: int, chunk: int
    ) -> int:
        size = self.costs.message_bytes(way, source, target, shard, chunk)
        placement = self.program.placement
        ranks = placement.rank(source, shard), placement.rank(target, shard)
        link = self.tasks.open(self.costs.link(*ranks), in_order=False)
        time_s = self.costs.message_s(ranks[0], ranks[1], size)
        what = Task(f"SEND_{way}", source, shard, position, chunk, peer=target, size_bytes=size)
        return self.tasks.add(what, link, time_s)

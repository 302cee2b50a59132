"""Unrolls a program into the tasks that the executor would run.

Every F or B is a task on the device of each rank (with several shards, every step is a task,
because rows are exchanged between steps). Every message and collective is a task on a link. The
rules follow ``runtime.executor``:

- a message starts once it is sent AND its receive is posted (over gloo a send only completes then;
  receives are posted early, so messages through shared memory have the same rule); only the first
  step that reads the message waits for it;
- the exchange of boundary rows starts after the step that pushed them; the next step that reads the
  table waits for the exchange. The exchange of halo gradients starts before the product for the own
  rows and is waited for after the product. If the next backward action is the same single step of
  another chunk, its exchange starts before this step's autograd;
- rows that travel by columns leave after the step that pushed them; their products run before the
  rows of the result return, and the step then waits for these;
- sums over the shards for forecasts and means are waited for at once. Sums of gradients have phases
  (``collectives.ShardSum``): the next one starts where the next bucket starts, or before the step;
- all ranks wait for one another before the optimizer's step (norm of the gradients), unless stages
  step without a drain, and after the last step (loss).

Sends and receives take no time on a device; the processor time of messages is a part of the steps'
(``ProfiledCosts``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gnnpipe.garbage_collector import collector_paused
from gnnpipe.perf.profiled_costs import ColumnMove, ProfiledCosts
from gnnpipe.perf.simulate import EXCHANGES, SENDS, Task, TaskKind, Tasks
from gnnpipe.schedule import Action, ActionKind, Direction, Program


@collector_paused()
def program_tasks(
    program: Program,
    costs: ProfiledCosts,
    order: Sequence[int] | None = None,
    overlap: bool = True,
    lanes: Sequence[int] | None = None,
) -> Tasks:
    """Return the tasks from one flush to the next, usually of one epoch.

    ``order[position]`` is the chunk of a pass (default: ascending in each epoch).

    Without ``overlap`` a rank waits for all that it sends, and receives are always posted. The
    devices are resources 0 to ranks - 1, by rank.

    ``lanes``: shards that stand for all shards of every stage, because each other shard has the
    sizes, device and links of one of these in every stage. Only these have tasks; the makespan is
    the same.
    """
    order = [p % program.chunks for p in range(program.passes)] if order is None else order
    tasks = Tasks()
    for rank in range(program.placement.num_ranks):
        tasks.open(f"rank {rank}", in_order=True)
    messages: dict[tuple[Direction, int, int, int], list[_Part]] = {}
    syncs: list[int] = []
    for stage in range(len(program.stages)):
        stage_tasks = _StageTasks(program, costs, order, overlap, tasks, messages, syncs, stage)
        if lanes is not None:
            stage_tasks.shards, stage_tasks.has_lanes = lanes, True
        stage_tasks.run()
    return tasks


class _Part(NamedTuple):
    """The part of a message that one shard sends to one shard of another stage."""

    task: int
    source: int
    target: int


class _StageTasks:
    """Adds the tasks of one stage, for all its shards at once. Lists are by shard."""

    def __init__(
        self,
        program: Program,
        costs: ProfiledCosts,
        order: Sequence[int],
        overlap: bool,
        tasks: Tasks,
        messages: dict[tuple[Direction, int, int, int], list[_Part]],
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
        self.shards: Sequence[int] = range(len(self.ranks))
        """The shards that have tasks; lists "by shard" have one entry for each of these."""
        self.has_lanes = False
        self.num_steps = program.num_steps[stage]
        self._last: dict[int, int] = {}
        """Last task on each device, by shard."""
        self._waits: dict[int, list[int]] = {}
        """Tasks that the next task on each device waits for, by shard."""
        self._arriving: dict[tuple[Direction, int], list[list[_Part]]] = defaultdict(list)
        self._pushed: list[list[int]] = [[] for _ in range(self.num_steps)]
        self._recorded: list[list[int]] = [[] for _ in range(self.num_steps)]
        """Exchanges of gradients to columns, by the step that pushed the rows."""
        self._returning: dict[tuple[int, int], list[int]] = {}
        self._num_syncs = 0
        self._buckets: list[tuple[int, int, int, int]] = []
        """Gradient sums under way: current task, bytes, step and number of remaining phases."""

    def run(self) -> None:
        """Add all tasks."""
        actions = self.program.stages[self.stage]
        last = max((i for i, a in enumerate(actions) if a.kind is ActionKind.BACKWARD), default=-1)
        last_step = max((i for i, a in enumerate(actions) if a.kind is ActionKind.STEP), default=-1)
        self._last = dict.fromkeys(self.shards, -1)
        self._waits = {shard: [] for shard in self.shards}
        begins = [self.costs.begin_s(self.stage, shard) for shard in self.shards]
        self._device(TaskKind.BEGIN, begins)
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
                self._step(index == last_step)
            else:
                self._probe(action)

    def _step(self, is_last: bool) -> None:
        self._finish_gradient_sums()
        if self.program.consistency.max_versions_behind == 0:
            self._sync()
        updates = [self.costs.update_s(self.stage, shard) for shard in self.shards]
        self._device(TaskKind.STEP, updates)
        if is_last:
            self._sync()

    def _finish_s(self, action: Action, shard: int, is_last: bool) -> float:
        """Return the time for the features' weight after a B: of all chunks, or of its own."""
        if self.program.steps_by_chunk:
            share = (action.steps[0] == 0) / self.program.chunks
        else:
            share = float(is_last)
        return share * self.costs.finish_s(self.stage, shard) if share else 0.0

    def _device(
        self, kind: TaskKind, durations_s: list[float], position: int = -1, step: int = -1
    ) -> None:
        chunk = self._chunk(position)
        for shard, time_s in zip(self.shards, durations_s, strict=True):
            what = Task(kind, self.stage, shard, position, chunk, step)
            before = tuple(self._waits[shard])
            self._waits[shard].clear()
            self._last[shard] = self.tasks.add(what, self.ranks[shard], time_s, before)

    def _wait(self, *tasks: int) -> None:
        for waits in self._waits.values():
            waits += tasks

    def _probe(self, action: Action) -> None:
        if action.kind.is_pass:
            self._wait_for_messages(Direction.FORWARD, action.position)
        kind = TaskKind(action.kind)
        each = [self.costs.probe_s(kind, self.stage, shard) for shard in self.shards]
        has_sums = action.kind is ActionKind.FORECAST and len(self.ranks) > 1
        sums = self.costs.fit_bytes(self.stage) if has_sums else ()
        # Work and sums alternate: the fit of each aggregation needs the one before.
        parts = [time_s / (len(sums) + 1) for time_s in each]
        for size in sums:
            self._device(kind, parts, action.position)
            self._reduce(TaskKind.REDUCE_FIT, size, action.position, action.position)
        self._device(kind, parts, action.position)

    def _step_times(self, way: Direction, chunk: int, step: int) -> list[float]:
        return [self.costs.step_s(way, self.stage, shard, chunk, step) for shard in self.shards]

    def _forward(self, action: Action) -> None:
        chunk = self.order[action.position]
        if action.steps[0] == 0:
            self._wait_for_messages(Direction.FORWARD, action.position)
        if len(self.ranks) == 1:
            self._all_steps(action)
            return
        for step in range(*action.steps):
            if step:
                self._wait(*self._pushed[step - 1])
                self._pushed[step - 1].clear()
            each = self._step_times(Direction.FORWARD, chunk, step)
            if self.costs.has_columns(self.stage, step - 1):
                each = self._product(action.position, step, each)
            self._device(TaskKind.FORWARD, each, action.position, step)
            if step < self.num_steps - 1:
                self._sum_means(action.position, step)
                pushed = self._exchange(Direction.FORWARD, action.position, step)
                if self.overlap:
                    self._pushed[step] += pushed
                else:
                    self._wait(*pushed)

    def _product(self, position: int, step: int, each: list[float]) -> list[float]:
        """Add the products with columns that ``step`` begins with; return the rest of its times."""
        chunk = self.order[position]
        products = [
            self.costs.product_s(self.stage, shard, chunk, step - 1) for shard in self.shards
        ]
        self._device(TaskKind.PRODUCT, products, position, step)
        self._wait(self._move_columns(ColumnMove.READ_TO_ROWS, position, step - 1))
        return [whole - part for whole, part in zip(each, products, strict=True)]

    def _all_steps(self, action: Action, is_last: bool | None = None) -> None:
        """Run all steps as one task: with one shard no rows are exchanged between them."""
        chunk, way = self.order[action.position], action.kind.direction
        steps = range(*action.steps)
        time_s = sum(self.costs.step_s(way, self.stage, 0, chunk, step) for step in steps)
        if is_last is not None:
            time_s += self._finish_s(action, 0, is_last)
        step = steps[0] if len(steps) == 1 else -1
        self._device(TaskKind(action.kind), [time_s], action.position, step)

    def _backward(self, action: Action, following: Action | None, is_last: bool) -> None:
        chunk = self.order[action.position]
        if action.steps[1] == self.num_steps:
            self._wait_for_messages(Direction.BACKWARD, action.position)
        if len(self.ranks) == 1:
            self._all_steps(action, is_last)
            return
        repeat = following if action.is_repeated_by(following) else None
        for step in reversed(range(*action.steps)):
            each = self._step_times(Direction.BACKWARD, chunk, step)
            if step < self.num_steps - 1:
                self._pull(action.position, step, repeat)
                own = self._pull_times(chunk, step)
                each = [whole - part for whole, part in zip(each, own, strict=True)]
            if step == action.steps[0]:
                extra = [self._finish_s(action, shard, is_last) for shard in self.shards]
                each = [time_s + more for time_s, more in zip(each, extra, strict=True)]
            self._device(TaskKind.BACKWARD, each, action.position, step)
            if step:
                self._sum_means(action.position, step - 1)
            if self.costs.has_columns(self.stage, step - 1):
                move = ColumnMove.READ_TO_COLUMNS
                self._recorded[step - 1].append(self._move_columns(move, action.position, step - 1))

    def _pull_times(self, chunk: int, step: int) -> list[float]:
        return [self.costs.pull_s(self.stage, shard, chunk, step) for shard in self.shards]

    def _pull(self, position: int, step: int, repeat: Action | None) -> None:
        """Add the pull of the rows that a step pushed; ``repeat``: the same step of another chunk.

        The product for own rows runs while gradients of halo rows are exchanged. Products with
        columns run before their result is exchanged.
        """
        has_columns = self.costs.has_columns(self.stage, step)
        arriving = self._returning.pop((position, step), None)
        if arriving is None:
            arriving = self._start_pull(position, step)
        if not self.overlap:
            self._wait(*arriving)
        if not has_columns:
            own = self._pull_times(self.order[position], step)
            self._device(TaskKind.PULL, own, position, step)
        if self.overlap:
            self._wait(*arriving)
            if repeat is not None:
                self._returning[repeat.position, step] = self._start_pull(repeat.position, step)

    def _start_pull(self, position: int, step: int) -> list[int]:
        """Add the exchanges that a pull waits for, and return them."""
        arriving = []
        if self.costs.has_columns(self.stage, step):
            self._wait(*self._recorded[step])
            self._recorded[step].clear()
            own = self._pull_times(self.order[position], step)
            self._device(TaskKind.PULL, own, position, step)
            arriving = [self._move_columns(ColumnMove.PUSHED_TO_ROWS, position, step)]
        return [*self._exchange(Direction.BACKWARD, position, step), *arriving]

    def _exchange(self, way: Direction, position: int, step: int) -> list[int]:
        """Add and return the exchange of a step; nothing if the step pushes only for means."""
        if not self.costs.has_exchange(way, self.stage, step):
            return []
        chunk = self.order[position]
        sizes = [
            self.costs.exchange_bytes(way, self.stage, shard, chunk, step) for shard in self.shards
        ]
        return [self._all_to_all(way, position, step, sizes)]

    def _move_columns(self, move: ColumnMove, position: int, step: int) -> int:
        """Add and return an exchange of the rows of a step that travel by columns."""
        is_forward = move in (ColumnMove.PUSHED_TO_COLUMNS, ColumnMove.READ_TO_ROWS)
        way, chunk = Direction.FORWARD if is_forward else Direction.BACKWARD, self.order[position]
        sizes = [
            self.costs.column_bytes(move, self.stage, shard, chunk, step) for shard in self.shards
        ]
        return self._all_to_all(way, position, step, sizes)

    def _all_to_all(self, way: Direction, position: int, step: int, sizes: Sequence[int]) -> int:
        """Add and return an exchange in which each shard with tasks sends ``sizes`` bytes."""
        sent = sum(sizes) * len(self.ranks) // len(sizes)
        chunk = self.order[position]
        what = Task(EXCHANGES[way], self.stage, -1, position, chunk, step, size_bytes=sent)
        # The shards without tasks send no more than those that stand for them.
        all_sizes = [*sizes, *[0] * (len(self.ranks) - len(sizes))]
        time_s = self.costs.exchange_s(self.stage, all_sizes)
        return self._add_collective(what, time_s, max(sizes))

    def _add_collective(
        self, what: Task, time_s: float, sent_bytes: float, before: tuple[int, ...] = ()
    ) -> int:
        """Add a task of all shards; each fills its ports for ``sent_bytes``, out and in."""
        link = self.tasks.open(self.costs.group(self.stage), in_order=False)
        ranks = [self.ranks[shard] for shard in self.shards]
        ports = self._ports(ranks, ranks, time_s, sent_bytes)
        return self.tasks.add(what, link, time_s, (*self._last.values(), *before), *ports)

    def _ports(
        self, senders: Sequence[int], receivers: Sequence[int], time_s: float, sent_bytes: float
    ) -> tuple[tuple[int, ...], float]:
        """Return the ports of a transfer, and the seconds for which it fills them."""
        filled_s = min(self.costs.port_s(sent_bytes), time_s)
        if not filled_s:
            return (), 0.0
        names = [f"out of rank {rank}" for rank in senders]
        names += [f"into rank {rank}" for rank in receivers]
        ports = tuple(self.tasks.open(name, in_order=False) for name in names)
        return ports, filled_s

    def _sum_means(self, position: int, step: int) -> None:
        for size in self.costs.mean_bytes(self.stage, step):
            self._reduce(TaskKind.REDUCE_MEAN, size, position, self.order[position], step)

    def _sum_gradients(self, action: Action) -> None:
        size = self.costs.gradient_bytes(self.stage, action.steps)
        if self.overlap:
            self._next_phases()
            if size:
                self._add_phase(size, action.steps[0], (), self.costs.shard_sum_phases() - 1)
        elif size:
            self._reduce(TaskKind.REDUCE_GRADIENTS, size, step=action.steps[0])

    def _add_phase(self, size: int, step: int, before: tuple[int, ...], remaining: int) -> None:
        phases = self.costs.shard_sum_phases()
        sent = self.costs.shard_sum_bytes(self.stage, size) // phases
        what = Task(TaskKind.REDUCE_GRADIENTS, self.stage, step=step, size_bytes=sent)
        time_s = self.costs.shard_sum_s(self.stage, size) / phases
        task = self._add_collective(what, time_s, sent / len(self.ranks), before)
        self._buckets.append((task, size, step, remaining))

    def _next_phases(self) -> None:
        """Start the next phase of every bucket that has one, after its current phase."""
        buckets, self._buckets = self._buckets, []
        for task, size, step, remaining in buckets:
            if remaining:
                self._wait(task)
                self._add_phase(size, step, (task,), remaining - 1)
            else:
                self._buckets.append((task, size, step, remaining))

    def _finish_gradient_sums(self) -> None:
        while any(remaining for *_, remaining in self._buckets):
            self._next_phases()
        self._wait(*(task for task, *_ in self._buckets))
        self._buckets.clear()

    def _reduce(
        self, kind: TaskKind, size: int, position: int = -1, chunk: int = -1, step: int = -1
    ) -> None:
        sent = self.costs.shard_sum_bytes(self.stage, size)
        what = Task(kind, self.stage, -1, position, chunk, step, size_bytes=sent)
        time_s = self.costs.shard_sum_s(self.stage, size)
        self._wait(self._add_collective(what, time_s, sent / len(self.ranks)))

    def _sync(self) -> None:
        """Wait for all ranks; the first stage adds the task."""
        position = self._num_syncs
        self._num_syncs += 1
        if self.program.placement.num_ranks == 1:
            return
        if len(self.syncs) == position:
            what = Task(TaskKind.SYNC, -1, position=position)
            place = self.tasks.open("all ranks", in_order=False)
            self.syncs.append(self.tasks.add(what, place, self.costs.sync_s()))
        task = self.syncs[position]
        # Gradient sums end before the all-reduce starts.
        pending = dict.fromkeys(other for waits in self._waits.values() for other in waits)
        self.tasks.before[task] = (*self.tasks.before[task], *self._last.values(), *pending)
        self._wait(task)

    def _wait_for_messages(self, way: Direction, position: int) -> None:
        """Make the next task on each device wait for the messages posted for this chunk."""
        for message in self._arriving.pop((way, position), ()):
            for part in message:
                self._waits[part.target].append(part.task)

    def _receive(self, action: Action) -> None:
        message = self._message(action.kind.direction, action.peer, self.stage, action.position)
        # Without overlap this dependency would deadlock stages that skip others.
        if self.overlap:
            for part in message:
                posted = self._last[part.target]
                self.tasks.before[part.task] = (*self.tasks.before[part.task], posted)
        self._arriving[action.kind.direction, action.position].append(message)

    def _send(self, action: Action) -> None:
        message = self._message(action.kind.direction, self.stage, action.peer, action.position)
        for part in message:
            sender = self._last[part.source]
            self.tasks.before[part.task] = (sender, *self.tasks.before[part.task])
            if not self.overlap:
                self._waits[part.source].append(part.task)

    def _message(self, way: Direction, source: int, target: int, position: int) -> list[_Part]:
        """Return the parts of a message; the first of its send and receive adds their tasks."""
        key = way, source, target, position
        if key not in self.messages:
            pairs = [(i, j) for i, j in self.costs.message_pairs(source, target) if self._has(i, j)]
            self.messages[key] = [_Part(self._message_task(*key, pair), *pair) for pair in pairs]
        return self.messages[key]

    def _has(self, shard: int, other: int) -> bool:
        return not self.has_lanes or (shard in self.shards and other in self.shards)

    def _message_task(
        self, way: Direction, source: int, target: int, position: int, pair: tuple[int, int]
    ) -> int:
        chunk = self._chunk(position)
        size = self.costs.message_bytes(way, source, target, pair, chunk)
        placement = self.program.placement
        ranks = placement.rank(source, pair[0]), placement.rank(target, pair[1])
        link = self.tasks.open(self.costs.link(*ranks), in_order=False)
        time_s = self.costs.message_s(*ranks, size)
        what = Task(
            SENDS[way],
            source,
            pair[0],
            position,
            chunk,
            peer=target,
            peer_shard=pair[1],
            size_bytes=size,
        )
        ports = self._ports(ranks[:1], ranks[1:], time_s, size)
        return self.tasks.add(what, link, time_s, (), *ports)

    def _chunk(self, position: int) -> int:
        """The chunk at a position; a ``SpecialPosition`` is returned unchanged."""
        return self.order[position] if position >= 0 else position

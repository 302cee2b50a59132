"""The processes of a run, before they are assigned to stages and shards.

A ``World`` has the operations that setup needs: agreeing on errors and sharing plain objects. A
single process has no process group. Only this file and ``mesh`` make process groups.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gnnpipe.errors import IdleRank, InputError
from gnnpipe.output import say
from gnnpipe.runtime.comm.cpu_affinity import on_own_cores
from gnnpipe.runtime.comm.launch import (
    check_rendezvous,
    disable_flight_recorder,
    keep_ranks,
    launched_local_rank,
    launched_rank,
    launched_world_size,
    use_loopback,
)
from gnnpipe.runtime.comm.machine_links import connect
from gnnpipe.runtime.comm.shared_memory import SharedMemoryLink
from gnnpipe.runtime.comm.start_thread import StartThread

SETUP_TIMEOUT_S = 7200.0
"""Longest wait of ranks for one another outside epochs; a rank that dies ends the wait at once."""

_WAIT_S = 20.0
"""Longest wait for the other ranks of a rank that has the wrong number of ranks."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float = 120.0
    """Longest wait of ranks for one another inside epochs."""
    control_group: dist.ProcessGroup | None = None
    """All ranks over gloo, for plain objects; its timeout is long: reading a graph takes long.
    ``None`` without other processes (a single rank, or a profile that acts as one of several)."""
    own_group: dist.ProcessGroup | None = None
    """The default group, if this class made it; ``None`` if the user's own script did."""
    links: Mapping[int, SharedMemoryLink] = field(default_factory=dict, compare=False)
    """By rank, the links to the other ranks of this machine; none between GPUs."""

    @classmethod
    def meet(
        cls,
        num_ranks: int,
        device: str = "auto",
        timeout_s: float = 120.0,
        shape: str = "plan",
        settings: Mapping[str, object] | None = None,
        remedy: str = "",
    ) -> World:
        """Join the other processes; ``InputError`` if there are not ``num_ranks`` of them.

        ``shape``: the setting that determines ``num_ranks``, and ``remedy`` what to try, for the
        error message ('': another grid). ``settings``: values by flag that all ranks must have in
        common; ``InputError`` on every rank otherwise.
        """
        found, wrong = launched_world_size(), None
        if found != num_ranks:
            remedy = remedy or f"make stages x shards {found}"
            wrong = _wrong_number(num_ranks, found, shape, remedy)
        # Ranks with another shape still join, so that the others learn of it and do not wait.
        is_launched = dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ
        if wrong is not None and (found == 1 or not is_launched):
            raise wrong
        if found == 1:
            return cls(0, 1, _device(device, None), timeout_s)
        own_group = None
        has_gpus = device != "cpu" and torch.cuda.is_available()
        if not has_gpus:
            disable_flight_recorder()
        if not dist.is_initialized():
            check_rendezvous()
            use_loopback()
            backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
            try:
                _init_process_group(backend, timedelta(seconds=timeout_s if not wrong else _WAIT_S))
            except RuntimeError as error:
                raise wrong or error from None
            own_group = dist.group.WORLD
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=SETUP_TIMEOUT_S))
        groups = control, own_group
        world = cls(dist.get_rank(), found, torch.device("cpu"), timeout_s, *groups)
        world.leave_at_exit()
        try:
            world.agree_on(settings or {})
            world.agree(wrong)
        except InputError:
            world.leave()
            raise
        try:
            place, fault = _device(device, launched_local_rank()), None
        except InputError as error:
            place, fault = world.device, error
        world.agree(fault)
        if place.type == "cuda":
            torch.cuda.set_device(place)
            return replace(world, device=place)
        return replace(world, links=connect(world.rank, world.gather, timeout_s))

    @classmethod
    def alone(cls) -> World:
        """Return the world of a single CPU process without process groups, for reports."""
        return cls(0, 1, torch.device("cpu"))

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all ranks, in float64."""
        if self.control_group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return list(total.tolist())

    def gather(self, thing: Any) -> list[Any]:
        """Return a small picklable object of every rank, by rank, on every rank."""
        if self.control_group is None:
            return [thing]
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, thing, group=self.control_group)
        return things

    def collect(self, thing: Any) -> list[Any]:
        """Return a picklable object of every rank, by rank, on rank 0; an empty list elsewhere."""
        if self.control_group is None:
            return [thing]
        things: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(thing, things, dst=0, group=self.control_group)
        return things or []

    def share(self, thing: Any, source: int = 0) -> Any:
        """Return the object of the rank ``source`` on every rank."""
        if self.control_group is None:
            return thing
        box = [thing if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self.control_group)
        return box[0]

    def agree(self, error: InputError | None) -> None:
        """Raise the first rank's ``InputError`` on every rank, if any rank has one.

        Without this, a rank with a missing file would leave the others waiting for it.
        """
        faults = [(r, e) for r, e in enumerate(self.gather(str(error) if error else None)) if e]
        if not faults:
            return
        rank, text = faults[0]
        everywhere = len(faults) == self.world_size
        raise InputError(text if everywhere else f"rank {rank}: {text}")

    def agree_on(self, settings: Mapping[str, object]) -> None:
        """Raise ``InputError`` on every rank if a rank has another value of a setting than rank 0.

        ``settings``: values by flag.
        """
        first, *others = self.gather(dict(settings))
        for rank, other in enumerate(others, start=1):
            apart = [name for name in first | other if first.get(name) != other.get(name)]
            if apart:
                texts = [
                    f"{n} {first.get(n)} on rank 0, {other.get(n)} on rank {rank}" for n in apart
                ]
                raise InputError(f"{'; '.join(texts)}: start every rank with the same settings")

    @property
    def can_shrink(self) -> bool:
        """Whether ``keep`` may leave out ranks: not if the user's script made the group."""
        return self.own_group is not None

    @property
    def has_left(self) -> bool:
        """Whether the process groups were closed, by ``leave`` or by ``keep``."""
        return self.own_group is not None and self.own_group is not dist.group.WORLD

    def keep(self, count: int, is_quiet: bool = False) -> World:
        """Close the groups and return the world of the first ``count`` ranks, on these ranks.

        Every rank must call this. Later runs of this process also have these ranks only.

        Raises:
            IdleRank: On every other rank, after a line for the user unless ``is_quiet``.
            InputError: There are fewer ranks, or none may be left out.
        """
        if count == self.world_size:
            return self
        if count > self.world_size or not self.can_shrink:
            raise InputError(
                f"plan: needs {_ranks(count)}, and the world has {_ranks(self.world_size)}; start "
                f"{_ranks(count)}, or plan anew (--plan auto)"
            )
        self.gather(None)  # no message is in transit
        # The new group needs the store of this group.
        store = dist.distributed_c10d._get_default_store()
        self.leave()
        if self.rank >= count:
            uses = f"the plan uses {count} of {_ranks(self.world_size)}"
            say(f"rank {self.rank}: {uses}; this rank is not needed, and ends", is_quiet)
            raise IdleRank
        keep_ranks(count)
        if count == 1:
            return World(0, 1, self.device, self.timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=self.timeout_s),
            store=PrefixStore(f"first-{count}", store),
            rank=self.rank,
            world_size=count,
        )
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=SETUP_TIMEOUT_S))
        groups = control, dist.group.WORLD
        kept = World(self.rank, count, self.device, self.timeout_s, *groups)
        kept.leave_at_exit()
        if self.device.type == "cuda":
            return kept
        return replace(kept, links=connect(self.rank, kept.gather, self.timeout_s))

    def leave(self) -> None:
        """Close the links and process groups of this run.

        With a group of the user's script, both stay open: it may train again.
        """
        if self.own_group is None:
            return
        for link in self.links.values():
            link.close()
        if not self.has_left:
            dist.destroy_process_group()

    def leave_at_exit(self, start_thread: StartThread | None = None) -> None:
        """Register to leave at the end of the process, without keeping the groups until then."""
        group = None if self.own_group is None else weakref.ref(self.own_group)
        if self.world_size > 1:
            atexit.register(leave_at_exit, group, start_thread)

    @contextmanager
    def on_own_cores(self) -> Iterator[None]:
        """Keep ranks on CPUs to cores of their own inside the block (every rank must enter).

        Ranks whose process group the user's own script made stay where they are.
        """
        if self.own_group is None or self.device.type != "cpu":
            yield
            return
        with on_own_cores(self.rank, torch.get_num_threads(), self.gather):
            yield


def stay_at_exit() -> None:
    """Keep process groups open at exit, in a process that ends after an error that it caught."""
    atexit.unregister(leave_at_exit)


def leave_at_exit(
    group: weakref.ref[dist.ProcessGroup] | None, start_thread: StartThread | None
) -> None:
    """Stop the thread, and close all groups if ``group`` is still the default one.

    Nothing is done if an uncaught error ends the process. Connections that outlive the interpreter
    may abort the process after its work is done. After an error a message may still be in transit,
    and closing would wait for it. An ``InputError`` is raised on every rank, so no message is in
    transit.
    """
    fault = getattr(sys, "last_value", None)  # an uncaught exception
    if fault is None or isinstance(fault, InputError):
        if start_thread is not None:
            start_thread.close()
        own = None if group is None else group()
        if own is not None and own is dist.group.WORLD:
            dist.destroy_process_group()
        del own
        # A caught error may keep groups alive in a cycle with the frames of its traceback.
        gc.collect()


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """Make the default group, under a key prefix that no earlier group of these ranks had.

    The store outlives a group: under the same prefix, the ranks of a second group would find the
    addresses of the first group.
    """
    rank, world_size = launched_rank(), launched_world_size()
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    store = _store(*address, rank, world_size, timeout)
    times = store.add(f"gnnpipe/{rank}", 1)
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=PrefixStore(f"gnnpipe/group-{times}", store),
        rank=rank,
        world_size=world_size,
    )


@cache
def _store(address: str, port: str, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store of a launch of these ranks; it is kept.

    Without torchrun rank 0 hosts it, and other ranks may ask for it while rank 0 is between two
    groups.
    """
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store


def _wrong_number(wanted: int, found: int, shape: str, remedy: str) -> InputError:
    return InputError(
        f"{shape}: need {_ranks(wanted)}, not {found}; {remedy}, or type: {torchrun_line(wanted)}"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def torchrun_line(world_size: int) -> str:
    """Return the command that starts this command line on ``world_size`` ranks of this machine."""
    script, arguments = Path(sys.argv[0]), " ".join(sys.argv[1:])
    ours = script.name == "gnnpipe" or script.parent.name == "gnnpipe"
    if world_size == 1:
        return f"gnnpipe {arguments}" if ours else f"python {script} {arguments}".rstrip()
    program = "-m gnnpipe" if ours else str(script)
    return f"torchrun --nproc-per-node {world_size} {program} {arguments}".rstrip()


def _device(name: str, local_rank: int | None) -> torch.device:
    """Return the device of this rank: its own GPU if there is one, else the CPU.

    The GPU is chosen by the rank's number on this machine; a process that no launcher started takes
    torch's current GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU; try --device cpu")
    if (local_rank or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: rank {local_rank} has no GPU of its own "
            f"({torch.cuda.device_count()} here); start one rank per GPU or try --device cpu"
        )
    torch.cuda.init()  # type: ignore[no-untyped-call]  # memory queries do not always do this
    return torch.device("cuda", torch.cuda.current_device() if local_rank is None else local_rank)

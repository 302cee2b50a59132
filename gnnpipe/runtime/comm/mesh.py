"""Which rank this is: the only file that asks torch.distributed.

Ranks form a mesh with the axes ``stage`` and ``graph``: rank = stage * G + shard. A single rank
needs no process group at all, and then nothing in here talks to anybody.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from gnnpipe.errors import InputError
from gnnpipe.runtime.comm.cpu_affinity import on_own_cores, usable_cores
from gnnpipe.runtime.comm.launch import (
    check_meeting,
    keep_no_record,
    launched_local_rank,
    launched_world_size,
    stay_on_loopback,
)
from gnnpipe.runtime.comm.recorder import Recorder
from gnnpipe.runtime.comm.start_thread import StartThread

__all__ = ["Mesh", "stay_at_exit"]

SETUP_TIMEOUT_S = 7200.0
"""How long ranks wait for one another outside epochs; a rank that dies ends it at once."""


@dataclass(frozen=True)
class Mesh:
    """Place of this rank among S stages x G shards."""

    stages: int
    shards: int
    rank: int
    device: torch.device
    graph_group: dist.ProcessGroup | None
    """The ranks that share this stage; none when G = 1."""
    control_group: dist.ProcessGroup | None
    """All ranks over gloo, for plain objects; waits long, since reading and cutting take long.
    None: no other rank is there (a single rank, or a profile that plays one rank of several)."""
    saving_group: dist.ProcessGroup | None = None
    """All ranks over gloo, for the thread that writes checkpoints."""
    own_group: dist.ProcessGroup | None = None
    """All ranks, if they met here, and not before in the user's own script."""
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    start_thread: StartThread = field(default_factory=StartThread, compare=False)
    down_group: dist.ProcessGroup | None = None
    """The ranks of ``graph_group`` once more, over gloo connections of their own; none on GPUs."""

    @classmethod
    def join(cls, stages: int, shards: int, device: str = "auto", timeout_s: float = 120.0) -> Mesh:
        """Meet the other ranks. ``InputError`` if there are not S * G of them."""
        world = launched_world_size()
        if world != stages * shards:
            raise InputError(
                f"--stages {stages} --shards {shards}: need {_ranks(stages * shards)}, not "
                f"{world}; make stages x shards {world}, or type: {torchrun_line(stages * shards)}"
            )
        if world == 1:
            place = _device(device, None)
            return cls(stages, shards, 0, place, None, None, recorder=_recorder(place))
        own_group = None
        gpus = device != "cpu" and torch.cuda.is_available()
        if not gpus:
            keep_no_record()
        if not dist.is_initialized():
            check_meeting()
            stay_on_loopback()
            _meet("cpu:gloo,cuda:nccl" if gpus else "gloo", timedelta(seconds=timeout_s))
            own_group = dist.group.WORLD
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=SETUP_TIMEOUT_S))
        saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=SETUP_TIMEOUT_S))
        mesh = cls(
            stages, shards, dist.get_rank(), torch.device("cpu"), None, control, own_group=own_group
        )
        atexit.register(_leave, mesh)
        try:
            place, fault = _device(device, launched_local_rank()), None
        except InputError as error:
            place, fault = mesh.device, error
        mesh.agree(fault)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        grid = init_device_mesh(place.type, (stages, shards), mesh_dim_names=("stage", "graph"))
        group = grid.get_group("graph") if shards > 1 else None
        whole = cls(
            stages,
            shards,
            mesh.rank,
            place,
            group,
            control,
            saving,
            own_group,
            _recorder(place),
            StartThread(has_thread=place.type == "cpu"),
            _once_more(stages, shards, place, timeout_s),
        )
        atexit.register(_leave, whole)
        return whole

    @classmethod
    def alone(cls) -> Mesh:
        """One rank that talks to nobody, on the CPU; for reports about any shape."""
        return cls(1, 1, 0, torch.device("cpu"), None, None)

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.rank // self.shards

    @property
    def shard(self) -> int:
        """Shard of this rank."""
        return self.rank % self.shards

    @property
    def world_size(self) -> int:
        """S * G."""
        return self.stages * self.shards

    def peer(self, stage: int) -> int:
        """Rank that holds the same shard at another stage."""
        return stage * self.shards + self.shard

    def sum(self, values: list[float]) -> list[float]:
        """Element by element over all ranks, in float64."""
        if self.control_group is None:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return list(total.tolist())

    def gather(self, thing: Any) -> list[Any]:
        """A small picklable thing of every rank, by rank, on every rank."""
        if self.control_group is None:
            return [thing]
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, thing, group=self.control_group)
        return things

    def collect(self, thing: Any) -> list[Any]:
        """A picklable thing of every rank, by rank, on rank 0; an empty list elsewhere."""
        if self.control_group is None:
            return [thing]
        things: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(thing, things, dst=0, group=self.control_group)
        return things or []

    def share(self, thing: Any) -> Any:
        """Rank 0's thing, on every rank."""
        if self.control_group is None:
            return thing
        box = [thing if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return box[0]

    def agree(self, error: InputError | None) -> None:
        """End every rank with the first rank's ``InputError``, if any rank has one.

        Without this, one rank with a missing file would leave the others waiting for it.
        """
        faults = [(r, e) for r, e in enumerate(self.gather(str(error) if error else None)) if e]
        if not faults:
            return
        rank, text = faults[0]
        everywhere = len(faults) == self.world_size
        raise InputError(text if everywhere else f"rank {rank}: {text}")

    def leave(self) -> None:
        """Part from the other ranks in good order; a process group of the user's own remains."""
        self.start_thread.close()
        if self.own_group is not None and self.own_group is dist.group.WORLD:
            dist.destroy_process_group()

    @contextmanager
    def on_own_cores(self) -> Iterator[frozenset[int]]:
        """Within, ranks on CPUs stay on cores of their own (every rank must enter).

        Gives the cores that were this process's before. Ranks that met in the user's own script
        are left where they are.
        """
        if self.own_group is None or self.device.type != "cpu":
            yield usable_cores()
            return
        with on_own_cores(self.rank, torch.get_num_threads(), self.gather) as before:
            yield before


def stay_at_exit() -> None:
    """Of a process that ends by a fault which it has caught: see ``_leave``."""
    atexit.unregister(_leave)


def _leave(mesh: Mesh) -> None:
    """Part when the process ends, if it does not end by a fault of its own.

    Connections that are still there when the interpreter has gone may abort the process, behind all
    that it had to do. After a fault something may be on its way, and would be waited for. What was
    wrong with the input is wrong on every rank.
    """
    fault = getattr(sys, "last_value", None)  # what nobody has caught
    if fault is None or isinstance(fault, InputError):
        mesh.leave()
        # An error that was caught may hold groups in a circle with the frames that it went through.
        gc.collect()


def _once_more(
    stages: int, shards: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup | None:
    """A second group of the shards of this rank's stage. Every rank makes those of all stages."""
    if shards == 1 or device.type != "cpu":
        return None
    groups: list[dist.ProcessGroup] = [
        dist.new_group(
            list(range(s * shards, (s + 1) * shards)), timedelta(seconds=timeout_s), "gloo"
        )
        for s in range(stages)
    ]
    return groups[dist.get_rank() // shards]


def _meet(backend: str, timeout: timedelta) -> None:
    """Make the process group, under a name that no group of these ranks had before.

    torchrun's store outlives a group: under the same name the ranks of a second one would find the
    addresses of the first.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    times = store.add(f"gnnpipe/{rank}", 1)
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=PrefixStore(f"gnnpipe/group-{times}", store),
        rank=rank,
        world_size=world_size,
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def torchrun_line(world_size: int) -> str:
    """The command that starts what was typed on ``world_size`` ranks of this machine."""
    script, arguments = Path(sys.argv[0]), " ".join(sys.argv[1:])
    ours = script.name == "gnnpipe" or script.parent.name == "gnnpipe"
    if world_size == 1:
        return f"gnnpipe {arguments}" if ours else f"python {script} {arguments}".rstrip()
    program = "-m gnnpipe" if ours else str(script)
    return f"torchrun --nproc-per-node {world_size} {program} {arguments}".rstrip()


def _recorder(device: torch.device) -> Recorder:
    return Recorder(is_on=device.type == "cpu")


def _device(name: str, local_rank: int | None) -> torch.device:
    """The device of this rank: its own GPU where there is one, else the CPU.

    By its number among the ranks of this machine; without one the GPU that is torch's current one,
    which all is started on that does not name another.
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
    torch.cuda.init()  # type: ignore[no-untyped-call]  # not every question about its memory does
    return torch.device("cuda", torch.cuda.current_device() if local_rank is None else local_rank)

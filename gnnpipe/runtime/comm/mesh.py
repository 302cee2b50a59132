"""The position of this rank in a plan: its stage, its shard and its process groups."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from datetime import timedelta

import torch.distributed as dist

from gnnpipe.collectives import DEFAULT_COLLECTIVES, Collectives
from gnnpipe.plan import Placement
from gnnpipe.runtime.comm.recorder import Recorder
from gnnpipe.runtime.comm.shared_memory import SharedMemoryLink
from gnnpipe.runtime.comm.start_thread import StartThread
from gnnpipe.runtime.comm.world import World


@dataclass(frozen=True, kw_only=True)
class Mesh(World):
    """A ``World`` whose ranks have been assigned to stages and shards."""

    placement: Placement
    collectives: Collectives = DEFAULT_COLLECTIVES
    graph_group: dist.ProcessGroup | None = None
    """The ranks that share this stage; ``None`` for a single rank."""
    down_group: dist.ProcessGroup | None = None
    """The ranks of ``graph_group`` again, over gloo connections of their own, so that two halo
    exchanges run at once; ``None`` on GPUs."""
    backward_group: dist.ProcessGroup | None = None
    """All ranks again, for gradients of other stages, on GPUs: NCCL runs the messages of two ranks
    and a group in the order in which both have started them. ``None`` over gloo, which has tags."""
    recorder: Recorder = field(default_factory=Recorder, compare=False)
    start_thread: StartThread = field(default_factory=StartThread, compare=False)

    @classmethod
    def of(
        cls, world: World, placement: Placement, collectives: Collectives = DEFAULT_COLLECTIVES
    ) -> Mesh:
        """Assign ranks to stages and shards and make the groups; every rank must call this."""
        if isinstance(world, Mesh) and world.placement == placement:
            same = world.collectives == collectives
            return world if same else replace(world, collectives=collectives)
        is_cpu = world.device.type == "cpu"
        given = {f.name: getattr(world, f.name) for f in fields(World)}
        mesh = cls(
            **given,
            placement=placement,
            collectives=collectives,
            graph_group=_stage_group(world, placement, None),
            down_group=_stage_group(world, placement, "gloo") if is_cpu else None,
            backward_group=None if is_cpu else _backward_group(world, placement),
            recorder=Recorder(is_on=is_cpu),
            start_thread=StartThread(has_thread=is_cpu and world.world_size > 1),
        )
        mesh.leave_at_exit(mesh.start_thread)
        return mesh

    @classmethod
    def join(cls, stages: int, shards: int, device: str = "auto", timeout_s: float = 120.0) -> Mesh:
        """Join the other processes in a grid of S stages of G shards."""
        placement = Placement.grid(stages, shards)
        shape = f"--stages {stages} --shards {shards}"
        return cls.of(World.meet(placement.num_ranks, device, timeout_s, shape), placement)

    @classmethod
    def alone(cls) -> Mesh:
        """Return the mesh of a single CPU rank without process groups, for reports."""
        return cls.of(World.alone(), Placement.grid(1, 1))

    @property
    def stages(self) -> int:
        """S."""
        return self.placement.num_stages

    @property
    def shards(self) -> int:
        """G of this rank's stage."""
        return len(self.placement.group(self.rank))

    @property
    def shard_links(self) -> list[SharedMemoryLink | None] | None:
        """The links to the shards of this stage, with ``None`` at the place of this shard.

        ``None`` if a shard is on another machine.
        """
        group = self.placement.group(self.rank)
        if any(rank not in self.links for rank in group if rank != self.rank):
            return None
        return [self.links.get(rank) for rank in group]

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.placement.stage(self.rank)

    @property
    def shard(self) -> int:
        """The shard of this rank."""
        return self.placement.shard(self.rank)

    def close_groups(self) -> None:
        """Stop the thread that starts messages, and destroy the process groups that ``of`` made.

        The groups of the world stay open. Not for a mesh that ``of`` returned unchanged.
        """
        self.start_thread.close()
        for group in (self.graph_group, self.down_group, self.backward_group):
            if group is not None:
                dist.destroy_process_group(group)

    def leave(self) -> None:
        """Stop the thread that starts messages, and close the process groups."""
        self.start_thread.close()
        super().leave()


def _backward_group(world: World, placement: Placement) -> dist.ProcessGroup | None:
    """Return the group of all ranks for gradients of other stages, if there are several stages."""
    if placement.num_stages == 1 or world.world_size == 1:
        return None
    ranks, timeout = list(range(world.world_size)), timedelta(seconds=world.timeout_s)
    group: dist.ProcessGroup = dist.new_group(ranks, timeout)
    return group


def _stage_group(
    world: World, placement: Placement, backend: str | None
) -> dist.ProcessGroup | None:
    """Return the group of this rank's stage. Every rank must make the groups of all stages."""
    own: dist.ProcessGroup | None = None
    for ranks in placement.stages:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timedelta(seconds=world.timeout_s), backend)
            own = group if world.rank in ranks else own
    return own

"""The shards of a stage take the same steps; if they differ, a machine computes wrong."""

from __future__ import annotations

import zlib

from gnnpipe.errors import FailedError
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import Assembly

__all__ = ["check_same_weights"]


def check_same_weights(assembly: Assembly, mesh: Mesh, epoch: int) -> None:
    """``FailedError`` on every rank if two shards of a stage hold other weights; from 0."""
    digest = 0
    for _, tensor in assembly.executor.stage.piece.named_state():
        digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), digest)
    everyone = mesh.gather(digest)
    for rank, found in enumerate(everyone):
        first = rank // mesh.shards * mesh.shards
        if found != everyone[first]:
            raise FailedError(
                f"epoch {epoch + 1}: ranks {first} and {rank} hold other weights of stage "
                f"{rank // mesh.shards}; one of them computes wrong. Go on with --resume, "
                "without that machine"
            )

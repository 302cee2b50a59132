"""Finds the first stage, op and chunk with NaN or infinite values, after an epoch has failed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from torch import Tensor

from gnnpipe.errors import FailedError
from gnnpipe.models import Values
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import RankRuntime
from gnnpipe.train.evaluate import results_by_chunk


def check_same_weights(rank_runtime: RankRuntime, mesh: Mesh, epoch: int) -> None:
    """``FailedError`` on every rank if shards of a stage hold different weights after an epoch."""
    digest = 0
    for _, tensor in rank_runtime.executor.stage.stage_module.named_state():
        digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), digest)
    everyone = mesh.gather(digest)
    for rank, found in enumerate(everyone):
        first = mesh.placement.group(rank)[0]
        if found != everyone[first]:
            raise FailedError(
                f"epoch {epoch + 1}: ranks {first} and {rank} hold other weights of stage "
                f"{mesh.placement.stage(rank)}; one of them computes wrong. Go on with --resume, "
                "without that machine"
            )


def find_fault(
    rank_runtime: RankRuntime, mesh: Mesh, first_epoch: int, losses: Sequence[float]
) -> str:
    """Describes the first NaN or infinite values: epoch (from 1), stage, op and chunk.

    Runs a forward pass with the current weights and without dropout. If all rows are finite, the
    fault lies in dropout or backward, and a weight with a NaN gradient is named. The same text on
    every rank.

    Args:
        rank_runtime: This rank's part.
        mesh: The ranks.
        first_epoch: First epoch (from 0) of the program.
        losses: Of its epochs.
    """
    stage = rank_runtime.executor.stage
    found: list[tuple[int, int, int]] = []

    def watch(chunk: int, step: int, made: Values) -> None:
        if not all(map(_is_finite, made.values())):
            found.append((mesh.stage, step, chunk))

    stage.watch = watch
    try:
        results_by_chunk(rank_runtime)
    finally:
        stage.watch = None
    names = [[a.name for a in one] for one in stage.stage_module.rounds]
    first = min(found, default=None)
    mine: tuple[tuple[int, int, int], str] | None = None
    if first is not None:
        # A step ends with the rows that it pushes; the last step follows the last aggregation.
        step = min(first[1], len(names) - 1)
        where = f", op {', '.join(names[step])}" if names else ""
        mine = first, f"stage {first[0]}{where}, chunk {first[2]}"
    executor = rank_runtime.executor
    everyone = mesh.gather((mine, executor.grad_clip.faulty, executor.faulty_losses))
    passes = [one for one in mesh.gather(executor.fault_pass) if one is not None]
    later = min(passes, default=0) // executor.num_chunks
    loss = losses[later]
    rows = [place for place, _, _ in everyone if place is not None]
    grads = [(rank, name) for rank, (_, names, _) in enumerate(everyone) for name in names]
    faulty_losses = [loss for _, _, found in everyone for loss in found]
    what = f"the loss is {loss}" if not math.isfinite(loss) else "gradients are NaN or infinite"
    where = ""
    if rows:
        where = f", first in {min(rows)[1]}"
    elif faulty_losses and not math.isfinite(loss):
        _, chunk = min(faulty_losses)
        where = f", first in the loss of chunk {chunk}"
    elif grads:
        # Backward starts at the last weights.
        rank, name = grads[-1]
        where = f", first in the gradient of {name} (stage {mesh.placement.stage(rank)})"
    return f"epoch {first_epoch + later + 1}: {what}{where}"


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())

"""Programs of schedules with steps by chunk, and the runs that they refuse."""

from __future__ import annotations

from collections.abc import Sequence

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.models import Model
from gnnpipe.plan import Plan, StageDag
from gnnpipe.schedule import SCHEDULES, CheckedProgram, training_program
from gnnpipe.setup.inputs import edges_are_random
from gnnpipe.setup.prepared import MOST_EPOCHS, epochs_to_flush

_SAME_WEIGHTS = frozenset({"stash", "2bw"})
"""Policies whose backward has the weights of forward."""


def check_edges(plan: Plan, model: Model) -> None:
    """``InputError`` if chunks of two epochs are in flight and the model draws edges by epoch."""
    if SCHEDULES[plan.schedule].spans_epochs and edges_are_random(model):
        raise InputError(
            f"--schedule {plan.schedule}: the model draws other edges in every epoch, and chunks "
            "of two epochs are in flight; try --schedule 1f1b"
        )


def program_by_chunk(
    config: TrainConfig, dag: StageDag, buckets: Sequence[Sequence[int]]
) -> CheckedProgram:
    """Returns the longest program up to a flush of a schedule with steps by chunk.

    ``InputError`` if a setting does not fit its version gaps.
    """
    plan = dag.plan
    spans = SCHEDULES[plan.schedule].spans_epochs
    epochs = epochs_to_flush(config, plan.chunks, 0, MOST_EPOCHS) if spans else 1
    found = training_program(
        dag,
        buckets,
        epochs=epochs,
        steps_every=config.steps_every,
        passes_ahead=config.passes_ahead,
    )
    if config.weights == "2bw" and found.largest_gap > 1:
        raise InputError(
            f"--weights 2bw: a stage makes up to {found.largest_gap} optimizer steps between "
            "forward and backward of a chunk, not 1; try --steps-every of at least the number of "
            "--stages, or --weights stash"
        )
    recomputing = (config.recompute or stage.recompute for stage in plan.stages)
    gaps = (max(gaps) for gaps in found.version_gaps)
    if config.weights not in _SAME_WEIGHTS and any(map(all, zip(recomputing, gaps, strict=True))):
        raise InputError(
            f"--recompute: with --schedule {plan.schedule} --weights {config.weights}, backward "
            "would compute forward again with other weights; leave it out, or try --weights stash"
        )
    return found

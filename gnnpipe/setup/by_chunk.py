"""Programs of schedules with steps by chunk, and the runs that they refuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gnnpipe.config import TrainConfig
from gnnpipe.config.settings import chunks_per_step
from gnnpipe.config.validation import check_schedule, check_staleness
from gnnpipe.errors import InputError
from gnnpipe.models import Model
from gnnpipe.optim.optimizers import OptimizerChoice
from gnnpipe.optim.predicted_step import check_predictable
from gnnpipe.optim.weight_policies import WEIGHT_POLICIES
from gnnpipe.plan import Plan, StageDag
from gnnpipe.planner.candidate import MAX_CHUNKS
from gnnpipe.schedule import SCHEDULES, CheckedProgram, training_program
from gnnpipe.setup.inputs import edges_are_random
from gnnpipe.setup.prepared import MOST_EPOCHS, epochs_to_flush


def partitioner_of(config: TrainConfig, plan: Plan) -> str:
    """Returns the partitioner; ``auto`` mixes parts if there are several steps an epoch."""
    if config.partitioner != "auto":
        return config.partitioner
    every = chunks_per_step(plan.schedule, plan.chunks, config.steps_every)
    return "mixed" if every < plan.chunks else "metis"


def check_edges(plan: Plan, model: Model) -> None:
    """``InputError`` if chunks of two epochs are in flight and the model draws edges by epoch."""
    if SCHEDULES[plan.schedule].spans_epochs and edges_are_random(model):
        raise InputError(
            f"--schedule {plan.schedule}: the model draws other edges in every epoch, and chunks "
            "of two epochs are in flight; try --schedule 1f1b"
        )


def why_not_async(config: TrainConfig, model: Model, optimizer: OptimizerChoice | None) -> str:
    """Returns why a search may not choose the schedule async; '' if it may.

    A search has the default ``--weights``. What a function ``optimizer`` returns is not known yet.
    """
    if edges_are_random(model):
        return "the model draws other edges in every epoch"
    try:
        check_staleness(config, MAX_CHUNKS, "async")
        check_schedule(config, MAX_CHUNKS, "async")
        check_optimizer(config, optimizer)
    except InputError as error:
        return str(error)
    return "--recompute: backward would have other weights" if config.recompute else ""


def check_optimizer(config: TrainConfig, optimizer: OptimizerChoice | None) -> None:
    """``InputError`` if ``--weights`` cannot predict the steps of the optimizer.

    What a function ``optimizer`` returns is not known yet; it is checked when it is called.
    """
    if not WEIGHT_POLICIES[config.weights].predicts_steps:
        return
    if optimizer is None:
        check_predictable(getattr(torch.optim, config.optimizer), f"--weights {config.weights}")
    elif isinstance(optimizer, type):
        check_predictable(optimizer, f"--weights {config.weights}")


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
            "forward and backward of a chunk, not 1; try --steps-every of at least "
            f"{found.most_in_flight - 1}, or --weights stash"
        )
    recomputing = (config.recompute or stage.recompute for stage in plan.stages)
    gaps = (max(gaps) for gaps in found.version_gaps)
    is_same = WEIGHT_POLICIES[config.weights].keeps_forward_weights
    if not is_same and any(map(all, zip(recomputing, gaps, strict=True))):
        raise InputError(
            f"--recompute: with --schedule {plan.schedule} --weights {config.weights}, backward "
            "would compute forward again with other weights; leave it out, or try --weights stash"
        )
    return found

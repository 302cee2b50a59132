"""Proves that optimizer steps follow complete gradients, and derives the version gaps of passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnnpipe.schedule.program import Action, ActionKind, Program, ProgramError


def check_optimizer_steps(stage: int, actions: Sequence[Action], program: Program) -> None:
    """Check that the stage has the promised number of STEPs, each after complete gradient sums.

    The last STEP must come after the last B. With steps by chunk, each STEP comes right after the
    backward of its pass, and all stages step after the same passes.
    """
    windows = list(_optimizer_windows(actions))
    promised = program.consistency.optimizer_steps
    kinds = [a.kind for a in actions if a.kind in (ActionKind.REDUCE_GRADIENTS, ActionKind.STEP)]
    ends_with_step = all(a.kind is not ActionKind.BACKWARD for a in windows[-1])
    count = len(windows) - 1
    if not count or not ends_with_step or (promised and promised * program.epochs != count):
        raise ProgramError(
            f"stage {stage}: must end with STEP after its last B, has "
            f"{' '.join(kinds) or 'nothing'}"
        )
    if any(a.kind is ActionKind.REDUCE_GRADIENTS for a in windows[-1]):
        raise ProgramError(f"stage {stage}: sums gradients after its last STEP")
    for window in windows[:-1]:
        _check_gradient_sums(stage, window, program)
    if program.steps_by_chunk:
        _check_steps_by_chunk(stage, actions, program)


def _optimizer_windows(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Yield the actions before the first STEP, between two STEPs, and after the last STEP."""
    window: list[Action] = []
    for a in actions:
        if a.kind is ActionKind.STEP:
            yield window
            window = []
        else:
            window.append(a)
    yield window


def _check_gradient_sums(stage: int, window: Sequence[Action], program: Program) -> None:
    """Check that each step's gradients are summed over the shards once, after their last B."""
    num_steps = program.num_steps[stage]
    sums = [(i, a) for i, a in enumerate(window) if a.kind is ActionKind.REDUCE_GRADIENTS]
    summed = [step for _, a in sums for step in range(*a.steps)]
    if sorted(summed) != list(range(num_steps if len(program.placement.stages[stage]) > 1 else 0)):
        raise ProgramError(
            f"stage {stage}: must sum the gradients of every step once over its shards, sums those "
            f"of steps {summed}"
        )
    for i, a in sums:
        later = [b.steps for b in window[i:] if b.kind is ActionKind.BACKWARD]
        if any(first < a.steps[1] and a.steps[0] < end for first, end in later):
            raise ProgramError(
                f"stage {stage}: {a.text(num_steps)} comes before its gradients are complete"
            )


def _check_steps_by_chunk(stage: int, actions: Sequence[Action], program: Program) -> None:
    """Check that the n-th STEP has the last of every K / STEPs passes, right after its last B."""
    num_steps, count = program.num_steps[stage], program.consistency.optimizer_steps
    every = program.chunks // (count or 1)
    expected, last = every - 1, Action(ActionKind.STEP, stage)
    for a in actions:
        if a.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            last = a
        if a.kind is not ActionKind.STEP:
            continue
        if a.position != expected or (last.kind, last.position) != (ActionKind.BACKWARD, expected):
            raise ProgramError(
                f"stage {stage}: {a.text(num_steps)} comes after {last.text(num_steps)}; the next "
                f"step must be that of pass {expected}, right after the backward of this pass"
            )
        expected += every


def check_version_gaps(stage: int, actions: Sequence[Action], program: Program) -> tuple[int, ...]:
    """Return the STEPs between the forward and the backward of every pass.

    ``ProgramError`` if a pass has more than the schedule promises.
    """
    promised = program.consistency.max_versions_behind
    version = 0
    version_of: dict[int, int] = {}
    gaps = [0] * program.passes
    for a in actions:
        if a.kind is ActionKind.STEP:
            version += 1
        elif a.kind is ActionKind.FORWARD:
            version_of.setdefault(a.position, version)
        elif a.kind is ActionKind.BACKWARD:
            gap = gaps[a.position] = version - version_of[a.position]
            if promised is not None and gap > promised:
                raise ProgramError(
                    f"stage {stage}: weights at {a.text(program.num_steps[stage])} are {gap} "
                    f"optimizer steps newer than at the chunk's F; the schedule promises at most "
                    f"{promised}"
                )
    return tuple(gaps)

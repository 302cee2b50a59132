"""Schedules and programs: the order of a run's actions, and the proof that the order is right.

To add a schedule, write a file that registers it (see ``schedule.schedules``) and import it here.
"""

from gnnpipe.schedule.check import CheckedProgram, check
from gnnpipe.schedule.lower import evaluation_program, training_program, with_forecast
from gnnpipe.schedule.program import (
    Action,
    ActionKind,
    Consistency,
    Direction,
    GradientScope,
    Program,
    ProgramError,
    SpecialPosition,
)
from gnnpipe.schedule.schedules import EXACT_SCHEDULE, SCHEDULES, Schedule

__all__ = [
    "EXACT_SCHEDULE",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "CheckedProgram",
    "Consistency",
    "Direction",
    "GradientScope",
    "Program",
    "ProgramError",
    "Schedule",
    "SpecialPosition",
    "check",
    "evaluation_program",
    "training_program",
    "with_forecast",
]

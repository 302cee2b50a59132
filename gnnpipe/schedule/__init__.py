"""WHEN it runs: actions, the orders that make a program of them, and the proof that it is right."""

from gnnpipe.schedule.check import ProgramReport, check
from gnnpipe.schedule.lower import evaluation_program, recall_actions, training_program
from gnnpipe.schedule.program import (
    PROBE_POSITIONS,
    Action,
    ActionKind,
    Direction,
    Program,
    SpecialPosition,
)

__all__ = [
    "PROBE_POSITIONS",
    "Action",
    "ActionKind",
    "Direction",
    "Program",
    "ProgramReport",
    "SpecialPosition",
    "check",
    "evaluation_program",
    "recall_actions",
    "training_program",
]

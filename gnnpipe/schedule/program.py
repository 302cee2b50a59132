"""Actions and programs: the one object that is checked, simulated and executed.

A program is a list of actions per stage; the shards of a stage all run the same list. Chunks appear
by their POSITION in the walk: which chunk stands there changes with every epoch's order, the
program does not.

A stage whose longest chain of aggregations is n long has n + 1 steps, cut where rows are pushed:
step 0 ends with the first pushes, step j aggregates what step j - 1 pushed and ends with the next,
step n ends with the stage's values. A stage of n layers has n + 1. An F or B covers a range of
steps.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROBE", "PROBES", "RECALLED", "Action", "Program"]

PROBE, RECALLED = -2, -3
"""Positions of the pilot rows with the current weights, which pass through the stages before the
chunks do, and of the same rows with the weights that are about to change."""

PROBES = (PROBE, RECALLED)


@dataclass(frozen=True)
class Action:
    """One thing a stage does.

    ``kind`` is F or B (compute), SEND_F, RECV_F, SEND_B, RECV_B (values forward, gradients back,
    without waiting), FORECAST (find out from the pilot rows where the stale rows go), CARRY (take
    them there), RECALL (what the next FORECAST has to know of this epoch's tables and weights),
    REDUCE_GRAD (begin to sum a bucket of gradients over the shards) or STEP (end that; optimizer).
    """

    kind: str
    stage: int
    position: int = -1
    """Place of the chunk in the walk; PILOT for FORECAST, CARRY and their values, RECALLED for
    RECALL and its, -1 for REDUCE_GRAD and STEP."""
    steps: tuple[int, int] = (0, 0)
    """F and B: first step, one past the last. B runs them from the last to the first. REDUCE_GRAD:
    the steps whose gradients it adds up."""
    peer: int = -1
    """SEND and RECV: the other stage."""

    def text(self, num_steps: int) -> str:
        """Short form as in torch.distributed.pipelining: ``2F0``; part of a stage ``2F0[1:2]``."""
        if self.kind in ("FORECAST", "CARRY", "RECALL", "STEP"):
            return f"{self.stage}{self.kind}"
        part = ""
        if self.kind in ("F", "B", "REDUCE_GRAD") and self.steps != (0, num_steps):
            part = f"[{self.steps[0]}:{self.steps[1]}]"
        if self.kind == "REDUCE_GRAD":
            return f"{self.stage}{self.kind}{part}"
        peer = f">{self.peer}" if "SEND" in self.kind else f"<{self.peer}" * ("RECV" in self.kind)
        place = {PROBE: "P", RECALLED: "R"}.get(self.position, str(self.position))
        return f"{self.stage}{self.kind}{place}{part}{peer}"


@dataclass(frozen=True)
class Program:
    """The actions of every stage, in order, for one epoch (or one evaluation)."""

    stages: tuple[tuple[Action, ...], ...]
    num_steps: tuple[int, ...]
    """Steps of each stage."""
    chunks: int
    shards: int = 1
    """Ranks that run each list; more than one add up their gradients."""
    is_exact: bool = False
    """No read is stale: the walk is layer by layer."""

    def text(self) -> str:
        """One line per stage, actions separated by blanks."""
        return "".join(
            f"stage {s}: " + " ".join(a.text(steps) for a in actions) + "\n"
            for s, (actions, steps) in enumerate(zip(self.stages, self.num_steps, strict=True))
        )

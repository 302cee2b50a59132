"""How an epoch answers when one thing takes a tenth less time.

Only what lies on the critical path can change it; how much is simulated, for another path may take
over before the tenth is gained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gnnpipe.perf.critical import critical_shares, place_of
from gnnpipe.perf.simulate import simulate
from gnnpipe.perf.tasks import Task
from gnnpipe.perf.timeline import Timeline

__all__ = ["LESS", "sensitivity"]

LESS = 0.1


def sensitivity(
    timeline: Timeline, name: Callable[[Task], str] = place_of, most: int = 6
) -> dict[str, float]:
    """Change of the epoch, relative to it and so below 0, by what takes ``LESS`` less time.

    Of the ``most`` largest on the critical path; all that is not on it has none.
    """
    tasks = timeline.tasks
    places = [name(what) for what in tasks.what]
    found = {}
    for place in list(critical_shares(timeline, name))[:most]:
        times = [
            time_s * (1 - LESS) if at == place else time_s
            for at, time_s in zip(places, tasks.duration_s, strict=True)
        ]
        shorter = simulate(replace(tasks, duration_s=times)).makespan_s
        found[place] = shorter / timeline.makespan_s - 1
    return found

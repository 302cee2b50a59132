"""What a plan costs before it runs, and where the time of an epoch went."""

from gnnpipe.perf.memory import MemoryEstimate, estimate_memory
from gnnpipe.perf.spans import Collective, EpochSpans, Message, TimeShares, time_shares
from gnnpipe.perf.volume import CommVolume, closed_form_volume

__all__ = [
    "Collective", "CommVolume", "EpochSpans", "MemoryEstimate", "Message", "TimeShares",
    "closed_form_volume", "estimate_memory", "time_shares",
]  # fmt: skip

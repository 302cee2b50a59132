"""What a plan costs, before it runs."""

from gnnpipe.perf.memory import MemoryEstimate, estimate_memory
from gnnpipe.perf.volume import CommVolume, closed_form_volume

__all__ = ["CommVolume", "MemoryEstimate", "closed_form_volume", "estimate_memory"]

"""Orders the calls of a recording, so that the order in which forward writes them does not matter.

A model with branches may be written layer by layer or branch by branch. Either way its calls are
listed branch by branch: depth first from the result, each call behind the calls that it reads, the
calls that it reads in the order of its arguments. Consecutive ops then belong together, and a
chain of calls keeps its order.
"""

from __future__ import annotations

from torch import fx

from gnnpipe.capture.markers import assign, drop

RECORDED_PLACE = "recorded_place"
"""Key in ``meta`` of a call: its place in forward. Random numbers are drawn in this order."""


def order_calls(graph: fx.Graph) -> None:
    """Move the calls of a recording into the order above, and number the dropouts in this order."""
    for place, call in enumerate(graph.nodes):
        call.meta[RECORDED_PLACE] = place
    output = graph.output_node()
    for call in _branch_by_branch(graph):
        output.prepend(call)
    for site, call in enumerate(call for call in graph.nodes if call.target is drop):
        call.kwargs = {**call.kwargs, "site": site}


def _branch_by_branch(graph: fx.Graph) -> list[fx.Node]:
    """All calls, depth first from those that nothing reads, and from the result last."""
    unread = [c for c in graph.nodes if not c.users and c.op not in ("placeholder", "output")]
    # Values that forward assigns to buffers, by the name of the buffer: the result stays the last.
    unread.sort(key=lambda call: str(call.kwargs["buffer"]) if call.target is assign else "")
    found: dict[fx.Node, None] = {}
    waiting = [graph.output_node(), *reversed(unread)]
    while waiting:
        call = waiting[-1]
        sources = [s for s in call.all_input_nodes if s not in found and s.op != "placeholder"]
        waiting += reversed(sources)
        if not sources:
            waiting.pop()
            found[call] = None
    found.pop(graph.output_node())
    return list(found)

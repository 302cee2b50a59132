"""Finds the buffers that forward assigns, and the calls that it makes without gradients.

A recording computes values and changes nothing. The marker ``assign`` names the buffer that a value
replaces; the runtime computes the value again at the end of an epoch and copies it into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.edge_work.kinds import Kind, kinds_of, reads_shape
from gnnpipe.capture.fx_names import attribute, refuse
from gnnpipe.capture.markers import assign, is_sum, without_gradient
from gnnpipe.capture.rewrite import replace_in_place

WITHOUT_GRADIENT = "without_gradient"
"""Mark in ``meta`` of a call that forward makes under ``torch.no_grad``."""


def mark_assigned(graph: fx.Graph, model: nn.Module) -> None:
    """Add ``assign`` for every buffer of the traced model that holds a recorded value."""
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            if isinstance(value, fx.Proxy):
                buffer = f"{path}{'.' * bool(path)}{name}"
                _add_mark(graph, value.node, buffer)


def keep_buffers(training: fx.GraphModule, evaluation: fx.GraphModule, model: nn.Module) -> None:
    """Replace calls that change a buffer in place in training; ``assign`` marks its last value.

    Must run before the recordings are joined, because evaluation reads the buffer as it is.

    Raises:
        InputError: Evaluation assigns a buffer, or the state dict lacks an assigned one.
    """
    for mark in assigned(evaluation.graph):
        hint = "assign it if self.training"
        refuse(f"forward assigns the buffer {mark.kwargs['buffer']} in evaluation, too", hint, mark)
    graph, held = training.graph, set[fx.Node]()
    place = {call: i for i, call in enumerate(graph.nodes)}
    for call in place:
        changed = call.args[0] if call.args else None
        if not isinstance(changed, fx.Node):
            continue
        is_first = changed not in held and _is_buffer(training, changed)
        if not (is_first or changed in held) or not replace_in_place(training, call):
            continue
        if is_first:
            _add_mark(graph, changed, str(changed.target).removeprefix("model."))
        for reader in [user for user in changed.users if place.get(user, len(place)) > place[call]]:
            reader.replace_input_with(changed, call)
        held.add(call)
    kept = model.state_dict(keep_vars=True)
    for mark in assigned(graph):
        if mark.kwargs["buffer"] not in kept:
            lacks = f"{mark.kwargs['buffer']}, which is not part of the state dict"
            refuse(f"forward assigns the buffer {lacks}", "register it as persistent", mark)


def hold_back_gradients(recording: fx.GraphModule) -> None:
    """Let values that forward makes under ``torch.no_grad`` hold gradients back."""
    graph = recording.graph
    marked = {call for call in graph.nodes if WITHOUT_GRADIENT in call.meta}
    if not marked:
        return
    kinds = kinds_of(recording)
    for call in marked:
        readers = [user for user in call.users if user not in marked and user.op != "output"]
        if not readers or kinds[call] is not Kind.OTHER or reads_shape(call):
            continue
        with graph.inserting_after(call):
            held = graph.call_function(without_gradient, (call,))
        held.stack_trace = call.stack_trace
        for reader in readers:
            reader.replace_input_with(call, held)


def assigned(graph: fx.Graph) -> list[fx.Node]:
    """The marks of buffers that forward assigns."""
    return [call for call in graph.nodes if call.target is assign]


def sources_of(value: fx.Node) -> list[fx.Node]:
    """A value and all calls that it depends on, up to sums over all vertices."""
    found, waiting = {value: None}, [value]
    while waiting:
        call = waiting.pop()
        if is_sum(call):
            continue
        new = [source for source in call.all_input_nodes if source not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)


def check_weightless(mark: fx.Node, recording: nn.Module) -> None:
    """Raises ``InputError`` if an assigned value is made of weights, which the step has changed."""
    for call in sources_of(mark.all_input_nodes[0]):
        if call.op == "get_attr":
            is_made = isinstance(attribute(recording, str(call.target)), nn.Parameter)
        else:
            is_module = call.op == "call_module"
            is_made = is_module and any(
                True for _ in recording.get_submodule(str(call.target)).parameters()
            )
        if is_made:
            what = f"forward assigns the buffer {mark.kwargs['buffer']} a value made of weights"
            refuse(what, "compute it in a callback", mark)


def check_changed(
    before: Mapping[str, Tensor],
    module: nn.Module,
    assigned_values: Mapping[str, Tensor],
    when: str,
) -> None:
    """Raises ``InputError`` unless plain PyG changed the buffers as the recording would.

    Args:
        before: Buffers by name, before forward.
        module: The user's module after forward; statistics of norms are not compared.
        assigned_values: By buffer, the values that the recording assigns.
        when: Mode of forward, for the message.
    """
    for name, now in own_buffers(module):
        truth = assigned_values.get(name, before.get(name))
        is_equal = (
            truth is not None
            and truth.numel() in (1, now.numel())
            and torch.allclose(truth.detach().to(now).expand_as(now), now, 1e-6, 1e-9)
        )
        if not is_equal:
            refuse(f"forward changes the buffer {name}{when} in a way that cannot be recorded")


def own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, by name, of the modules that are no classes of torch or PyG."""
    for path, owner in module.named_modules():
        if type(owner).__module__.startswith(("torch.", "torch_geometric.")):
            continue
        for name, value in owner.named_buffers(recurse=False):
            yield f"{path}{'.' * bool(path)}{name}", value.detach()


def _is_buffer(recording: fx.GraphModule, call: fx.Node) -> bool:
    if call.op != "get_attr" or not str(call.target).startswith("model."):
        return False
    value = attribute(recording, str(call.target))
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _add_mark(graph: fx.Graph, value: fx.Node, buffer: str) -> None:
    with graph.inserting_before(graph.output_node()):
        mark = graph.call_function(assign, (value,), {"buffer": buffer})
    mark.stack_trace = value.stack_trace

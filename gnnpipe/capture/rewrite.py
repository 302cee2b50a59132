"""Replaces dropout and in-place calls in a recording."""

from __future__ import annotations

import copy
import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from gnnpipe.capture.fx_names import dropout_arguments, name_of, refuse
from gnnpipe.capture.markers import drop


def replace_dropout(training: fx.GraphModule, evaluation: fx.GraphModule) -> None:
    """Replace ``F.dropout`` by the marker ``drop``, or by nothing where it is off.

    Raises ``InputError`` for dropout that stays on in evaluation.
    """
    for module, is_training in ((training, True), (evaluation, False)):
        for call in list(module.graph.nodes):
            if call.target is not F.dropout:
                continue
            given = dropout_arguments(call.args, call.kwargs)
            if given["training"] and not is_training:
                refuse("dropout stays on in evaluation", "pass training=self.training", call)
            on = given["training"] or not is_training
            with module.graph.inserting_after(call):
                new = module.graph.call_function(
                    drop if on else operator.pos,
                    (given["input"],),
                    {"probability": given["p"], "site": -1} if on else {},
                )
            new.stack_trace = call.stack_trace
            call.replace_all_uses_with(new)
            module.graph.erase_node(call)


def check_same_calls(training: fx.GraphModule, evaluation: fx.GraphModule) -> None:
    """Raises ``InputError`` unless both recordings make the same calls (one program runs both)."""

    def shape(call: fx.Node, number: dict[fx.Node, int]) -> tuple[str, ...]:
        def place(source: fx.Node) -> Any:
            return f"%{number[source]}"

        if call.target in (drop, operator.pos):
            return call.op, "dropout", str(number[call.all_input_nodes[0]])
        args = fx.node.map_arg((call.args, dict(call.kwargs)), place)
        return call.op, str(call.target), str(args)

    calls, others = list(training.graph.nodes), list(evaluation.graph.nodes)
    hint = "only dropout and normalisation may"
    numbers = [{call: i for i, call in enumerate(found)} for found in (calls, others)]
    for a, b in zip(calls, others, strict=False):
        if shape(a, numbers[0]) != shape(b, numbers[1]):
            refuse("forward does other things in training than in evaluation", hint, a)
    if len(calls) != len(others):
        refuse("forward does more in training than in evaluation, or less", hint)


def _name_inplace(call: fx.Node) -> bool:
    """Whether a function is called with ``inplace=True``; then its arguments are made keywords."""
    target: Any = call.target
    try:
        given = inspect.signature(target).bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError):
        return False
    if not given.get("inplace"):
        return False
    call.args, call.kwargs = (call.args[0],), dict(list(given.items())[1:])
    return True


def make_out_of_place(recording: fx.GraphModule) -> None:
    """Replace in-place calls by calls that return a new value, which later readers get.

    A value that enters a step is a leaf of the step's autograd graph and must not be modified.
    """
    place = {call: i for i, call in enumerate(recording.graph.nodes)}
    for call in place:
        name = name_of(call)
        if not _replace_in_place(recording, call):
            continue
        changed = call.args[0] if call.args else None
        if isinstance(changed, fx.Node):
            if changed.op == "get_attr":
                hint = "a recording keeps no state between epochs"
                refuse(f"{name} changes {name_of(changed)} in place", hint, call)
            for reader in [user for user in changed.users if place[user] > place[call]]:
                reader.replace_input_with(changed, call)


def _replace_in_place(recording: fx.GraphModule, call: fx.Node) -> bool:
    """Replace the target of an in-place call; False if the call changes nothing in place."""
    name = call.target if isinstance(call.target, str) else ""
    function = getattr(call.target, "__name__", "") if call.op == "call_function" else ""
    if function.endswith("_") and not function.endswith("__"):
        refuse(f"{function} changes a value in place", f"use {function.rstrip('_')}", call)
    if call.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        if not hasattr(torch.Tensor, name[:-1]):
            refuse(f"{name} changes a value in place", "use a new one", call)
        call.target = name[:-1]
        return True
    if call.op == "call_function" and _name_inplace(call):
        call.kwargs = {**call.kwargs, "inplace": False}
        return True
    module = recording.get_submodule(name) if call.op == "call_module" else None
    if module is None or not getattr(module, "inplace", False):
        return False
    twin: Any = copy.copy(module)
    twin.inplace = False
    # Not below the user's modules: a Sequential would run the twin as a further layer.
    call.target = f"{call.name}_out_of_place"
    recording.add_submodule(call.target, twin)
    return True

"""Replaces dropout and in-place calls in a recording."""

from __future__ import annotations

import copy
import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from gnnpipe.capture.fx_names import OUT_OF_PLACE, dropout_arguments, line_of
from gnnpipe.capture.markers import drop
from gnnpipe.errors import InputError

__all__ = ["check_same_calls", "make_out_of_place", "replace_dropout"]


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
                raise InputError(
                    f"model: dropout stays on in evaluation{line_of(call)}; pass "
                    "training=self.training"
                )
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
    numbers = [{call: i for i, call in enumerate(found)} for found in (calls, others)]
    for a, b in zip(calls, others, strict=False):
        if shape(a, numbers[0]) != shape(b, numbers[1]):
            raise InputError(
                f"model: forward does other things in training than in evaluation{line_of(a)}; "
                "only dropout and normalisation may"
            )
    if len(calls) != len(others):
        raise InputError(
            "model: forward does more in training than in evaluation, or less; only dropout and "
            "normalisation may"
        )


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
        name = call.target if isinstance(call.target, str) else ""
        function = getattr(call.target, "__name__", "") if call.op == "call_function" else ""
        if function.endswith("_") and not function.endswith("__"):
            raise InputError(
                f"model: {function} changes a value in place{line_of(call)}; use "
                f"{function.rstrip('_')}"
            )
        is_method = call.op == "call_method" and name.endswith("_") and not name.endswith("__")
        in_place_function = call.op == "call_function" and _name_inplace(call)
        module = None
        if call.op == "call_module":
            module = recording.get_submodule(name)
        if not (is_method or in_place_function or getattr(module, "inplace", False)):
            continue
        if is_method:
            if not hasattr(torch.Tensor, name[:-1]):
                raise InputError(
                    f"model: {name} changes a value in place{line_of(call)}; use a new one"
                )
            call.target = name[:-1]
        elif in_place_function:
            call.kwargs = {**call.kwargs, "inplace": False}
        elif module is not None:
            twin: Any = copy.copy(module)
            twin.inplace = False
            recording.add_submodule(f"{name}{OUT_OF_PLACE}", twin)
            call.target = f"{name}{OUT_OF_PLACE}"
        changed = call.args[0] if call.args else None
        if isinstance(changed, fx.Node) and changed.op == "get_attr":
            raise InputError(
                f"model: {name} changes {str(changed.target).removeprefix('model.')} in place"
                f"{line_of(call)}; a recording keeps no state between epochs"
            )
        if isinstance(changed, fx.Node):
            for reader in [user for user in changed.users if place[user] > place[call]]:
                reader.replace_input_with(changed, call)

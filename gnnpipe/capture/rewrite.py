"""Rewrites a recording: dropout, in-place calls, aggregated features, and weights and buffers
with a row for each vertex.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gnnpipe.capture.edge_work.kinds import Kind, kinds_of
from gnnpipe.capture.fx_names import (
    EDGES,
    FEATURES,
    attribute,
    dropout_arguments,
    input_number,
    is_input,
    name_of,
    refuse,
)
from gnnpipe.capture.markers import (
    PRODUCTS,
    aggregate,
    by_mode,
    copied,
    drop,
    is_of_all,
    of_vertices,
    with_items,
)
from gnnpipe.capture.stage.step_calls import is_linear
from gnnpipe.graph.operators import LINEAR_KINDS, RELATION, WEIGHTED
from gnnpipe.graph.types import numbered_name


def replace_dropout(training: fx.GraphModule, evaluation: fx.GraphModule) -> None:
    """Replace ``F.dropout`` by the marker ``drop``, or by nothing where it is off.

    Raises ``InputError`` for dropout that stays on in evaluation.
    """
    for module, is_training in ((training, True), (evaluation, False)):
        for call in list(module.graph.nodes):
            if call.target is not F.dropout:
                continue
            given = dropout_arguments(call.args, call.kwargs)
            if any(isinstance(given[name], fx.Node) for name in ("p", "training")):
                refuse("dropout takes a value that forward computes", "pass numbers", call)
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


def replace_masks(recording: fx.GraphModule) -> None:
    """Replace random masks of rows, ``torch.zeros_like(x).bernoulli_(p)``, by dropout of ones.

    So that they are drawn by vertex, as all dropout is.
    """
    graph, kinds = recording.graph, kinds_of(recording)
    for call in list(graph.nodes):
        given = [*call.args[1:], *call.kwargs.values()]
        is_mask = call.op == "call_method" and call.target == "bernoulli"
        if not is_mask or kinds[call] is not Kind.OTHER:
            continue
        if len(given) != 1 or not isinstance(given[0], float):
            continue
        share = given[0]
        with graph.inserting_before(call):
            ones = graph.call_function(torch.ones_like, (call.args[0],))
            kept = graph.call_function(drop, (ones,), {"probability": 1.0 - share, "site": -1})
            new = graph.call_function(operator.mul, (kept, share))
        for made in (ones, kept, new):
            made.stack_trace = call.stack_trace
        call.replace_all_uses_with(new)
        graph.erase_node(call)


def join_modes(training: fx.GraphModule, evaluation: fx.GraphModule) -> None:
    """Add to the recording of training what evaluation does otherwise, chosen by ``by_mode``.

    Calls of the same functions with the same settings in the same order are one call. Where such a
    call reads another value in evaluation, it reads ``by_mode`` of both values.
    """
    if any("edges" in call.kwargs for one in (training, evaluation) for call in one.graph.nodes):
        # So that an aggregation over other edges in evaluation is the same call.
        _name_given_edges(training)
        _name_given_edges(evaluation)
    calls, others = list(training.graph.nodes), list(evaluation.graph.nodes)
    of_evaluation = {other: call for call, other in _common(calls, others)}
    place = next(iter(calls))
    for other in others:
        call = of_evaluation.get(other)
        if call is None:
            with training.graph.inserting_after(place):
                call = training.graph.node_copy(other, of_evaluation.__getitem__)
            if other.op == "get_attr":
                setattr(training, str(other.target), attribute(evaluation, str(other.target)))
            of_evaluation[other] = call
        else:
            _read_by_mode(call, other, of_evaluation)
        place = call


def _name_given_edges(recording: fx.GraphModule) -> None:
    """Add the edges to aggregations over the graph's own edges, as those over others have them."""
    inputs = {str(c.target): c for c in recording.graph.nodes if c.op == "placeholder"}
    for call in recording.graph.nodes:
        if call.target is not aggregate or "edges" in call.kwargs or is_of_all(call):
            continue
        is_weighted = str(call.kwargs["structure"]).endswith(WEIGHTED)
        weight = inputs.get("edge_weight") if is_weighted else None
        call.kwargs = {**call.kwargs, "edges": inputs[EDGES], "edge_weight": weight}


def _common(calls: list[fx.Node], others: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of calls of the same functions with the same settings in the same order."""
    tokens = [_token(call) for call in calls], [_token(call) for call in others]
    if tokens[0] == tokens[1]:  # nearly always; the search for common runs is quadratic
        return list(zip(calls, others, strict=True))
    blocks = SequenceMatcher(None, *tokens, autojunk=False).get_matching_blocks()
    return [(calls[m.a + i], others[m.b + i]) for m in blocks for i in range(m.size)]


def _token(call: fx.Node) -> str:
    """The function of a call and its settings; equal for a dropout that is on or off."""
    if call.target in (drop, operator.pos):
        return "dropout"
    settings = fx.node.map_arg((call.args, dict(sorted(call.kwargs.items()))), lambda _: "value")
    return f"{call.op} {call.target} {settings}"


def _read_by_mode(call: fx.Node, other: fx.Node, of_evaluation: Mapping[fx.Node, fx.Node]) -> None:
    """Let a call read the values that its counterpart ``other`` reads in evaluation."""
    if call.target is drop:
        pairs = [(call.all_input_nodes[0], of_evaluation[other.all_input_nodes[0]])]
    else:
        given = _inputs(call), map(of_evaluation.__getitem__, _inputs(other))
        pairs = list(dict.fromkeys(zip(*given, strict=True)))
    for now, kept in pairs:
        if now is kept:
            continue
        with call.graph.inserting_before(call):
            chosen = call.graph.call_function(by_mode, (now, kept))
        chosen.stack_trace = call.stack_trace
        call.replace_input_with(now, chosen)


def _inputs(call: fx.Node) -> list[fx.Node]:
    """The values that a call reads, in the order of its arguments."""
    found: list[fx.Node] = []
    fx.node.map_arg((call.args, dict(sorted(call.kwargs.items()))), found.append)
    return found


def product_of(call: fx.Node) -> tuple[fx.Node, Any, str] | None:
    """Matrix, rows and reduction ('sum' or 'mean') of a product of two matrices; else None."""
    matrix = call.args[0] if call.args else None
    given = [*call.args[1:], *call.kwargs.values()]
    reduction = str(given[1]) if len(given) > 1 else "sum"
    is_product = call.target in PRODUCTS and isinstance(matrix, fx.Node)
    if not (is_product and len(given) in (1, 2) and reduction in ("sum", "mean")):
        return None
    assert isinstance(matrix, fx.Node)
    return matrix, given[0], reduction


def replace_products(recording: fx.GraphModule, weight_fields: Collection[str]) -> None:
    """Replace products of ``adj_t`` with rows, such as ``torch.sparse.mm(adj_t, x)``.

    ``weight_fields``: of the graph, with the values of ``adj_t`` other than 1.
    """
    for call in list(recording.graph.nodes):
        product = product_of(call)
        if product is None or not is_input(product[0], EDGES):
            continue
        edges, rows, reduction = product
        number = input_number(edges)
        field = "edge_weight" if number is None else numbered_name("edge_weight", number)
        structure = reduction + (WEIGHTED if field in weight_fields else "")
        structure += "" if number is None else f"{RELATION}{number}"
        settings: dict[str, Any] = {"structure": structure, "observed_by": ""}
        with recording.graph.inserting_after(call):
            new = recording.graph.call_function(aggregate, (rows,), settings)
        new.stack_trace = call.stack_trace
        call.replace_all_uses_with(new)
        recording.graph.erase_node(call)


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
        if not replace_in_place(recording, call):
            continue
        changed = call.args[0] if call.args else None
        if isinstance(changed, fx.Node):
            if changed.op == "get_attr":
                hint = "a recording keeps no state between epochs"
                refuse(f"{name} changes {name_of(changed)} in place", hint, call)
            for reader in [user for user in changed.users if place[user] > place[call]]:
                reader.replace_input_with(changed, call)


def replace_in_place(recording: fx.GraphModule, call: fx.Node) -> bool:
    """Replace the target of an in-place call; False if the call changes nothing in place."""
    if call.target is operator.setitem:
        call.target = with_items
        return True
    name = call.target if isinstance(call.target, str) else ""
    if call.op == "call_method" and name in _OUT_OF_PLACE:
        call.op, call.target = "call_function", _OUT_OF_PLACE[name]
        return True
    function = getattr(call.target, "__name__", "") if call.op == "call_function" else ""
    if function.endswith("_") and not function.endswith("__"):
        for library in (F, torch):
            other = getattr(library, function[:-1], None)
            if other is not None and getattr(library, function, None) is call.target:
                call.target = other
                return True
        refuse(f"{function} changes a value in place", "use a new one", call)
    if name == "requires_grad_":
        call.target = "view_as"
        call.args, call.kwargs = (call.args[0], call.args[0]), {}
        return False
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


_OUT_OF_PLACE: dict[str, Any] = {"copy_": copied, "fill_": torch.fill, "zero_": torch.zeros_like}
"""Functions that give the value which a method without a counterpart assigns."""


def aggregate_features_first(recording: fx.GraphModule) -> None:
    """Turn ``A (x W)`` with the features x into ``(A x) W``, if nothing else reads x.

    ``A x`` is the same in every epoch and takes the memory of x (``aggregates_features``).
    """
    (x,) = (call for call in recording.graph.nodes if is_input(call, FEATURES))
    maps = list(x.users)
    sums = [reader for one in maps for reader in one.users]
    if not sums or not all(_is_product(recording, one) for one in maps):
        return
    first, *others = sums
    if not all(one.target is aggregate and one.kwargs == first.kwargs for one in sums):
        return
    if first.kwargs["structure"] not in LINEAR_KINDS:
        return
    for one in sums:
        one.replace_all_uses_with(one.all_input_nodes[0])
    for one in others:
        recording.graph.erase_node(one)
    first.args = (x,)
    maps[0].prepend(first)
    for one in maps:
        one.replace_input_with(x, first)


AFTER_AGGREGATION = "after an aggregation"
"""In ``meta`` of a linear map that was put there. It stays an op of its own, so a plan, which
numbers ops, serves both orders."""


def aggregate_before_maps(recording: fx.GraphModule, has_types: bool) -> bool:
    """Turn ``A (x W)`` into ``(A x) W``: rows of an earlier epoch are then stale in x, not in W.

    The gradient of W then counts stale rows, too. Not if something else reads ``x W``; nor if x has
    columns that are features themselves, which may be many; nor for the relations of one vertex
    type, which read narrow rows of their own. The number of ops stays.

    Args:
        recording: Changed in place.
        has_types: The graph has several vertex types.

    Returns:
        Whether anything was changed.
    """
    is_changed = False
    for call in list(recording.graph.nodes):
        kind, _, relation = str(call.kwargs.get("structure", "")).partition(RELATION)
        if call.target is not aggregate or kind not in LINEAR_KINDS:
            continue
        rows: Any = call.args[0]
        if (relation and not has_types) or len(rows.users) > 1:
            continue
        if not (_is_product(recording, rows) and rows.args):
            continue
        x: Any = rows.args[0]
        if _has_features(recording, x):
            continue
        with recording.graph.inserting_after(call):
            product = recording.graph.node_copy(rows)
        call.replace_all_uses_with(product)
        call.replace_input_with(rows, x)
        product.replace_input_with(x, call)
        product.meta[AFTER_AGGREGATION] = True
        recording.graph.erase_node(rows)
        is_changed = True
    return is_changed


def _has_features(recording: fx.GraphModule, rows: fx.Node) -> bool:
    """Whether rows depend on the features otherwise than through linear maps and convolutions."""
    seen, waiting = {rows}, [rows]
    while waiting:
        call = waiting.pop()
        if is_input(call, FEATURES):
            return True
        sources = call.all_input_nodes
        if call.op == "call_module":
            module = recording.get_submodule(str(call.target))
            is_map = any(weight.dim() > 1 for weight in module.parameters())
        else:
            is_product = call.target in (*PRODUCTS, F.linear, torch.addmm)
            is_map = is_product and any(_is_matrix(recording, source) for source in sources)
        new = [source for source in sources if source not in seen and not is_map]
        seen.update(new)
        waiting += new
    return False


def _is_matrix(recording: fx.GraphModule, call: fx.Node) -> bool:
    """Whether a value is a weight of several dimensions, or is made of one such weight alone."""
    while call.op not in ("get_attr", "placeholder") and len(call.all_input_nodes) == 1:
        (call,) = call.all_input_nodes
    value = attribute(recording, str(call.target)) if call.op == "get_attr" else None
    return isinstance(value, nn.Parameter) and value.dim() > 1


def _is_product(recording: fx.GraphModule, call: fx.Node) -> bool:
    """Whether a call is a linear map without bias."""
    if not is_linear(recording, call):
        return False
    if call.op == "call_module":
        return recording.get_submodule(str(call.target)).bias is None
    return call.kwargs.get("bias") is None and all(one is None for one in call.args[2:])


def mark_vertex_weights(
    recording: fx.GraphModule, model: nn.Module, counts: Mapping[str, int]
) -> None:
    """Insert ``of_vertices`` behind the user's weights and buffers of N rows, and embeddings.

    Not behind W in ``x @ W``, whose rows are columns of x. ``counts``: N by vertex type. Rules
    insert the marker themselves.
    """
    for call in list(recording.graph.nodes):
        if call.op != "get_attr":
            continue
        path = str(call.target)
        weight = attribute(recording, path)
        is_weight = isinstance(weight, nn.Parameter) and weight.dim() >= 2
        if not is_weight and not _is_buffer(path, weight):
            continue
        if len(weight) not in counts.values() or _is_right_factor(call):
            continue
        # In the recording's own module tree the owner may be a plain nn.Module.
        owner = model.get_submodule(path.removeprefix("model.").rpartition(".")[0])
        is_library = type(owner).__module__.startswith(("torch.", "torch_geometric."))
        if is_library and not isinstance(owner, nn.Embedding):
            continue
        with recording.graph.inserting_after(call):
            rows = recording.graph.call_function(
                of_vertices, (call,), {"vertex_type": _type_of(path, len(weight), counts)}
            )
        rows.stack_trace = call.stack_trace
        call.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)


def _is_buffer(path: str, value: Any) -> bool:
    """Whether a value is a dense buffer of the model, not a constant that forward makes."""
    is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    is_own = is_tensor and path.startswith("model.")
    return is_own and value.layout is torch.strided and value.dim() > 0


def _is_right_factor(weight: fx.Node) -> bool:
    """Whether a weight, or what row-wise calls make of it, is W in ``x @ W`` or ``linear(x, W)``.

    In ``x.t() @ W``, a sum over the vertices, W may have a row for each vertex.
    """
    for user in weight.users:
        first = user.args[0] if user.args else None
        if user.target in (*PRODUCTS, F.linear, torch.addmm):
            is_sum = isinstance(first, fx.Node) and name_of(first) in _TRANSPOSES
            if first is not weight and not is_sum:
                return True
        elif len(user.all_input_nodes) == 1 and _is_right_factor(user):
            return True
    return False


_TRANSPOSES = ("t", "transpose", "permute", "getattr")  # x.T, x.mT


def _type_of(path: str, count: int, counts: Mapping[str, int]) -> str:
    """The type with this number of vertices; if several have it, the one named in the path."""
    types = [name for name, found in counts.items() if found == count]
    named = [name for name in types if name in path.split(".")]
    if len(types) > 1 and len(named) != 1:
        refuse(
            f"{path.removeprefix('model.')} has {count} rows, and {' and '.join(types)} have as "
            "many vertices",
            "keep it in a ModuleDict or ParameterDict under the type's name",
        )
    return (named or types)[0]


def check_vertex_weights(recording: fx.GraphModule, counts: Mapping[str, int]) -> None:
    """Raises ``InputError`` for a weight whose number of rows is not that of the vertices."""
    for path, vertex_type in vertex_weights(recording.graph).items():
        found, n = len(attribute(recording, path)), counts[vertex_type]
        if found != n:
            kind = f"{vertex_type} vertices".strip()
            refuse(f"{path.removeprefix('model.')} has {found} rows, but the graph has {n} {kind}")


def vertex_weights(graph: fx.Graph) -> dict[str, str]:
    """Vertex types by the paths of all the model's weights and buffers with a row for each vertex.

    Not of values that forward makes of the edges.
    """
    marks = (c for c in graph.nodes if c.target is of_vertices)
    found = {str(m.all_input_nodes[0].target): str(m.kwargs["vertex_type"]) for m in marks}
    return {path: name for path, name in found.items() if path.startswith("model.")}


def cut_vertex_weights(
    module: nn.Module, paths: Mapping[str, str], counts: Mapping[str, int]
) -> None:
    """Resize weights and buffers to ``counts`` vertices; rows repeat where the sample has more."""
    for path, vertex_type in paths.items():
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        weight = getattr(owner, name)
        rows = weight.detach()[torch.arange(counts[vertex_type]) % len(weight)]
        setattr(owner, name, nn.Parameter(rows) if isinstance(weight, nn.Parameter) else rows)

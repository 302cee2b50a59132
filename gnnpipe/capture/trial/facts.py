"""Determines what each recorded call does to rows, on a small random graph.

The recording runs three times: on all rows of the sample and on each half of them; aggregations are
computed on all rows, and each half gets its part. A row-wise call gives the same rows in all runs.
A sum over all vertices is left to the runtime (``vertex_sums``). Another call that mixes rows,
counts them or draws random numbers is refused by name and line. Finally the result is compared with
the model itself, run by plain PyG, which reveals an error in a recording or a rule.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.buffers import assigned, check_changed, check_weightless, own_buffers
from gnnpipe.capture.call_facts import Facts
from gnnpipe.capture.edge_work.program import random_numbers_of
from gnnpipe.capture.fusion import fuse
from gnnpipe.capture.fx_names import (
    AS_IS,
    EDGE_VALUES,
    EDGES,
    FEATURES,
    edges_read,
    input_number,
    is_input,
    name_of,
    refuse,
)
from gnnpipe.capture.markers import aggregate, assign, by_mode, drop, of_all, of_vertices
from gnnpipe.capture.preserve import detached_copy
from gnnpipe.capture.rewrite import cut_vertex_weights, vertex_weights
from gnnpipe.capture.stage.block_conv import DropoutMode
from gnnpipe.capture.trial.run import Found, SampleRun, copied_modules, refuse_edge_work
from gnnpipe.capture.trial.sample_graph import Sample, names_of_weights, perturb_weights
from gnnpipe.capture.trial.saved_tensors import saved_by_calls
from gnnpipe.capture.trial.vertex_sums import (
    SumKind,
    add_over_chunks,
    count_node,
    for_all_vertices,
    sum_kind,
)
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import EDGE_DATA
from gnnpipe.graph.operators import EVERYONE, SUM, relation_ends


def probe(
    model: nn.Module,
    method: str,
    recording: fx.GraphModule,
    samples: tuple[Sample, Sample],
    num_vertices: Mapping[str, int],
) -> dict[fx.Node, Facts]:
    """``Facts`` of every call of a model's recorded ``method``; adds calls to the recording.

    ``samples``: in training and in evaluation; the same unless forward makes other edges.
    ``num_vertices``: numbers of vertices of the run's graph, by type. Raises ``InputError`` for
    calls that cannot run chunk by chunk.
    """
    was_in_inference = torch.is_inference_mode_enabled()
    # In inference mode autograd would save nothing that could be counted.
    with torch.inference_mode(False), torch.no_grad():
        module = copied_modules(recording)
        cut_vertex_weights(module, vertex_weights(recording.graph), samples[0].counts)
        names = names_of_weights(model, recording)
        perturb_weights(module, names)
        run = SampleRun(recording.graph, module, samples[0])
        found: dict[fx.Node, Facts] = {}
        call = next(iter(recording.graph.nodes))
        while call.op != "output":
            if call.target is assign:
                found[call] = _examine_assigned(call, found, run)
            elif call not in found:
                found[call] = _examine(call, found, run, num_vertices)
            call = call.next  # a call that was inserted, if any
        _check_output(call, run)
        _put_result_last(call, found, run)
        for new in fuse(recording, found):
            found[new] = _facts_of(new, found, run)
        with torch.inference_mode(was_in_inference):
            check_equals_model(model, method, call, run, names, samples[1])
        saved = saved_by_calls(run, {call for call in found if found[call].is_rows})
    for call, memory in saved.items():
        if found[call].depends:
            found[call] = replace(found[call], memory=memory)
    return found


def _examine(
    call: fx.Node, found: dict[fx.Node, Facts], run: SampleRun, num_vertices: Mapping[str, int]
) -> Facts:
    """``Facts`` of a call, which may be changed to count or add up all vertices."""
    try:
        return _facts_of(call, found, run)
    except InputError:
        facts = _counting_all(call, found, run, num_vertices)
        facts = facts or _adding_up(call, found, run, num_vertices)
        if facts is None:
            raise
        return facts


def _examine_assigned(mark: fx.Node, found: dict[fx.Node, Facts], run: SampleRun) -> Facts:
    """``Facts`` of the mark of an assigned buffer; ``InputError`` for a value with rows."""
    if found[mark.all_input_nodes[0]].depends:
        what = f"forward assigns the buffer {mark.kwargs['buffer']} a value for each vertex"
        refuse(what, "only sums and means over all vertices can be kept", mark)
    check_weightless(mark, run.module)
    run.make(mark, False, False, "")
    return Facts(False, (), False)


def _put_result_last(output: fx.Node, found: dict[fx.Node, Facts], run: SampleRun) -> None:
    """Make the result the last op, if forward adds up rows after it for a buffer."""
    result: Any = output.args[0]
    calls = list(output.graph.nodes)[:-1]
    if not any(found[call].is_rows for call in calls[calls.index(result) + 1 :]):
        return
    with output.graph.inserting_before(output):
        last = output.graph.call_function(operator.pos, (result,))
    output.args = (last,)
    found[last] = _facts_of(last, found, run)


def _counting_all(
    call: fx.Node, found: dict[fx.Node, Facts], run: SampleRun, num_vertices: Mapping[str, int]
) -> Facts | None:
    """``Facts`` of a call that reads the number of all vertices, not that of a chunk; else None."""
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for number in [source for source in call.all_input_nodes if run.is_local_number(source)]:
        bases = {}
        for base in run.counted_rows(number):
            kind = found[base].vertex_type
            bases[base] = count_node(base, kind, num_vertices[kind])
            found[bases[base]] = _facts_of(bases[base], found, run)
        made = for_all_vertices(number, run.whole, bases) or [bases[number]]
        for new in made:
            if new not in found:
                found[new] = _facts_of(new, found, run)
        call.replace_input_with(number, made[-1])
        replaced.append((number, made[-1]))
    if not replaced:
        return None
    try:
        return _facts_of(call, found, run)
    except InputError:
        for number, new in replaced:
            call.replace_input_with(new, number)
        return None


def _adding_up(
    call: fx.Node, found: dict[fx.Node, Facts], run: SampleRun, num_vertices: Mapping[str, int]
) -> Facts | None:
    """``Facts`` of a call that is a sum over all vertices, which new calls add up; else None."""
    sources = [found[source] for source in call.all_input_nodes]
    is_aggregation = call.target is aggregate or edges_read(call) is not None
    if is_aggregation or any(s.of_edges for s in sources):
        return None
    rows = next((s for s in _ancestors(call) if found[s].is_rows or is_input(s, FEATURES)), None)
    if rows is None:
        return None
    vertex_type = _type_of(call, sources, run.sample)
    value, halves = run.in_parts(call, vertex_type)
    sizes = [part.stop - part.start for part in run.sample.halves(vertex_type)]
    kind = sum_kind(value, halves, sizes)
    if kind is None:
        return None
    facts = Facts(False, (), kind is not SumKind.CONSTANT, vertex_type=vertex_type)
    if kind is not SumKind.CONSTANT:
        count = count_node(call, vertex_type, num_vertices[vertex_type])
        found[count] = _facts_of(count, found, run)
        for new in add_over_chunks(call, kind, rows, count):
            run.in_parts(new, vertex_type)
            found[new] = facts
    return facts


def _ancestors(call: fx.Node) -> Iterator[fx.Node]:
    """All calls that a call depends on, the nearest first."""
    seen, waiting = {call}, [call]
    while waiting:
        for source in waiting.pop(0).all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
                yield source


def _facts_of(call: fx.Node, found: dict[fx.Node, Facts], run: SampleRun) -> Facts:
    """Compute a call on the sample, and what it does to rows."""
    sources = [found[source] for source in call.all_input_nodes]
    is_source = call.op == "placeholder" or call.target is of_vertices
    depends = is_source or (call.target is not of_all and any(s.depends for s in sources))
    is_off = call.target is drop and not call.kwargs["probability"]
    if is_off and (not depends or any(s.of_edges for s in sources)):
        call.target, call.kwargs = operator.pos, {}  # no mask is drawn
    of_edges = _is_of_edges(call, sources)
    if call.target is drop and not depends:
        hint = "only dropout of vertex rows has masks that do not depend on the chunks"
        refuse("dropout of a weight", hint, call)
    vertex_type = _type_of(call, sources, run.sample) if depends and not of_edges else ""
    are_first, form, drops = run.make(call, depends, of_edges, vertex_type)
    value = run.whole[call]
    is_rows = (
        isinstance(value, Tensor)
        and (depends and are_first and not of_edges)
        and value.is_floating_point()
    )
    shape = tuple(value.shape[1:]) if is_rows else ()
    return Facts(is_rows, shape, depends, of_edges, form, drops, vertex_type)


def _type_of(call: fx.Node, sources: list[Facts], sample: Sample) -> str:
    """The vertex type of the rows of a call's value."""
    if call.target is of_vertices:
        return str(call.kwargs["vertex_type"])
    if call.target is aggregate and call.kwargs["structure"] not in (EVERYONE, SUM):
        return relation_ends(sample.graph.relations, str(call.kwargs["structure"]))[1]
    if is_input(call, FEATURES):
        number = input_number(call)
        types = sample.graph.types
        return "" if number is None or types is None else types.names[number]
    edges = call if is_input(call, EDGES) else edges_read(call)
    if edges is not None:
        return sample.ends[str(edges.target)][1]
    kinds = sorted({s.vertex_type for s in sources if s.depends and not s.of_edges})
    if len(kinds) > 1:
        hint = "only a convolution leads from one type of vertices to another"
        refuse(f"{name_of(call)} mixes rows of {' and '.join(kinds)}", hint, call)
    return kinds[0] if kinds else ""


def _is_of_edges(call: fx.Node, sources: list[Facts]) -> bool:
    """Whether a call's value has one row for each edge; ``InputError`` if it mixes in vertices."""
    if is_input(call, *EDGE_DATA, EDGE_VALUES):
        return True
    if not any(s.of_edges for s in sources) or edges_read(call) is not None:
        return False
    if any(s.depends and not s.of_edges for s in sources) or call.target in (drop, aggregate):
        what = "dropout or normalisation" if call.target in (drop, aggregate) else name_of(call)
        refuse_edge_work(what, call)
    return True


def _check_output(call: fx.Node, run: SampleRun) -> None:
    result: Any = call.args[0]
    value = run.whole.get(result) if isinstance(result, fx.Node) else None
    n = run.sample.counts[run.sample.graph.target]
    if not isinstance(value, Tensor) or value.dim() != 2 or len(value) != n:
        what = list(value.shape) if isinstance(value, Tensor) else type(result).__name__
        hint = "wrap it in a module that returns the logits"
        refuse(f"forward must return one tensor [N, classes], not {what}", hint)


def check_equals_model(
    model: nn.Module,
    method: str,
    call: fx.Node,
    run: SampleRun,
    names: Mapping[str, str],
    evaluation: Sample,
) -> None:
    """Raises ``InputError`` unless recording and model give equal results and gradients.

    Results in evaluation are compared, too, if the recording chooses by the mode. ``names``: names
    of the recording's weights in the model, by path. ``evaluation``: the sample in evaluation.
    """
    result: Any = call.args[0]
    plain = _plain_copy(model, run, names)
    buffers = {name: value.clone() for name, value in own_buffers(plain)}
    with torch.enable_grad():
        truth = _plain_result(plain, method, run.sample)
        values = _recorded_values(run, run.sample, True)
        found: Tensor = values[result]
        towards = torch.linspace(-1.0, 1.0, truth.numel(), dtype=truth.dtype).view_as(truth)
        for out in (truth, found):
            if out.requires_grad:
                (out * towards).sum().backward()  # type: ignore[no-untyped-call]
    _check_close(truth, found, "")
    marks = assigned(run.graph)
    new = {str(mark.kwargs["buffer"]): values[mark] for mark in marks}
    check_changed(buffers, plain, new, "")
    every = run.module.named_parameters(remove_duplicate=False)
    recorded = {names[path]: p for path, p in every if path in names}
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    rounding = 1e-10 * max([1.0, *map(_largest, grads)])
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            _check_no_nan(parameter.grad, f"the gradient of {name} is")
        if not _same_gradient(parameter, recorded.get(name), rounding):
            hint = "leave gradients to autograd (no autograd.Function, no writes under no_grad)"
            refuse(f"the gradient of {name} is another in its recording", f"{hint}, {AS_IS}")
    is_other = evaluation is not run.sample
    if is_other or marks or any(other.target is by_mode for other in run.graph.nodes):
        plain = _plain_copy(model, run, names).eval()
        truth = _plain_result(plain, method, run.sample)
        check_changed(buffers, plain, {}, " in evaluation")
        run.module.eval()
        _check_close(truth, _recorded_values(run, evaluation, False)[result], " in evaluation")
        run.module.train()


def _plain_copy(model: nn.Module, run: SampleRun, names: Mapping[str, str]) -> nn.Module:
    """A copy of the user's model with the weights of the sample run."""
    plain = detached_copy(model).double().train()
    paths = {path.removeprefix("model."): t for path, t in vertex_weights(run.graph).items()}
    cut_vertex_weights(plain, paths, run.sample.counts)
    known = {names[path]: p for path, p in run.module.named_parameters() if path in names}
    for name, parameter in plain.named_parameters():
        if name in known:
            parameter.data.copy_(known[name].data)
    others = names_of_weights(model, model).items()
    perturb_weights(plain, {path: name for path, name in others if name not in known})
    return plain


def _plain_result(plain: nn.Module, method: str, sample: Sample) -> Tensor:
    """The model's result on the sample, without dropout."""
    with random_numbers_of(0, 0), DropoutMode():
        truth = sample.call(plain, method, torch.float64)
    found: Tensor = truth[sample.graph.target] if isinstance(truth, Mapping) else truth
    return found


def _recorded_values(run: SampleRun, sample: Sample, is_training: bool) -> Found:
    """The values of the recording's calls on the sample, without dropout."""
    again = SampleRun(run.graph, run.module, sample)
    again.types, again.is_training = run.types, is_training
    with DropoutMode():
        for call in run.graph.nodes:
            if call.op != "output":
                again.whole[call] = again.value(call)
    return again.whole


def _check_no_nan(truth: Tensor, what: str) -> None:
    """Raises ``InputError`` for NaN, which equals no other number; ``what``: subject and verb."""
    if truth.isnan().any():
        refuse(
            f"{what} NaN on a sample with random features, so that its recording cannot be checked",
            "keep logarithms, roots and divisions away from 0 and from negative numbers (clamp, or "
            f"add an epsilon), {AS_IS}",
        )


def _largest(numbers: Tensor) -> float:
    """The largest finite magnitude; 0 if there is none."""
    magnitudes = numbers.detach().abs()
    return float(magnitudes[magnitudes.isfinite()].amax()) if magnitudes.isfinite().any() else 0.0


def _check_close(truth: Tensor, found: Tensor, when: str) -> None:
    _check_no_nan(truth, f"its result{when} is")
    # Some PyG convolutions compute edge weights in float32 for rows of any dtype.
    if not torch.allclose(truth, found, 1e-6, 1e-6 * max(_largest(truth), 1.0)):
        refuse(
            f"its recording gives other numbers than the model{when} on a sample (by "
            f"{float((truth - found).detach().abs().max()):.1e})",
            f"take out of forward what depends on more than its inputs, {AS_IS}",
        )


def _same_gradient(truth: Tensor, found: Tensor | None, rounding: float) -> bool:
    """Whether two gradients are equal; ``rounding``: error of one that is zero in exact numbers."""
    a = torch.zeros_like(truth) if truth.grad is None else truth.grad
    b = torch.zeros_like(truth) if found is None or found.grad is None else found.grad
    return torch.allclose(a, b, 1e-5, 1e-4 * _largest(a) + rounding)

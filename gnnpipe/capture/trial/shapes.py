"""Answers what a model's forward asks about shapes, while the forward is recorded."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.capture.edge_work.kinds import is_of_edges_alone, reads_shape
from gnnpipe.capture.markers import aggregate, is_of_all
from gnnpipe.capture.stage.block_conv import DropoutMode
from gnnpipe.capture.trial.run import SampleRun
from gnnpipe.capture.trial.sample_graph import Sample
from gnnpipe.errors import InputError
from gnnpipe.graph.operators import relation_ends


def answer_by_shapes(question: fx.Node, root: Any, sample: Sample) -> bool | None:
    """The answer to a question such as ``x.dim() == 2``, found by the recorded calls on a sample.

    None if the answer depends on more than numbers of dimensions and columns: on values, types of
    numbers, or how many vertices and edges there are. ``root``: a module with the weights
    and submodules that the calls name.
    """
    asked = _calls_on_shapes(question)
    if asked is None:
        return None
    needed, waiting = {question}, [question]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - needed
        needed |= new
        waiting += new
    run = SampleRun(question.graph, root, sample)
    run.types = dict.fromkeys(question.graph.nodes, "")
    dtype = next((p.dtype for p in root.parameters() if p.is_floating_point()), torch.float32)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), DropoutMode():
            for call in question.graph.nodes:
                if call in needed:
                    value = _aggregated(call, run) if call.target is aggregate else run.value(call)
                    is_input = call.op == "placeholder" and value.is_floating_point()
                    run.whole[call] = value.to(dtype) if is_input else value
    except InputError:
        return None
    is_fixed = all(_is_fixed(call, asked, run) for call in asked)
    return bool(run.whole[question]) if is_fixed else None


def _aggregated(call: fx.Node, run: SampleRun) -> Tensor:
    """Zeros in the shape of an aggregation's value; the sample's weights have another type."""
    rows: Tensor = run.whole[call.all_input_nodes[0]]
    if is_of_all(call):
        return rows
    target = relation_ends(run.sample.graph.relations, str(call.kwargs["structure"]))[1]
    return rows.new_zeros(run.sample.counts[target], *rows.shape[1:])


def _calls_on_shapes(question: fx.Node) -> set[fx.Node] | None:
    """The calls between those that read a shape and the question; None if it reads values."""
    found, waiting = {question}, [question]
    while waiting:
        call = waiting.pop()
        if reads_shape(call) and call.target != "numel":
            continue
        module = getattr(call.target, "__module__", "")
        is_plain = call.op == "call_function" and module in ("_operator", "builtins")
        if not is_plain or not call.all_input_nodes:
            return None
        new = set(call.all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _is_fixed(call: fx.Node, asked: set[fx.Node], run: SampleRun) -> bool:
    """Whether a value is the same for every number of vertices and edges."""
    value, sample = run.whole[call], run.sample
    if isinstance(value, torch.Size):
        return all(user.target is operator.getitem for user in asked.intersection(call.users))
    counts = {*sample.counts.values(), *(len(ends[0]) for ends in sample.edges.values())}
    if not isinstance(value, int) or (value in counts and not isinstance(value, bool)):
        return False
    of = call.args[0]
    if not isinstance(of, fx.Node):
        return True  # arithmetic with a constant
    if call.target == "size":
        return _counts_columns(of, call.args[1] if len(call.args) > 1 else call.kwargs["dim"], run)
    if isinstance(run.whole[of], torch.Size):
        return _counts_columns(of.all_input_nodes[0], call.args[1], run)
    return True


def _counts_columns(of: fx.Node, dimension: Any, run: SampleRun) -> bool:
    """Whether a dimension of a value is that of columns, not of vertices or edges."""
    value = run.whole[of]
    is_known = isinstance(value, Tensor) and isinstance(dimension, int)
    return is_known and dimension % value.dim() != 0 and not is_of_edges_alone(of)

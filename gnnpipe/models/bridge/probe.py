"""What each recorded call does to rows, found out on a small random graph.

The recording is run three times: on all rows of the sample, and on either half of them, where an
aggregation hands each half its rows of the whole. A call that works row by row gives the same rows
all three times; one that mixes rows, counts them or draws random numbers does not, and is refused
by name and line. At last the whole is compared with the model itself, run by plain PyG: a recording
or a rule that is wrong cannot get past this.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from gnnpipe.errors import InputError
from gnnpipe.graph.operators import EVERYONE, Block, weighted_rows
from gnnpipe.models.bridge.blocks import FORMS, BlockConv
from gnnpipe.models.bridge.inner_dropout import DropoutKinds
from gnnpipe.models.bridge.marks import aggregate, drop
from gnnpipe.models.bridge.recording import BY_HAND, EDGES, FEATURES, attribute, line_of
from gnnpipe.models.bridge.sample import Sample
from gnnpipe.models.layer import Rows

__all__ = ["Facts", "probe"]

Found = dict[fx.Node, Any]
"""Values by the call that made them."""


@dataclass(frozen=True)
class Facts:
    """What is known of one recorded call."""

    is_rows: bool
    """Its value has a row for each vertex, of floating numbers: it can be handed on and sent."""
    shape: tuple[int, ...]
    """Of one row."""
    depends: bool
    """It depends on the vertices at all, and not on weights alone."""
    form: str = ""
    """Of a convolution that runs unchanged: 'pair' or 'square' (``blocks``)."""
    drops: tuple[str, ...] = ()
    """What each dropout of such a convolution drops."""

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return torch.Size(self.shape).numel() if self.is_rows else 0


def probe(model: nn.Module, recording: fx.GraphModule, sample: Sample) -> dict[fx.Node, Facts]:
    """What every call does; ``InputError`` for what cannot run chunk by chunk."""
    run = _Run(copy.deepcopy(recording).double().train(), sample)
    found: dict[fx.Node, Facts] = {}
    with torch.no_grad():
        for own, call in zip(recording.graph.nodes, run.module.graph.nodes, strict=True):
            if call.op == "output":
                _check_output(call, run)
                _check_whole(model, call, run)
                continue
            depends = call.op == "placeholder" or any(
                found[source].depends for source in own.all_input_nodes
            )
            if call.target is drop and not depends:
                raise InputError(
                    f"model: dropout of a weight{line_of(call)}; only that of vertices has a mask "
                    "that belongs to what is dropped"
                )
            form, drops = run.make(call, depends)
            value = run.whole[call]
            is_rows = isinstance(value, Tensor) and depends and value.is_floating_point()
            shape = tuple(value.shape[1:]) if is_rows else ()
            found[own] = Facts(is_rows, shape, depends, form, drops)
    return found


class _Run:
    """The three runs of a recording side by side."""

    def __init__(self, module: fx.GraphModule, sample: Sample) -> None:
        self.module, self.sample = module, sample
        self.whole: Found = {}
        self.parts: tuple[Found, Found] = ({}, {})

    def make(self, call: fx.Node, depends: bool) -> tuple[str, tuple[str, ...]]:
        """Find a call's value in all runs; form and dropouts if it is an unchanged convolution."""
        form = ""
        drops: tuple[str, ...] = ()
        sample = self.sample
        value: Any
        if call.op == "placeholder":
            value = sample.x if call.target == FEATURES else sample.edge_index
        elif any(n.op == "placeholder" and n.target == EDGES for n in call.all_input_nodes):
            value, form, drops = self._convolve(call)
        elif call.target is aggregate:
            value = self._aggregate(self.whole[call.all_input_nodes[0]], call)
        else:
            value = self._call(call, self.whole)
            pieces = [self._call(call, part) for part in self.parts]
            if depends:
                _check_rows(call, value, pieces, sample.num_rows)
            self._keep(call, value, pieces)
            return form, drops
        is_edges = call.op == "placeholder" and call.target == EDGES
        self._keep(call, value, [None if is_edges else value[half] for half in sample.halves])
        return form, drops

    def follow(self, call: fx.Node) -> None:
        """Find a call's value in the run on all rows alone; unchanged convolutions run whole."""
        if call.op == "placeholder":
            of_rows = call.target == FEATURES
            self.whole[call] = self.sample.x if of_rows else self.sample.edge_index
        elif call.target is aggregate:
            self.whole[call] = self._aggregate(self.whole[call.all_input_nodes[0]], call)
        else:
            with DropoutKinds(self.sample.num_rows, self.sample.num_edges):
                self.whole[call] = self._call(call, self.whole)

    def _aggregate(self, x: Tensor, call: fx.Node) -> Tensor:
        kind = str(call.kwargs["structure"])
        if kind == EVERYONE:
            return x.mean(0, keepdim=True).expand_as(x)
        matrix = torch.from_numpy(weighted_rows(self.sample.graph, kind).toarray())
        return (matrix @ x.flatten(1)).reshape(x.shape)

    def _keep(self, call: fx.Node, value: Any, pieces: list[Any]) -> None:
        self.whole[call] = value
        for part, piece in zip(self.parts, pieces, strict=True):
            part[call] = piece

    def _call(self, call: fx.Node, values: Found) -> Any:
        args: Any = fx.node.map_arg(call.args, values.__getitem__)
        kwargs: Any = fx.node.map_arg(call.kwargs, values.__getitem__)
        target: Any = call.target
        try:
            if call.op == "call_function":
                return target(*args, **kwargs)
            if call.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            if call.op == "call_module":
                return self.module.get_submodule(target)(*args, **kwargs)
            return attribute(self.module, target)
        except Exception as error:
            raise InputError(
                f"model: {_name(call)} fails on a sample: {error}{line_of(call)}"
            ) from None

    def _convolve(self, call: fx.Node) -> tuple[Tensor, str, tuple[str, ...]]:
        """The result, the form in which blocks give the same rows of it, and its dropouts."""
        is_module = call.op == "call_module"
        conv = self.module.get_submodule(str(call.target)) if is_module else None
        if not isinstance(conv, MessagePassing):
            raise InputError(
                f"model: {_name(call)} works on the edges outside of a convolution{line_of(call)}; "
                "prepare the edges before the graph is made, or put this into a MessagePassing"
            )
        n = self.sample.num_rows
        with DropoutKinds(n, self.sample.num_edges) as kinds:
            whole = self._call(call, self.whole)
        if not isinstance(whole, Tensor):
            raise InputError(f"model: {_name(call)} returns more than its rows{line_of(call)}")
        rows = {
            k: v for k, v in self.whole.items() if isinstance(v, Tensor) and v.shape[:1] == (n,)
        }
        shapes = {k: tuple(v.shape[1:]) for k, v in rows.items()}
        reason = ""
        for form in FORMS:
            try:
                block_conv = BlockConv(conv, call, shapes, form, kinds.found)
                if all(self._agrees(block_conv, rows, whole, half) for half in (0, 1)):
                    return whole, form, tuple(kinds.found)
                reason = "its rows come out otherwise"
            except Exception as error:
                reason = reason or str(error)
        raise InputError(
            f"model: {_name(call)} ({type(conv).__name__}) does not give the same rows when it is "
            f"shown only the edges into them: {reason}{line_of(call)}. It may read degrees or "
            "statistics of the whole graph, or draw random numbers"
        )

    def _agrees(
        self, block_conv: BlockConv, rows: dict[fx.Node, Tensor], whole: Tensor, half: int
    ) -> bool:
        """Run on one half of the vertices, with the others as its halo, in another order."""
        halves, n = self.sample.halves, self.sample.num_rows
        own = torch.arange(n)[halves[half]]
        order = torch.cat([own, torch.arange(n)[halves[1 - half]].flip(0)])
        number = torch.empty_like(order)
        number[order] = torch.arange(n)
        edges = self.sample.edge_index
        edges = number[edges[:, torch.isin(edges[1], own)]]
        nothing = torch.empty(0, dtype=torch.int64)
        block = Block(edges, nothing, nothing.bool()[:, None], (n, len(own)))
        received = torch.cat([rows[k][order].flatten(1) for k in block_conv.pushed], dim=1)
        mine = rows[block_conv.own][own] if block_conv.own is not None else None
        found = block_conv(received, block, Rows(keys=own, features=None), mine)
        return torch.allclose(found, whole[own], 1e-9, 1e-12)


def _name(call: fx.Node) -> str:
    target = call.target
    if isinstance(target, str):
        return target.removeprefix("model.")
    return str(getattr(target, "__name__", target))


def _check_rows(call: fx.Node, value: Any, pieces: list[Any], n: int) -> None:
    """Each half has its rows of the whole. A count or a shape is seen where it is used."""
    halves = [_tensors(piece) for piece in pieces]
    for index, tensor in enumerate(_tensors(value)):
        if tensor.dim() == 0 or len(tensor) != n:
            raise InputError(
                f"model: {_name(call)} does not keep one row for each vertex (it gives "
                f"{list(tensor.shape)} for {n} vertices){line_of(call)}; only vertex-wise work and "
                "convolutions can be cut into chunks"
            )
        parts = [half[index] for half in halves]
        fits = all(part.shape[1:] == tensor.shape[1:] for part in parts)
        joined = torch.cat(parts) if fits else tensor[:0]
        if joined.shape != tensor.shape or not torch.allclose(
            joined.double(), tensor.double(), 1e-9, 1e-12, equal_nan=True
        ):
            raise InputError(
                f"model: {_name(call)} mixes vertices or draws random numbers{line_of(call)}; it "
                f"would give another result chunk by chunk. Make it work row by row, {BY_HAND}"
            )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for one in value for t in _tensors(one)]
    return []


def _check_output(call: fx.Node, run: _Run) -> None:
    result: Any = call.args[0]
    value = run.whole.get(result) if isinstance(result, fx.Node) else None
    n = run.sample.num_rows
    if not isinstance(value, Tensor) or value.dim() != 2 or len(value) != n:
        what = list(value.shape) if isinstance(value, Tensor) else type(result).__name__
        raise InputError(
            f"model: forward must return one tensor [N, classes], not {what}; wrap it in a module "
            "that returns the logits"
        )


def _check_whole(model: nn.Module, call: fx.Node, run: _Run) -> None:
    """The recording gives what the model gives, run by plain PyG, and the same gradients."""
    result: Any = call.args[0]
    sample = run.sample
    plain = copy.deepcopy(model).double().train()
    with torch.enable_grad():
        try:
            with DropoutKinds(sample.num_rows, sample.num_edges):
                truth = plain(sample.x, sample.edge_index)
        except Exception as error:
            raise InputError(f"model: fails on a sample in plain PyG: {error}") from None
        again = _Run(run.module, sample)
        for other in run.module.graph.nodes:
            if other.op != "output":
                again.follow(other)
        found = again.whole[result]
        towards = torch.linspace(-1.0, 1.0, truth.numel(), dtype=truth.dtype).view_as(truth)
        for out in (truth, found):
            if out.requires_grad:
                (out * towards).sum().backward()
    # Some of PyG's convolutions find their edge weights in float32, whatever the rows are.
    if not torch.allclose(truth, found, 1e-6, 1e-6):
        raise InputError(
            f"model: its recording gives other numbers than the model on a sample (by "
            f"{float((truth - found).abs().max()):.1e}); forward depends on something that a "
            f"recording cannot hold, {BY_HAND}"
        )
    recorded = dict(run.module.named_parameters(remove_duplicate=False))
    for name, parameter in plain.named_parameters():
        twin = recorded.get(f"model.{name}")
        if not _same_gradient(parameter, twin):
            raise InputError(
                f"model: the gradient of {name} is another in its recording; forward holds "
                f"gradients back or makes its own (no_grad, autograd.Function), {BY_HAND}"
            )


def _same_gradient(truth: Tensor, found: Tensor | None) -> bool:
    a = torch.zeros_like(truth) if truth.grad is None else truth.grad
    b = torch.zeros_like(truth) if found is None or found.grad is None else found.grad
    return torch.allclose(a, b, 1e-5, 1e-5 * float(a.abs().max() + 1e-6))

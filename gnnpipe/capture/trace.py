"""Records a PyG model's forward as a graph of calls with torch.fx, without data.

Convolutions with a rule (``rules``) are replaced by the rule's calls. Other modules of PyG and
torch are one call each; the user's own modules are traced through. Code that a recording would
compute differently from the model is refused with the user's source line.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from linecache import getline
from types import FrameType
from typing import Any

import scipy.sparse as sp
import torch
from torch import fx, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.attention import PerformerAttention

from gnnpipe.capture.buffers import (
    WITHOUT_GRADIENT,
    hold_back_gradients,
    keep_buffers,
    mark_assigned,
)
from gnnpipe.capture.call import called
from gnnpipe.capture.call_order import order_calls
from gnnpipe.capture.edge_work.kinds import is_of_edges_alone
from gnnpipe.capture.edge_work.modules import EdgeModule, EdgeUpdate, Propagate
from gnnpipe.capture.fx_names import (
    AS_IS,
    EDGES,
    FEATURES,
    by_argument,
    fields_of,
    first_line,
    input_name,
    input_number,
    is_input,
    is_own,
    place_of,
    refuse,
)
from gnnpipe.capture.markers import drop
from gnnpipe.capture.patched_libraries import RecordedValue, patched_libraries
from gnnpipe.capture.preserve import random_state, unchanged
from gnnpipe.capture.rewrite import (
    check_vertex_weights,
    join_modes,
    make_out_of_place,
    mark_vertex_weights,
    replace_dropout,
    replace_masks,
    replace_products,
)
from gnnpipe.capture.rules.attention import ATTENTION_RULES, HETERO_RULES, performer
from gnnpipe.capture.rules.convolutions import RULES, TAKES_PAIRS, OtherKindError, reversible
from gnnpipe.capture.rules.norms import EDGE_RULES, NORMS, frozen_batch_norm
from gnnpipe.capture.stage.step_calls import HOOKS
from gnnpipe.capture.trial.sample_graph import Sample
from gnnpipe.capture.trial.shapes import answer_by_shapes
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import EDGE_DATA, Graph
from gnnpipe.graph.operators import RELATION
from gnnpipe.graph.types import AdjacencyForm, relation_of
from gnnpipe.output import report_progress, warn

_RULES = {**RULES, **EDGE_RULES, **ATTENTION_RULES}

_SHARE_OF_RECORDING = 0.5
"""Share of the time of ``capture``; the comparison with the original takes the rest."""


class _ModelCall(nn.Module):
    """Calls the model with features, edges and edge data; other parameters keep their defaults."""

    def __init__(self, model: nn.Module, method: str, graph: Graph) -> None:
        super().__init__()
        self.model, self._method, self._graph = model, method, graph

    def forward(self, x: Any, edges: Any, carried: Any) -> Any:
        return called(self.model, self._method, self._graph)(x, edges, **carried)


def trace(
    model: nn.Module, method: str, sample: Sample, graph: Graph, opened: Collection[type] = ()
) -> fx.GraphModule:
    """Record a method of the model; the model's modules have the prefix ``model.``.

    ``sample``: answers what the method asks about shapes, and names the edge data it gets. If
    ``graph`` has several vertex types, the method is called with dicts of features and edges.
    Inputs that no call reads are removed. ``opened``: classes of convolutions whose calls are
    recorded one by one.
    """
    was = {name: module.training for name, module in model.named_modules()}
    try:
        model.train()
        frozen = {module for module in model.modules() if not module.training}
        training = _record(model, method, sample, graph, frozen, opened)
        report_progress(_SHARE_OF_RECORDING / 2)
        model.eval()
        evaluation = _record(model, method, sample, graph, frozen, opened)
        report_progress(_SHARE_OF_RECORDING)
    finally:
        for name, module in model.named_modules():
            module.training = was[name]
    replace_dropout(training, evaluation)
    keep_buffers(training, evaluation, model)
    for recording in (training, evaluation):
        hold_back_gradients(recording)
    join_modes(training, evaluation)
    replace_products(training, graph.weight_fields if graph.has_weighted_adjacency else ())
    make_out_of_place(training)
    replace_masks(training)
    mark_vertex_weights(training, model, graph.vertex_counts)
    check_vertex_weights(training, graph.vertex_counts)
    observed = _observed(training)
    training.graph.eliminate_dead_code()
    for path in sorted(observed - _observed(training)):
        warn(
            f"model: {path.removeprefix('model.')} has a call whose result is never used; its "
            "running statistics leave that call out, where plain PyG counts it"
        )
    for call in list(training.graph.nodes):
        if call.op == "placeholder" and not call.users:
            training.graph.erase_node(call)
    order_calls(training.graph)
    training.recompile()
    return training


def _observed(recording: fx.GraphModule) -> Counter[str]:
    """Numbers of aggregations that update a module's running statistics, by its path."""
    marks = (str(call.kwargs.get("observed_by") or "") for call in recording.graph.nodes)
    return Counter(mark.partition(":")[0] for mark in marks if mark)


class _Tracer(fx.Tracer):
    relation = ""
    """Suffix of structure names while a rule runs: the edge type of its convolution."""

    is_in_opened = False
    """The forward of a convolution runs whose calls are recorded one by one."""
    derived_edges: fx.Proxy | None = None
    """While a rule runs: the edges of its convolution, if forward made them."""

    def __init__(
        self, sample: Sample, graph: Graph, frozen: Collection[nn.Module], opened: Collection[type]
    ) -> None:
        """``frozen``: modules that stay in evaluation mode when the model trains."""
        super().__init__()
        self.frozen, self._opened = frozen, opened
        self._takes_edge_work = graph.types is None
        self._sample, self._names, self._graph = sample, sample.names, graph
        self._types, self._made, self._is_asking = graph.types, 0, False
        self._adjacency = graph.adjacency if graph.has_weighted_adjacency else None
        self._weights: dict[int | None, fx.Proxy] = {}
        """The values of ``adj_t``, if it has any, by relation."""
        self._tensor_paths: dict[int, str] = {}
        self._autocast, self._has_gradients = _autocast_state(), torch.is_grad_enabled()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The value of a call."""
        return RecordedValue(node, self)

    def create_arg(self, a: Any) -> Any:
        """An argument of a call; ``fx.Tracer`` would take a recorded value for a constant."""
        return a.node if isinstance(a, fx.Proxy) else super().create_arg(a)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        """Records a call as ``fx.Tracer`` does; a recording would lose the model's own autocast."""
        made = super().create_proxy(*args, **kwargs)
        made.node.stack_trace = _user_line()
        if _autocast_state() != self._autocast:
            refuse("forward uses torch.autocast", "use --matmul-dtype bf16 instead", made.node)
        is_call = made.node.op not in ("get_attr", "placeholder")
        if is_call and self._has_gradients and not torch.is_grad_enabled():
            made.node.meta[WITHOUT_GRADIENT] = True
        return made

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The recording's inputs, in dicts if there are several vertex types."""

        def make(name: str) -> Any:
            return self.create_proxy("placeholder", name, (), {})

        types = self._types
        if types is None:
            arguments = [make(FEATURES), make(EDGES)]
        else:
            places = {name: i for i, name in enumerate(types.names) if name in types.features}
            arguments = [
                {name: make(input_name(FEATURES, i)) for name, i in places.items()},
                {r: make(input_name(EDGES, i)) for i, r in enumerate(types.relations)},
            ]
        if self._adjacency is not None:
            names = self._graph.weight_fields
            self._weights = {None if types is None else relation_of(f): make(f) for f in names}
        fields = sorted(fields_of(self._names, self._graph))
        arguments.append(by_argument(self._names, self._graph, {f: make(f) for f in fields}))
        return root_fn, [self.root, *arguments]

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """The calls of ``root`` as a graph."""
        named = (*root.named_buffers(), *root.named_parameters())
        self._tensor_paths = {id(tensor): path for path, tensor in named}
        return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A weight or buffer as a recorded value; ``fx.Tracer`` would search all at each access."""
        path = self._tensor_paths.get(id(attr_val))
        if path is None or self._is_asking:
            return attr_val
        if path not in parameter_proxy_cache:
            parameter_proxy_cache[path] = self.create_proxy("get_attr", path, (), {})
        return parameter_proxy_cache[path]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one call: convolutions and modules of torch and PyG, not models."""
        kind = type(m).__module__
        if isinstance(m, pyg.MessagePassing | pyg.JumpingKnowledge | EdgeModule):
            return type(m) not in self._opened
        # Some modules in torch_geometric.nn.conv only combine convolutions.
        several = ("torch_geometric.nn.models", "torch_geometric.nn.conv")
        if kind.startswith(several) or isinstance(m, pyg.Sequential | pyg.HeteroDictLinear):
            return False
        return kind.startswith("torch_geometric.nn") or super().is_leaf_module(
            m, module_qualified_name
        )

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The answer to a question about shapes; True for ``requires_grad`` of a traced value.

        Checkpointing depends on the latter.
        """
        if isinstance(obj, fx.proxy.Attribute) and obj.attr == "requires_grad":
            return True
        answer = self._answer(obj.node)
        return super().to_bool(obj) if answer is None else answer

    def _answer(self, question: fx.Node) -> bool | None:
        """The answer to a question about shapes, else None."""
        was = {module: module.training for module in self.root.modules()}
        self._is_asking = True
        try:
            self.root.eval()  # so that no running statistics change
            return answer_by_shapes(question, self.root, self._sample)
        finally:
            self._is_asking = False
            for module, is_training in was.items():
                module.training = is_training

    def _is_identity(self, m: nn.Module) -> bool:
        """Whether the call of a module returns its first argument as it is."""
        is_frozen_drop = m in self.frozen and isinstance(m, nn.Dropout)
        return is_frozen_drop or (type(m) is nn.Identity and not any(getattr(m, h) for h in HOOKS))

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Record a module's call: by its rule, as dropout, or as ``fx.Tracer`` does."""
        if self._is_asking:
            return forward(*args, **kwargs)
        if self._is_identity(m):
            return args[0] if args else kwargs["input"]
        if m in self.frozen and type(m) in (nn.BatchNorm1d, pyg.BatchNorm):
            found = frozen_batch_norm(m, args[0] if args else next(iter(kwargs.values())))
            if found is not None:
                return found
        if isinstance(m, nn.Dropout):
            return drop(args[0] if args else kwargs["input"], probability=m.p)
        if type(m) in NORMS and not any(a is not None for a in (*args[1:], *kwargs.values())):
            found = NORMS[type(m)](m, args[0], self.path_of_module(m))
            if found is not None:
                return found
        if isinstance(m, PerformerAttention):
            return performer(m, args[0])  # its mask is of all vertices
        if isinstance(m, pyg.GroupAddRev):
            return reversible(m, *args, **kwargs)
        if isinstance(m, pyg.Aggregation) and not self._is_over_edges(args[1:], kwargs):
            refuse(
                f"{self.path_of_module(m)} ({type(m).__name__}) pools over all vertices, which a "
                "chunk cannot",
                "only vertex-wise outputs can be trained",
            )
        if type(m) in HETERO_RULES and self._types is not None:
            given = inspect.signature(m.forward).bind(*args, **kwargs).arguments
            if set(given) == {"x_dict", "edge_index_dict"}:
                x = {k: v for k, v in given["x_dict"].items() if v is not None}
                return HETERO_RULES[type(m)](m, x, given["edge_index_dict"], partial(self._make, m))
        # A rule does what the class does, not what a forward of this one object does.
        is_of_class = "forward" not in vars(m)
        if isinstance(m, pyg.MessagePassing) and type(m) in _RULES and is_of_class:
            found = self._lower(m, args, kwargs)
            if found is not None:
                return found
        is_opened = isinstance(m, pyg.MessagePassing) and type(m) in self._opened
        depth = len(self.module_stack)
        try:
            with self._recording_propagate(m) if is_opened else nullcontext():
                return super().call_module(m, forward, args, kwargs)
        except BaseException:
            # fx does not, and forward may catch the exception.
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            raise

    def _is_over_edges(self, args: Any, kwargs: Any) -> bool:
        """Whether the index that an aggregation gets is made of the edges."""
        index = kwargs.get("index", args[0] if args else None)
        return isinstance(index, fx.Proxy) and is_of_edges_alone(index.node)

    @contextmanager
    def _recording_propagate(self, m: nn.Module) -> Iterator[None]:
        """Context in which ``propagate`` and ``edge_updater`` of a convolution are recorded."""

        def recorder(kind: type[Propagate] | type[EdgeUpdate]) -> Callable[..., Any]:
            def call(edge_index: Any, size: Any = None, **given: Any) -> Any:
                del size  # follows from the rows
                return self._add_module(m, kind(m))(edge_index, **given)

            return call

        m.__dict__.update(propagate=recorder(Propagate), edge_updater=recorder(EdgeUpdate))
        was_in_opened, self.is_in_opened = self.is_in_opened, True
        try:
            yield
        finally:
            self.is_in_opened = was_in_opened
            del m.__dict__["propagate"], m.__dict__["edge_updater"]

    def is_dense_features(self, value: fx.Node) -> bool:
        """Whether a value is the dense features of a graph with one vertex type."""
        one_type = self._types is None
        return one_type and is_input(value, FEATURES) and not sp.issparse(self._graph.x)

    def _make(
        self, of: nn.Module, conv: nn.Module, read: Any, reading: Any, edges: Any, **carried: Any
    ) -> Any:
        """Record the call of ``conv``, a convolution made by the rule of the convolution ``of``.

        ``read``: rows of source vertices; ``reading``: rows of target vertices, None if the same;
        ``carried``: values of the edges.
        """
        self._add_module(of, conv)
        given = {name: value for name, value in carried.items() if value is not None}
        return conv(read if reading is None else (read, reading), edges, **given)

    def _add_module(self, of: nn.Module, made: nn.Module) -> nn.Module:
        """Make a module, which stands for a part of the module ``of``, one of the recording's."""
        path = self.path_of_module(of).removeprefix("model.").replace(".", "_")
        name = f"part_{self._made}_of_{path}"
        self._made += 1
        self.root.add_module(name, made)
        assert self.submodule_paths is not None
        self.submodule_paths[made] = name
        return made

    def _lower(self, m: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of the convolution's rule, or None if the convolution must run unchanged."""
        given = _signature(type(m).forward).bind(m, *args, **kwargs).arguments
        del given["self"]
        others = {k: v for k, v in given.items() if k not in (EDGES, "adj_t") and v is not None}
        edges = given.get(EDGES, given.get("adj_t"))
        if not isinstance(edges, fx.Proxy):
            return None
        is_given = is_input(edges.node, EDGES)
        if not is_given and not (self._takes_edge_work and is_of_edges_alone(edges.node)):
            return None
        rows = [v for v in others.values() if not isinstance(v, fx.Proxy)]
        if rows and not (type(m) in TAKES_PAIRS and len(rows) == 1 and rows[0] is others["x"]):
            return None
        takes = _signature(_RULES[type(m)]).parameters
        carried = {k: v for k, v in others.items() if k in EDGE_DATA}
        # A rule with ``make`` hands edge values on to another convolution.
        if "make" not in takes and not all(self._is_fixed(k, v, edges) for k, v in carried.items()):
            return None
        if getattr(m, "flow", "source_to_target") != "source_to_target":
            return None
        number = input_number(edges.node) if is_given else None
        if (
            is_given
            and number in self._weights
            and "edge_weight" in takes
            and self._reads_values(m)
        ):
            others["edge_weight"] = self._weights[number]
        needed = {k for k, p in takes.items() if p.default is p.empty} - {"conv", "make"}
        if set(others) - set(takes) or needed - set(others):
            return None
        if "make" in takes:
            others["make"] = partial(self._make, m, edges=edges)
        self.relation = "" if number is None else f"{RELATION}{number}"
        self.derived_edges = None if is_given else edges
        try:
            return _RULES[type(m)](m, **others)
        except OtherKindError:
            return None
        finally:
            self.relation, self.derived_edges = "", None

    def _is_fixed(self, field: str, value: fx.Proxy, edges: fx.Proxy) -> bool:
        """Whether a value of the edges is the graph's, or made of the edges alone."""
        if is_input(value.node, field):
            # A relation's value may be given with the edges of another relation.
            is_one_type = self._types is None
            return is_one_type or input_number(value.node) == input_number(edges.node)
        return self._takes_edge_work and field == "edge_weight" and is_of_edges_alone(value.node)

    def _reads_values(self, m: nn.Module) -> bool:
        """Whether a convolution multiplies by the values of ``adj_t``."""
        is_sparse_tensor = self._adjacency is AdjacencyForm.SPARSE_TENSOR
        return not (is_sparse_tensor and isinstance(m, pyg.SAGEConv | pyg.GINConv))


def _record(
    model: nn.Module,
    method: str,
    sample: Sample,
    graph: Graph,
    frozen: Collection[nn.Module],
    opened: Collection[type],
) -> fx.GraphModule:
    root = _ModelCall(model, method, graph)
    tracer = _Tracer(sample, graph, frozen, opened)
    name = type(model).__name__
    before = random_state()
    try:
        # Forward may keep traced values in its module, which later calls would read.
        with unchanged(model), patched_libraries(opened):
            calls = tracer.trace(root)
            has_drawn = random_state() != before  # ``unchanged`` takes random numbers back
            mark_assigned(calls, model)
        recording = fx.GraphModule(root, calls)
        _choose_target(recording, graph.target)
    except InputError:
        raise
    except Exception as error:
        where = place_of(error)
        if isinstance(error, KeyError) and graph.types is not None:
            refuse(f"{name} reads {error} ({where}), which the graph lacks: {_given(graph)}")
        refuse(
            f"{name} cannot be traced: {first_line(error)} ({where}). Make that line independent "
            f"of the data, {AS_IS}"
        )
    if has_drawn:
        refuse(
            f"{name}.forward decides by random numbers what it calls (stochastic depth?)",
            "the recording would repeat one decision in every epoch",
        )
    return recording


def _given(graph: Graph) -> str:
    """The types, relations and edge data of a graph with several vertex types, for a message."""
    assert graph.types is not None
    found = (
        f"its types with features are {', '.join(graph.types.features) or 'none'}, its relations "
        f"{', '.join(map(str, graph.relations))}"
    )
    for field in graph.derived:
        found += f", its {field.partition('__')[0]} of {graph.relations[relation_of(field) or 0]}"
    return found


def _choose_target(recording: fx.GraphModule, target: str) -> None:
    """Make the output the result of the labelled vertex type, if forward returns a dict."""
    output = recording.graph.output_node()
    result = output.args[0]
    if target and isinstance(result, Mapping):
        if not isinstance(result.get(target), fx.Node):
            given = ", ".join(map(str, result)) or "nothing"
            refuse(f"forward gives results for {given}, but {target!r} has the labels")
        output.args = (result[target],)
        recording.graph.eliminate_dead_code()


@lru_cache(1 << 8)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of a function; ``inspect`` is slow, and layers of a class share one."""
    return inspect.signature(function)


def _user_line() -> str:
    """The innermost line of the user's that is traced, as in a traceback; '' if there is none.

    ``fx.Tracer.record_stack_traces`` reads and formats all frames, which is slow.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _Tracer.trace.__code__:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if is_own(path):
            return f'File "{path}", line {line}, in {frame.f_code.co_name}\n{getline(path, line)}'
        frame = frame.f_back
    return ""


def _autocast_state() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

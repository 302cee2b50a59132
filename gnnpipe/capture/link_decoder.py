"""Link prediction: adds an op behind a model's last one that scores pairs of vertices.

The model's final rows [N, d] are pushed into a history table. Each chunk scores the pairs whose
targets it owns and reads the sources from the table, as a layer reads neighbours. So staleness,
gradients and communication are those of a layer, and the scores are exact layer by layer. P pairs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnpipe.capture.fx_names import first_line, refuse
from gnnpipe.capture.preserve import detached_copy
from gnnpipe.capture.stage.block_conv import DropoutKind, DropoutKinds, KeyedDropout
from gnnpipe.capture.trial.sample_graph import names_of_weights, perturb_weights
from gnnpipe.errors import InputError
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.models.rows import Rows, Values
from gnnpipe.models.stage_module import Aggregation, MeanOfRows, Model, Received, StageModule
from gnnpipe.ops.saved_tensors import recorded_saved_tensors

PAIR_SCORES = "pair_scores"
"""Name of the op that scores pairs; its table holds the final rows."""


class PairModel(Model):
    """A model with scores of vertex pairs."""

    def __init__(self, inner: Model, num_ops: int, width: int) -> None:
        """``inner`` has ``num_ops`` ops and gives rows [N, width].

        Pairs are scored by the module's ``decode(z, edge_label_index)``, or by the inner product of
        both ends if the module has no such method. Raises ``InputError`` if a score depends on more
        than the two ends.
        """
        self.inner, self.num_ops, self.width = inner, num_ops, width
        self.name, self.digest = inner.name, inner.digest
        self.has_decode = inspect.ismethod(getattr(inner.module, "decode", None))
        found: _Tried = _try_out(inner.module, width) if self.has_decode else ((), (), 0)
        self.drops, self.decode_weights, self.kept_width = found
        """For ``decode``: kinds of rows of its dropouts, names of its weights, and numbers that
        autograd keeps for each pair."""
        whole = inner.stage_module(range(num_ops))
        told = {name for name, _ in whole.named_state()} | set(self.decode_weights)
        state = inner.module.state_dict(keep_vars=True).items()
        self.decode_buffers = tuple(
            name for name, v in state if name not in told and not isinstance(v, nn.Parameter)
        )
        """Names of the buffers that no op reads: ``decode`` may read them."""

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Edge data that the inner model reads."""
        return self.inner.edge_inputs

    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """Same as for the inner model; scores stay in full precision."""
        return self.inner.has_bf16_products(dense)

    @property
    def size_text(self) -> str:
        """Size of the inner model and kind of the scores."""
        return f"{self.inner.size_text}, pairs by {'decode' if self.has_decode else 'product'}"

    @property
    def module(self) -> nn.Module:
        """The inner model's module."""
        return self.inner.module

    def stage_module(self, ops: Sequence[int]) -> StageModule:
        """The inner model's ops; the last stage also scores the pairs."""
        inner = self.inner.stage_module([i for i in ops if i < self.num_ops])
        return PairStageModule(self, inner) if self.num_ops in ops else inner


def without_pairs(model: Model) -> Model:
    """The model that makes the rows, without the op that scores pairs."""
    return model.inner if isinstance(model, PairModel) else model


class PairStageModule(StageModule):
    """The last stage: ops of the inner model, then the scores.

    Returns ``x`` [P_c, 1], the scores of a chunk's pairs, and ``rows`` [C, d], the final rows.
    """

    def __init__(self, model: PairModel, inner: StageModule) -> None:
        self._model, self._inner = model, inner
        scores = Aggregation(PAIR_SCORES, PAIRS, model.width, PAIRS, "")
        self.rounds = [*inner.rounds, (scores,)]

    def set_vertex_values(self, values: Mapping[str, Tensor] | None) -> None:
        """See ``StageModule``."""
        self._inner.set_vertex_values(values)

    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Run one step (see ``StageModule``)."""
        if index < self._inner.num_steps:
            pushed, values = self._inner.step(index, values, received, rows)
            if index < self._inner.num_steps - 1:
                return pushed, values
            return {PAIR_SCORES: values["x"]}, {"rows": values["x"]}
        if rows.is_probe:
            return {}, {}  # A forecast ends with the last table.
        found = received[PAIR_SCORES]
        assert found.block is not None
        source, target = found.block.edge_index
        own = values["rows"]
        if self._model.has_decode:
            every = torch.cat([own, found.rows])
            ends = torch.stack([source + len(own), target])
            with KeyedDropout(self._model.drops, found.block, rows, _SITE):
                decode: Any = self._model.module.decode
                scores = decode(every, ends)
        else:
            scores = _Products.apply(found.rows, own, source, target)  # type: ignore[no-untyped-call]
        return {}, {"x": scores.reshape(-1, 1), "rows": own}

    def __deepcopy__(self, memo: dict[int, Any]) -> PairStageModule:
        """A copy; the inner stage module comes first, as it shares weights of other stages."""
        inner = copy.deepcopy(self._inner, memo)
        return PairStageModule(copy.deepcopy(self._model, memo), inner)

    @property
    def feature_structures(self) -> tuple[str, ...]:
        """See ``StageModule``."""
        return self._inner.feature_structures

    def maps_of_features(self, types: Collection[str]) -> list[nn.Parameter]:
        """See ``StageModule``."""
        return self._inner.maps_of_features(types)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Weights of the inner ops, then of ``decode``."""
        inner = dict(self._inner.named_parameters())
        yield from inner.items()
        own = dict(self._model.module.named_parameters())
        yield from ((name, own[name]) for name in self._model.decode_weights if name not in inner)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers of the inner ops and of ``decode``."""
        state = self._model.module.state_dict(keep_vars=True)
        yield from (
            dict(self._inner.named_state())
            | dict(self.named_parameters())
            | {name: state[name] for name in self._model.decode_buffers}
        ).items()

    def writes_output_buffer(self, index: int) -> bool:
        """Same as for the inner stage module; final rows are never made in place."""
        return index < self._inner.num_steps - 1 and self._inner.writes_output_buffer(index)

    def observe(self, means: Mapping[str, MeanOfRows]) -> None:
        """Same as for the inner stage module."""
        self._inner.observe(means)

    def to(self, device: torch.device) -> None:
        """Move weights and buffers of the inner ops and of ``decode``."""
        self._inner.to(device)
        for _, kept in self.named_state():
            kept.data = kept.data.to(device)


_SITE = 0x7FFF0000
"""Dropout key of ``decode``, above those of all convolutions."""

_AT_ONCE = 1 << 13
"""Pairs gathered at a time: rows of all pairs may need more memory than the model."""


class _Products(torch.autograd.Function):
    """Inner products of pairs, without keeping gathered rows for backward."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, own: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(read, own, source, target)
        pairs = zip(torch.split(source, _AT_ONCE), torch.split(target, _AT_ONCE), strict=True)
        return torch.cat([(read[s] * own[t]).sum(1) for s, t in pairs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        read, own, source, target = ctx.saved_tensors
        to_read, to_own = torch.zeros_like(read), torch.zeros_like(own)
        parts = (torch.split(one, _AT_ONCE) for one in (grad, source, target))
        for g, s, t in zip(*parts, strict=True):
            to_read.index_add_(0, s, own[t] * g[:, None])
            to_own.index_add_(0, t, read[s] * g[:, None])
        return to_read, to_own, None, None


_Tried = tuple[tuple[DropoutKind, ...], tuple[str, ...], int]
"""Kinds of the dropouts of ``decode``, names of its weights, numbers kept for each pair."""


def _try_out(module: nn.Module, width: int) -> _Tried:
    """Run ``decode`` on samples; raises ``InputError`` if it cannot score chunk by chunk."""
    name = f"{type(module).__name__}.decode"
    own: Any = module.decode
    given = list(inspect.signature(own).parameters.values())
    if len([p for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]) > 2:
        refuse(f"{name} should take (z, edge_label_index) and nothing more")
    # In the copy all weights have gradients and none is zero.
    tried = detached_copy(module).double().train().requires_grad_(True)
    perturb_weights(tried, names_of_weights(tried, tried))
    decode: Any = tried.decode
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(_ROWS, width, dtype=torch.float64, generator=generator, requires_grad=True)
    ends = torch.randint(0, _ROWS // 2, (2, _PAIRS), generator=generator)
    of_pairs = recorded_saved_tensors(lambda tensor: tensor.shape[:1] == (_PAIRS,))
    with DropoutKinds(0, _ROWS, _PAIRS) as kinds, of_pairs as kept:
        whole = _decoded(decode, z, ends, name)
    named = list(tried.named_parameters())
    weights = [p for _, p in named]
    grads = (
        torch.autograd.grad(whole.sum(), [z, *weights], allow_unused=True)
        if whole.requires_grad
        else [None]
    )
    if grads[0] is None:
        refuse(f"{name} gives scores that do not depend on z")
    # Other rows beside the ends, fewer pairs, and evaluation mode must not change a score.
    others = torch.cat([z.detach()[: _ROWS // 2].flip(0), torch.ones(3, width).double()])
    moved = _ROWS // 2 - 1 - ends[:, 3:]
    with torch.no_grad():
        with DropoutKinds(0, len(others), _PAIRS - 3):
            part = _decoded(decode, others, moved, name)
        tried.eval()
        still = _decoded(decode, z, ends, name)
    if set(kinds.found) - {DropoutKind.EDGES}:
        refuse(f"{name} drops rows of vertices", "do that in forward")
    if not torch.allclose(part, whole[3:], 1e-9, 1e-12):
        refuse(
            f"{name} does not score each pair by its two ends alone (a norm over all pairs or "
            "rows?), so that chunks would give other scores"
        )
    if not torch.allclose(still, whole, 1e-9, 1e-12):
        refuse(f"{name} gives other scores in training, beside its dropout")
    if ((whole >= 0) & (whole <= 1)).all():
        hint = "leave its sigmoid out (of GAE, pass a decoder of your own)"
        refuse(f"{name} gives numbers from 0 to 1, where scores are logits", hint)
    used = tuple(n for (n, _), g in zip(named, grads[1:], strict=True) if g is not None)
    return tuple(kinds.found), used, sum(t.numel() for t in kept) // _PAIRS


_ROWS, _PAIRS = 22, 29


def _decoded(decode: Any, z: Tensor, ends: Tensor, name: str) -> Tensor:
    try:
        found = decode(z, ends)
    except (InputError, TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        refuse(f"{name}(z, edge_label_index) fails on a sample: {first_line(error)}")
    count = ends.shape[1]
    if not isinstance(found, Tensor) or found.shape not in ((count,), (count, 1)):
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        refuse(f"{name} should give a score for each pair, [P], not {what}")
    return found.reshape(-1)

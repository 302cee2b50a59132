"""Link prediction: behind a model's last op, one more that scores pairs of vertices.

The model gives every vertex its final row; they are pushed into a table of their own, and each
chunk scores the pairs whose targets it owns, reading the other ends as a layer reads neighbours. So
all that holds for layers (what is stale, which gradient goes where, what a shard is sent) holds for
the pairs, and under a layer-by-layer walk the scores are exact. Final rows are d wide; P pairs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gnnpipe.errors import InputError
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.models.bridge.inner_dropout import DropoutKinds, KeyedDropout
from gnnpipe.models.layer import Rows, Values
from gnnpipe.models.piece import Aggregation, Model, Piece, Received

__all__ = ["PAIR_SCORES", "PairModel", "PairPiece"]

PAIR_SCORES = "pair_scores"
"""The op that scores; its table holds the final rows."""


class PairModel(Model):
    """A model whose final rows are scored in pairs."""

    def __init__(self, inner: Model, num_ops: int, width: int) -> None:
        """``inner`` has ``num_ops`` ops and gives rows of ``width``.

        Its module's ``decode(z, edge_label_index)`` scores them, if there is one; else the inner
        product of both ends. ``InputError`` if that does not score each pair by its ends alone.
        """
        self.inner, self.num_ops, self.width = inner, num_ops, width
        self.name = inner.name
        self.drops, self.decode_weights, self.gives_chances = _try_out(inner.module, width)
        """What each dropout of ``decode`` drops, the names of its weights, and whether it gives
        numbers from 0 to 1, which are no logits."""

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Those of the inner model."""
        return self.inner.edge_inputs

    @property
    def size_text(self) -> str:
        """That of the inner model."""
        return f"{self.inner.size_text}, pairs by {'decode' if self.has_decode else 'product'}"

    @property
    def has_decode(self) -> bool:
        """The model itself says how pairs are scored."""
        return hasattr(self.module, "decode")

    @property
    def module(self) -> nn.Module:
        """The inner model's."""
        return self.inner.module

    def piece(self, first: int, last: int) -> Piece:
        """The inner model's ops, and behind them the scores."""
        inner = self.inner.piece(first, min(last, self.num_ops))
        return PairPiece(self, inner) if last > self.num_ops else inner


class PairPiece(Piece):
    """The last stage: its ops of the inner model, then the scores.

    What leaves it is ``x`` [P_c, 1], the scores of a chunk's pairs, and ``rows`` [C, d].
    """

    def __init__(self, model: PairModel, inner: Piece) -> None:
        self._model, self._inner = model, inner
        scores = Aggregation(PAIR_SCORES, PAIRS, model.width, PAIRS, "")
        self.rounds = [*inner.rounds, (scores,)]

    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Run one step (see ``Piece``)."""
        if index < self._inner.num_steps:
            pushed, values = self._inner.step(index, values, received, rows)
            if index < self._inner.num_steps - 1:
                return pushed, values
            return {PAIR_SCORES: values["x"]}, {"rows": values["x"]}
        if rows.pilot:
            return {}, {}  # A forecast ends with the last table.
        found = received[PAIR_SCORES]
        assert found.block is not None
        source, target = found.block.edge_index
        own = values["rows"]
        if self._model.has_decode:
            every = torch.cat([own, found.rows])
            ends = torch.stack([source + len(own), target])
            with KeyedDropout(self._model.drops, found.block, rows, _SITE):
                scores = self._model.module.decode(every, ends)  # type: ignore[operator]
        else:
            scores = _Products.apply(found.rows, own, source, target)  # type: ignore[no-untyped-call]
        return {}, {"x": scores.reshape(-1, 1), "rows": own}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the inner ops, then those of ``decode``."""
        inner = dict(self._inner.named_parameters())
        yield from inner.items()
        own = dict(self._model.module.named_parameters())
        yield from ((name, own[name]) for name in self._model.decode_weights if name not in inner)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights, and the inner ops' buffers."""
        yield from (dict(self._inner.named_state()) | dict(self.named_parameters())).items()

    def observe(self, name: str, mean: Tensor, count: int) -> None:
        """As the inner piece."""
        self._inner.observe(name, mean, count)

    def to(self, device: torch.device) -> None:
        """Move the inner ops, and the weights of ``decode``."""
        self._inner.to(device)
        for _, weight in self.named_parameters():
            weight.data = weight.data.to(device)


_SITE = 0x7FFF0000
"""Of the dropout in ``decode``; behind that of all convolutions."""

_AT_ONCE = 1 << 16
"""Pairs whose rows are gathered at a time: both ends of all pairs may be larger than the model."""


class _Products(torch.autograd.Function):
    """Inner products of pairs, keeping neither end's gathered rows for backward."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, own: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(read, own, source, target)
        pieces = zip(_split(source), _split(target), strict=True)
        found = [(read[s] * own[t]).sum(1) for s, t in pieces]
        return torch.cat(found) if found else read.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        read, own, source, target = ctx.saved_tensors
        to_read, to_own = torch.zeros_like(read), torch.zeros_like(own)
        for g, s, t in zip(_split(grad), _split(source), _split(target), strict=True):
            to_read.index_add_(0, s, own[t] * g[:, None])
            to_own.index_add_(0, t, read[s] * g[:, None])
        return to_read, to_own, None, None


def _split(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, _AT_ONCE)


def _try_out(module: nn.Module, width: int) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """``decode`` on a sample: see ``PairModel``."""
    decode: Any = getattr(module, "decode", None)
    if decode is None:
        return (), (), False
    name = f"{type(module).__name__}.decode"
    given = list(inspect.signature(decode).parameters.values())
    if len([p for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]) > 2:
        raise InputError(f"model: {name} should take (z, edge_label_index) and nothing more")
    parameters = dict(module.named_parameters())
    dtype = next((p.dtype for p in parameters.values()), torch.get_default_dtype())
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(_ROWS, width, dtype=dtype, generator=generator, requires_grad=True)
    ends = torch.randint(0, _ROWS, (2, _PAIRS), generator=generator)
    with DropoutKinds(0, _ROWS, _PAIRS) as kinds:
        whole = _decoded(module, z, ends, name)
    drops = tuple(kinds.found)
    if set(drops) - {"edges"}:
        raise InputError(f"model: {name} drops rows of vertices; do that in forward")
    with DropoutKinds(0, _ROWS, _PAIRS - 3), torch.no_grad():
        order = torch.arange(_ROWS - 1, -1, -1)
        part = _decoded(module, z[order], _ROWS - 1 - ends[:, 3:], name)
    if not torch.allclose(part, whole[3:], 1e-4, 1e-5):
        raise InputError(
            f"model: {name} does not score each pair by its two ends alone (a norm over all "
            "pairs?); chunks could not tell what it gives"
        )
    named = list(parameters.items())
    grads = torch.autograd.grad(whole.sum(), [p for _, p in named], allow_unused=True)
    used = tuple(n for (n, _), g in zip(named, grads, strict=True) if g is not None)
    return drops, used, bool(((whole >= 0) & (whole <= 1)).all())


_ROWS, _PAIRS = 11, 29


def _decoded(module: Any, z: Tensor, ends: Tensor, name: str) -> Tensor:
    try:
        found = module.decode(z, ends)
    except Exception as error:
        raise InputError(f"model: {name} fails on a sample: {error}") from None
    count = ends.shape[1]
    if not isinstance(found, Tensor) or found.shape not in ((count,), (count, 1)):
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"model: {name} should give a score for each pair, [P], not {what}")
    return found.reshape(-1)

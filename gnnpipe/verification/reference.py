"""Reference training on one device, which shares no code with the runtime.

The reference reads the graph as given, before any partition, and runs the model on all vertices in
one autograd graph with plain PyTorch and PyG. It is slow and takes much memory; ``gnnpipe verify``
and the tests use it. It imports only the data containers ``Graph`` and ``TrainConfig`` of the
program (tests/verification/test_comparison.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpipe.config import TrainConfig
from gnnpipe.verification.reference_graph import WholeGraph
from gnnpipe.verification.reference_models import UserModel
from gnnpipe.verification.reference_walk import ChunkWalk

LossFn = Callable[..., Tensor]


@dataclass(frozen=True)
class ReferenceEpoch:
    """Loss of an epoch, and gradients by the names of the weights."""

    loss: float
    grads: dict[str, Tensor]


class Reference:
    """Trains a model on the whole graph; epochs with stale rows walk the run's chunks."""

    def __init__(
        self,
        config: TrainConfig,
        graph: WholeGraph,
        walk: ChunkWalk,
        user_model: UserModel | None = None,
        loss_fn: LossFn | None = None,
    ) -> None:
        """``user_model``: run in exact epochs; shares its weights with the walk's model."""
        self.config, self.graph, self.walk = config, graph, walk
        self._user_model, self._loss_fn = user_model, loss_fn
        self._module = walk.model.module
        self._weights = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        settings = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.momentum:
            settings["momentum"] = config.momentum
        self._optimizer = getattr(torch.optim, config.optimizer)(self._weights.values(), **settings)

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copies these weights, by name."""
        own = self._module.state_dict(keep_vars=True)
        for name, value in weights.items():
            own[name].copy_(value)

    def train_epoch(self, epoch: int, is_exact: bool, max_norm: float = math.inf) -> ReferenceEpoch:
        """Trains one epoch (from 0).

        ``is_exact``: without stale rows; ``max_norm``: largest gradient norm.
        """
        loss = self._train_loss(self._outputs(epoch, is_exact), epoch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        _clip(list(self._weights.values()), min(max_norm, self.config.clip_norm or math.inf))
        grads = self._kept_gradients()
        self.walk.keep_weights()
        self._optimizer.param_groups[0]["lr"] = learning_rate(self.config, epoch)
        self._optimizer.step()
        return ReferenceEpoch(float(loss.detach()), grads)

    def exact_gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Returns gradients without stale rows: by the recorded steps, and by the module.

        ``None`` without a module. The pass writes the tables, so the reference must be new.
        """
        if self._user_model is None:
            return None
        module = self._user_model.outputs(self.walk.exact_pass(0))
        return self._gradients(self.walk.walk_exact(0)), self._gradients(module)

    def _gradients(self, outputs: Tensor) -> dict[str, Tensor]:
        self._optimizer.zero_grad()
        self._train_loss(outputs, 0).backward()  # type: ignore[no-untyped-call]
        return self._kept_gradients()

    def _kept_gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self._module.named_parameters()
        }

    def _train_loss(self, outputs: Tensor, epoch: int) -> Tensor:
        is_train = self.graph.is_train
        given = {"vertices": is_train.nonzero()[:, 0], "epoch": epoch}
        return self._loss(outputs[is_train], self.graph.y[is_train], given)

    def _outputs(self, epoch: int, is_exact: bool) -> Tensor:
        if self._user_model is None or not is_exact:
            return self.walk.outputs(epoch, is_exact)
        if self.walk.has_stale_epochs:
            with torch.no_grad():  # fills the tables for later epochs
                self.walk.outputs(epoch, is_exact)
        return self._user_model.outputs(self.walk.exact_pass(epoch))

    def _loss(self, outputs: Tensor, y: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Mean loss of outputs [R, C] over the known targets y [R] or [R, T]; for pairs [R, 1].

        Without labels: the mean over the rows of the user's loss.

        ``given``: further arguments that the user's loss may take.
        """
        known = ~y.isnan() if y.is_floating_point() else y >= 0
        if self._loss_fn is not None:
            if self.graph.pairs is not None:
                outputs, y, known = outputs[:, 0], y[:, 0], known[:, 0]
            if y.dtype == torch.int8:  # the user's loss gets NaN in place of -1
                y = torch.where(known, y.to(outputs.dtype), torch.nan)
            names = inspect.signature(self._loss_fn).parameters
            taken = {name: value for name, value in given.items() if name in names}
            if not known.any():  # a graph without labels
                return self._loss_fn(outputs, **taken) / len(y)
            return self._loss_fn(outputs, y, **taken) / int(known.sum())
        if y.is_floating_point():
            return F.mse_loss(outputs[known], y[known])
        if y.dim() == 1:
            return F.cross_entropy(outputs, y)
        return F.binary_cross_entropy_with_logits(outputs[known], y[known].to(outputs.dtype))


def _clip(weights: list[nn.Parameter], max_norm: float) -> None:
    """Clips the global gradient norm."""
    grads = [p.grad for p in weights if p.grad is not None]
    norm = float(torch.cat([grad.double().flatten() for grad in grads]).norm())
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)


def learning_rate(config: TrainConfig, epoch: int) -> float:
    """Learning rate of an epoch (from 0): linear warm-up, then constant or half a cosine.

    The plateau schedule stays constant, since ``verify`` does not evaluate.
    """
    if epoch < config.warmup_epochs:
        return config.lr * (epoch + 1) / (config.warmup_epochs + 1)
    if config.lr_schedule != "cosine":
        return config.lr
    done = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * (1 + math.cos(math.pi * done)) / 2

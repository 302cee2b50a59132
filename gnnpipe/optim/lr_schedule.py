"""Learning-rate schedule over the epochs, built from torch's schedulers."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError

Scheduler: TypeAlias = lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau
SchedulerFactory: TypeAlias = Callable[[Optimizer], Scheduler]
"""Makes a scheduler, which steps once an epoch, for the optimizer of a rank."""


def rate_scale(steps: int) -> float:
    """Factor on a learning rate that is right for one step an epoch, with ``steps`` of them.

    The gradient of a step is then that of a chunk, whose noise grows with the number of chunks. The
    square root is the rule for Adam when the batch becomes smaller (arXiv 2205.10287), checked in
    docs/adr/0048-learning-rate-of-several-steps.md.
    """
    return 1 / math.sqrt(steps)


class LearningRate:
    """Learning rate of one optimizer; every rank has one, and all get the same metrics.

    From the settings: a linear warm-up from lr / (warm-up epochs + 1), then one of: constant; a
    half cosine down to 0 over the remaining epochs; halved whenever the validation metric has not
    improved for ``lr_patience`` epochs. With n optimizer steps an epoch all rates are divided by
    the square root of n. Or a user's scheduler, whose rates are taken as they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: TrainConfig,
        factory: SchedulerFactory | None = None,
        is_error: bool = False,
        steps: int = 1,
    ) -> None:
        """Start the schedule.

        Args:
            optimizer: Its groups have the learning rates for one step an epoch.
            config: The settings.
            factory: Makes the user's scheduler; then those of the settings are not used.
            is_error: A smaller validation metric is better.
            steps: Optimizer steps an epoch.
        """
        self._optimizer, self._config = optimizer, config
        self._name = config.lr_schedule_with(steps)
        self._steps = steps if factory is None else 1
        self._factory, self._is_error = factory, is_error
        # Some schedulers change more than the learning rate.
        self._first = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self.restart(1.0, [])

    @property
    def reads_metric(self) -> bool:
        """Whether the schedule follows the validation metric."""
        return isinstance(self._late, lr_scheduler.ReduceLROnPlateau)

    @property
    def value(self) -> float:
        """Learning rate of the next step, of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def steps_text(self) -> str:
        """Line on the rates with several steps an epoch; empty with one or a user's scheduler."""
        if self._steps == 1:
            return ""
        whole = float(self._first[0]["lr"])
        return (
            f"{self._steps} optimizer steps an epoch: learning rate {self._name} from "
            f"{whole * rate_scale(self._steps):.3g}, which is {whole:g} / sqrt({self._steps})"
        )

    def restart(self, factor: float, metrics: Iterable[float | None]) -> None:
        """Repeat the schedule of past epochs with ``factor`` on all learning rates.

        ``metrics``: of each epoch, as in ``step``.
        """
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            group.pop("initial_lr", None)
            group.update(first)
            group["lr"] = first["lr"] * rate_scale(self._steps) * factor
        if self._factory is None:
            self._early, self._late = self._warm_up(), self._by_name()
        else:
            self._early, self._late = None, _made(self._factory, self._optimizer)
        self._epoch = 0
        for metric in metrics:
            self._step_unwatched(metric)

    def _step_unwatched(self, metric: float | None) -> None:
        """Step without torch's warning that the optimizer has not stepped before."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of .lr_scheduler.step")
            self.step(metric)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def _schedulers(self) -> list[Scheduler]:
        return [one for one in (self._early, self._late) if one is not None]

    def coming(self, epochs: int) -> list[list[float]]:
        """Return the learning rates [epoch][group] of the next ``epochs`` epochs.

        The validation metric is taken not to change them; between two evaluations it cannot.
        """
        groups = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items() if k != "params"}
            for g in self._groups
        ]
        states = [copy.deepcopy(one.state_dict()) for one in self._schedulers]
        epoch, found = self._epoch, []
        for _ in range(epochs):
            found.append([float(group["lr"]) for group in self._groups])
            self._step_unwatched(None)
        for group, before in zip(self._groups, groups, strict=True):
            for name, value in before.items():
                if isinstance(value, Tensor):  # the scheduler fills it in place
                    group[name].copy_(value)
                else:
                    group[name] = value
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self._epoch = epoch
        return found

    def step(self, metric: float | None) -> None:
        """End an epoch; ``metric``: the validation metric, if it was evaluated."""
        self._epoch += 1
        if self._early is not None and self._epoch <= self._config.warmup_epochs:
            self._early.step()
        elif isinstance(self._late, lr_scheduler.ReduceLROnPlateau):
            if metric is not None:
                self._late.step(metric)
        elif self._late is not None:
            self._late.step()

    def _warm_up(self) -> lr_scheduler.LRScheduler | None:
        epochs = self._config.warmup_epochs
        if not epochs:
            return None
        return lr_scheduler.LinearLR(
            self._optimizer, start_factor=1 / (epochs + 1), total_iters=epochs
        )

    def _by_name(self) -> Scheduler | None:
        """The schedule after the warm-up; ``None``: constant."""
        config = self._config
        if self._name == "cosine":
            # Starts from the rate at the end of the warm-up, where it is first stepped.
            left = config.epochs - config.warmup_epochs
            return lr_scheduler.CosineAnnealingLR(self._optimizer, T_max=left)
        if self._name == "plateau":
            return lr_scheduler.ReduceLROnPlateau(
                self._optimizer,
                mode="min" if self._is_error else "max",
                factor=0.5,
                threshold=0.0,
                patience=math.ceil(config.lr_patience / max(config.eval_every, 1)) - 1,
            )
        return None


def check_scheduler(config: TrainConfig, factory: SchedulerFactory | None) -> None:
    """Raise ``InputError`` for an argument ``scheduler`` that is no function, or not alone."""
    if factory is None:
        return
    if not callable(factory):
        raise InputError(
            f"scheduler: is a {type(factory).__name__}; pass a function of the optimizer, such as "
            "lambda optimizer: CosineAnnealingLR(optimizer, epochs)"
        )
    if config.lr_schedule not in ("auto", "constant"):
        raise InputError(
            f"--lr-schedule {config.lr_schedule}: a scheduler was passed in, too; leave one out"
        )
    if config.warmup_epochs:
        raise InputError(
            f"--warmup-epochs {config.warmup_epochs}: not used with a scheduler that is passed in; "
            "leave it out, or use torch's SequentialLR"
        )


def _made(factory: SchedulerFactory, optimizer: Optimizer) -> Scheduler:
    made = factory(optimizer)
    if not isinstance(made, Scheduler):
        raise InputError(
            f"scheduler: returned an object of type {type(made).__name__}, not a "
            "torch.optim.lr_scheduler; try lambda optimizer: CosineAnnealingLR(optimizer, epochs)"
        )
    if made.optimizer is not optimizer:
        raise InputError(
            "scheduler: was made for another optimizer; make it for the optimizer that the "
            "function is given (each rank has its own)"
        )
    return made

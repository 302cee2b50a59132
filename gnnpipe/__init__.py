"""Train deep graph neural networks on the whole graph, on one device or on many.

>>> from gnnpipe import Graph, TrainConfig, Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnpipe.version import __version__

if TYPE_CHECKING:
    from gnnpipe.config import TrainConfig
    from gnnpipe.errors import FailedError, InputError, LostRankError, StoppedError
    from gnnpipe.graph.graph import Graph
    from gnnpipe.run.info import Info, info
    from gnnpipe.run.result import RunResult
    from gnnpipe.run.resume import resumed_config
    from gnnpipe.train.callbacks import Callback
    from gnnpipe.train.loggers import TensorBoardLogger, WandbLogger
    from gnnpipe.train.multi_seed import SeedsResult, fit_seeds
    from gnnpipe.train.trainer import Trainer

__all__ = [
    "Callback",
    "FailedError",
    "Graph",
    "Info",
    "InputError",
    "LostRankError",
    "RunResult",
    "SeedsResult",
    "StoppedError",
    "TensorBoardLogger",
    "TrainConfig",
    "Trainer",
    "WandbLogger",
    "__version__",
    "fit_seeds",
    "info",
    "resumed_config",
]

_HOME = {
    "Callback": "gnnpipe.train.callbacks",
    "FailedError": "gnnpipe.errors",
    "Graph": "gnnpipe.graph.graph",
    "InputError": "gnnpipe.errors",
    "LostRankError": "gnnpipe.errors",
    "StoppedError": "gnnpipe.errors",
    "Info": "gnnpipe.run.info",
    "info": "gnnpipe.run.info",
    "RunResult": "gnnpipe.run.result",
    "SeedsResult": "gnnpipe.train.multi_seed",
    "TensorBoardLogger": "gnnpipe.train.loggers",
    "TrainConfig": "gnnpipe.config",
    "Trainer": "gnnpipe.train.trainer",
    "WandbLogger": "gnnpipe.train.loggers",
    "fit_seeds": "gnnpipe.train.multi_seed",
    "resumed_config": "gnnpipe.run.resume",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `gnnpipe --help` and a bad flag must not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'gnnpipe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet (tab completion)."""
    return sorted(__all__)

"""Train deep graph neural networks on the whole graph, on one device or on many.

>>> from gnnpipe import Graph, TrainConfig, Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnpipe.version import __version__

if TYPE_CHECKING:
    from gnnpipe.callbacks.callback import Callback
    from gnnpipe.callbacks.loggers import TensorBoardLogger, WandbLogger
    from gnnpipe.config import TrainConfig
    from gnnpipe.errors import FailedError, IdleRank, InputError, LostRankError, StoppedError
    from gnnpipe.graph.graph import Graph
    from gnnpipe.multi_seed import SeedsResult, fit_seeds
    from gnnpipe.perf.profile import Profile
    from gnnpipe.plan.cluster import Cluster
    from gnnpipe.profiling.profile import profile
    from gnnpipe.profiling.scenario import GraphShape
    from gnnpipe.profiling.simulate import Simulation, simulate
    from gnnpipe.run.info import Info, info
    from gnnpipe.run.result import RunResult
    from gnnpipe.run.resume import resumed_config
    from gnnpipe.train.trainer import Trainer
    from gnnpipe.verification.comparison import Comparison
    from gnnpipe.verification.verify import Verification, verify

__all__ = [
    "Callback",
    "Cluster",
    "Comparison",
    "FailedError",
    "Graph",
    "GraphShape",
    "IdleRank",
    "Info",
    "InputError",
    "LostRankError",
    "Profile",
    "RunResult",
    "SeedsResult",
    "Simulation",
    "StoppedError",
    "TensorBoardLogger",
    "TrainConfig",
    "Trainer",
    "Verification",
    "WandbLogger",
    "__version__",
    "fit_seeds",
    "info",
    "profile",
    "resumed_config",
    "simulate",
    "verify",
]

_HOME = {
    "Callback": "gnnpipe.callbacks.callback",
    "Cluster": "gnnpipe.plan.cluster",
    "Comparison": "gnnpipe.verification.comparison",
    "FailedError": "gnnpipe.errors",
    "Graph": "gnnpipe.graph.graph",
    "GraphShape": "gnnpipe.profiling.scenario",
    "IdleRank": "gnnpipe.errors",
    "Info": "gnnpipe.run.info",
    "InputError": "gnnpipe.errors",
    "LostRankError": "gnnpipe.errors",
    "Profile": "gnnpipe.perf.profile",
    "RunResult": "gnnpipe.run.result",
    "SeedsResult": "gnnpipe.multi_seed",
    "Simulation": "gnnpipe.profiling.simulate",
    "StoppedError": "gnnpipe.errors",
    "TensorBoardLogger": "gnnpipe.callbacks.loggers",
    "TrainConfig": "gnnpipe.config",
    "Trainer": "gnnpipe.train.trainer",
    "Verification": "gnnpipe.verification.verify",
    "WandbLogger": "gnnpipe.callbacks.loggers",
    "fit_seeds": "gnnpipe.multi_seed",
    "info": "gnnpipe.run.info",
    "profile": "gnnpipe.profiling.profile",
    "resumed_config": "gnnpipe.run.resume",
    "simulate": "gnnpipe.profiling.simulate",
    "verify": "gnnpipe.verification.verify",
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

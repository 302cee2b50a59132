"""Profiles by hand and prepared runs for tests."""

from dataclasses import replace

import scipy.sparse as sp

from gnnpipe.config import TrainConfig
from gnnpipe.data.load import load_graph
from gnnpipe.perf import Profile
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes, op_kind
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

_KARATE = load_graph("karate")
ONE_HOT = replace(_KARATE, x=sp.csr_array(_KARATE.x))
"""With sparse features wider than a layer, so that every layer pushes rows."""
LINK = LinkTimes(1e-4, 1e9, 0.1)


def profile_of(model, **changes):
    """Every op a millisecond for each row, in all it does."""
    part = Affine(0.5, 1e-3, 1e-6, 1e-7)
    times = OpTimes(part, part, part, part, part, part, part, 0.2)
    ops = {op_kind(op): times for op in model.ops}
    compute = tuple(ComputeTimes(n, ops, part, part, 1e-9) for n in (1, 2))
    fields = {
        "machine": "made up",
        "source": "by hand",
        "note": "",
        "device": "cpu",
        "dtype": "float32",
        "comm_dtype": "same",
        "matmul_dtype": "same",
        "kernel": "auto",
        "recompute": False,
        "threads": 1,
        "compute": compute,
        "message": LINK,
        "exchange": LINK,
        "shard_sum": LINK,
    }
    return Profile(**fields | changes)


def prepared_of(graph=None, module=None, **changes):
    config = TrainConfig(
        **{"dataset": "karate", "hidden": 8, "out": "off", "cache_dir": "off", "quiet": True}
        | changes
    )
    return prepare(config, Mesh.alone(), graph, module)

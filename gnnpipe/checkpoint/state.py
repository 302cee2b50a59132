"""Collects the tensors of a run for a checkpoint, and restores them under any shape.

Weights and optimizer moments have their names in the whole model. Rows of history tables are stored
by aggregation, each rank's rows next to the vertices (numbers in the given graph) that they belong
to. So runs with any number of stages, shards and chunks find what they need. A table that is
rewritten before it is read (one chunk, or exact order) is not stored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.errors import InputError
from gnnpipe.models import StageModule
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.base import History
from gnnpipe.runtime.history.mean import MeanHistory
from gnnpipe.setup.build import RankRuntime
from gnnpipe.setup.prepared import Prepared

WEIGHT, OPTIMIZER, BEFORE, BEST = "weight", "optimizer", "before", "best"
_NUMBER = ":number "
"""Separates the name of a state that is no tensor from its type."""
VERTICES, ROWS, MEAN, DRAWS = "vertices", "rows", "mean", "draws"


def tensors_of(
    prepared: Prepared,
    rank_runtime: RankRuntime,
    mesh: Mesh,
    kept: Mapping[str, Tensor],
    with_tables: bool,
) -> dict[str, Tensor]:
    """Return the tensors that this rank stores in a checkpoint, by name.

    Args:
        prepared: The run.
        rank_runtime: This rank's part.
        mesh: The ranks.
        kept: Weights of the best epoch, by name.
        with_tables: Whether to store the history tables.
    """
    executor = rank_runtime.executor
    found: dict[str, Tensor] = {}
    if mesh.shard == 0:  # the shards of a stage hold the same weights
        stage_module = executor.stage.stage_module
        found |= {f"{WEIGHT}/{n}": t for n, t in stage_module.named_state()}
        found |= {f"{BEST}/{n}": t for n, t in kept.items()}
        if executor.forecaster is not None:
            before = executor.forecaster.before
            found |= {f"{BEFORE}/{n}": t for n, t in before.named_state()}
        assert executor.optimizer is not None
        for name, parameter in _trained(stage_module):
            for key, value in executor.optimizer.state.get(parameter, {}).items():
                found |= _stored(f"{OPTIMIZER}/{name}/{key}", value)
    for name, history, kind in _histories(prepared, rank_runtime) if with_tables else ():
        if isinstance(history, MeanHistory):
            if mesh.shard == 0:
                found[f"{MEAN}/{name}"] = history.lasting
            continue
        own = history.layout.num_own
        found[f"{ROWS}/{name}/{mesh.rank}"] = history.lasting[:own]
        vertices = torch.from_numpy(prepared.chunking.perm[history.layout.own])
        found[f"{VERTICES}/{kind}/{mesh.rank}"] = vertices
    found[f"{DRAWS}/{mesh.rank}"] = generator_states()
    return found


def load_tensors(
    stored: StoredCheckpoint, prepared: Prepared, rank_runtime: RankRuntime, mesh: Mesh
) -> dict[str, Tensor]:
    """Restore this rank from a checkpoint; return the weights of the best epoch, by name.

    Raises ``InputError`` where the checkpoint does not fit the run.
    """
    executor = rank_runtime.executor
    stage_module = executor.stage.stage_module
    own = dict(stage_module.named_state())
    _copy(stored, WEIGHT, own)
    if executor.forecaster is not None:
        # Without a forecast so far, the weights before the first one are the current weights.
        source = BEFORE if _has(stored, BEFORE) else WEIGHT
        _copy(stored, source, dict(executor.forecaster.before.named_state()))
    assert executor.optimizer is not None
    on_device = {
        parameter
        for group in executor.optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }
    names = [name for name in stored.tensors if name.startswith(f"{OPTIMIZER}/")]
    for name, parameter in _trained(stage_module):
        start = f"{OPTIMIZER}/{name}/"
        values = stored.read([n for n in names if n.startswith(start)])
        state: dict[str, Any] = {}
        for n, value in values.items():
            key, _, number = n.removeprefix(start).partition(_NUMBER)
            # torch keeps step counters on the CPU, except for fused kernels.
            stays = key == "step" and parameter not in on_device
            state[key] = value if stays else _like(parameter, value)
            if number:
                state[key] = int(value) if number == "int" else float(value)
        executor.optimizer.state.pop(parameter, None)
        if state:  # a weight that is not stepped has none
            executor.optimizer.state[parameter] = state
    _load_histories(stored, prepared, rank_runtime, mesh)
    best = {name for name in own if f"{BEST}/{name}" in stored.tensors}
    values = stored.read([f"{BEST}/{name}" for name in best])
    return {n.removeprefix(f"{BEST}/"): v.to(mesh.device) for n, v in values.items()}


def _stored(name: str, value: Any) -> dict[str, Tensor]:
    """Return a value of an optimizer's state as it is stored, by name."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, int | float):
        kind = "int" if isinstance(value, int) else "float"
        return {f"{name}{_NUMBER}{kind}": torch.tensor(value, dtype=torch.float64)}
    raise InputError(
        f"optimizer: its state {name.removeprefix(OPTIMIZER + '/')} is a {type(value).__name__}, "
        "which a checkpoint cannot store; keep tensors and numbers, or train with "
        "--checkpoint-every 0"
    )


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` on the parameter's device, with its strides if the shapes are equal.

    torch's fused Adam needs moments with the strides of their parameter.
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _load_histories(
    stored: StoredCheckpoint, prepared: Prepared, rank_runtime: RankRuntime, mesh: Mesh
) -> None:
    """Fill the history tables, halo rows too, from the rows that any number of ranks stored."""
    if not _has(stored, ROWS) and not _has(stored, MEAN):
        return  # stored without tables, or by an exact run: the tables stay zero
    for name, history, kind in _histories(prepared, rank_runtime):
        if isinstance(history, MeanHistory):
            history.settle_at(stored.read([f"{MEAN}/{name}"])[f"{MEAN}/{name}"].to(mesh.device))
            continue
        local = np.concatenate([history.layout.own, history.layout.halo])
        vertices = prepared.chunking.perm[local]
        place = np.full(prepared.graph.num_vertices, -1, dtype=np.int64)
        place[vertices] = np.arange(len(vertices))
        start = f"{ROWS}/{name}/"
        filled = 0
        for part in [n for n in stored.tensors if n.startswith(start)]:
            which = f"{VERTICES}/{kind}/{part.removeprefix(start)}"
            both = stored.read([part, which])
            rows, numbers = both[part], both[which]
            is_known = len(numbers) == len(rows) and rows.shape[1:] == history.lasting.shape[1:]
            if not is_known or (
                len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(place)
            ):
                raise InputError(f"{stored.path}: {part!r} is of another model or graph")
            to = torch.from_numpy(place)[numbers]
            chosen = to >= 0
            history.lasting[to[chosen].to(mesh.device)] = rows[chosen].to(history.lasting)
            filled += int(chosen.sum())
        if filled != len(vertices):
            raise InputError(
                f"{stored.path}: holds only {filled} of {len(vertices)} rows of {name!r}"
            )


def _histories(prepared: Prepared, rank_runtime: RankRuntime) -> Iterator[tuple[str, History, str]]:
    """Yield the histories whose rows outlast an epoch: name, history, type of the vertices."""
    if prepared.program.is_exact:
        return
    kinds = {op.name: op.pushed_type for op in prepared.model_graph.aggregations}
    for name, history in rank_runtime.executor.stage.histories.items():
        yield name, history, kinds[name]


def _trained(stage_module: StageModule) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in stage_module.named_parameters() if p.requires_grad]


def _has(stored: StoredCheckpoint, kind: str) -> bool:
    return any(name.startswith(f"{kind}/") for name in stored.tensors)


@torch.no_grad()
def _copy(stored: StoredCheckpoint, kind: str, into: Mapping[str, Tensor]) -> None:
    values = stored.read([f"{kind}/{name}" for name in into])
    for name, tensor in into.items():
        value = values[f"{kind}/{name}"]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise InputError(
                f"{stored.path}: {name} is {_shape(value)} there and {_shape(tensor)} here; go on "
                "with the model that was trained"
            )
        tensor.copy_(value)


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def generator_states() -> Tensor:
    """Return the states of all global random generators as JSON bytes, [B] uint8."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tolist(), *rest],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8).clone()


def restore_generators(stored: StoredCheckpoint, rank: int, world_size: int) -> None:
    """Restore the random generators, if the number of ranks is the same."""
    names = [name for name in stored.tensors if name.startswith(f"{DRAWS}/")]
    if len(names) != world_size:
        return
    name = f"{DRAWS}/{rank}"
    try:
        state = json.loads(bytes(stored.read([name])[name].tolist()))
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(state["numpy"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{stored.path}: {name!r} holds no generator states ({error})") from None

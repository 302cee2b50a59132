"""Reads a run's folder for predictions: its settings, trained weights and number of classes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnnpipe.capture.preserve import detached_copy
from gnnpipe.checkpoint.retention import newest_epoch, newest_whole
from gnnpipe.checkpoint.state import BEST, WEIGHT
from gnnpipe.config import TrainConfig
from gnnpipe.config.settings import BY_CHUNK_SETTINGS, PREDICTION_SETTINGS
from gnnpipe.data.labels import is_known
from gnnpipe.data.load import configured_graph, unlabelled_graph
from gnnpipe.errors import InputError
from gnnpipe.files import like_run_in, read_text
from gnnpipe.graph.graph import Graph
from gnnpipe.models import MODELS
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.inputs import made_model, number_dtype
from gnnpipe.setup.layer_output import ends_at

WEIGHTS = "model.pt"
"""The trained weights in the folder of a run that has ended."""


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A run as its folder holds it."""

    path: Path
    config: TrainConfig
    """The run's settings, changed for a prediction that writes no folder."""
    weights: Mapping[str, Tensor]
    num_classes: int
    """C or T of the run's graph; 0: not known."""
    is_multi_label: bool | None
    """Whether a vertex of the run's graph has several labels; ``None``: not known."""
    note: str
    """Says where the weights are from if the run has not ended; else ''."""

    def check_parts(self, graph: Graph | None, model: nn.Module | None) -> None:
        """Raise ``InputError`` if a part that the run got from Python is not passed again."""
        name = str(self.path)
        if model is None and self.config.model.startswith("passed-in:"):
            raise InputError(
                f"run {name!r}: its model was passed in from Python; pass it again: "
                f"Trainer.load({name!r}, model=model)"
            )
        if graph is None and self.config.dataset.startswith("passed-in:"):
            raise InputError(
                f"run {name!r}: its graph was passed in from Python; pass it again: "
                f"Trainer.load({name!r}, graph=graph), or name a dataset: --dataset graph.npz"
            )

    def with_classes(self, graph: Graph) -> Graph:
        """Return a graph with as many classes as the run's, if some are not in its labels.

        Raises ``InputError`` if label iterations need to know the kind of labels that are missing.
        """
        if graph.pairs is not None or graph.y.ndim > 1:
            return graph
        if self.config.label_iterations and not is_known(graph.y).any():
            if self.is_multi_label is None:
                raise InputError(
                    f"run {str(self.path)!r}: has not ended, so that label iterations on a graph "
                    "without labels do not know the kind of labels; end it by --resume first"
                )
            if self.is_multi_label:
                y = np.full((graph.num_vertices, self.num_classes), -1, dtype=np.int8)
                return replace(graph, y=y, num_classes=self.num_classes)
        if graph.num_classes >= self.num_classes:
            return graph
        return replace(graph, num_classes=self.num_classes)

    def read_graph(self, world: World, is_own: bool) -> Graph:
        """Read the run's graph, or another one without labels; ``InputError`` on every rank."""
        graph, error = None, None
        try:
            if is_own:
                graph = configured_graph(self.config, needs_labels=False)
            else:
                graph = self.with_classes(unlabelled_graph(self.config, self.num_classes))
        except InputError as fault:
            error = fault
        world.agree(error)
        assert graph is not None
        return graph

    def load_into(self, module: nn.Module) -> None:
        """Copy the weights into the run's model; ``InputError`` if they do not fit."""
        # A checkpoint holds no buffers that no op reads.
        unread = dict(module.named_buffers()) if self.note else {}
        state = {k: v for k, v in module.state_dict().items() if k in unread}
        try:
            module.load_state_dict(state | dict(self.weights))
        except RuntimeError as error:
            wrong = " ".join(str(error).split()).partition("state_dict for ")[2] or str(error)
            raise InputError(
                f"run {str(self.path)!r}: its weights do not fit this graph ({wrong}); "
                "try a graph with as many features and classes as the run's"
            ) from None

    def model_ending_at(self, layer: str, graph: Graph, model: nn.Module | None) -> nn.Module:
        """Return a copy of the run's model with its weights, which ends at ``layer``."""
        if self.config.task == "links" or graph.pairs is not None:
            raise InputError(
                f"--layer {layer!r}: run {str(self.path)!r} predicts links, and its predictions "
                "are hidden rows; leave it out"
            )
        if self.config.label_iterations:
            raise InputError(
                f"--layer {layer!r}: run {str(self.path)!r} has label iterations, which need the "
                "logits of each pass; leave it out"
            )
        model = made_model(model, self.config, graph)
        self.load_into(model.to(number_dtype(self.config)))
        return ends_at(detached_copy(model), layer)


def read_trained(run: str | Path, num_ranks: int, changes: Mapping[str, Any]) -> TrainedRun:
    """Return the run in a folder, to predict on so many ranks.

    One rank runs the whole model; several have the shape of the run, unless ``changes`` (any of
    ``PREDICTION_SETTINGS``) gives another. Of a run that has not ended the weights are those of its
    newest complete checkpoint. Raises ``InputError`` if the folder contains no run, or no weights.
    """
    path = Path(run)
    for name in changes:
        if name not in PREDICTION_SETTINGS:
            raise InputError(
                f"run {str(run)!r}: {name} cannot differ from the run's; what can: "
                f"{', '.join(PREDICTION_SETTINGS)}"
            )
    if not (path / "config.toml").is_file():
        raise InputError(
            f"run {str(run)!r}: contains no run (no config.toml); give the folder of a "
            f"run{like_run_in(path.parent)}"
        )
    own = TrainConfig.from_dict(TrainConfig.read_toml(path / "config.toml") | {"profile": ""})
    if own.task == "links" and "dataset" in changes:
        raise InputError(
            f"--dataset {changes['dataset']!r}: run {str(run)!r} predicts links, for which another "
            "graph is passed in from Python: Trainer.load(run, graph=Graph.from_pyg(data, "
            "task='links')).predict() gives the final rows; leave --dataset out for the run's own"
        )
    weights, note = _read_weights(path, own.kept_epoch == "best")
    config = _config(own, num_ranks, changes)
    classes = _num_classes(path, own, weights)
    return TrainedRun(path, config, weights, classes, _is_multi_label(path), note)


def _config(own: TrainConfig, num_ranks: int, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of a prediction: nothing is trained, validated or written."""
    values: dict[str, Any] = {
        "out": "off",
        "log": "",
        "checkpoint_every": None,
        "on_nan": "stop",
        "predict": False,
        "patience": 0,
        "target_metric": None,
        "keep_weights": "last",
        "lr_schedule": "constant",
        **{name: getattr(TrainConfig, name) for name in BY_CHUNK_SETTINGS},
    }
    shape = ("stages", "shards", "chunks")
    if num_ranks == 1:
        values |= {"stages": 1, "shards": 1, "plan": "uniform"}
    if any(name in changes for name in shape):
        values["plan"] = "uniform"
    values |= changes
    if values.get("shards", own.shards) == 1:
        values["row_way"] = "halo"
    return replace(own, **values)


def _num_classes(path: Path, config: TrainConfig, weights: Mapping[str, Tensor]) -> int:
    """Return the number of classes of the run's graph; 0 if it is not known."""
    if config.model in set(MODELS):
        last = f"convs.{config.layers - 1}"
        names = "decode.weight", f"{last}.lin.weight", f"{last}.lin_l.weight"
        return next((len(weights[name]) for name in names if name in weights), 0)
    return _from_result(path, "num_classes")


def _is_multi_label(path: Path) -> bool | None:
    """Return whether the run's graph has several labels at once; ``None`` if it is not known."""
    found = _in_result(path, "multi_label")
    return found if isinstance(found, bool) else None


def _from_result(path: Path, name: str) -> int:
    """Return a whole number of result.json; 0 if there is none."""
    found = _in_result(path, name)
    return found if type(found) is int and found > 0 else 0


def _in_result(path: Path, name: str) -> Any:
    """Return a value of result.json; ``None`` if there is none."""
    try:
        return json.loads(read_text(path / "result.json"))[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _read_weights(path: Path, keeps_best: bool) -> tuple[dict[str, Tensor], str]:
    """Return the weights of model.pt, or else of the newest checkpoint with a note that says so."""
    has_ended = (path / WEIGHTS).is_file()
    has_gone_on = newest_epoch(path) > _from_result(path, "epochs") > 0  # resumed after its end
    stored, faults = (None, []) if has_ended and not has_gone_on else newest_whole(path)
    if stored is None and has_ended:
        return _read_state_dict(path / WEIGHTS), ""
    if stored is None:
        reason = faults[0] if faults else "see --checkpoint-every"
        raise InputError(
            f"run {str(path)!r}: has not ended, so there is no {WEIGHTS}, and it has no complete "
            f"checkpoint ({reason}); train it again"
        )
    names = [n.removeprefix(f"{WEIGHT}/") for n in stored.tensors if n.startswith(f"{WEIGHT}/")]
    is_best = keeps_best and all(f"{BEST}/{name}" in stored.tensors for name in names)
    kind = BEST if is_best else WEIGHT
    found = stored.read([f"{kind}/{name}" for name in names])
    epoch = "the best epoch up to " if is_best else ""
    note = (
        f"run {str(path)!r}: has not ended; its weights are those of {epoch}{stored.path.name} "
        f"(gnnpipe train --resume {path} ends it)"
    )
    return {name.removeprefix(f"{kind}/"): value for name, value in found.items()}, note


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
            raise TypeError("not a state_dict")
        return found
    except (
        *(OSError, EOFError, pickle.UnpicklingError, RuntimeError),
        *(ValueError, LookupError, TypeError, AttributeError),
    ) as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(
            f"{path}: is damaged ({reason}); copy it again from where it was written, or remove it "
            "to use the newest checkpoint of the run"
        ) from None

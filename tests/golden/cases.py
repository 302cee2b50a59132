"""The runs whose losses, bytes, programs and memory estimates are kept in ``golden.json``.

Only the public interface is used (``Trainer``, ``TrainConfig``, the files of a run folder), so that
the same file can describe the program before and after a change of its structure.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pyg_models
import torch
from helpers import small_graph

from gnnpipe import TrainConfig, Trainer

__all__ = ["CASES", "FILE", "key_of", "run_case", "run_cases"]

FILE = Path(__file__).with_name("golden.json")
BUILT_IN = ("gcn", "sage", "gcnii", "resgcn", "gat")
RECORDED = ("arxiv", "products", "GAT", "GIN batch norm", "deep res+", "branches")
"""Names of ``pyg_models.MODELS``."""
EPOCHS = 6

SHAPES = [
    ((1, 1, 1), "auto"),
    ((1, 1, 8), "auto"),
    ((1, 1, 8), "none"),
    ((1, 1, 8), "paper"),
    ((1, 1, 8), "exact"),
    ((2, 1, 8), "auto"),
    ((1, 2, 1), "auto"),
    ((2, 2, 8), "auto"),
]
CASES = [(model, shape, s) for shape, s in SHAPES for model in (*BUILT_IN, *RECORDED)]


def key_of(model: str, shape: tuple[int, int, int], staleness: str) -> str:
    """The name of a case in the file."""
    return f"{model} {shape} {staleness}"


def run_case(model: str, shape: tuple[int, int, int], staleness: str, mesh: Any = None) -> Any:
    """Losses of six epochs, bytes by axis, program text and memory estimate of one run.

    Every rank of the shape calls it; ``mesh`` as for ``Trainer``. What rank 0 finds is kept.
    """
    torch.manual_seed(5)
    stages, shards, chunks = shape
    graph = small_graph(120)
    settings = {"model": model, "layers": 4, "hidden": 8} if model in BUILT_IN else {}
    module = None if model in BUILT_IN else pyg_models.MODELS[model]()
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            epochs=EPOCHS,
            dtype="float64",
            quiet=True,
            cache_dir="off",
            predict=False,
            stages=stages,
            shards=shards,
            chunks=chunks,
            staleness=staleness,
            eval_every=0,
            checkpoint_every=0,
            out=f"{folder}/run",
            **settings,
        )
        with warnings.catch_warnings():
            # A BatchNorm over chunks warns; its numbers are what is kept here.
            warnings.simplefilter("ignore", UserWarning)
            result = Trainer(config, graph=graph, model=module, world=mesh).fit()
        program = ""
        if mesh is None or mesh.rank == 0:
            program = (Path(folder) / "run" / "program.txt").read_text()
    return {
        "losses": [row.loss for row in result.history],
        "bytes": dict(result.comm_bytes_per_epoch),
        "memory": [dataclasses.asdict(rank) for rank in result.memory_estimate_bytes],
        "program": program.splitlines(),
    }


def run_cases(cases: list[tuple[str, tuple[int, int, int], str]]) -> dict[str, Any]:
    """``run_case`` for cases of one shape of several ranks, called on every rank."""
    from gnnpipe.runtime.comm.mesh import Mesh

    stages, shards, _ = cases[0][1]
    mesh = Mesh.join(stages, shards)
    return {key_of(*case): run_case(*case, mesh=mesh) for case in cases}


def read() -> dict[str, Any]:
    """The kept values by case, with the program as a list of lines."""
    kept = json.loads(FILE.read_text())
    programs = kept["programs"]
    return {k: v | {"program": programs[v["program"]]} for k, v in kept["cases"].items()}


def write(found: dict[str, Any]) -> None:
    """Keep the values; equal programs are stored once."""
    programs: list[list[str]] = []
    cases = {}
    for key, value in found.items():
        if value["program"] not in programs:
            programs.append(value["program"])
        cases[key] = value | {"program": programs.index(value["program"])}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in cases.items()]
    texts = ",\n".join(f" {json.dumps(p)}" for p in programs)
    FILE.write_text(
        '{"cases": {\n' + ",\n".join(lines) + '\n},\n"programs": [\n' + texts + "\n]}\n"
    )

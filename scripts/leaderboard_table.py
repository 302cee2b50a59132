"""Writes docs/leaderboard.md: recipes, published scores, parity with plain PyG, memory and time.

python scripts/leaderboard_table.py            # write the page (some minutes)
python scripts/leaderboard_table.py --check    # exit code 1 if the page would change

Each recipe is made narrow and shallow and trained for three epochs on a random graph with the
features and classes of its data set, in float64 and without dropout, by gnnpipe and by a loop of
plain PyG. Memory and time are those of ``gnnpipe simulate`` for the real numbers of vertices and
edges; no data set is read.
"""

from __future__ import annotations

import re
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import write_page  # noqa: E402
from ogb_recipes import RECIPES, SOURCES, Recipe  # noqa: E402
from ogb_run import prepared_graph, prepared_model  # noqa: E402
from parity import (  # noqa: E402
    ALONE,
    EPOCHS,
    LR,
    ON_TWO_RANKS,
    Shape,
    difference,
    gnnpipe_losses,
    losses_on_two_ranks,
    shown,
)

from gnnpipe import Graph, TrainConfig  # noqa: E402
from gnnpipe.errors import InputError  # noqa: E402
from gnnpipe.ops.hashed_dropout import drawn_labels, row_keys  # noqa: E402
from gnnpipe.perf import simulate  # noqa: E402
from gnnpipe.perf.hardware import hardware_profile  # noqa: E402
from gnnpipe.perf.unroll import program_tasks  # noqa: E402
from gnnpipe.plan import ModelGraph  # noqa: E402
from gnnpipe.profiling.predict import costs_of  # noqa: E402
from gnnpipe.profiling.scenario import GraphShape, scenario_of_shape  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.runtime.comm.world import World  # noqa: E402
from gnnpipe.setup.inputs import choose_model, number_dtype  # noqa: E402
from gnnpipe.setup.label_inputs import with_label_inputs  # noqa: E402
from gnnpipe.setup.model_graph import describe  # noqa: E402

PAGE = ROOT / "docs" / "leaderboard.md"
VERTICES = 60


@dataclass(frozen=True)
class Sizes:
    """Numbers of a data set; ``edges`` with both directions of each."""

    vertices: int
    edges: int
    features: int
    classes: int
    edge_features: int = 0


SIZES = {
    "arxiv": Sizes(169_343, 2_315_598, 128, 40),
    "products": Sizes(2_449_029, 123_718_280, 100, 47),
    "proteins": Sizes(132_534, 79_122_504, 8, 112, edge_features=8),
    "papers100m": Sizes(111_059_956, 3_228_124_712, 128, 172),
}
"""From https://ogb.stanford.edu/docs/nodeprop/; arxiv and papers100M after --symmetrize."""


def random_graph(sizes: Sizes) -> Graph:
    """A small graph with the features and classes of a data set, and unlabelled vertices."""
    rng = np.random.default_rng(0)
    dense = rng.random((VERTICES, VERTICES)) < 0.1
    dense |= dense.T
    dense[-1] = dense[:, -1] = False
    edge_index = torch.from_numpy(np.stack(np.nonzero(dense)))
    part = torch.from_numpy(rng.permutation(VERTICES) % 3)
    if sizes.edge_features:
        y = torch.from_numpy(rng.integers(0, 2, (VERTICES, sizes.classes)))
    else:
        y = torch.from_numpy(rng.integers(0, sizes.classes, VERTICES))
    data = Data(
        x=torch.from_numpy(rng.standard_normal((VERTICES, sizes.features)).astype(np.float32)),
        edge_index=edge_index,
        y=y,
        train_mask=part == 0,
        val_mask=part == 1,
        test_mask=part == 2,
    )
    if sizes.edge_features:
        given = rng.random((edge_index.shape[1], sizes.edge_features))
        data.edge_attr = torch.from_numpy(given.astype(np.float32))
    return Graph.from_pyg(data, num_classes=sizes.classes)


def small_args(recipe: Recipe) -> Namespace:
    """The recipe's flags for a narrow and shallow model without dropout."""
    args = recipe.args()
    width = 8 * max(args.heads, args.groups)
    more = f"--hidden_channels {width} --num_layers {min(args.num_layers, 3)} "
    more += f"--hops {min(args.hops, 3)} --dropout 0 --input_dropout 0 --attn_dropout 0"
    return recipe.args(*more.split())


def make_small(name: str) -> tuple[nn.Module, Graph, Namespace]:
    """A recipe's model, narrow and shallow and always with the same weights; graph and flags."""
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    args = small_args(recipe)
    graph = prepared_graph(args, random_graph(SIZES[recipe.script]))
    torch.manual_seed(0)
    return prepared_model(args, graph), graph, args


def truth_of(name: str) -> list[float]:
    """Losses of a recipe in a loop of plain PyG."""
    model, graph, args = make_small(name)
    model = model.double()
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    more = [] if graph.edge_attr is None else [torch.from_numpy(graph.edge_attr).double()]
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    keys = row_keys(torch.arange(graph.num_vertices))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses = []
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        rest, found = train, x
        if args.label_rate:
            given = train & drawn_labels(keys, args.label_rate, 0, epoch)
            rest, labels = train & ~given, F.one_hot(y, graph.num_classes) * given[:, None]
            for _ in range(args.label_iters):
                with torch.no_grad():
                    soft = model(torch.cat([x, labels], dim=-1), edges, *more).softmax(-1)
                labels = torch.where(given[:, None], labels, soft)
            found = torch.cat([x, labels], dim=-1)
        logits = model(found, edges, *more)[rest]
        if y.dim() == 1:
            loss = F.cross_entropy(logits, y[rest])
        else:
            loss = F.binary_cross_entropy_with_logits(logits, y[rest].double())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    name: str, shape: Shape, world: Mesh | None = None, must_be_recorded: bool = True
) -> list[float]:
    """Losses of a recipe in gnnpipe."""
    model, graph, args = make_small(name)
    labels = {"label_inputs": args.label_rate, "label_iterations": args.label_iters}
    return gnnpipe_losses(model, graph, shape, world, must_be_recorded, **labels)


def losses_of(name: str, shape: Shape) -> tuple[list[float], str]:
    """Losses of a recipe on one rank, and why its model is not recorded.

    No losses if the model is not recorded and cannot run on the shape.
    """
    try:
        return trained(name, shape), ""
    except InputError as error:
        why = str(error)
    if shape != ALONE[0]:
        return [], why
    return trained(name, shape, must_be_recorded=False), why


DEVICES = {
    "1 x 80 GB": (80e9, ["", "--recompute"] + [f"--recompute --chunks {k}" for k in (8, 64)]),
    "4 x 24 GB": (
        24e9,
        [
            "--shards 4",
            "--shards 4 --recompute",
            *[f"--shards 4 --recompute --chunks {k}" for k in (8, 64)],
            *[f"--stages 4 --recompute --chunks {k}" for k in (16, 64)],
        ],
    ),
}
"""Memory of a device in bytes, and the flags that are tried until the estimate fits."""
HARDWARE = "a100:nvlink3"
DEEP = 32
"""Memory and time of deeper models are extrapolated from 8 and 16 layers: both are linear."""


def estimates(recipe: Recipe) -> list[str]:
    """For each of ``DEVICES`` the flags that fit, the memory and the epoch time."""
    layers = recipe.args().num_layers
    depths = [8, 16] if layers > DEEP else [layers]
    try:
        depth = {n: _described(recipe, n) for n in depths}
    except InputError:
        return ["runs whole", "cannot run"]
    found = []
    for device_bytes, choices in DEVICES.values():
        least = float("inf")
        for flags in choices:
            pairs = [_estimate(recipe, flags, n, model) for n, model in depth.items()]
            needed, seconds = (_at(layers, depths, [pair[i] for pair in pairs]) for i in range(2))
            least = min(least, needed)
            if needed <= device_bytes:
                time = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
                found.append(f"{needed / 1e9:.1f} GB, {time} s")
                found[-1] += f" with `{flags}`" if flags else ""
                break
        else:
            found.append(f"does not fit: at least {least / 1e9:,.0f} GB")
    return found


def _at(layers: int, depths: list[int], values: list[float]) -> float:
    """The value at ``layers`` layers on the line through ``values``, or the only value."""
    if len(depths) == 1:
        return values[0]
    slope = (values[1] - values[0]) / (depths[1] - depths[0])
    return values[0] + slope * (layers - depths[0])


def _described(recipe: Recipe, layers: int) -> tuple[ModelGraph, int]:
    """The recorded model with ``layers`` layers, and the width of its features."""
    args = recipe.args("--num_layers", str(layers))
    graph = prepared_graph(args, random_graph(SIZES[recipe.script]))
    torch.manual_seed(0)
    model = prepared_model(args, graph)
    config = TrainConfig(out="off", label_inputs=args.label_rate)
    graph = with_label_inputs(graph, config)
    chosen = choose_model(model, config, graph, World.alone(), number_dtype(config), True)
    return describe(chosen, graph), graph.num_features


def _estimate(
    recipe: Recipe, flags: str, layers: int, model: tuple[ModelGraph, int]
) -> tuple[float, float]:
    """Memory in bytes and time of an epoch in seconds."""
    sizes, given = SIZES[recipe.script], recipe.args(*flags.split())
    config = TrainConfig(
        device="cuda",
        out="off",
        layers=layers,
        staleness="exact" if given.stages == 1 else "auto",
        **{name: getattr(given, name) for name in ("stages", "shards", "chunks", "recompute")},
    )
    shape = GraphShape(sizes.vertices, sizes.edges, model[1], sizes.classes)
    scenario = scenario_of_shape(config, shape, model[0])
    profile = hardware_profile(HARDWARE, scenario.model, config)
    parts = (scenario.dag, scenario.model, scenario.sizes)
    costs = costs_of(config, profile, *parts, 1, scenario.has_forecasts, None)
    timeline = simulate(program_tasks(scenario.program, costs, scenario.order))
    return max(scenario.memory_bytes), timeline.makespan_s


PREFACE = """# Recipes of OGB's leaderboards

This page lists commands that train the models of OGB's vertex leaderboards on whole graphs, the
published scores, and memory and time by estimate. `scripts/leaderboard_table.py` writes the page.

The scripts take the flags of OGB's own examples (layers, hidden channels, learning rate, runs and
so on) and those of gnnpipe's shapes (`--stages`, `--shards`, `--chunks`, `--staleness`); `--help`
lists all. They train ten seeds (papers100M: three) and print, as OGB's logger does, mean
and standard deviation of the test score at the best validation score. OGB's files are downloaded,
or [put where the scripts find them](how-to/read-your-graph.md#ogbs-datasets-from-disk).

**None of these commands has been run on OGB's data yet.** A published score is that of the program
that its source names (—: none was found that could be checked), and the last column says where this
program differs. Tests run every script on small graphs in OGB's file layout.
"""

PARITY = """
## Parity with plain PyG

Each recipe is made narrow (8 channels per head) and shallow (at most 3 layers and 3 hops) and
trained for three epochs on a random graph of 60 vertices with the features and classes of the data
set, in float64 and without dropout. The numbers are the largest relative difference of a loss to a
loop of plain PyG, for shapes (stages, shards, chunks) with `--staleness exact`. *Recorded*: runs on
any shape. *Whole*: runs as it is, on one rank in one chunk.

| recipe | runs | (1,1,1) | (1,1,4) | (2,1,4) | (1,2,1) |
|---|---|---|---|---|---|
"""

ESTIMATES = """
## Memory and time

Estimates as by `gnnpipe simulate --shape`, from the numbers of vertices and edges alone: memory of
each device, and time of a training epoch by the data sheet of an A100 with NVLink, which is rough.
Flags are added until the memory suffices; all of these shapes are exact but those with `--stages`.
A shard is assumed to read one row of other shards for each own row, and all vertices count as
training vertices. With the data, `gnnpipe info` is more exact:

    gnnpipe info --model scripts/ogb_recipes.py:arxiv_gcnii --dataset ogbn-arxiv --symmetrize

Models of more than 32 layers are extrapolated from 8 and 16 layers. The time of models with sums
over all vertices (SGFormer, Polynormer, GPS) is estimated too high. On papers100M, BatchNorm needs
the rows of all vertices, also where only 1 % of them are trained on; try LayerNorm
(`ogbn_papers100m.py --norm layer`).
Label iterations are not in the time. A recipe with label_rate R takes `gnnpipe info --label-inputs
R`, too.

| recipe | 1 x 80 GB | 4 x 24 GB |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    lines = [PREFACE]
    for script in SIZES:
        lines += [f"\n## ogbn-{script.replace('100m', '100M')}\n", *_recipes(script)]
    reasons = []
    rows = []
    names = [recipe.name for recipe in RECIPES]
    on_ranks = losses_on_two_ranks(trained, names)
    for name in names:
        truth, found = truth_of(name), [losses_of(name, shape) for shape in ALONE]
        why = found[0][1]
        every = [losses for losses, _ in found] + [on_ranks[name, s] for s in ON_TWO_RANKS]
        cells = [name, "whole" if why else "recorded"]
        cells += [shown(difference(losses, truth)) for losses in every]
        rows.append(f"| {' | '.join(cells)} |")
        reasons += [f"- {name}: {without_place(why)}"] if why else []
    lines += [PARITY.rstrip("\n"), *rows]
    lines += ["\nWhy a model is not recorded:\n", *reasons] if reasons else []
    lines.append(ESTIMATES.rstrip("\n"))
    lines += [f"| {r.name} | {' | '.join(estimates(r))} |" for r in RECIPES]
    return "\n".join(lines) + "\n"


def without_place(message: str) -> str:
    """A message without the line of the script that it names."""
    return re.sub(r" \(/.*?, line .*?\)(?=;)", "", message).removeprefix("model: ")


def _link(source: str) -> str:
    return f"[{source}]({SOURCES[source]})"


def _recipes(script: str) -> list[str]:
    """The table of a data set's recipes."""
    metric = "ROC AUC" if script == "proteins" else "accuracy"
    rows = [f"| recipe | published {metric} | command | what differs |", "|---|---|---|---|"]
    for recipe in RECIPES:
        if recipe.script == script:
            score = f"{recipe.score} ({_link(recipe.source)})" if recipe.score else "—"
            notes = [recipe.differs] if recipe.differs else []
            if recipe.settings:
                notes.append(f"settings: {_link(recipe.settings)}")
            row = [recipe.title, score, f"`{recipe.command}`"]
            rows.append(f"| {' | '.join([*row, '; '.join(notes)])} |")
    return rows


def main() -> int:
    warnings.simplefilter("ignore")
    return write_page(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())

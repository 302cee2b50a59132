"""The scripts for OGB's leaderboards, on small graphs in OGB's layout on disk."""

from __future__ import annotations

import importlib
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.test_ogb import write_csv

from gnnpipe import InputError, TrainConfig, Trainer

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import leaderboard_table
import ogb_recipes
import ogb_run
import ogbn_arxiv
from leaderboard_table import SIZES, losses_of, truth_of
from ogb_models import make_model

N = 60
SCHEMES = {"arxiv": "time", "products": "sales_ranking", "proteins": "species"}
FOLDERS = {name: f"ogbn_{name}" for name in SCHEMES} | {"papers100m": "ogbn_papers100M"}


def write_ogb(root, script):
    """A small graph with the widths and classes of a data set, as OGB's archive holds it."""
    rng, sizes = np.random.default_rng(0), SIZES[script]
    folder = root / FOLDERS[script]
    raw, order = folder / "raw", rng.permutation(N)
    edges = rng.integers(0, N, (200, 2))
    x = rng.standard_normal((N, sizes.features)).astype(np.float32).round(3)
    parts = {"train": order[:20], "valid": order[20:30], "test": order[30:40]}
    for part, vertices in parts.items():
        write_csv(folder / "split" / SCHEMES.get(script, "time") / f"{part}.csv.gz", vertices)
    if script == "papers100m":
        label = rng.integers(0, sizes.classes, (N, 1)).astype(np.float32)
        label[order[40:]] = np.nan
        raw.mkdir()
        np.savez(raw / "data.npz", edge_index=edges.T, node_feat=x, num_nodes_list=[N])
        np.savez(raw / "node-label.npz", node_label=label)
        return
    write_csv(raw / "edge.csv.gz", edges)
    write_csv(raw / "num-node-list.csv.gz", [N])
    if script == "proteins":
        write_csv(raw / "edge-feat.csv.gz", rng.random((len(edges), 8)).round(3))
        write_csv(raw / "node-label.csv.gz", rng.integers(0, 2, (N, sizes.classes)))
    else:
        write_csv(raw / "node-feat.csv.gz", x)
        write_csv(raw / "node-label.csv.gz", rng.integers(0, sizes.classes, N))


RUNS = [
    ("arxiv", "--correct_and_smooth"),
    ("arxiv", "--use_sage --residual --jk sum --log_loss 0.5 --label_rate 0.5 --chunks 4"),
    ("arxiv", "--model revgnn --label_rate 0.5 --label_iters 1 --correct_and_smooth"),
    ("products", "--model gcnii --num_layers 4 --chunks 4 --staleness exact"),
    ("proteins", "--use_sage --eval_steps 1"),
    ("proteins", "--model deepergcn --edge_features --norm layer --label_rate 0.5"),
    ("papers100m", "--no-symmetrize"),
]


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.filterwarnings("ignore:--label-inputs .*. stale rows")
@pytest.mark.parametrize(("script", "flags"), RUNS)
@pytest.mark.slow
def test_a_script_trains_on_ogbs_files(script, flags, tmp_path, capsys):
    write_ogb(tmp_path, script)
    parser = importlib.import_module(f"ogbn_{script}").parser()
    small = "--hidden_channels 8 --epochs 2 --runs 2 --device cpu"
    args = parser.parse_args([*flags.split(), *small.split()])
    args.data_dir, args.out = str(tmp_path), str(tmp_path / "run")
    found = ogb_run.train(args)
    assert [result.seed for result in found.results] == [0, 1]
    assert found.results[0].metric == args.metric
    scores = [100 * result.test_metric_at_best_val for result in found.results]
    wanted = f"Final Test: {np.mean(scores):.2f} ± {np.std(scores, ddof=1):.2f}"
    printed = capsys.readouterr().out
    assert wanted in printed
    assert ("Test after C&S" in printed) == args.correct_and_smooth


def test_correct_and_smooth(tmp_path):
    """Against the formulas over a dense adjacency."""
    graph = leaderboard_table.random_graph(SIZES["arxiv"])
    source, target = graph.edge_index
    y = np.arange(N) % 3
    is_near = y[source] == y[target]
    graph = replace(graph.with_edges(is_near | (np.arange(len(source)) % 8 == 0)), y=y)
    args = ogbn_arxiv.parser().parse_args(["--model", "mlp", "--epochs", "3"])
    model = make_model(graph, args)
    config = replace(ogb_run.config_of(args), device="cpu", out=str(tmp_path / "run"), quiet=True)
    trainer = Trainer(config, graph=graph, model=model)
    trainer.fit()
    soft = trainer.predict().softmax(-1)

    source, target = map(torch.from_numpy, graph.edge_index)
    a = torch.zeros(N, N).index_put((target, source), torch.tensor(1.0), accumulate=True)
    scale = a.sum(1).clamp(min=1).pow(-0.5)
    a = scale[:, None] * a * scale
    train, y = torch.from_numpy(graph.train_mask)[:, None], torch.from_numpy(y)
    true = torch.nn.functional.one_hot(y, 40).float()
    first = error = torch.where(train, true - soft, 0)
    for _ in range(50):
        error = torch.where(train, first, a @ error)
    first = soft = torch.where(train, true, soft + 20 * error)
    for _ in range(50):
        soft = (0.8 * (a @ soft) + 0.2 * first).clamp(0, 1)
    hits = (soft.argmax(-1) == y).double().numpy()
    wanted = hits[graph.val_mask].mean(), hits[graph.test_mask].mean()
    assert min(wanted) > 0.3
    assert ogb_run.smoothed_scores(args, graph, tmp_path / "run") == pytest.approx(wanted)


def test_the_log_loss():
    logits, y = torch.tensor([[1.0, 0.0], [2.0, -1.0]]), torch.tensor([0, 1])
    each = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))]
    wanted = sum(math.log(0.5 + loss) - math.log(0.5) for loss in each)
    assert float(ogb_run.log_loss(0.5, logits, y)) == pytest.approx(wanted)


def test_recipes_are_named_apart_and_cite_known_sources():
    names = [recipe.name for recipe in ogb_recipes.RECIPES]
    assert len(set(names)) == len(names)
    for recipe in ogb_recipes.RECIPES:
        assert bool(recipe.score) == bool(recipe.source)
        assert {recipe.source, recipe.settings} - {""} <= ogb_recipes.SOURCES.keys()


def test_the_page_has_every_recipe():
    text = leaderboard_table.PAGE.read_text(encoding="utf-8")
    for recipe in ogb_recipes.RECIPES:
        assert f"`{recipe.command}`" in text
        assert text.count(f"\n| {recipe.name} |") == 2


def test_the_page_shows_parity_on_every_shape():
    text = leaderboard_table.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w+ \| recorded \| (.*) \|$", text, flags=re.M)
    assert len(rows) == len(ogb_recipes.RECIPES)
    numbers = [float(number) for row in rows for number in row.split(" | ")]
    assert len(numbers) == 4 * len(rows)
    assert max(numbers) < 1e-8


def test_a_recipe_is_a_model_by_name():
    name = f"{ogb_recipes.__file__}:arxiv_jknet"
    config = TrainConfig(model=name, dataset="karate", epochs=1, out="off", quiet=True)
    assert Trainer(config).fit().epochs == 1
    with pytest.raises(InputError, match="arxiv_none"):
        Trainer(replace(config, model=name.replace("jknet", "none"))).fit()


# As OGB's leaderboard lists them.
PARAMETERS = {
    "arxiv_graphsage": 218_664,
    "arxiv_mlp": 110_120,
    "arxiv_jknet": 89_000,
    "arxiv_dagnn": 43_857,
    "products_gcn": 103_727,
    "products_graphsage": 206_895,
    "products_mlp": 103_727,
    "products_gat": 751_574,
    "proteins_gcn": 96_880,
    "proteins_graphsage": 193_136,
    "papers100m_sgc": 144_044,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_has_as_many_parameters_as_published(name):
    graph = leaderboard_table.random_graph(SIZES[name.partition("_")[0]])
    model = getattr(ogb_recipes, name)(graph)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


FAST = {"gcn", "gat", "gcnii", "deepergcn", "sgformer", "gpsconv"}
"""Recipes of arxiv that are tried in every test run; all take minutes."""


def marked(recipe):
    is_fast = recipe.name in {f"arxiv_{name}" for name in FAST}
    return pytest.param(recipe, id=recipe.name, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("recipe", [marked(recipe) for recipe in ogb_recipes.RECIPES])
@pytest.mark.slow
def test_a_recipe_trains_as_in_plain_pyg(recipe):
    truth = pytest.approx(truth_of(recipe.name), rel=1e-9)
    assert losses_of(recipe.name, (1, 1, 1)) == (truth, "")
    assert losses_of(recipe.name, (1, 1, 4)) == (truth, "")


def test_no_script_is_long():
    for script in SIZES:
        path = Path(ogb_run.__file__).with_name(f"ogbn_{script}.py")
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80

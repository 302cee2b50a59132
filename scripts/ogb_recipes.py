"""Recipes of OGB's leaderboards: flags with published settings, the published score, its source.

    gnnpipe info --model scripts/ogb_recipes.py:arxiv_gcnii --dataset ogbn-arxiv --symmetrize

names the model of a recipe, also for verify, profile and simulate. scripts/leaderboard_table.py
writes docs/leaderboard.md from this list.
"""

from __future__ import annotations

import importlib
import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from ogb_models import make_model
from torch import nn

from gnnpipe import Graph


@dataclass(frozen=True)
class Recipe:
    """A command and the score that was published for its settings."""

    title: str
    script: str
    """ogbn_<...>.py without ``ogbn_`` and ``.py``."""
    flags: str = ""
    score: str = ""
    """Mean ± deviation of the test score in percent; '': no number was found."""
    source: str = ""
    """Source of the score, a name in ``SOURCES``."""
    differs: str = ""
    """Differences between the published program and this one."""
    settings: str = ""
    """Source of the settings, if another."""

    @property
    def name(self) -> str:
        """As ``arxiv_gcnii``: the script and the title."""
        words = "".join(c if c.isalnum() else " " for c in self.title.lower()).split()
        return "_".join([self.script, *words])

    @property
    def command(self) -> str:
        """The exact command."""
        return f"python scripts/ogbn_{self.script}.py {self.flags}".strip()

    def args(self, *more: str) -> Namespace:
        """The parsed flags, followed by ``more`` flags."""
        parser = importlib.import_module(f"ogbn_{self.script}").parser()
        args = parser.parse_args([*shlex.split(self.flags), *more])
        args.model = "sage" if args.use_sage else args.model
        return args


def __getattr__(name: str) -> Callable[[Graph], nn.Module]:
    """The function that makes the model of a recipe for a graph."""
    for recipe in RECIPES:
        if recipe.name == name:
            return lambda graph: make_model(graph, recipe.args())
    raise AttributeError(name)


OGB = "OGB's leaderboard"
GITHUB = "https://github.com/"
SOURCES = {
    OGB: "https://ogb.stanford.edu/docs/leader_nodeprop/",
    "DGL": GITHUB + "dmlc/dgl/tree/master/examples/pytorch/ogb/ogbn-arxiv",
    "arxiv baselines": GITHUB + "EtoDemerzel0427/ogbn-arxiv-baselines",
    "deep_gcns_torch": GITHUB + "lightaime/deep_gcns_torch/tree/master/examples",
    "GCNII": GITHUB + "chennnM/GCNII/tree/master/PyG/ogbn-arxiv",
    "DAGNN": GITHUB + "mengliu1998/DeeperGNN",
    "UniMP": GITHUB + "PaddlePaddle/PGL/tree/main/ogb_examples/nodeproppred/unimp",
    "EGC": GITHUB + "shyam196/egc/blob/main/hyperparameters.md",
    "SGFormer": GITHUB + "qitianwu/SGFormer",
    "Polynormer": GITHUB + "cornell-zhang/Polynormer/tree/main/large_graph_exp",
    "classic GNNs": GITHUB + "LUOyk1999/tunedGNN/tree/main/large_graph",
    "SIGN": GITHUB + "dmlc/dgl/tree/master/examples/pytorch/ogb/sign",
    "PyG": GITHUB + "pyg-team/pytorch_geometric/tree/master/examples",
}

BOT = "--optimizer AdamW --lr 0.005 --epochs 1000 --warmup_epochs 50 --log_loss 0.5"
EGC_FLAGS = "--num_layers 3 --dropout 0.2 --epochs 1000 --patience 80"
CLASSIC = "--lr 0.0005 --epochs 2000 --input_dropout 0.15 --weight_decay 5e-4"
SAMPLED = "trained there on samples of the graph"

ARXIV = [
    Recipe(
        "GCN",
        "arxiv",
        "",
        "71.74 ± 0.29",
        OGB,
        "142,888 parameters on the leaderboard; OGB's present example has 110,120, as this model",
    ),
    Recipe("GraphSAGE", "arxiv", "--use_sage", "71.49 ± 0.27", OGB),
    Recipe("MLP", "arxiv", "--model mlp", "55.50 ± 0.23", OGB),
    Recipe(
        "GCN + linear",
        "arxiv",
        f"--residual {BOT}",
        "72.70 ± 0.16",
        "DGL",
        "each epoch trains on half of the training vertices there, drawn anew; no plateau schedule",
    ),
    Recipe(
        "GCN + linear + labels",
        "arxiv",
        f"--residual {BOT} --label_rate 0.5",
        "73.06 ± 0.24",
        "DGL",
        "no plateau schedule",
    ),
    Recipe(
        "GAT",
        "arxiv",
        "--model gat --heads 4 --hidden_channels 1024",
        "71.51 ± 0.12",
        "arxiv baselines",
        "ELU there",
    ),
    Recipe(
        "GAT + labels",
        "arxiv",
        "--model gat --heads 3 --hidden_channels 750 --residual --dropout 0.75 "
        "--input_dropout 0.1 --optimizer RMSprop --lr 0.002 --epochs 2000 --warmup_epochs 50 "
        "--log_loss 0.307 --label_rate 0.5",
        "73.66 ± 0.11",
        "DGL",
        "no dropout of edges, no symmetric norm",
    ),
    Recipe(
        "GCNII",
        "arxiv",
        "--model gcnii --num_layers 16 --alpha 0.5 --norm none --dropout 0.1 --lr 0.001 "
        "--epochs 1000 --patience 200",
        "72.74 ± 0.16",
        "GCNII",
        "the published variant adds each layer's input",
    ),
    Recipe(
        "DeeperGCN",
        "arxiv",
        "--model deepergcn --num_layers 28 --hidden_channels 128 --t 0.1",
        "71.92 ± 0.16",
        "deep_gcns_torch",
        "no gradient through the softmax there, and self-loops are added",
    ),
    Recipe(
        "JKNet",
        "arxiv",
        "--num_layers 5 --hidden_channels 128 --jk max",
        "72.19 ± 0.21",
        "arxiv baselines",
    ),
    Recipe(
        "DAGNN",
        "arxiv",
        "--model dagnn --num_layers 2 --hops 16 --dropout 0.2 --lr 0.005 --epochs 1000",
        "72.09 ± 0.25",
        OGB,
        settings="DAGNN",
    ),
    Recipe("APPNP", "arxiv", "--model appnp --hops 10", "71.44 ± 0.21", "arxiv baselines"),
    Recipe(
        "SIGN",
        "arxiv",
        "--model sign --hops 5 --hidden_channels 512 --lr 0.001 --epochs 1000 --log_steps 10",
        "71.95 ± 0.11",
        "SIGN",
        "a perceptron for each hop there, in batches",
    ),
    Recipe(
        "UniMP",
        "arxiv",
        "--model unimp --heads 2 --norm layer --dropout 0.3 --lr 0.001 --weight_decay 5e-4 "
        "--epochs 2000 --label_rate 0.625",
        "73.11 ± 0.20",
        OGB,
        "labels are added to the features through an embedding there",
        "UniMP",
    ),
    Recipe(
        "UniMP without labels",
        "arxiv",
        "--model unimp --heads 2 --norm layer --dropout 0.3 --lr 0.001 --weight_decay 5e-4 "
        "--epochs 2000",
        "72.25 ± 0.15",
        "UniMP",
    ),
    Recipe(
        "EGC-S",
        "arxiv",
        "--model egc --hidden_channels 184 --heads 8 --lr 0.00569 --weight_decay 1e-3 " + EGC_FLAGS,
        "72.19 ± 0.16",
        OGB,
        "learning rate halved on a plateau there",
        "EGC",
    ),
    Recipe(
        "GIN",
        "arxiv",
        "--model gin --hidden_channels 156 --head --lr 0.00879 --weight_decay 1e-4 " + EGC_FLAGS,
        "",
        "",
        "a residual and one linear map in each layer there",
        "EGC",
    ),
    Recipe(
        "GATv2",
        "arxiv",
        "--model gatv2 --hidden_channels 112 --heads 8 --head --lr 0.00879 --weight_decay 1e-3 "
        + EGC_FLAGS,
        "",
        "",
        "a residual in each layer there",
        "EGC",
    ),
    Recipe(
        "SGFormer",
        "arxiv",
        "--model sgformer --alpha 0.5 --lr 0.001 --epochs 1000 --log_steps 9 --runs 5",
        "72.63 ± 0.13",
        "SGFormer",
        "residuals in the GCN and BatchNorm in the attention there",
    ),
    Recipe(
        "Polynormer",
        "arxiv",
        "--model polynormer --num_layers 7 --lr 0.0005 --epochs 2000 --input_dropout 0.15 "
        "--weight_decay 5e-4",
        "73.45 (one run)",
        "Polynormer",
        "on this graph local layers alone there, with GCN",
    ),
    Recipe(
        "RevGAT",
        "arxiv",
        "--model revgnn --conv gat --heads 3 --num_layers 5 --hidden_channels 768 --dropout 0.75 "
        "--optimizer RMSprop --lr 0.002 --epochs 2000 --label_rate 0.5 --label_iters 1 "
        "--log_loss 0.307",
        "74.02 ± 0.18",
        "deep_gcns_torch",
        "no dropout of edges, no symmetric norm",
    ),
    Recipe(
        "classic GCN*",
        "arxiv",
        f"--num_layers 5 --hidden_channels 512 --residual --head {CLASSIC}",
        settings="classic GNNs",
    ),
    Recipe(
        "classic SAGE*",
        "arxiv",
        f"--use_sage --num_layers 4 --residual --head {CLASSIC}",
        settings="classic GNNs",
    ),
    Recipe("GPS, Performer as sums", "arxiv", "--model gps --epochs 1000 --lr 0.001"),
    Recipe("GPSConv", "arxiv", "--model gpsconv --heads 4 --epochs 1000 --lr 0.001"),
]

PRODUCTS = [
    Recipe("GCN", "products", "", "75.64 ± 0.21", OGB),
    Recipe("GraphSAGE", "products", "--use_sage", "78.50 ± 0.14", OGB),
    Recipe("MLP", "products", "--model mlp --dropout 0 --epochs 200", "61.06 ± 0.08", OGB),
    Recipe(
        "MLP + C&S",
        "products",
        "--model mlp --hidden_channels 200 --norm batch --correct_and_smooth",
        "84.18 ± 0.07",
        OGB,
        "the command is that of PyG's example, but for BatchNorm before ReLU and one adjacency",
        "PyG",
    ),
    Recipe(
        "GAT",
        "products",
        "--model gat --heads 4 --hidden_channels 512 --residual --lr 0.001 --epochs 100",
        "79.45 ± 0.59",
        "PyG",
        f"{SAMPLED}; ELU",
    ),
    Recipe(
        "DeeperGCN",
        "products",
        "--model deepergcn --num_layers 14 --hidden_channels 128 --norm batch --t 0.1 --epochs 500",
        "80.98 ± 0.20",
        "deep_gcns_torch",
        f"{SAMPLED}; no gradient through the softmax, and self-loops are added",
    ),
    Recipe(
        "SIGN",
        "products",
        "--model sign --hops 5 --hidden_channels 512 --dropout 0.4 --lr 0.001 --epochs 1000 "
        "--log_steps 10",
        "80.52 ± 0.16",
        "SIGN",
        "a perceptron for each hop there, in batches",
    ),
    Recipe(
        "UniMP",
        "products",
        "--model unimp --heads 4 --hidden_channels 512 --norm layer --dropout 0.3 --lr 0.001 "
        "--label_rate 0.625",
        "82.56 ± 0.31",
        "UniMP",
        SAMPLED,
    ),
    Recipe(
        "classic GCN*",
        "products",
        "--num_layers 5 --hidden_channels 200 --norm layer --head --lr 0.003",
        "",
        "",
        f"{SAMPLED}; norm before each layer",
        "classic GNNs",
    ),
    Recipe(
        "classic SAGE*",
        "products",
        "--use_sage --num_layers 5 --hidden_channels 200 --norm layer --head --lr 0.003 "
        "--epochs 1000",
        "",
        "",
        f"{SAMPLED}; norm before each layer",
        "classic GNNs",
    ),
]

DEEP_PROTEINS = (
    "--norm layer --mlp_layers 2 --edge_features --epochs 1000 --log_steps 5"  # of deep_gcns_torch
)
PROTEINS = [
    Recipe("GCN", "proteins", "", "72.51 ± 0.35", OGB),
    Recipe("GraphSAGE", "proteins", "--use_sage", "77.68 ± 0.20", OGB),
    Recipe("MLP", "proteins", "--model mlp --dropout 0.5", "72.04 ± 0.48", OGB),
    Recipe(
        "DeeperGCN",
        "proteins",
        "--model deepergcn --num_layers 112 --hidden_channels 64 --learn_t --dropout 0.1 "
        + DEEP_PROTEINS,
        "85.80 ± 0.17",
        "deep_gcns_torch",
        f"{SAMPLED}; sums of edge features as input",
    ),
    Recipe(
        "RevGNN-Deep",
        "proteins",
        "--model revgnn --num_layers 1001 --hidden_channels 80 --aggr max --dropout 0.1 "
        "--lr 0.001 " + DEEP_PROTEINS,
        "87.74 ± 0.13",
        "deep_gcns_torch",
        f"{SAMPLED}; sums of edge features and the species as input; ten views in evaluation",
    ),
    Recipe(
        "RevGNN-Wide",
        "proteins",
        "--model revgnn --num_layers 448 --hidden_channels 224 --aggr max --dropout 0.2 "
        "--lr 0.001 " + DEEP_PROTEINS,
        "88.24 ± 0.15",
        "deep_gcns_torch",
        f"{SAMPLED}; sums of edge features and the species as input; ten views in evaluation",
    ),
]

PAPERS100M = [
    Recipe("MLP", "papers100m", "--model mlp", "47.24 ± 0.31", OGB, "in batches of 256 there"),
    Recipe("SGC", "papers100m", "", "63.29 ± 0.19", OGB, "in batches of 256 there"),
    Recipe(
        "SIGN",
        "papers100m",
        "--model sign --hops 3 --hidden_channels 512 --dropout 0.5 --lr 0.001",
        "65.68 ± 0.06",
        OGB,
        "settings unknown here",
    ),
    Recipe(
        "TransformerConv",
        "papers100m",
        "--model unimp --heads 4 --norm layer --lr 0.001",
        "67.36 ± 0.10",
        OGB,
        f"{SAMPLED}; settings unknown here",
    ),
]

RECIPES = [*ARXIV, *PRODUCTS, *PROTEINS, *PAPERS100M]

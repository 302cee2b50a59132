"""Flags and training of scripts/ogbn_*.py: OGB's flags, switches of the models, gnnpipe's shape."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from ogb_models import MODELS, NORMS, make_model
from torch import Tensor, nn
from torch_geometric.nn import CorrectAndSmooth

from gnnpipe import Graph, InputError, SeedsResult, TrainConfig, Trainer, fit_seeds
from gnnpipe.data.load import load_graph


def flags(description: str, **defaults: object) -> ArgumentParser:
    """The parser, with the data set's own ``defaults``."""
    parser = ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _ogb_flags(parser)
    _model_flags(parser)
    shape = parser.add_argument_group("shape of the run (docs/how-to/choose-a-shape.md)")
    shape.add_argument("--stages", type=int, default=1)
    shape.add_argument("--shards", type=int, default=1)
    shape.add_argument("--chunks", type=int, default=1)
    shape.add_argument("--staleness", default="auto", help="auto, none, paper or exact")
    shape.add_argument("--recompute", action="store_true", help="activation checkpointing")
    shape.add_argument("--data_dir", default="", help="folder that holds OGB's folders")
    shape.add_argument("--out", default="", help="run folder, or off")
    parser.set_defaults(**defaults)
    return parser


def _ogb_flags(parser: ArgumentParser) -> None:
    ogb = parser.add_argument_group("flags of OGB's examples")
    ogb.add_argument("--device", default="auto", help="auto, cpu or cuda; a number means cuda")
    ogb.add_argument("--log_steps", type=int, default=1, help="epochs between two evaluations")
    ogb.add_argument("--use_sage", action="store_true", help="the same as --model sage")
    ogb.add_argument("--num_layers", type=int, default=3, help="number of layers")
    ogb.add_argument(
        "--hidden_channels", type=int, default=256, help="width, of all heads together"
    )
    ogb.add_argument("--dropout", type=float, default=0.5, help="dropout after each layer")
    ogb.add_argument("--lr", type=float, default=0.01, help="learning rate")
    ogb.add_argument("--epochs", type=int, default=500, help="number of epochs")
    ogb.add_argument("--runs", type=int, default=10, help="number of seeds, from 0")
    ogb.add_argument("--weight_decay", type=float, default=0.0, help="weight decay")
    ogb.add_argument("--optimizer", default="Adam", help="name in torch.optim")
    ogb.add_argument("--warmup_epochs", type=int, default=0, help="linear warm-up of --lr")
    ogb.add_argument("--patience", type=int, default=0, help="evaluations without a better one")
    ogb.add_argument("--log_loss", type=float, default=0.0, help="EPS: log(EPS + cross entropy)")
    ogb.add_argument(
        "--correct_and_smooth", action="store_true", help="also score after Correct and Smooth"
    )
    ogb.add_argument(
        "--label_rate", type=float, default=0.0, help="share of labels as inputs in an epoch"
    )
    ogb.add_argument("--label_iters", type=int, default=0, help="passes that predict label inputs")


def _model_flags(parser: ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="gcn", choices=sorted(MODELS), help="architecture")
    model.add_argument("--norm", default="batch", choices=sorted(NORMS), help="after each layer")
    model.add_argument("--residual", action="store_true", help="add a linear map of each input")
    model.add_argument("--jk", default="none", choices=("none", "sum", "cat", "max"))
    model.add_argument("--head", action="store_true", help="end with a linear map")
    model.add_argument("--input_dropout", type=float, default=0.0, help="dropout of the features")
    model.add_argument("--attn_dropout", type=float, default=0.0, help="dropout of attention")
    model.add_argument("--heads", type=int, default=1, help="attention heads; egc: heads")
    model.add_argument("--bases", type=int, default=4, help="egc: bases")
    model.add_argument(
        "--alpha", type=float, default=0.1, help="gcnii, appnp; sgformer: GCN's part"
    )
    model.add_argument("--theta", type=float, default=0.5, help="gcnii: strength of the weights")
    model.add_argument("--hops", type=int, default=3, help="sgc, sign, appnp, dagnn, tag")
    model.add_argument("--conv", default="gen", choices=("gen", "gcn", "sage", "gat"))
    model.add_argument("--aggr", default="softmax", help="gen: softmax, power, max, mean or add")
    model.add_argument("--t", type=float, default=1.0, help="gen: factor inside softmax")
    model.add_argument("--learn_t", action="store_true", help="gen: train --t")
    model.add_argument("--mlp_layers", type=int, default=1, help="gen: layers of its perceptron")
    model.add_argument("--groups", type=int, default=2, help="revgnn: groups of channels")
    model.add_argument("--edge_features", action="store_true", help="gen: read edge features")


def config_of(args: Namespace) -> TrainConfig:
    """The settings of a run."""
    is_number = args.device.isdigit()
    return TrainConfig(
        dataset=args.dataset,
        device="cuda" if is_number else args.device,
        metric=args.metric,
        eval_every=args.log_steps,
        predict=False,
        keep_weights="best",
        label_inputs=args.label_rate,
        label_iterations=args.label_iters,
        **{name: getattr(args, name) for name in SHARED},
    )


SHARED = ("dropout", "lr", "epochs", "weight_decay", "optimizer", "warmup_epochs", "patience")
SHARED += ("stages", "shards", "chunks", "staleness", "recompute", "data_dir", "out")
"""Flags that are settings of gnnpipe by the same name."""


def prepared_graph(args: Namespace, graph: Graph) -> Graph:
    """The graph that the model of ``args`` reads."""
    return graph if args.edge_features else graph.reduced_to(())


def prepared_model(args: Namespace, graph: Graph) -> nn.Module:
    """The model of ``args`` for a graph, whose labels may be further features."""
    return make_model(graph, args, graph.num_classes if args.label_rate else 0)


def log_loss(eps: float, logits: Tensor, y: Tensor) -> Tensor:
    """The sum of log(eps + cross entropy) - log(eps): arXiv 2103.13355."""
    each = F.cross_entropy(logits, y, reduction="none")
    return ((eps + each) / eps).log().sum()


def smoothed_scores(args: Namespace, graph: Graph, run: Path) -> tuple[float, float]:
    """Validation and test accuracy of a run's best weights after Correct and Smooth.

    As in PyG's example: 50 steps each, the errors spread with weight 1 and scaled by 20, the labels
    with weight 0.8; both over the symmetrically normalised adjacency.
    """
    logits = Trainer.load(run, graph=graph, model=prepared_model(args, graph)).predict().cpu()
    edges, y = torch.from_numpy(graph.edge_index), torch.from_numpy(graph.y)
    train = torch.from_numpy(np.flatnonzero(graph.train_mask))
    post = CorrectAndSmooth(50, 1.0, 50, 0.8, autoscale=False, scale=20.0)
    soft = post.correct(logits.softmax(-1), y[train], train, edges)
    found = post.smooth(soft, y[train], train, edges).argmax(-1).numpy() == graph.y
    return float(found[graph.val_mask].mean()), float(found[graph.test_mask].mean())


def main(parser: ArgumentParser) -> None:
    """Trains as the command line says; a wrong setting is one line."""
    try:
        train(parser.parse_args())
    except InputError as error:
        sys.exit(f"{parser.prog}: {error}")


def train(args: Namespace) -> SeedsResult:
    """Trains ``args.runs`` seeds and prints the lines of OGB's logger."""
    args.model = "sage" if args.use_sage else args.model
    graph = load_graph(args.dataset, data_dir=args.data_dir, symmetrize=args.symmetrize)
    graph = prepared_graph(args, graph)
    config = config_of(args)
    if args.correct_and_smooth and (config.out == "off" or graph.is_multi_label):
        raise InputError("--correct_and_smooth: needs a run folder and one class per vertex")
    if args.correct_and_smooth and args.stages * args.shards > 1:
        raise InputError("--correct_and_smooth: runs on one rank; leave out --stages and --shards")
    found = fit_seeds(
        config,
        args.runs,
        graph=graph,
        make_model=lambda: prepared_model(args, graph),
        loss_fn=partial(log_loss, args.log_loss) if args.log_loss else None,
    )
    if os.environ.get("RANK", "0") == "0":
        print("All runs:")
        _print("Highest Valid", [result.best_val_metric for result in found.results])
        _print("   Final Test", [result.test_metric_at_best_val for result in found.results])
    if args.correct_and_smooth:
        runs = [found.path / f"seed-{result.seed}" for result in found.results]
        val, test = zip(*(smoothed_scores(args, graph, run) for run in runs), strict=True)
        _print("Valid after C&S", val)
        _print(" Test after C&S", test)
    return found


def _print(words: str, scores: Sequence[float]) -> None:
    """Prints mean and standard deviation in percent, as OGB's logger."""
    mean, std = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else math.nan
    print(f"{words}: {100 * mean:.2f} ± {100 * std:.2f}")

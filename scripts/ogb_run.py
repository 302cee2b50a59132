"""Flags and training of scripts/ogbn_*.py: OGB's flags, switches of the models, gnnpipe's shape."""

from __future__ import annotations

import argparse
import os
from argparse import ArgumentParser, Namespace
from dataclasses import replace

import numpy as np
import torch.nn.functional as F
from ogb_models import MODELS, NORMS, make_model
from torch import Tensor

from gnnpipe import Graph, SeedsResult, TrainConfig, fit_seeds
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
    ogb.add_argument("--label_rate", type=float, default=0.0, help="share of labels as inputs")


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
        **{name: getattr(args, name) for name in SHARED},
    )


SHARED = ("dropout", "lr", "epochs", "weight_decay", "optimizer", "warmup_epochs", "patience")
SHARED += ("stages", "shards", "chunks", "staleness", "recompute", "data_dir", "out")
"""Flags that are settings of gnnpipe by the same name."""


def prepared_graph(args: Namespace, graph: Graph) -> Graph:
    """The graph that the model of ``args`` reads."""
    if not args.edge_features:
        graph = graph.reduced_to(())
    return with_label_inputs(graph, args.label_rate) if args.label_rate else graph


def with_label_inputs(graph: Graph, share: float) -> Graph:
    """The graph with a share of the training labels as features, and not to be trained on."""
    train = np.flatnonzero(graph.train_mask)
    chosen = np.random.default_rng(0).permutation(train)[: int(share * len(train))]
    labels = np.zeros((graph.num_vertices, graph.num_classes), np.float32)
    if graph.is_multi_label:
        labels[chosen] = np.maximum(graph.y[chosen], 0)
    else:
        labels[chosen, graph.y[chosen]] = 1
    mask = graph.train_mask.copy()
    mask[chosen] = False
    return replace(graph, x=np.concatenate([graph.x, labels], axis=1), train_mask=mask)


def log_loss(eps: float, logits: Tensor, y: Tensor) -> Tensor:
    """The sum of log(eps + cross entropy) - log(eps): arXiv 2103.13355."""
    each = F.cross_entropy(logits, y, reduction="none")
    return ((eps + each) / eps).log().sum()


def train(args: Namespace) -> SeedsResult:
    """Trains ``args.runs`` seeds and prints the lines of OGB's logger."""
    args.model = "sage" if args.use_sage else args.model
    graph = load_graph(args.dataset, data_dir=args.data_dir, symmetrize=args.symmetrize)
    graph = prepared_graph(args, graph)
    found = fit_seeds(
        config_of(args),
        args.runs,
        graph=graph,
        make_model=lambda: make_model(graph, args),
        loss_fn=(lambda logits, y: log_loss(args.log_loss, logits, y)) if args.log_loss else None,
    )
    if os.environ.get("RANK", "0") == "0":
        print("All runs:")
        for words, name in (("Highest Valid", "best_val_metric"), FINAL):
            print(f"{words}: {100 * found.mean[name]:.2f} ± {100 * found.deviation[name]:.2f}")
    return found


FINAL = ("   Final Test", "test_metric_at_best_val")
"""The number that OGB's leaderboard shows: the test score of the epoch that validates best."""

"""Trains models of the ogbn-proteins leaderboard on the whole graph.

    python scripts/ogbn_proteins.py --use_sage                       # OGB's GraphSAGE, ten seeds
    python scripts/ogbn_proteins.py --model deepergcn --num_layers 28 --edge_features --norm layer

docs/leaderboard.md lists the recipes. OGB's archive
(http://snap.stanford.edu/ogb/data/nodeproppred/proteins.zip) is downloaded; without a network
unpack it as <--data_dir>/ogbn_proteins, which holds raw/ and split/.

The flags are those of OGB's example gnn.py: no norm, no dropout, 1000 epochs, every fifth of them
evaluated. The features of a vertex are the means of its edge features; with --edge_features the
model reads these, too. The result is the ROC AUC, a mean over 112 labels as in OGB's evaluator, of
the evaluated epoch with the best validation ROC AUC, over seeds 0 to 9.
"""

from __future__ import annotations

from argparse import ArgumentParser

from ogb_run import flags, main


def parser() -> ArgumentParser:
    own = {"dataset": "ogbn-proteins", "metric": "rocauc", "symmetrize": False}
    made = flags("Train on ogbn-proteins", **own, norm="none", dropout=0.0, epochs=1000)
    made.add_argument("--eval_steps", dest="log_steps", type=int, default=5, help="as --log_steps")
    return made


if __name__ == "__main__":
    main(parser())

"""Trains models of the ogbn-papers100M leaderboard on the whole graph.

    python scripts/ogbn_papers100m.py --model sgc --num_layers 1 --runs 3
    torchrun --nnodes 2 --nproc-per-node 4 scripts/ogbn_papers100m.py --model sage --shards 8

docs/leaderboard.md lists the recipes. The graph has 111 million vertices and 1.6 billion edges,
3.2 billion with --symmetrize, and each rank reads all of it before it keeps its part. OGB's archive
(http://snap.stanford.edu/ogb/data/nodeproppred/papers100M-bin.zip, 56 GB) is downloaded; without a
network unpack it as <--data_dir>/ogbn_papers100M, which holds raw/ and split/.

The flags are those of OGB's example mlp.py: 30 epochs without dropout; but all training vertices
make one step an epoch here, so give more epochs. Only 1.4 % of the vertices have a label: a last
layer is computed for the training vertices alone, and scores are over labelled vertices. OGB asks
for three seeds here.
"""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from ogb_run import flags, main


def parser() -> ArgumentParser:
    own = {"dataset": "ogbn-papers100M", "metric": "accuracy", "dropout": 0.0, "epochs": 30}
    made = flags("Train on ogbn-papers100M", **own, model="sgc", runs=3)
    made.add_argument(
        "--symmetrize", action=BooleanOptionalAction, default=True, help="edges go both ways"
    )
    return made


if __name__ == "__main__":
    main(parser())

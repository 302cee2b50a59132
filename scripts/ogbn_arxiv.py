"""Trains models of the ogbn-arxiv leaderboard on the whole graph.

    python scripts/ogbn_arxiv.py                                   # OGB's GCN, ten seeds
    python scripts/ogbn_arxiv.py --model gcnii --num_layers 16
    torchrun --nproc-per-node 4 scripts/ogbn_arxiv.py --shards 4   # four shards: exact

docs/leaderboard.md lists the recipes. OGB's archive
(http://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip) is downloaded; without a network unpack
it as <--data_dir>/ogbn_arxiv, which holds raw/ and split/.

The flags are those of OGB's example gnn.py. As there, edges go both ways, every epoch is evaluated,
and the result is the test accuracy of the epoch with the best validation accuracy: mean and
standard deviation over seeds 0 to 9.
"""

from __future__ import annotations

from argparse import ArgumentParser

from ogb_run import flags, main


def parser() -> ArgumentParser:
    return flags("Train on ogbn-arxiv", dataset="ogbn-arxiv", metric="accuracy", symmetrize=True)


if __name__ == "__main__":
    main(parser())

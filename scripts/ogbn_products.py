"""Trains models of the ogbn-products leaderboard on the whole graph.

    python scripts/ogbn_products.py --use_sage                       # OGB's GraphSAGE, ten seeds
    torchrun --nproc-per-node 4 scripts/ogbn_products.py --shards 4  # four shards: exact

docs/leaderboard.md lists the recipes. OGB's archive
(http://snap.stanford.edu/ogb/data/nodeproppred/products.zip, 1.4 GB) is downloaded; without a
network unpack it as <--data_dir>/ogbn_products, which holds raw/ and split/.

The flags are those of OGB's example gnn.py: no norm, 300 epochs, each of them evaluated. The result
is the test accuracy of the epoch with the best validation accuracy, over seeds 0 to 9.
"""

from __future__ import annotations

from argparse import ArgumentParser

from ogb_run import flags, main


def parser() -> ArgumentParser:
    own = {"dataset": "ogbn-products", "metric": "accuracy", "symmetrize": False}
    return flags("Train on ogbn-products", **own, norm="none", epochs=300)


if __name__ == "__main__":
    main(parser())

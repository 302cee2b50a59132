"""Datasets by name, and the messages for unknown names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import quick_config

from gnnpipe import Trainer
from gnnpipe.data import load, source
from gnnpipe.data.clean import RawGraph
from gnnpipe.data.load import dataset_names, load_graph
from gnnpipe.data.source import SOURCES, Source
from tests.data.refuse import refused


def test_every_name_has_a_line_of_help():
    lines = dataset_names()
    assert all(len(line.split("  ", 1)) == 2 for line in lines)
    for word in ("debian", "karate", "synthetic:rmat", "ogbn-papers100M", "coauthor:CS|Physics"):
        assert any(line.startswith(word) for line in lines)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("debina", "unknown dataset; did you mean 'debian'"),
        ("zzz", "unknown dataset; known: debian, karate, synthetic, ogbn-arxiv"),
        ("ogbn-arxive", "did you mean 'ogbn-arxiv'"),
        ("planetoid", "did you mean 'planetoid:Cora'"),
        ("planetoid:Coro", "planetoid has no 'coro'; did you mean 'Cora'"),
        ("flickr:big", "flickr has no 'big'; use 'flickr'"),
        ("none.npz", "'none.npz': no such file"),
        ("./folder/none", "'folder/none': no such file"),
    ],
)
def test_unknown_names(dataset, message):
    refused(message, dataset)


def test_reading_does_not_import_pyg():
    code = (
        "import sys; from gnnpipe.data.load import load_graph; load_graph('karate');"
        "assert 'torch' not in sys.modules and 'torch_geometric' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_split_by_percentages_follows_the_seed():
    a, b, c = (load_graph("karate", split="50/25/25", seed=s) for s in (0, 0, 1))
    assert a.train_mask.tolist() == b.train_mask.tolist() != c.train_mask.tolist()
    assert [int(m.sum()) for m in (a.train_mask, a.val_mask, a.test_mask)] == [17, 9, 8]


def test_a_source_of_the_users_own_is_trained_on(monkeypatch):
    """One ``Source`` and one registration; --dataset takes its names."""
    monkeypatch.setattr(source, "SOURCES", [*SOURCES])
    monkeypatch.setattr(load, "SOURCES", source.SOURCES)

    def read(request):
        rng = np.random.default_rng(0)
        return RawGraph(
            name="mine",
            edge_index=rng.integers(0, 40, (2, 200)),
            x=rng.standard_normal((40, 3)),
            y=np.arange(40) % 3,
        )

    source.add_source(
        Source(
            handles=lambda name: name.startswith("mine://"),
            read=read,
            listing=(("mine://<table>", "a table of mine"),),
            names=("mine://all",),
        )
    )
    config = quick_config(dataset="mine://all", split="60/20/20", epochs=2)
    assert len(Trainer(config).fit().history) == 2
    assert any(line.startswith("mine://<table>") for line in dataset_names())
    refused("did you mean 'mine://all'", "mine:all")

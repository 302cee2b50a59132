"""Generated graphs are seeded, of the asked shape, and worth learning on."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from gnnpipe.data.load import load_graph
from gnnpipe.data.synthetic import parse_synthetic
from tests.data.refuse import refused


def homophily(g):
    source, target = g.edge_index
    return (g.y[source] == g.y[target]).mean()


@pytest.mark.parametrize(("degree", "wanted"), [(6, 0.9), (20, 0.5), (10, 0.0), (10, 1.0)])
def test_planted_has_the_asked_degree_and_homophily(degree, wanted):
    g = load_graph(f"synthetic:planted:n=4000,degree={degree},classes=5,homophily={wanted}")
    assert g.num_edges == 4000 * degree
    assert homophily(g) == pytest.approx(wanted, abs=0.02)
    assert (g.num_vertices, g.num_classes, g.num_features) == (4000, 5, 64)
    assert np.bincount(g.y).tolist() == [800] * 5
    assert g.train_mask.sum() == 2400


def test_rmat_has_the_asked_degree_and_hubs():
    g = load_graph("synthetic:rmat:n=5000,degree=12,features=16,classes=4")
    assert g.num_edges == 5000 * 12
    assert g.degrees.max() > 40 * 12
    assert np.bincount(g.y, minlength=4).min() > 300
    assert g.x.shape == (5000, 16)


@pytest.mark.parametrize("kind", ["planted", "rmat"])
def test_synthetic_is_seeded_and_undirected(kind):
    a, b, c = (load_graph(f"synthetic:{kind}:n=1000,seed={s}") for s in (1, 1, 2))
    for field in ("indptr", "indices", "x", "y", "train_mask"):
        assert np.array_equal(getattr(a, field), getattr(b, field))
    assert not np.array_equal(a.indices, c.indices)
    pairs = set(map(tuple, a.edge_index.T.tolist()))
    assert {(t, s) for s, t in pairs} == pairs


@pytest.mark.parametrize("kind", ["planted", "rmat"])
def test_neighbours_help_to_learn_the_labels(kind):
    g = load_graph(f"synthetic:{kind}:n=5000,features=32,classes=4")
    a = sp.csr_array((np.ones(g.num_edges), g.indices, g.indptr), shape=(5000, 5000))
    mean = a @ g.x / np.maximum(g.degrees, 1)[:, None]

    def accuracy(x):
        ones = np.hstack([x, np.ones((5000, 1))])
        w = np.linalg.lstsq(ones[g.train_mask], np.eye(4)[g.y[g.train_mask]], rcond=None)[0]
        return ((ones[g.test_mask] @ w).argmax(axis=1) == g.y[g.test_mask]).mean()

    alone, together = accuracy(g.x), accuracy(np.hstack([g.x, mean]))
    assert 0.4 < alone < 0.8
    assert together > alone + 0.1


def test_synthetic_numbers_may_be_written_as_powers():
    assert parse_synthetic("synthetic:planted:n=3e6, noise=2").n == 3_000_000


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("plant", "unknown generator 'plant'; did you mean 'planted'"),
        ("", "unknown generator ''"),
        ("rmat:homophily=1", "unknown key 'homophily'; known: classes"),
        ("planted:nodes=5", "unknown key 'nodes'"),
        ("planted:n", "'n' is not key=value; try n=1000"),
        ("planted:n=many", "n=many is not a whole number; try n=20000"),
        ("planted:n=10.5", "n=10.5 is not a whole number"),
        ("planted:degree=nan", "degree=nan is not a number; try degree=10"),
        ("planted:n=1", "n=1 is not in 2..2147483647; try n=20000"),
        ("planted:n=-5", "n=-5 is not in"),
        ("planted:classes=1", "classes=1 is not in 2..20000; try classes=8"),
        ("planted:n=4,degree=1,classes=5", "classes=5 is not in 2..4; try classes=4"),
        ("planted:features=0", "features=0 is not in 1.."),
        ("planted:homophily=1.5", "homophily=1.5 is not in 0..1; try homophily=0.8"),
        ("planted:noise=-1", "noise=-1.0 is not in 0..inf; try noise=1"),
        ("rmat:seed=-1", "seed=-1 is not in 0..9223372036854775808; try seed=0"),
        ("planted:n=100,degree=60", "does not fit into classes of 12 vertices; .* up to 7.8"),
        (
            "rmat:n=100,degree=60",
            "too dense for R-MAT on 100 vertices; try a degree up to 12 or a larger n",
        ),
    ],
)
def test_synthetic_refused(rest, message):
    text = refused(message, f"synthetic:{rest}")
    assert any(hint in text for hint in ("; try ", "; did you mean ", "; known: "))

"""What passes the gate is a lawful Graph; what does not is refused in one line that helps."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.data.clean import RawGraph, clean
from gnnpipe.data.split import split_masks
from gnnpipe.errors import InputError

N = 6
EDGES = np.array([[0, 1, 2, 3, 3, 1], [1, 0, 2, 4, 4, 5]])
TRAIN, VAL, TEST = (np.isin(np.arange(N), part) for part in ([0, 1], [2, 3], [4, 5]))


def make(edge_index=EDGES, **changes):
    options = {k: changes.pop(k) for k in ("split", "seed", "symmetrize") if k in changes}
    arrays = {
        "name": "toy",
        "edge_index": edge_index,
        "x": np.arange(2.0 * N).reshape(N, 2),
        "y": np.array([0, 1, 2, 0, 1, 2]),
        "masks": (TRAIN, VAL, TEST),
    }
    return clean(RawGraph(**(arrays | changes)), **options)


def test_edges_stay_as_given_and_rows_are_by_target():
    g = make()
    assert g.edge_index.tolist() == [[1, 0, 2, 3, 3, 1], [0, 1, 2, 4, 4, 5]]
    assert g.indptr.tolist() == [0, 1, 2, 3, 3, 5, 6]
    assert g.self_loops.tolist() == [2]
    assert g.parallel_edges.tolist() == [4]
    assert g.indices.dtype == np.int32
    assert g.indptr.dtype == g.y.dtype == np.int64
    assert g.x.dtype == np.float32
    assert (g.num_vertices, g.num_edges, g.num_features, g.num_classes) == (6, 6, 2, 3)


def test_symmetrize_adds_each_reverse_once():
    g = make(symmetrize=True)
    pairs = set(map(tuple, g.edge_index.T.tolist()))
    assert pairs == {(0, 1), (1, 0), (2, 2), (3, 4), (4, 3), (1, 5), (5, 1)}
    assert g.num_edges == 7


def test_edges_are_removed_on_request():
    simple = make().without_self_loops().without_parallel_edges()
    assert simple.edge_index.tolist() == [[1, 0, 3, 1], [0, 1, 4, 5]]
    assert simple.indptr.tolist() == [0, 1, 2, 2, 2, 3, 4]
    assert simple.without_self_loops() is simple


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=50),
            st.sampled_from(["i1", "i4", "i8", "u1", "u8"]),
            st.booleans(),
        )
    )
)
def test_edges_equal_a_list_of_pairs(case):
    n, pairs, dtype, symmetrize = case
    edges = np.array(pairs, dtype=dtype).reshape(-1, 2).T
    raw = RawGraph(name="h", edge_index=edges, x=np.ones((n, 1)), y=np.zeros(n, int))
    g = clean(raw, split="100/0/0", symmetrize=symmetrize)
    want = sorted((t, s) for s, t in pairs)
    if symmetrize:
        want = sorted({*want, *((s, t) for t, s in want)})
    loops = [i for i, (t, s) in enumerate(want) if t == s]
    assert g.self_loops.tolist() == loops
    again = [i for i in range(1, len(want)) if want[i] == want[i - 1]]
    assert g.parallel_edges.tolist() == again
    simple = g.without_self_loops().without_parallel_edges()
    assert simple.num_edges == len({(t, s) for t, s in want if t != s})
    got = [(t, int(s)) for t in range(n) for s in g.indices[g.indptr[t] : g.indptr[t + 1]]]
    assert got == want


def test_a_graph_without_edges_is_a_graph():
    assert make(np.empty((2, 0), int)).num_edges == 0


def test_features_of_any_real_type_and_sparse():
    assert make(x=np.ones((N, 3), np.float16)).x.dtype == np.float32
    assert make(x=np.arange(N)).x.shape == (N, 1)
    doubled = sp.coo_array(([1.0, 1.0, 3.0], ([0, 0, 2], [1, 1, 0])), shape=(N, 4))
    x = make(x=doubled).x
    assert isinstance(x, sp.csr_array)
    assert x.toarray()[0].tolist() == [0, 2, 0, 0]


def test_labels_as_column_as_floats_and_missing():
    y = np.array([[0.0], [1], [2], [np.nan], [1], [-1]])
    g = make(y=y, masks=([0, 1], [2], [4]))
    assert g.y.tolist() == [0, 1, 2, -1, 1, -1]
    assert make(num_classes=7).num_classes == 7
    ones = np.array([[0.0], [1], [1], [0], [1], [0]], np.float16)
    assert make(y=ones).y.tolist() == [0, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "mask",
    [
        [0, 1],
        np.array([1, 0], np.uint16),
        np.stack([TRAIN, VAL], axis=1),
        np.stack([TRAIN, VAL]),
        TRAIN.astype(np.uint8),
        TRAIN.astype(np.int64),
        TRAIN.astype(int).tolist(),
        np.stack([TRAIN, VAL]).astype(np.int32),
    ],
    ids=["indices", "small ints", "columns", "rows", "bytes", "int64", "list", "rows of ints"],
)
@pytest.mark.filterwarnings("ignore:graph 'toy'. the masks hold 2 splits")
def test_masks_in_other_forms(mask):
    assert make(masks=(mask, VAL, TEST)).train_mask.tolist() == TRAIN.tolist()


def test_as_many_indices_as_vertices_are_indices_still():
    everyone = np.random.default_rng(0).permutation(N)
    none = np.zeros(N, int)
    assert make(masks=(everyone, none, none)).train_mask.all()


def test_masks_that_overlap_are_told_once_and_kept():
    train, val, test = np.zeros((3, N), bool)
    train[:4], val[3:5], test[2:] = True, True, True
    with pytest.warns(UserWarning, match="in both") as told:
        g = make(masks=(train, val, test))
    assert [str(w.message) for w in told] == [
        "graph 'toy': 2 vertices are in both train_mask and test_mask (test accuracy would include "
        "vertices trained on); 1 vertex is in both train_mask and val_mask (validation accuracy "
        "would include vertices trained on); 2 vertices are in both val_mask and test_mask (the "
        "best epoch would be chosen on vertices of the test)"
    ]
    assert (g.train_mask == train).all()
    assert (g.test_mask == test).all()


def test_what_is_refused_is_not_commented_on():
    with pytest.raises(InputError, match="x is of type"):
        make(x=np.full((N, 1), "a"), masks=(TRAIN, TRAIN, TEST), is_own_data=True)


def test_split_masks_is_the_documented_cut():
    y = np.where(np.arange(103) % 4 == 0, -1, 0)
    train, val, test = split_masks(y >= 0, (0.6, 0.2, 0.2), seed=3)
    order = np.random.default_rng(3).permutation(np.flatnonzero(y >= 0))
    cuts = round(0.6 * len(order)), round(0.8 * len(order))
    assert sorted(order[: cuts[0]]) == np.flatnonzero(train).tolist()
    assert sorted(order[cuts[0] : cuts[1]]) == np.flatnonzero(val).tolist()
    assert sorted(order[cuts[1] :]) == np.flatnonzero(test).tolist()
    g = make(masks=None, split="50/25/25", seed=1)
    assert [int(m.sum()) for m in (g.train_mask, g.val_mask, g.test_mask)] == [3, 1, 2]


NAN_X = np.ones((N, 2))
NAN_X[3, 1] = np.nan
LABELLED_TO_4 = np.array([0, 1, 2, 0, 1, -1])

REFUSED = {
    "nan": ({"x": NAN_X}, r"x\[3, 1\] = nan; try: finite features"),
    "inf": ({"x": np.where(np.isnan(NAN_X), -np.inf, 1)}, r"x\[3, 1\] = -inf"),
    "beyond float32": ({"x": np.where(np.isnan(NAN_X), 1e300, 1)}, r"x\[3, 1\] = inf"),
    "sparse nan": ({"x": sp.csr_array(NAN_X - 1)}, r"x\[3, 1\] = nan"),
    "x missing": ({"x": None}, "no features x; try: the one-hot degrees"),
    "x rows": ({"x": np.ones((5, 2))}, r"x has shape \[5, 2\] for 6 vertices"),
    "x columns": ({"x": np.ones((N, 0))}, r"x has shape \[6, 0\]"),
    "x complex": ({"x": sp.csr_array(np.ones((N, 1), complex))}, "x is of type complex128"),
    "x text": ({"x": np.full((N, 1), "a")}, "x is of type <U1"),
    "edge high": (
        {"edge_index": [[0, 1], [1, 6]]},
        r"edge_index\[:, 1\] = \[1, 6\] names vertex 6",
    ),
    "edge negative": ({"edge_index": [[0, -2], [1, 1]]}, "names vertex -2, but the 6 vertices"),
    "edge uint64": ({"edge_index": np.array([[0], [2**64 - 1]], "u8")}, "names vertex 1844"),
    "edge float": ({"edge_index": np.zeros((2, 1))}, "edge_index is of type float64"),
    "edge shape": ({"edge_index": EDGES.T}, r"edge_index has shape \[6, 2\]"),
    "label high": (
        {"num_classes": 2},
        r"y\[2\] = 2 is out of range; try: classes 0..1 .num_classes is 2",
    ),
    "label an id": ({"y": [0, 1, 10**9, 0, 0, 0]}, r"y\[2\] = 1000000000 is out of range"),
    "label negative": ({"y": [0, 1, -7, 0, 0, 0]}, r"y\[2\] = -7 is out of range"),
    "label broken": ({"y": [0, 1, 0.5, 0, 0, 0]}, r"y\[2\] = 0.5; try: whole numbers"),
    "label infinite": ({"y": [0, 1, np.inf, 0, 0, 0]}, r"y\[2\] = inf"),
    "label huge": ({"y": [0, 1, 1e30, 0, 0, 0]}, r"y\[2\] = 1e\+30; try: whole numbers"),
    "label column": ({"y": [[0], [0.5], [1], [0], [0], [0]]}, r"y\[1\] = 0.5"),
    "label text": ({"y": list("abcdef")}, "y is of type <U1"),
    "labels cube": ({"y": np.ones((N, 3, 2))}, r"y has shape \[6, 3, 2\].*T labels of 0 and 1"),
    "labels several": ({"y": np.full((N, 3), 2)}, r"y\[0, 0\] = 2 is out of range"),
    "labels several half": ({"y": np.full((N, 2), 0.5)}, r"y\[0, 0\] = 0.5; try: 0, 1"),
    "labels several count": ({"y": np.ones((N, 3)), "num_classes": 4}, "y has 3 labels.*4"),
    "labels short": ({"num_vertices": 7}, "y has 6 labels for 7 vertices"),
    "rows too few": ({"num_vertices": 5, "x": np.eye(5)}, "y has 6 labels, and x has 5 rows"),
    "sparse rows too few": (
        {"num_vertices": 5, "x": sp.eye(5).tocsr()},
        "y has 6 labels, and x has 5 rows",
    ),
    "no label": ({"y": [-1] * N}, r"no vertex is labelled \(all are -1\)"),
    "no vertex": ({"y": [], "x": np.ones((0, 1))}, "no vertices"),
    "too many": ({"num_vertices": 2**40}, "1099511627776 vertices; try: at most"),
    "no split": ({"masks": None}, "no split.*try: --split 60/20/20"),
    "no test mask": ({"masks": (TRAIN, VAL, None)}, "no test_mask; try: --split"),
    "train empty": ({"masks": (TRAIN & VAL, VAL, TEST)}, "train_mask: no vertex to train on"),
    "mask short": ({"masks": (TRAIN, VAL[:5], TEST)}, "val_mask has 5 entries for 6 vertices"),
    "mask index": ({"masks": (TRAIN, VAL, [6])}, r"test_mask\[0\] = 6 is out of range"),
    "mask twice": (
        {"masks": (TRAIN, [2, 3, 2], TEST)},
        "val_mask, taken as indices, names vertex 2 2 times; try: each index once .* or bool",
    ),
    "mask of codes": ({"masks": ([0, 1, 2, 0, 1, 0], VAL, TEST)}, "names vertex 0 3 times"),
    "mask ints short": ({"masks": ([0, 1, 0, 1, 0], VAL, TEST)}, "train_mask, taken as indices"),
    "mask wide": ({"masks": (np.array([[0, 1]] * 5), VAL, TEST)}, r"train_mask has shape \[5, 2\]"),
    "mask of no split": ({"masks": (np.ones((N, 0), bool), VAL, TEST)}, "train_mask has shape"),
    "mask float": ({"masks": (TRAIN * 1.0, VAL, TEST)}, "train_mask is of type float64"),
    "mask depth": ({"masks": (np.ones((N, 2, 2), bool), VAL, TEST)}, "train_mask has shape"),
    "unlabelled": ({"y": LABELLED_TO_4}, "test_mask: 1 of its vertices have no label, .* is 5"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        make(**changes)
    text = str(caught.value)
    assert text.startswith("dataset 'toy': ")
    assert "; try: " in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([0, 1, 2, 0, 1, 2], "3 classes"),
        ([1, 2, 3, 1, 2, 3], "4 classes (no vertex is of 0)"),
        ([5, -1, 5, 5, 5, 5], "6 classes (no vertex is of 0, 1, 2, ...)"),
    ],
)
def test_classes_that_no_vertex_is_of_are_told(labels, text):
    masks = tuple(np.asarray(part) & (np.array(labels) >= 0) for part in (TRAIN, VAL, TEST))
    assert make(y=np.array(labels), masks=masks).label_text == text

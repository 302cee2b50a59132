"""Metrics against their definitions, counted one by one."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from helpers import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.errors import InputError
from gnnpipe.tasks.loss import choose_metric, loss_sum, num_targets
from gnnpipe.tasks.scoring import accuracy, f1, margin, roc_auc, tally


def f1_of(truth, answer):
    """F1 of one class by its definition; 0 where it is neither there nor answered."""
    both = sum(t and a for t, a in zip(truth, answer, strict=True))
    total = sum(truth) + sum(answer)
    return 2 * both / total if total else 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(2, 6))
def test_one_class_of_several(seed, n, classes):
    rng = np.random.default_rng(seed)
    logits, y = rng.standard_normal((n, classes)), rng.integers(0, classes, n)
    counts = tally(torch.tensor(logits), torch.tensor(y)).numpy()
    answer = logits.argmax(1)
    assert accuracy(counts, is_multi_label=False) == pytest.approx((answer == y).mean())
    assert f1(counts, is_multi_label=False, average="micro") == pytest.approx((answer == y).mean())
    there = sorted(set(y) | set(answer))
    macro = np.mean([f1_of(y == c, answer == c) for c in there])
    assert f1(counts, is_multi_label=False, average="macro") == pytest.approx(macro)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(2, 5))
def test_several_labels_with_some_unknown(seed, n, labels):
    rng = np.random.default_rng(seed)
    logits, y = rng.standard_normal((n, labels)), rng.integers(-1, 2, (n, labels))
    counts = tally(torch.tensor(logits), torch.tensor(y)).numpy()
    columns = [(y[:, t][y[:, t] >= 0], logits[:, t][y[:, t] >= 0] > 0) for t in range(labels)]
    known = [(t, a) for t, a in columns if len(t)]
    if not known:
        assert math.isnan(accuracy(counts, is_multi_label=True))
        assert math.isnan(f1(counts, is_multi_label=True, average="micro"))
        return
    right = np.mean([(t == a).mean() for t, a in known])
    assert accuracy(counts, is_multi_label=True) == pytest.approx(right)
    macro = np.mean([f1_of(t == 1, a) for t, a in columns])
    assert f1(counts, is_multi_label=True, average="macro") == pytest.approx(macro)
    flat = [np.concatenate(part) for part in zip(*columns, strict=True)]
    assert f1(counts, is_multi_label=True, average="micro") == pytest.approx(
        f1_of(flat[0] == 1, flat[1])
    )


def area_of(scores, truth):
    """Share of the pairs of a positive and a negative that are in order, ties half."""
    pairs = list(product(scores[truth == 1], scores[truth == 0]))
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 25), st.integers(1, 4))
def test_roc_auc_is_the_share_of_pairs_in_order(seed, n, labels):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, (n, labels)).astype(np.float32)  # with ties
    y = rng.integers(-1, 2, (n, labels)).astype(np.int8)
    areas = [
        area_of(scores[:, t], y[:, t]) for t in range(labels) if {0, 1} <= set(y[:, t].tolist())
    ]
    found = roc_auc(scores, y)
    assert found == pytest.approx(np.mean(areas)) if areas else math.isnan(found)


def test_two_classes_are_ranked_by_the_second():
    logits = torch.tensor([[0.0, 3.0], [5.0, 6.0], [1.0, -1.0], [0.0, 2.0]])
    scores, labels = margin(logits, torch.tensor([1, 0, 0, 1]))
    assert scores.ravel().tolist() == [3, 1, -2, 2]
    assert roc_auc(scores, labels) == 1.0


def labelled(y):
    from dataclasses import replace

    graph = small_graph()
    y = np.resize(np.asarray(y), (graph.num_vertices, *np.shape(y)[1:]))
    classes = y.shape[1] if y.ndim == 2 else int(y.max()) + 1
    return replace(graph, y=y.astype(np.int8 if y.ndim == 2 else np.int64), num_classes=classes)


def test_the_metric_follows_the_labels():
    assert choose_metric(labelled([0, 1, 2]), "auto") == "accuracy"
    assert choose_metric(labelled([0, 1]), "auto") == "accuracy"
    assert choose_metric(labelled([0, 1, 0, 0, 0]), "auto") == "rocauc"
    assert choose_metric(labelled([1, 1, 1, 1, 0]), "auto") == "rocauc"
    assert choose_metric(labelled([1, 1, 1, 1, 0]), "accuracy") == "accuracy"
    assert choose_metric(labelled([[0, 1], [1, 1]]), "auto") == "f1-micro"
    assert choose_metric(labelled([[0, 1], [1, 1]]), "rocauc") == "rocauc"
    with pytest.raises(InputError, match=r"--metric rocauc: needs two classes.*has 3 .*f1-macro"):
        choose_metric(labelled([0, 1, 2]), "rocauc")


def test_unknown_labels_take_no_part_in_the_loss():
    logits = torch.randn(4, 2, dtype=torch.float64)
    y = torch.tensor([[1, -1], [0, 1], [-1, -1], [1, 0]], dtype=torch.int8)
    p = logits.sigmoid()
    terms = [-p[0, 0].log(), -(1 - p[1, 0]).log(), -p[1, 1].log(), -p[3, 0].log()]
    terms.append(-(1 - p[3, 1]).log())
    assert float(loss_sum(logits, y)) == pytest.approx(float(sum(terms)))
    graph = labelled([[1, -1], [0, 1]])
    assert num_targets(graph) == int((graph.y[graph.train_mask] >= 0).sum())

"""Metrics against their definitions, counted one by one."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from helpers import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.errors import InputError
from gnnpipe.tasks.loss import choose_metric, loss_sum, targets_by_chunk
from gnnpipe.tasks.scoring import accuracy, f1, margin, ranking_score, tally


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
    found = ranking_score(scores, y, "rocauc")
    assert found == pytest.approx(np.mean(areas)) if areas else math.isnan(found)


def average_precision_of(scores, truth):
    """Precision times the gain of recall, over all thresholds from the highest score down."""
    found, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = scores >= threshold
        recall = (truth[chosen] == 1).sum() / (truth == 1).sum()
        found += (recall - recall_before) * (truth[chosen] == 1).mean()
        recall_before = recall
    return found


def reciprocal_rank_of(scores, truth):
    """Each positive in a list with all negatives, before ties and after ties."""
    found = []
    for score in scores[truth == 1]:
        optimistic = 1 + sum(other > score for other in scores[truth == 0])
        pessimistic = 1 + sum(other >= score for other in scores[truth == 0])
        found.append(1 / ((optimistic + pessimistic) / 2))
    return np.mean(found)


def hits_of(scores, truth, k):
    negatives = sorted(scores[truth == 0], reverse=True)
    if len(negatives) < k:
        return 1.0
    return np.mean([score > negatives[k - 1] for score in scores[truth == 1]])


RANKED = {
    "ap": average_precision_of,
    "mrr": reciprocal_rank_of,
    **{f"hits@{k}": partial(hits_of, k=k) for k in (10, 20, 50, 100)},
}


@pytest.mark.parametrize("metric", RANKED)
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 250), st.integers(1, 3), st.integers(1, 200))
def test_ranking_metrics_follow_their_definitions(metric, seed, n, labels, spread):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-spread, spread + 1, (n, labels)).astype(np.float32)  # with ties
    y = rng.integers(-1, 2, (n, labels)).astype(np.int8)
    truth = [
        RANKED[metric](scores[y[:, t] >= 0, t], y[y[:, t] >= 0, t])
        for t in range(labels)
        if {0, 1} <= set(y[:, t].tolist())
    ]
    found = ranking_score(scores, y, metric)
    assert found == pytest.approx(np.mean(truth)) if truth else math.isnan(found)


def test_ranking_metrics_on_a_list_by_hand():
    """Negatives 4, 2, 2, 1; positives 5, 2, 0."""
    scores, y = np.array([[4.0, 2, 2, 1, 5, 2, 0]]).T, np.array([[0, 0, 0, 0, 1, 1, 1]]).T
    # Ranks 1, (2 + 4) / 2 = 3 and 5.
    assert ranking_score(scores, y, "mrr") == pytest.approx((1 + 1 / 3 + 1 / 5) / 3)
    # One of 1, two of the five from 2 up, and three of seven.
    assert ranking_score(scores, y, "ap") == pytest.approx((1 + 2 / 5 + 3 / 7) / 3)
    many = np.concatenate([scores, np.full((6, 1), -1.0)])
    assert ranking_score(many, np.concatenate([y, np.zeros((6, 1), int)]), "hits@10") == 1.0
    many[-6:] = 0
    found = ranking_score(many, np.concatenate([y, np.zeros((6, 1), int)]), "hits@10")
    assert found == pytest.approx(2 / 3)  # a tie with the tenth negative is no hit
    assert ranking_score(scores, y, "hits@10") == 1.0  # fewer than ten negatives


def test_two_classes_are_ranked_by_the_second():
    logits = torch.tensor([[0.0, 3.0], [5.0, 6.0], [1.0, -1.0], [0.0, 2.0]])
    scores, labels = margin(logits, torch.tensor([1, 0, 0, 1]))
    assert scores.ravel().tolist() == [3, 1, -2, 2]
    assert ranking_score(scores, labels, "rocauc") == 1.0


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
    for metric in ("rocauc", "ap"):
        with pytest.raises(InputError, match=f"--metric {metric}: needs two.*has 3 .*f1-macro"):
            choose_metric(labelled([0, 1, 2]), metric)
    assert choose_metric(labelled([0, 1]), "ap") == "ap"
    for metric in ("mrr", "hits@50"):
        with pytest.raises(InputError, match=f"--metric {metric}: ranks pairs.*try --task links"):
            choose_metric(labelled([0, 1]), metric)


def test_unknown_labels_take_no_part_in_the_loss():
    logits = torch.randn(4, 2, dtype=torch.float64)
    y = torch.tensor([[1, -1], [0, 1], [-1, -1], [1, 0]], dtype=torch.int8)
    p = logits.sigmoid()
    terms = [-p[0, 0].log(), -(1 - p[1, 0]).log(), -p[1, 1].log(), -p[3, 0].log()]
    terms.append(-(1 - p[3, 1]).log())
    assert float(loss_sum(logits, y)) == pytest.approx(float(sum(terms)))
    graph = labelled([[1, -1], [0, 1]])
    chunk_of_row = np.repeat(np.arange(2, dtype=np.int32), [1, len(graph.y) - 1])
    known = (graph.y >= 0).sum(1) * graph.train_mask
    assert targets_by_chunk(graph, chunk_of_row) == [known[0], known[1:].sum()]

"""Computes metrics from logits: accuracy, F1, ranking metrics and regression errors.

Accuracy and F1 follow from four counts per class or label, which ranks add up. ROC AUC, average
precision, MRR and Hits@k rank all vertices or pairs, so rank 0 gathers the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Counts = npt.NDArray[np.float64]

Scored = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Accuracy and the run's metric on each part of the split; NaN for an empty part."""

    train_acc: float
    val_acc: float
    test_acc: float
    train_metric: float
    val_metric: float
    test_metric: float


def tally(logits: Tensor, y: Tensor) -> Tensor:
    """Counts true positives, false positives, false negatives and labelled rows, [C, 4] float64.

    From logits [R, C] and classes y [R] (the largest logit is the prediction) or labels y [R, C]
    (a logit above 0 predicts 1).
    """
    if y.dim() == 1:
        columns = torch.arange(logits.shape[1], device=y.device)
        known = (y >= 0)[:, None].expand_as(logits)
        truth, predicted = y[:, None] == columns, logits.argmax(1)[:, None] == columns
    else:
        known, truth, predicted = y >= 0, y == 1, logits > 0
    parts = [truth & predicted, known & ~truth & predicted, truth & ~predicted, known]
    return torch.stack([part.sum(0, dtype=torch.float64) for part in parts], dim=1)


def accuracy(counts: Counts, is_multi_label: bool) -> float:
    """Returns the share of correct predictions; for several labels the mean over labels, as OGB."""
    hits, false_positives, false_negatives, known = counts.T
    if not is_multi_label:
        return float(hits.sum() / known[0]) if known[0] else math.nan
    each = 1 - (false_positives + false_negatives)[known > 0] / known[known > 0]
    return float(np.mean(each)) if len(each) else math.nan


def f1(counts: Counts, is_multi_label: bool, average: str) -> float:
    """Returns F1 over all predictions ('micro') or the mean over classes or labels ('macro').

    As scikit-learn's ``f1_score``: classes that are neither present nor predicted are left out;
    labels that are neither count as 0.
    """
    hits, false_positives, false_negatives, known = counts.T
    if not known.any():
        return math.nan
    if average == "micro":
        hits = hits.sum(keepdims=True)
        false_positives, false_negatives = false_positives.sum(), false_negatives.sum()
    total = 2 * hits + false_positives + false_negatives
    each = np.divide(2 * hits, total, out=np.zeros_like(total), where=total > 0)
    return float(np.mean(each if is_multi_label or average == "micro" else each[total > 0]))


def target_sums(y: Tensor) -> Tensor:
    """Returns number and sum of the known targets of y [R, T], [T, 2] float64."""
    known = ~y.isnan()
    return torch.stack([known.sum(0).double(), y.double().nan_to_num(0.0).sum(0)], dim=1)


def error_sums(found: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    """Returns sums over the known targets, [T, 5] float64, of predictions and targets [R, T].

    The sums are: number of targets, absolute error, squared error, squared distance of y from
    ``mean`` [T], and y squared. The distance is summed, for the difference of two large sums of
    squares would cancel for targets far from zero.
    """
    known = ~y.isnan()
    truth = torch.where(known, y, 0).double()
    error = torch.where(known, found.double() - truth, 0)
    distance = torch.where(known, truth - mean.to(truth.device), 0)
    parts = [known.double(), error.abs(), error.square(), distance.square(), truth.square()]
    return torch.stack([part.sum(0) for part in parts], dim=1)


def regression_score(sums: Counts, metric: str) -> float:
    """Computes 'mae', 'rmse' or 'r2' from ``error_sums`` [T, 5]; NaN if no target is known.

    R2 is the mean over the T targets, as scikit-learn's ``r2_score``. A constant target counts as 1
    if every prediction is exact, else as 0.
    """
    count, absolute, squared, spread, square = sums.T
    if not count.any():
        return math.nan
    if metric == "mae":
        return float(absolute.sum() / count.sum())
    if metric == "rmse":
        return float(math.sqrt(squared.sum() / count.sum()))
    # A constant target differs from its mean by rounding only.
    varies = spread > 1e-24 * square
    scores = np.where(varies, 1 - squared / np.where(varies, spread, 1), squared == 0)
    return float(np.mean(scores[count > 0]))


def margin(logits: Tensor, y: Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[np.int8]]:
    """Returns the scores that are ranked and their labels, [R, T]; T = 1 for two classes."""
    logits = logits.detach().cpu()
    if y.dim() == 1:
        logits, y = logits[:, 1:] - logits[:, :1], y[:, None]
    return logits.numpy(), y.cpu().numpy().astype(np.int8)


def is_ranking(metric: str) -> bool:
    """Whether a metric depends on the order of all scores, and not on counts that are added up."""
    return metric in ("rocauc", "ap") or ranks_links(metric)


def ranks_links(metric: str) -> bool:
    """Whether a metric compares positive pairs with negative ones, and so is for links alone."""
    return metric == "mrr" or hits_k(metric) > 0


def hits_k(metric: str) -> int:
    """Returns k of the metric Hits@k; 0 for others."""
    name, _, k = metric.partition("@")
    return int(k) if name == "hits" else 0


def ranking_score(scores: npt.NDArray[Any], labels: npt.NDArray[np.int8], metric: str) -> float:
    """Computes a ranking metric from scores and labels [R, T], as the mean over the labels.

    As in OGB's evaluator, only labels with both a known positive and a known negative count; NaN if
    there are none.
    """
    found = []
    for column, truth in zip(scores.T, labels.T, strict=True):
        positive, negative = (column[truth == one].astype(np.float64) for one in (1, 0))
        if len(positive) and len(negative):
            found.append(_score_of(metric, positive, negative))
    return float(np.mean(found)) if found else math.nan


def _score_of(metric: str, positive: Scored, negative: Scored) -> float:
    """Computes a metric from the scores of the positives [P] and of the negatives [Q]."""
    if metric == "rocauc":
        return _roc_auc(positive, negative)
    if metric == "ap":
        return _average_precision(positive, negative)
    if metric == "mrr":
        return _mean_reciprocal_rank(positive, negative)
    return _hits(positive, negative, hits_k(metric))


def _roc_auc(positive: Scored, negative: Scored) -> float:
    """Returns the share of (positive, negative) that are in order; ties count half."""
    # Imported here: takes a third of a second, and few runs need it.
    from scipy.stats import rankdata

    count, both = len(positive), np.concatenate([positive, negative])
    area = float(rankdata(both)[:count].sum()) - count * (count + 1) / 2
    return area / (count * len(negative))


def _average_precision(positive: Scored, negative: Scored) -> float:
    """Returns the mean over the positives of the precision among the scores at least as high.

    As scikit-learn's ``average_precision_score``.
    """
    positive, negative = np.sort(positive), np.sort(negative)
    hits = len(positive) - np.searchsorted(positive, positive, "left")
    false_hits = len(negative) - np.searchsorted(negative, positive, "left")
    return float(np.mean(hits / (hits + false_hits)))


def _mean_reciprocal_rank(positive: Scored, negative: Scored) -> float:
    """Returns the mean of 1 / rank of each positive among all negatives.

    The rank of a tie is the mean of the optimistic and the pessimistic rank, as in OGB's evaluator.
    """
    negative = np.sort(negative)
    higher = len(negative) - np.searchsorted(negative, positive, "right")
    as_high = len(negative) - np.searchsorted(negative, positive, "left")
    return float(np.mean(1 / (1 + (higher + as_high) / 2)))


def _hits(positive: Scored, negative: Scored, k: int) -> float:
    """Returns the share of positives above the k-th highest negative, as OGB's evaluator.

    1 if there are fewer than k negatives.
    """
    if len(negative) < k:
        return 1.0
    return float(np.mean(positive > np.partition(negative, -k)[-k]))

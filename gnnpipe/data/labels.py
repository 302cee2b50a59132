"""Checks labels in all their forms: a class for each vertex, several labels, or numbers.

A float, a column or a boolean may all mean a class.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gnnpipe.data.arrays import float32_array
from gnnpipe.data.messages import fail

Labels: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int8] | npt.NDArray[np.float32]

TASKS = ("classification", "regression")
"""The meaning of ``y``; a number may be either, so it is given by the user and never guessed."""

MAX_CLASSES = 10**6
"""Each class is a row of the last weight matrix; a larger number is taken for a mistake."""


def clean_num_classes(given: Any, name: str) -> int | None:
    """A number of classes as a user gave it; ``InputError`` unless it is one whole number.

    ``clean_labels`` checks that the labels stay below it.
    """
    if given is None:
        return None
    try:
        number = np.asarray(given)
    except ValueError:  # lists of different lengths
        number = np.asarray(repr(given))
    count = number.item() if number.size == 1 and number.dtype.kind in "iuf" else math.nan
    if not (1 <= count <= MAX_CLASSES and count == int(count)):
        shown = " ".join(repr(number.tolist()).split())[:40]
        fail(
            name,
            f"num_classes = {shown} is not one whole number in 1..{MAX_CLASSES}",
            "the largest label + 1, or leave it out",
        )
    return int(count)


def clean_targets(y: Any, name: str) -> npt.NDArray[np.float32]:
    """Targets of a regression as ``Graph`` stores them: [N, T] float32, NaN = no target.

    Raises ``InputError`` naming the entry.
    """
    raw = np.asarray(y)
    if raw.ndim == 1:
        raw = raw[:, None]
    if raw.ndim != 2 or 0 in raw.shape[1:]:
        fail(name, f"y has shape {list(raw.shape)}", "one number for each vertex, [N], or [N, T]")
    targets = float32_array(raw, name, "y")
    _fail_if(targets, np.isinf(targets), name, "", "finite numbers within float32, NaN = none")
    return targets


def is_known(labels: Labels) -> npt.NDArray[np.bool_]:
    """Whether there is a label, [N] or [N, T]."""
    return ~np.isnan(labels) if labels.dtype.kind == "f" else np.asarray(labels >= 0)


def clean_labels(y: Any, name: str, num_classes: int | None) -> Labels:
    """Labels as ``Graph`` stores them: classes [N] int64, or [N, T] int8 of 0 and 1; -1 = no label.

    NaN means no label, as in OGB; [N, 1] is one class. Raises ``InputError`` naming the entry.
    """
    labels = np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim not in (1, 2) or 0 in labels.shape[1:]:
        hint = "one class for each vertex, [N], or T labels of 0 and 1, [N, T]"
        fail(name, f"y has shape {list(labels.shape)}", hint)
    several = labels.ndim == 2
    wanted = "0, 1, or -1 = none" if several else "whole numbers: classes 0..C-1, -1 = none"
    if not several:
        wanted += "; or task='regression'"
    if labels.dtype.kind == "f":
        given = np.where(np.isnan(labels), -1, labels).astype(np.float64)
        # Beyond 2^53 a float is no exact integer, and int64 cannot hold all of them.
        _fail_if(labels, ~(np.abs(given) < 2.0**53) | (given != np.floor(given)), name, "", wanted)
        labels = given
    elif labels.dtype.kind not in "iub":
        fail(name, f"y is of type {labels.dtype}", wanted)
    labels = labels.astype(np.int64)
    if several:
        _fail_if(labels, (labels < -1) | (labels > 1), name, " is out of range", wanted)
        if num_classes not in (None, labels.shape[1]):
            fail(name, f"y has {labels.shape[1]} labels", f"as many as num_classes, {num_classes}")
        return labels.astype(np.int8)
    # Without a stated number of classes there are at most as many as vertices: a larger label is
    # some identifier, and a weight matrix of its size would take all memory.
    limit = max(len(labels), 2) if num_classes is None else num_classes
    hint = " numbered without gaps" if num_classes is None else f" (num_classes is {limit})"
    bad = (labels < -1) | (labels >= limit)
    _fail_if(labels, bad, name, " is out of range", f"classes 0..{limit - 1}{hint}, -1 = none")
    return labels


def one_hot_warning(labels: Labels) -> str:
    """Text if labels [N, T] look like one-hot classes, one 1 in every known row; else ''."""
    if labels.ndim == 1 or labels.dtype.kind == "f":
        return ""
    known = labels[(labels >= 0).any(axis=1)]
    if not ((known >= 0).all() and (known.sum(axis=1, dtype=np.int64) == 1).all()):
        return ""
    return (
        f"y [{len(labels)}, {labels.shape[1]}] has a single 1 in every row and is trained as "
        "several labels at once; if it means one class for each vertex, give y.argmax(1)"
    )


def _fail_if(labels: Any, bad: npt.NDArray[np.bool_], name: str, wrong: str, hint: str) -> None:
    """Raise ``InputError`` about the first bad entry, if there is one."""
    at = np.argwhere(bad)
    if len(at):
        place = tuple(at[0].tolist())
        fail(name, f"y[{', '.join(map(str, place))}] = {labels[place]}{wrong}", hint)

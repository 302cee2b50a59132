"""Data source of generated graphs of any size: planted partition and R-MAT.

Scaling is measured on graphs of any size, and a test of learning needs labels that a GNN can learn
but a model of single vertices cannot. Both generators are undirected, use whole arrays throughout
(30 million edges take some ten seconds), and depend on their parameters only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.data.clean import RawGraph
from gnnpipe.data.source import DataRequest, Source
from gnnpipe.errors import InputError
from gnnpipe.machine import memory_bytes
from gnnpipe.registry import nearest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Draw = Callable[[np.random.Generator, int], tuple[Ints, Ints]]

BLOCK = 1 << 22
"""Edges drawn at once, which bounds the temporary arrays."""


@dataclass(frozen=True)
class Planted:
    """Planted partition: classes of equal size; a vertex prefers neighbours of its own class.

    ``homophily`` is the share of edges inside a class, ``noise`` the standard deviation of the
    features around the (unit) centre of their class.
    """

    n: int = 20_000
    degree: float = 10.0
    classes: int = 8
    features: int = 64
    homophily: float = 0.8
    noise: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Rmat:
    """R-MAT (a, b, c = .57, .19, .19): heavy-tailed degrees, many vertices without any edge.

    The label is the largest of C random projections of a vertex's own features plus twice the mean
    over its neighbours, so that neither alone suffices.
    """

    n: int = 20_000
    degree: float = 10.0
    classes: int = 8
    features: int = 64
    seed: int = 0


def parse_synthetic(dataset: str) -> Planted | Rmat:
    """The parameters in 'synthetic:planted:n=1000,degree=8' or 'synthetic:rmat:...'.

    ``InputError`` naming a key and value that are not possible.

    >>> parse_synthetic("synthetic:rmat:n=1e3")
    Rmat(n=1000, degree=10.0, classes=8, features=64, seed=0)
    """
    try:
        return _parsed(dataset)
    except ValueError as error:
        raise InputError(f"--dataset {dataset!r}: {error}") from None


def _parsed(dataset: str) -> Planted | Rmat:
    kinds: dict[str, type[Planted] | type[Rmat]] = {"planted": Planted, "rmat": Rmat}
    _, _, rest = dataset.partition(":")
    kind, _, text = rest.partition(":")
    if kind not in kinds:
        raise ValueError(f"unknown generator {kind!r}; {nearest(kind, kinds)}")
    defaults: dict[str, Any] = {f.name: f.default for f in fields(kinds[kind])}
    values: dict[str, int | float] = {}
    for item in text.split(",") if text else []:
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"{item!r} is not key=value; try n=1000,degree=8")
        if key not in defaults:
            raise ValueError(f"unknown key {key!r}; {nearest(key, defaults)}")
        if key in values:
            raise ValueError(f"{key} is given twice; leave one out")
        values[key] = _number(key, value.strip(), defaults[key])
    spec = kinds[kind](**values)  # type: ignore[arg-type]
    _check(spec, defaults)
    return spec


def _number(key: str, text: str, default: float) -> int | float:
    is_whole = isinstance(default, int)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (is_whole and value != int(value)):
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f"{key}={' '.join(text.split())} is not {kind}; try {key}={default:g}")
    return int(value) if is_whole else value


def _check(spec: Planted | Rmat, defaults: dict[str, Any]) -> None:
    """``ValueError`` unless a graph with these parameters can be made here."""
    bounds: dict[str, tuple[float, float]] = {
        "n": (2, 2**31 - 1),
        "degree": (0, spec.n - 1),
        "classes": (2, spec.n),
        "features": (1, 1 << 20),
        "homophily": (0, 1),
        "noise": (0, math.inf),
        "seed": (0, 2**63),
    }
    for key, default in defaults.items():
        low, high = bounds[key]
        if not low <= getattr(spec, key) <= high:
            raise ValueError(
                f"{key}={getattr(spec, key)} is not in {low}..{high}; try "
                f"{key}={min(max(low, default), high):g}"
            )
    needed = spec.n * (4 * spec.features + 16 * spec.degree)
    if needed > memory_bytes():
        raise ValueError(
            f"its features and edges take {needed / 2**30:,.0f} GiB, and this machine has "
            f"{memory_bytes() / 2**30:,.0f}; try a smaller n"
        )
    if isinstance(spec, Planted) and spec.degree * spec.homophily > spec.n / spec.classes / 2:
        raise ValueError(
            f"degree={spec.degree:g} with homophily={spec.homophily:g} does not fit into classes "
            f"of {spec.n // spec.classes} vertices; try fewer classes or a degree up to "
            f"{spec.n / spec.classes / 2 / spec.homophily:.1f}"
        )
    if isinstance(spec, Rmat) and spec.degree > spec.n / 8:
        raise ValueError(
            f"degree={spec.degree:g} is too dense for R-MAT on {spec.n} vertices; try a degree up "
            f"to {spec.n // 8} or a larger n"
        )


def _make(request: DataRequest) -> RawGraph:
    """The graph that ``request.dataset`` describes; its own split is 60/20/20 by its own seed."""
    spec = parse_synthetic(request.dataset)
    rng = np.random.default_rng(spec.seed)
    edges, x, y = _planted(spec, rng) if isinstance(spec, Planted) else _rmat(spec, rng)
    return RawGraph(
        name=request.dataset,
        edge_index=edges,
        x=x,
        y=y,
        split_seed=spec.seed,
        num_classes=spec.classes,
        has_one_direction=True,
    )


def _pairs(n: int, degree: float, rng: np.random.Generator, draw: Draw) -> Ints:
    """Distinct undirected pairs [2, P], P = n * degree / 2; ``draw`` returns random ends."""
    want = round(n * degree / 2)
    keys = np.empty(0, dtype=np.int64)
    yield_rate = 1.0
    # A draw contains loops and pairs already present, which further draws replace. The bound is for
    # R-MAT, whose dense corner runs out of new pairs.
    for _ in range(20):
        missing = want - len(keys)
        if missing <= 0:
            break
        drawn = math.ceil(missing / max(yield_rate, 0.1))
        new = [keys]
        for start in range(0, drawn, BLOCK):
            a, b = draw(rng, min(BLOCK, drawn - start))
            low, high = np.minimum(a, b), np.maximum(a, b)
            new.append((low * n + high)[low != high])
        both = np.concatenate(new)
        both.sort()
        # A sort and a comparison: np.unique hashes, which is ten times slower here.
        fresh = np.append(True, both[1:] != both[:-1])[: len(both)]
        both = both[fresh]
        yield_rate = (len(both) - len(keys)) / drawn
        keys = both
    surplus = len(keys) - want
    if surplus > 0:
        keys = np.delete(keys, rng.choice(len(keys), surplus, replace=False))
    return np.stack(np.divmod(keys, n))


def _planted(spec: Planted, rng: np.random.Generator) -> tuple[Ints, Floats, Ints]:
    n = spec.n
    y = rng.permutation(np.arange(n, dtype=np.int64) % spec.classes)
    by_class = np.argsort(y, kind="stable")
    size = np.bincount(y, minlength=spec.classes)
    first = np.cumsum(size) - size

    def draw(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        a = rng.integers(0, n, count)
        c = y[a]
        inside = rng.random(count) < spec.homophily
        # ``place`` is a position among the vertices ordered by class: inside the class of ``a``, or
        # outside, with the positions of that class skipped.
        place = (rng.random(count) * np.where(inside, size[c], n - size[c])).astype(np.int64)
        place += np.where(inside, first[c], np.where(place >= first[c], size[c], 0))
        return a, by_class[place]

    edges = _pairs(n, spec.degree, rng, draw)
    centre = rng.standard_normal((spec.classes, spec.features), dtype=np.float32)
    centre /= np.linalg.norm(centre, axis=1, keepdims=True)
    x = rng.standard_normal((n, spec.features), dtype=np.float32)
    x *= np.float32(spec.noise)
    x += centre[y]
    return edges, x, y


def _rmat(spec: Rmat, rng: np.random.Generator) -> tuple[Ints, Floats, Ints]:
    n = spec.n
    bits = max(1, (n - 1).bit_length())
    # Without the shuffle, the vertex number would tell the degree (vertex 0 has the largest).
    number = rng.permutation(n).astype(np.int64)

    def draw(rng: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        a = np.zeros(count, dtype=np.int64)
        b = np.zeros(count, dtype=np.int64)
        for _ in range(bits):
            r = rng.random(count, dtype=np.float32)
            low = r >= 0.76
            a = 2 * a + low
            b = 2 * b + (((r >= 0.57) & ~low) | (r >= 0.95))
        ok = (a < n) & (b < n)
        return number[a[ok]], number[b[ok]]

    edges = _pairs(n, spec.degree, rng, draw)
    x = rng.standard_normal((n, spec.features), dtype=np.float32)
    own = x @ rng.standard_normal((spec.features, spec.classes), dtype=np.float32)
    one = np.ones(edges.shape[1], dtype=np.float32)
    half = sp.csr_array((one, (edges[0], edges[1])), shape=(n, n))
    degree = np.maximum(np.bincount(edges.ravel(), minlength=n), 1)[:, None]
    score = own + 2 * (half @ own + half.T @ own) / degree
    return edges, x, score.argmax(axis=1)


SOURCE = Source(
    handles=lambda name: name.partition(":")[0] == "synthetic",
    read=_make,
    listing=(
        (
            "synthetic:planted",
            "planted partition; :n=20000,degree=10,classes=8,features=64,homophily=0.8,noise=1,"
            "seed=0",
        ),
        ("synthetic:rmat", "R-MAT; :n=20000,degree=10,classes=8,features=64,seed=0"),
    ),
)

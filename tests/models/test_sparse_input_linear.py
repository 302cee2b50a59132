"""Features of a shard's rows: the product with a weight, and its gradient chunk by chunk."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from gnnpipe.models.sparse_input_linear import FeatureTable, feature_linear

ROWS, FEATURES, WIDTH = 13, 9, 4
CUTS = [0, 5, 5, 11, ROWS]
"""A chunk may be empty."""


def table(is_sparse: bool) -> tuple[FeatureTable, torch.Tensor]:
    x = np.random.default_rng(0).standard_normal((ROWS, FEATURES))
    x[np.abs(x) < 0.7] = 0.0
    made = FeatureTable(sp.csr_array(x) if is_sparse else x, torch.float64, torch.device("cpu"))
    return made, torch.from_numpy(x)


def loss_by_chunk(made: FeatureTable, weight, bias, uses: int = 1) -> torch.Tensor:
    """Backward chunk by chunk, the last first; the sum of squares of what comes out."""
    parts = []
    for start, stop in pairwise(CUTS):
        rows = made.rows(start, stop)
        out = sum((i + 1) * feature_linear(rows, weight, bias) for i in range(uses))
        parts.append(out.square().sum())
    for part in reversed(parts):
        part.backward()
    return sum(part.detach() for part in parts)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_chunks_give_the_gradient_of_the_whole(is_sparse, uses):
    made, x = table(is_sparse)
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)
    plain = ((x @ weight.T + bias) * sum(range(1, uses + 1))).square().sum()
    expected = torch.autograd.grad(plain, [weight, bias])
    for _ in range(2):  # The second epoch begins with nothing left over.
        weight.grad = bias.grad = None
        found = loss_by_chunk(made, weight, bias, uses)
        assert torch.allclose(found, plain.detach())
        assert torch.allclose(weight.grad, expected[0])
        assert torch.allclose(bias.grad, expected[1])


@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_weight_computed_for_each_chunk(is_sparse):
    made, x = table(is_sparse)
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.float64, requires_grad=True)
    for start, stop in pairwise(CUTS):
        feature_linear(made.rows(start, stop), weight * 2).square().sum().backward()
    (expected,) = torch.autograd.grad((x @ (2 * weight).T).square().sum(), [weight])
    assert torch.allclose(weight.grad, expected)


def test_two_weights_do_not_mix():
    made, x = table(is_sparse=True)
    a, b = (torch.randn(WIDTH, FEATURES, dtype=torch.float64, requires_grad=True) for _ in "ab")
    for start, stop in pairwise(CUTS):
        rows = made.rows(start, stop)
        (feature_linear(rows, a) * feature_linear(rows, b)).sum().backward()
    expected = torch.autograd.grad(((x @ a.T) * (x @ b.T)).sum(), [a, b])
    assert torch.allclose(a.grad, expected[0])
    assert torch.allclose(b.grad, expected[1])


def test_a_missing_gradient_raises():
    made, x = table(is_sparse=True)
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.float64, requires_grad=True)
    made.begin()
    feature_linear(made.rows(0, 5), weight).sum().backward()
    with pytest.raises(RuntimeError, match="never"):
        made.end()
    # The next pass has nothing of it.
    made.begin()
    weight.grad = None
    loss_by_chunk(made, weight, None)
    made.end()
    (expected,) = torch.autograd.grad((x @ weight.T).square().sum(), [weight])
    assert torch.allclose(weight.grad, expected)


def test_a_weight_that_was_frozen():
    made, x = table(is_sparse=True)
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.float64)
    for start, stop in pairwise(CUTS):
        feature_linear(made.rows(start, stop), weight)
    weight.requires_grad_(True)
    loss_by_chunk(made, weight, None)
    made.end()
    (expected,) = torch.autograd.grad((x @ weight.T).square().sum(), [weight])
    assert torch.allclose(weight.grad, expected)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_dense_rows(is_sparse):
    made, x = table(is_sparse)
    assert torch.equal(made.rows(5, 11).dense(), x[5:11])


@pytest.mark.parametrize("is_sparse", [True, False])
def test_label_columns_count_as_features(is_sparse):
    _, x = table(False)
    given = x.numpy().copy()
    kind = sp.csr_array(given) if is_sparse else given
    made = FeatureTable(kind, torch.float64, torch.device("cpu"), num_labels=3)
    assert torch.equal(made.label_columns, x[:, -3:])
    now = torch.randn(ROWS, 3, dtype=torch.float64)
    made.label_columns.copy_(now)
    whole = torch.cat([x[:, :-3], now], dim=1)
    assert torch.equal(made.rows(2, 9).dense(), whole[2:9])
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.float64, requires_grad=True)
    plain = (whole @ weight.T).square().sum()
    (expected,) = torch.autograd.grad(plain, [weight])
    found = loss_by_chunk(made, weight, None)
    assert torch.allclose(found, plain.detach())
    assert torch.allclose(weight.grad, expected)


def test_gradients_by_chunk_need_no_transpose_of_all_rows():
    x = sp.random_array((ROWS, FEATURES), density=0.4, rng=np.random.default_rng(1)).tocsr()
    cuts, cpu = list(pairwise(CUTS)), torch.device("cpu")
    made = FeatureTable(sp.csr_array(x), torch.float64, cpu, by_chunk=cuts)
    dense = torch.from_numpy(x.toarray())
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.float64, requires_grad=True)
    for start, stop in cuts:
        weight.grad = None
        feature_linear(made.rows(start, stop), weight).square().sum().backward()
        (expected,) = torch.autograd.grad((dense[start:stop] @ weight.T).square().sum(), [weight])
        assert torch.allclose(weight.grad, expected)
    assert sum(part.indices.numel() for part in made._transposed.values()) == x.nnz

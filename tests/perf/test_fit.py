"""The fit finds the costs that made the times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.perf.fit import Sample, Work, fit_costs, fit_link

costs = st.floats(1e-9, 1e-3)


@settings(max_examples=25, deadline=None)
@given(truth=st.lists(st.tuples(costs, costs, costs), min_size=2, max_size=3), seed=st.integers(0))
def test_an_affine_truth_is_found(truth, seed):
    """Parts that are timed alone and in pairs, as those of cut and uncut stages are."""
    rng = np.random.default_rng(seed % 2**32)
    kinds = range(len(truth))
    samples = []
    for which in [*((k,) for k in kinds), *((k, (k + 1) % len(truth)) for k in kinds)]:
        for _ in range(12):
            work = {k: Work(*rng.integers(1, 1000, 2).tolist()) for k in which}
            time_s = sum(
                b + r * work[k].rows + e * work[k].edges
                for k, (b, r, e) in ((k, truth[k]) for k in which)
            )
            samples.append(Sample(time_s, work))
    fitted = fit_costs(samples)
    for k, (base, per_row, per_edge) in enumerate(truth):
        found = fitted.costs[k]
        assert max(fitted.errors.values()) < 1e-6
        largest = base + 1000 * (per_row + per_edge)
        assert found.time_s(700, 300) == pytest.approx(
            base + 700 * per_row + 300 * per_edge, abs=1e-4 * largest
        )


def test_noise_gives_no_negative_cost_and_an_error():
    rng = np.random.default_rng(0)
    samples = [
        Sample(float(1e-3 * rng.uniform(0.7, 1.3)), {"a": Work(float(rows), 3.0 * rows)})
        for rows in range(1, 50)
    ]
    fitted = fit_costs(samples)
    found = fitted.costs["a"]
    assert min(found.base_s, found.per_row_s, found.per_edge_s, found.per_entry_s) >= 0
    assert 0.02 < fitted.errors["a"] < 0.4


def test_latency_and_bandwidth_are_found():
    sizes = [1000, 10_000, 1_000_000]
    found = fit_link(sizes, [3 * 1e-4 + size / 2e9 for size in sizes], messages=3)
    assert found.latency_s == pytest.approx(1e-4)
    assert found.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert found.time_s(2e9, 3) == pytest.approx(1.0003)


def test_what_passes_at_once_does_not_make_a_link_fast():
    """50 Mbit/s and a bucket of 64 KiB, as measured."""
    sizes, times = (1 << 10, 1 << 14, 1 << 17, 1 << 20), (2.3e-4, 2.1e-4, 0.0118, 0.165)
    found = fit_link(sizes, times)
    assert found.bandwidth_bytes_per_s == pytest.approx(50e6 / 8, rel=0.05)
    assert found.time_s(sizes[-1]) == pytest.approx(times[-1])
    assert 0.05 < found.relative_error < 0.2

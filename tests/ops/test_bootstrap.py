"""Corrected intervals beside SciPy's, and where nothing is to be corrected."""

import numpy as np
import pytest

from shoal.ops.bootstrap import corrected_interval, without_each


@pytest.mark.parametrize("statistic", [np.mean, np.var])
def test_as_scipy_has_it(statistic):
    """scipy.stats.bootstrap(method="BCa") of 40 skewed numbers, with the same resamples."""
    stats = pytest.importorskip("scipy.stats")
    data = np.random.default_rng(3).exponential(size=40)
    theirs = stats.bootstrap((data,), statistic, n_resamples=500, method="BCa", rng=np.random.default_rng(4), vectorized=False)
    without = np.array([statistic(np.delete(data, k)) for k in range(40)])
    low, high = corrected_interval(statistic(data), theirs.bootstrap_distribution, without, 0.95)
    assert (low, high) == pytest.approx(tuple(theirs.confidence_interval), rel=1e-9)


def test_nothing_to_correct():
    resampled = np.linspace(-1, 1, 201)
    assert corrected_interval(0.0, resampled, np.array([-1.0, 0.0, 1.0]), 0.9) == pytest.approx((-0.9, 0.9))


@pytest.mark.parametrize("estimate", [-5.0, 5.0])
def test_estimates_outside_their_resamples(estimate):
    low, high = corrected_interval(estimate, np.linspace(-1, 1, 201), np.zeros(4), 0.95)
    assert -1 <= low <= high <= 1 and np.sign(low + high) == np.sign(estimate)


@pytest.mark.parametrize(("rows", "parts", "least"), [(7, 7, 1), (1000, 200, 5), (450, 200, 2)])
def test_parts_left_out(rows, parts, least):
    counts = without_each(rows, np.random.default_rng(0))
    assert counts.shape == (parts, rows) and (counts.sum(0) == parts - 1).all()
    gone = rows - counts.sum(1)
    assert gone.min() == least and gone.max() <= least + 1

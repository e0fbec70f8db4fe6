"""The field's statistics: worked by hand, and against what rliable gave for the same scores (rliable_golden.py says how)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.html_report import performance_profile
from shoal.bench.statistics import (
    Interval,
    bootstrap,
    geometric_mean,
    interquartile_mean,
    permutation_test,
    probability_of_improvement,
)

GOLDEN = json.loads((Path(__file__).parent / "rliable_golden.json").read_text())
X, Y = (np.array(GOLDEN[name]) for name in "xy")


def test_by_hand():
    assert interquartile_mean(np.array([[100.0, 1.0], [2.0, 3.0]])) == 2.5  # 1 and 100 are cut off
    assert geometric_mean(np.array([2.0, 0.5, 1.0])) == pytest.approx(1.0)
    assert performance_profile(np.array([[1.0], [2.0]]), [0.5, 1.0, 2.0]).tolist() == [1.0, 0.5, 0.0]
    one, other = np.array([[3.0], [1.0]]), np.array([[1.0], [2.0]])
    assert probability_of_improvement(one, other) == 0.625  # 3 beats both, 1 ties with 1 and loses to 2
    assert probability_of_improvement(other, one) == 0.375


@pytest.mark.parametrize("name", ["x", "y"])
def test_points_are_rliables(name):
    scores = np.array(GOLDEN[name])
    assert interquartile_mean(scores) == pytest.approx(GOLDEN["iqm"][name], abs=1e-12)
    assert performance_profile(scores, GOLDEN["taus"]) == pytest.approx(GOLDEN["profile"][name])
    assert probability_of_improvement(X, Y) == pytest.approx(GOLDEN["improvement"])


@pytest.mark.parametrize("name", ["x", "y"])
def test_intervals_are_rliables(name):
    """Two draws of the same thing: they agree to a few hundredths of the interval's width."""
    low, high = GOLDEN["iqm_interval"][name]
    found = bootstrap(interquartile_mean, np.array(GOLDEN[name]), repeats=4000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.06 * (high - low))


def test_interval_of_improvement_is_rliables():
    low, high = GOLDEN["improvement_interval"]
    found = bootstrap(probability_of_improvement, X, Y, repeats=4000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.06 * (high - low))


def test_the_bootstrap_is_stratified():
    """Each task's runs are equal, so drawing within tasks changes nothing; drawing across them would."""
    scores = np.repeat(np.array([[1.0, 10.0, 100.0]]), 4, 0)
    assert bootstrap(lambda s: s.mean((-2, -1)), scores, repeats=50) == Interval(37.0, 37.0, 37.0)


def test_different_numbers_of_runs():
    runs = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]
    found = bootstrap(lambda tasks: np.mean([task.mean(-1) for task in tasks], 0), runs, repeats=500)
    assert found.value == 6.0 and found.low < 6.0 < found.high and found.high <= 6.5


def test_many_matrices_at_once():
    """The bootstrap's draws: what one call says of all of them is what it says of each."""
    rng = np.random.default_rng(3)
    x, y = rng.random((6, 5, 4)), rng.random((6, 7, 4))
    assert interquartile_mean(x).tolist() == [interquartile_mean(one) for one in x]
    assert geometric_mean(x).tolist() == [[geometric_mean(row) for row in one] for one in x]
    assert probability_of_improvement(x, y).tolist() == [probability_of_improvement(*pair) for pair in zip(x, y, strict=True)]


def test_permutations_by_hand():
    """Of the 20 ways to deal six runs, the one that was seen and its mirror image are the farthest apart."""
    low, high = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    assert permutation_test([low], [high]) == permutation_test([high], [low], np.log) == 2 / 20
    assert permutation_test([np.array([1.0, 2.0, 4.0])], [np.array([3.0, 5.0, 6.0])]) == 4 / 20  # one more, with its mirror image
    assert permutation_test([low], [low]) == 1.0
    assert permutation_test([np.array([1.0])], [np.array([9.0])]) == 1.0  # two runs are in no order that says anything


def test_permutations_stay_within_their_task():
    """Ten tasks that all went up by a little: sure together, though each alone is not, and though tasks differ by far more."""
    ones = [10.0**k * np.array([1.0, 1.1, 1.2]) for k in range(10)]
    more = [1.06 * runs for runs in ones]
    assert permutation_test(ones[:1], more[:1], np.log) > 0.1 and permutation_test(ones, more, np.log) < 0.05
    assert permutation_test(ones, ones, np.log) == 1.0


def test_noise():
    """Noise is what the interval does not exclude."""
    assert Interval(1.2, 1.1, 1.3).excludes(1.0) and not Interval(1.2, 0.9, 1.5).excludes(1.0)

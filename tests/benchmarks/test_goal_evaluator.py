"""The rule by which peers are judged, with a driver's own module: it is imported from its folder, as a driver does."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.peers.install import DRIVERS


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(str(DRIVERS))
    import goal_evaluator

    yield goal_evaluator
    sys.modules.pop("goal_evaluator")


def test_returns_of_whole_episodes(judge):
    returns = judge.RecentReturns(2)
    assert returns.mean is None
    for done in ([False, False], [True, False], [True, True]):
        returns.add(np.array([1.0, 2.0]), np.array(done))
    assert returns.mean == pytest.approx((2.0 + 1.0 + 6.0) / 3)


def balance(observation):
    """Pushes towards where the pole falls: hundreds of steps."""
    return (observation[:, 2] + 0.5 * observation[:, 3] + 0.05 * observation[:, 0] + 0.1 * observation[:, 1] > 0).astype(np.int64)


def test_weights_pass_when_good_twice(judge):
    clumsy = judge.GoalEvaluator(475.0, 1, lambda observation: np.zeros(len(observation), np.int64))
    assert not clumsy.passes(5.0) and clumsy.reached == (None, None) and clumsy.stopped > 0
    able = judge.GoalEvaluator(475.0, 1, balance)
    assert not able.passes(0.05), "it is not asked before a tenth of a second"
    assert able.passes(3.0) and able.reached[0] == 3.0 and able.reached[1] >= 475


def test_the_second_hundred_counts_too(judge, monkeypatch):
    means = iter([480.0, 470.0, 480.0, 476.0])
    able = judge.GoalEvaluator(475.0, 1, balance)
    monkeypatch.setattr(able, "_mean", lambda: next(means))
    assert not able.passes(1.0) and not able.passes(1.05) and able.passes(1.2) and able.reached == (1.2, 476.0)

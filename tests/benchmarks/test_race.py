"""The race's clock: real processes, and what it says of a goal that is not reached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.race import PublishTimes, race


@pytest.mark.slow
def test_goal_that_anyone_reaches_is_reached():
    result = race({"preset": "ppo_quick", "env": "CartPole-v1", "seed": 101}, goal=5.0, seconds=60.0)
    assert result["eval_return"] >= 5 and 0 <= result["seconds"] < 60


def test_time_of_the_version_that_passed():
    """The time is that of the version that passed."""
    clock = PublishTimes(60.0)
    clock._seen = [(10.0, 1.0), (11.0, 2.0), (12.5, 4.0), (14.0, 5.0)]
    control = SimpleNamespace(snapshot=lambda: {"worker-0": {}, "evaluator-0": {"eval_version": 3.0, "eval_return": 480.0}},
                              total=lambda name: 7.0)
    clock.end(control, "return", None)
    assert clock.result == {"seconds": 2.5, "eval_return": 480.0, "env_steps": 7}  # version 3 was not seen itself, 4 was


def test_missed_goal_has_no_time():
    clock = PublishTimes(60.0)
    clock.end(SimpleNamespace(snapshot=lambda: {"evaluator-0": {"eval_version": 3.0, "eval_return": 80.0}}), "seconds", None)
    assert clock.result["seconds"] is None

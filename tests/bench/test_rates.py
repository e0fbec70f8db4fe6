"""Env steps per second of a count that jumps: a window that cannot tell has no rate."""

from __future__ import annotations

import math
import random

import pytest

from shoal.bench.measure import COARSEST, rate
from shoal.bench.suite import load_suite


def looked_at(period, phase, jump, until, every=1.0):
    """What somebody sees who looks `every` second at a count that jumps every `period`, the first time at `phase`."""
    looks = [every * n for n in range(1, int(until / every) + 1)]
    return [(at, jump * max(0, 1 + math.floor((at - phase) / period))) for at in looks]


def test_one_rollout_between_two_looks_is_no_rate():
    """The quick table of before: 1,024 steps every 2.4 s were 507 a second in one run and 338 in the next."""
    seen = {rate(looked_at(2.4, phase, 1024, 7.0), 2.0) for phase in (0.1, 0.5, 1.0, 1.5)}
    assert len(seen) > 1
    for phase in (0.1, 0.5, 1.0, 1.5, 2.0):
        assert math.isnan(rate(looked_at(2.4, phase, 1024, 7.0), 2.0, looked=True))
        assert rate(looked_at(2.4, phase, 1024, 24.0), 4.0, looked=True) == pytest.approx(1024 / 2.4, rel=COARSEST)


def test_what_is_marked_as_it_changes_needs_no_more():
    """A peer's own marks: exact, however few they are."""
    marks = [(2.4 * n, 1024 * n) for n in range(4)]
    assert rate(marks, 2.0) == pytest.approx(1024 / 2.4)


@pytest.mark.parametrize("until", [5.0, 7.0, 14.0, 24.0])
def test_a_rate_is_near_the_truth_or_there_is_none(until):
    draw, found = random.Random(1), 0
    for _ in range(2000):
        period, phase, jump = draw.uniform(0.05, 6.0), draw.uniform(0.0, 1.0), draw.randint(1, 5000)
        value = rate(looked_at(period, phase, jump, until), 2.0, looked=True)
        if not math.isnan(value):
            found += 1
            assert min(abs(jump / period / value - 1), abs(value * period / jump - 1)) <= COARSEST
    assert found > (50 if until < 10 else 500)


def test_rollouts_that_are_not_all_alike_are_still_jumps():
    """Decisions are counted, and the first step of an episode is none: nothing divides them all."""
    seen = looked_at(2.4, 0.5, 1024, 7.0)
    uneven = [(at, steps - round(at)) if steps else (at, 0) for at, steps in seen]
    uneven = [(at, max([steps, *(s for a, s in uneven if a < at)])) for at, steps in uneven]
    assert math.isnan(rate(uneven, 2.0, looked=True))


def test_a_count_that_runs_has_a_rate_in_a_short_window():
    draw = random.Random(2)
    steps, marks = 0, []
    for second in range(1, 7):
        steps += draw.randint(36_000, 44_000)
        marks.append((second * 1.01, steps))
    assert rate(marks, 2.0, looked=True) == pytest.approx(40_000, rel=0.1)


def test_a_run_may_be_uneven():
    """A shared machine: a quarter more or less from second to second."""
    draw = random.Random(3)
    for _ in range(300):
        steps, marks = 0, []
        for second in range(1, 8):
            steps += draw.randint(30_001, 50_001)
            marks.append((second * draw.uniform(0.99, 1.01), steps))
        assert not math.isnan(rate(marks, 2.0, looked=True))


def test_ppo_on_pong_counts_often_enough():
    """450 steps a second on two slow cores: the quick variant's window holds ten of its rollouts and more."""
    (case,) = [case for case in load_suite("throughput", "quick").cases if case.preset == "ppo" and case.env == "ALE/Pong-v5"]
    at_once = 2 * 4 * case.overrides["algorithm.unroll"]  # actors x environments
    assert 450 * (case.max_seconds - case.warm_seconds) / at_once > 10
    (case,) = [case for case in load_suite("throughput").cases if case.name == "ppo ALE/Pong-v5"]
    for phase in (0.2, 0.7, 1.5, 2.2):
        assert not math.isnan(rate(looked_at(2.4, phase, 1024, case.max_seconds), case.warm_seconds, looked=True))

"""Rates: of a count that jumps, where a window that cannot tell has none; and numbers as text."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.peers.process_monitor import last_json
from benchmarks.work_rate import work_rate
from shoal.bench.rates import COARSEST, Spread, rate
from shoal.bench.suite import load_suite
from shoal.bench.text_tables import markdown, spread
from shoal.telemetry.short_numbers import short


def looked_at(period, phase, jump, until, every=1.0):
    """What somebody sees who looks `every` second at a count that jumps every `period`, the first time at `phase`."""
    looks = [every * n for n in range(1, int(until / every) + 1)]
    return [(at, jump * max(0, 1 + math.floor((at - phase) / period))) for at in looks]


def test_one_rollout_is_no_rate():
    """The quick table of before: 1,024 steps every 2.4 s were 507 a second in one run and 338 in the next."""
    seen = {rate(looked_at(2.4, phase, 1024, 7.0), 2.0) for phase in (0.1, 0.5, 1.0, 1.5)}
    assert len(seen) > 1
    for phase in (0.1, 0.5, 1.0, 1.5, 2.0):
        assert math.isnan(rate(looked_at(2.4, phase, 1024, 7.0), 2.0, looked=True))
        assert rate(looked_at(2.4, phase, 1024, 24.0), 4.0, looked=True) == pytest.approx(1024 / 2.4, rel=COARSEST)


def test_marked_at_every_change():
    """A peer's own marks: exact, however few they are."""
    marks = [(2.4 * n, 1024 * n) for n in range(4)]
    assert rate(marks, 2.0) == pytest.approx(1024 / 2.4)


@pytest.mark.parametrize("until", [5.0, 7.0, 14.0, 24.0])
def test_rate_is_near_or_missing(until):
    """A rate is near the truth or there is none."""
    draw, found = random.Random(1), 0
    for _ in range(2000):
        period, phase, jump = draw.uniform(0.05, 6.0), draw.uniform(0.0, 1.0), draw.randint(1, 5000)
        value = rate(looked_at(period, phase, jump, until), 2.0, looked=True)
        if not math.isnan(value):
            found += 1
            assert min(abs(jump / period / value - 1), abs(value * period / jump - 1)) <= COARSEST
    assert found > (50 if until < 10 else 500)


def test_rollouts_of_different_sizes():
    """Decisions are counted, and the first step of an episode is none: nothing divides them all."""
    seen = looked_at(2.4, 0.5, 1024, 7.0)
    uneven = [(at, steps - round(at)) if steps else (at, 0) for at, steps in seen]
    uneven = [(at, max([steps, *(s for a, s in uneven if a < at)])) for at, steps in uneven]
    assert math.isnan(rate(uneven, 2.0, looked=True))


def test_rate_in_a_short_window():
    """A count that runs has a rate in a short window."""
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


def test_rate_leaves_out_the_warm_up():
    marks = [(0.0, 0), (1.0, 5), (2.0, 10), (3.0, 110), (4.0, 210)]
    assert rate(marks, 2.0) == pytest.approx(100.0)
    assert math.isnan(rate(marks, 4.0)) and math.isnan(rate([], 0.0))
    assert math.isnan(rate([(2.0, 10), (9.0, 10)], 2.0))  # a long update, and nothing else


def test_rate_goes_from_jump_to_jump():
    marks = [(float(second), 400 * (second // 4)) for second in range(15)]  # 100 a second, 400 at a time
    assert rate(marks, 2.0) == rate(marks, 4.0) == rate(marks[:-2], 2.0) == pytest.approx(100.0)


def test_spread_is_median_and_range():
    assert Spread.of([3.0, 1.0, math.nan, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([1000.0, 3000.0, 2000.0]) == "2 k (1 k - 3 k)" and spread([]) == "-" and spread([None]) == "-"


def test_short_numbers():
    assert [short(x) for x in (512_345, 1_210, 348, 10.2e6, 0.53, None)] == ["512 k", "1.21 k", "348", "10.2 M", "0.53", "-"]


def test_markdown_is_aligned():
    lines = markdown(("a", "long head"), [["wide cell", "x"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0] == "| a         | long head |"


def test_work_is_done_at_least_once():
    waits = []
    assert work_rate(lambda: 3, 0.0, lambda: waits.append(1)) > 0 and len(waits) == 2


def test_the_last_line_of_json_is_the_report():
    assert last_json('{"a": 1}\nnoise\n{"b": 2}\n{torn\nmore') == {"b": 2} and last_json("nothing") is None

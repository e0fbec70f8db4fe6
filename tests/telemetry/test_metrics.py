"""The registry and the pages that roles write: cumulative words in, distributions of any stretch of time out."""

import math
import time

import numpy as np
import pytest

from shoal.errors import ProgramError, ShoalError
from shoal.telemetry.metrics import KINDS, PHASES, REGISTRY, Metric, Stats, distribution, mean

ENTROPY = Metric("entropy", "gauge", "nats", "Mean entropy of the policy in the last update.")


def page(*waits: str) -> tuple[Stats, np.ndarray]:
    names = Stats.names([f"wait_seconds/{wire}" for wire in waits], [ENTROPY])
    array = np.zeros(len(names))
    return Stats(names, array, [ENTROPY]), array


def test_names_and_meanings():
    """Names are unique and every metric says what it is."""
    names = Stats.names(["wait_seconds/unrolls"])
    assert len(names) == len(set(names))
    assert {metric.kind for metric in REGISTRY} == {"counter", "gauge", "mean", "histogram"}
    assert all(metric.text.endswith(".") for metric in REGISTRY)
    assert all(bool(metric.edges) == (metric.kind == "histogram") for metric in REGISTRY)


def test_counters_and_gauges():
    """Counters and gauges live in the given array."""
    stats, array = page()
    stats.add("env_steps", 3)
    stats.add("env_steps")
    stats.set("entropy", 0.5)
    stats.set("entropy", 0.25)
    again = Stats(Stats.names(metrics=[ENTROPY]), array)  # a restarted incarnation goes on with the same page
    again.add("env_steps")
    read = again.read()
    assert (read["env_steps"], read["entropy"]) == (5, 0.25)
    assert stats.get("env_steps") == 5


def test_unknown_names():
    """Unknown names are errors and can be asked for."""
    stats, _ = page()
    for write in (stats.add, stats.set, stats.observe):
        with pytest.raises(ShoalError, match=r"^there is no metric 'no_such_thing'; declare it: in `metrics`") as caught:
            write("no_such_thing", 1)
        assert isinstance(caught.value, KeyError) and "program.metrics" in str(caught.value)
        assert "REGISTRY of shoal/telemetry/metrics.py" in str(caught.value)
    assert "entropy" in stats and "policy_lag" in stats and "no_such_thing" not in stats


def test_scalars_and_arrays():
    """Scalars and arrays give the same histogram."""
    one, many = page()[0], page()[0]
    values = np.array([0, 0, 1, 3, 7, 40, 99999], np.int64)
    for value in values:
        one.observe("policy_lag", float(value))
    many.observe("policy_lag", values)
    many.observe("policy_lag", values[:0])
    assert one.read() == many.read()


def test_distribution_of_a_stretch_of_time():
    stats, _ = page()
    stats.observe("policy_lag", np.full(100, 50))
    before = stats.read()
    stats.observe("policy_lag", np.array([1] * 94 + [2] * 6))
    shown = distribution(stats.read(), before, KINDS["policy_lag"])
    assert (shown.count, shown.mean, shown.p95, shown.max) == (100, 1.06, 2, 2)
    whole = distribution(stats.read(), None, KINDS["policy_lag"])
    assert whole.max == 50 and whole.count == 200
    assert math.isnan(distribution(before, before, KINDS["policy_lag"]).mean)


def test_percentile_of_seconds():
    """Percentile of seconds is near the true one."""
    stats, _ = page()
    values = np.random.default_rng(0).gamma(2.0, 0.05, 5000)
    stats.observe("data_age_seconds", values)
    shown = distribution(stats.read(), None, KINDS["data_age_seconds"])
    assert shown.p95 == pytest.approx(np.percentile(values, 95), rel=0.1)
    assert shown.mean == pytest.approx(values.mean()) and shown.max == pytest.approx(values.max())


def test_mean_of_a_stretch_may_be_negative():
    stats, _ = page()
    stats.observe("episode_return", np.array([-1.0, -3.0]))
    before = stats.read()
    stats.observe("episode_return", 4.0)
    assert mean(before, None, "episode_return") == -2.0
    assert mean(stats.read(), before, "episode_return") == 4.0


def test_nested_phases_and_waiting():
    """Phases exclude what is nested and what was waited."""
    stats, _ = page("unrolls")
    with stats.phase("learn"):
        time.sleep(0.01)
        with stats.phase("publish"):
            time.sleep(0.02)
        stats.waited("unrolls", 5.0)  # a wait that happened inside counts for the wire, not for the phase
    read = stats.read()
    assert 0.02 <= read["phase_seconds/publish"] < 4.0
    assert read["phase_seconds/learn"] < 0.0
    assert read["wait_seconds/unrolls"] == 5.0
    assert set(PHASES) == {name.partition("/")[2] for name in read if name.startswith("phase_seconds/")}


def test_buckets_of_every_histogram():
    """Every histogram has a bucket for everything."""
    stats, _ = page()
    for name, metric in KINDS.items():
        if metric.kind == "histogram":
            stats.observe(name, np.array([0.0, 1e12]))
            assert distribution(stats.read(), None, metric).max == 1e12


def test_a_metric_is_declared_once():
    for other in (ENTROPY, Metric("env_steps", "counter", "", "Another one.")):
        with pytest.raises(ProgramError, match=f"{other.name} is declared twice"):
            Stats.names(metrics=[ENTROPY, other])

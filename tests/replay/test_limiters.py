"""Section 3, Limiter: the inequalities with numbers worked by hand."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from shoal import replay
from shoal.errors import ConfigError
from tests.replay.conftest import Start


def test_min_size_has_spi_one_and_no_bounds() -> None:
    limiter = replay.MinSize(2)
    assert limiter.samples_per_insert == 1 and limiter.min_diff == -math.inf and limiter.max_diff == math.inf
    assert not limiter.can_sample()
    limiter.insert()
    assert not limiter.can_sample()
    limiter.insert()
    assert limiter.can_sample(1_000_000)
    assert limiter.can_insert(1_000_000)


def test_can_sample() -> None:
    """`can_sample` needs items and the lower bound."""
    # s=2, m=3, e=4: bounds 2 and 10
    limiter = replay.SampleToInsertRatio(2.0, 3, 4.0)
    assert (limiter.min_diff, limiter.max_diff) == (2.0, 10.0)
    limiter.insert(3)  # I*spi = 6
    assert limiter.can_sample(4)  # 6 - 0 - 4 = 2 >= 2
    assert not limiter.can_sample(5)  # 1 < 2
    limiter.sample(3)
    assert limiter.can_sample(1) and not limiter.can_sample(2)
    limiter.delete()  # I - D = 2 < 3
    assert not limiter.can_sample(1)


def test_can_insert() -> None:
    """`can_insert` allows below the minimum size, or within the upper bound."""
    limiter = replay.SampleToInsertRatio(2.0, 3, 4.0)  # hi = 10
    assert limiter.can_insert(3)  # 0 + 3 <= 3
    assert limiter.can_insert(5)  # 5*2 = 10 <= 10
    assert not limiter.can_insert(6)  # 12 > 10 and 6 > 3
    limiter.insert(5)
    assert not limiter.can_insert(1)  # 12 > 10
    limiter.sample(2)
    assert limiter.can_insert(1) and not limiter.can_insert(2)  # 12 - 2 = 10, 14 - 2 = 12
    limiter.delete(4)  # I - D = 1
    assert limiter.can_insert(2)  # 1 + 2 <= 3


def test_a_pair_gives_the_bounds() -> None:
    limiter = replay.SampleToInsertRatio(1.0, 2, (-3.0, 7.0))
    assert (limiter.min_diff, limiter.max_diff) == (-3.0, 7.0)


def test_another_ratio():
    """From 2 samples per insert to 0.5: sampling was 5 behind, and is 5 behind."""
    limiter = replay.SampleToInsertRatio(2.0, 10, 20.0)
    limiter.insert(1010)
    limiter.sample(1995)
    limiter.become(replay.SampleToInsertRatio(0.5, 10, 20.0))
    assert (limiter.samples_per_insert, limiter.min_diff, limiter.max_diff) == (0.5, -15.0, 25.0)
    assert limiter.samples == 495  # 0.5 * 1000 - 5
    assert limiter.can_sample(25) and not limiter.can_sample(26)   # 505 - 495 - 25 = -15
    assert limiter.can_insert(30) and not limiter.can_insert(31)   # 1040 * 0.5 - 495 = 25
    limiter.become(replay.SampleToInsertRatio(0.5, 10, 20.0))
    assert limiter.samples == 495
    young = replay.SampleToInsertRatio(2.0, 10, 20.0)
    young.insert(4)
    young.become(replay.SampleToInsertRatio(8.0, 10, 20.0))
    assert young.samples == 0 and not young.can_sample()  # the first ten are still owed
    free = replay.MinSize(10)
    free.insert(110)
    free.sample(5000)
    free.become(replay.SampleToInsertRatio(3.0, 10, 20.0))
    assert free.samples == 300  # from no ratio to one: it begins in the middle of the band


@pytest.mark.parametrize("kind", [replay.Queue, replay.Stack])
def test_queue_and_stack_bounds(kind: type[replay.Queue]) -> None:
    limiter = kind(3)
    assert (limiter.samples_per_insert, limiter.min_size, limiter.min_diff, limiter.max_diff) == (1.0, 1, 0.0, 3.0)
    assert limiter.can_insert(3) and not limiter.can_insert(4) and not limiter.can_sample()
    limiter.insert(3)
    assert not limiter.can_insert() and limiter.can_sample(3) and not limiter.can_sample(4)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0.0, 1, -10.0, 10.0), "samples_per_insert"),
        ((-1.0, 1, -10.0, 10.0), "samples_per_insert"),
        ((1.0, 0, -10.0, 10.0), "min_size"),
        ((1.0, 1, 0.0, 1.9), "max_diff"),
        ((4.0, 1, 0.0, 7.9), "max_diff"),
        ((2.0, 2, 4.5, 20.0), "min_diff"),
    ],
)
def test_refused_at_construction(arguments: tuple[float, int, float, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        replay.RateLimiter(*arguments)


def test_the_smallest_band_is_accepted() -> None:
    replay.RateLimiter(1.0, 2, 0.0, 2.0)
    replay.RateLimiter(4.0, 2, 8.0, 16.0)


def test_upper_bound_below_start_warns() -> None:
    with pytest.warns(UserWarning, match="inserting will block"):
        replay.RateLimiter(2.0, 10, 0.0, 10.0)


def test_largest_allowed() -> None:
    """Largest allowed agrees with the inequalities."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        spi = float(rng.choice([0.1, 0.3, 1.0, 1 / 3, 2.5]))
        limiter = replay.SampleToInsertRatio(spi, int(rng.integers(1, 20)), float(rng.uniform(2.5, 30)))
        limiter.inserts, limiter.samples = int(rng.integers(0, 100)), int(rng.integers(0, 100))
        limiter.deletes = int(rng.integers(0, limiter.inserts + 1))
        n = int(rng.integers(1, 64))
        assert limiter.insertable(n) == max([i for i in range(1, n + 1) if limiter.can_insert(i)], default=0)
        assert limiter.sampleable(n) == max([i for i in range(1, n + 1) if limiter.can_sample(i)], default=0)


def test_present_key_counts_as_update() -> None:
    """Present key waits for permission and counts as update."""
    table = replay.Table("t", replay.Uniform(), max_size=10, limiter=replay.RateLimiter(1.0, 1, 0.0, 2.0))
    with replay.Server([table]) as server:
        client = server.client()
        key = client.insert({"x": 1}, {"t": 1.0})["t"]
        core = server.core.table("t")
        columns = core.columns[0]
        record = np.array([[[0, 0, 1, 1]]], np.int32)

        def again() -> int:
            return core.try_insert(
                core.layout(columns, True), np.array([5.0]), record, np.array([key]), np.zeros(1, np.int8)
            )

        assert again() == 1  # (1 + 1)*1 - 0 <= 2: permitted
        assert table.limiter.inserts == 1 and core.size == 1
        assert client.sample("t", 1).info.priorities[0] == 5.0
        client.insert({"x": 2}, {"t": 1.0})
        client.insert({"x": 3}, {"t": 1.0})
        assert not table.limiter.can_insert()
        assert again() == 0


def test_removals_and_reset() -> None:
    """Removal of any kind counts as a delete and reset zeroes."""
    table = replay.Table("t", replay.Fifo(), max_size=2, max_times_sampled=1)
    with replay.Server([table]) as server:
        client = server.client()
        keys = [client.insert({"x": i}, {"t": 1.0})["t"] for i in range(3)]
        assert table.limiter.deletes == 1  # by the remover
        client.delete("t", [keys[1]])
        assert table.limiter.deletes == 2
        client.sample("t")
        assert table.limiter.deletes == 3 and table.limiter.inserts == 3 and table.limiter.samples == 1
        client.reset("t")
        assert (table.limiter.inserts, table.limiter.samples, table.limiter.deletes) == (0, 0, 0)


def test_time_blocked_on_each_side() -> None:
    table = replay.Table.queue("q", 1)
    with replay.Server([table]) as server:
        client, began = server.client(), time.monotonic()
        with pytest.raises(replay.Timeout):
            client.sample("q", timeout=0.1)
        waited, began = time.monotonic() - began, time.monotonic()
        client.insert({"x": 1}, {"q": 1.0})
        with pytest.raises(replay.Timeout):
            client.insert({"x": 2}, {"q": 1.0}, timeout=0.2)
        blocked = time.monotonic() - began
        info = client.info()["tables"]["q"]
        assert 0.1 <= info["sample_blocked_seconds"] <= waited
        assert 0.2 <= info["insert_blocked_seconds"] <= blocked


def test_waiting_inserters_are_counted(start: Start) -> None:
    """A client of any kind that waits to insert is counted."""
    _, client = start(replay.Table.queue("q", 1))
    client.insert({"x": 1}, {"q": 1.0})
    with pytest.raises(replay.Timeout):
        client.insert({"x": 2}, {"q": 1.0}, timeout=0.3)
    assert client.info()["tables"]["q"]["insert_blocked_seconds"] > 0.2

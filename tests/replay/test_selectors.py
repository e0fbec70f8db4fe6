"""Section 3, Selectors; T5-T7 and T21 of specs/value.md."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import replay
from shoal.errors import ConfigError
from shoal.replay.table.sum_tree import rebuild, refresh, search, search_batch, total, tree_arrays


def make(selector: replay.Fifo, priorities: list[float], **options: object) -> tuple[replay.Server, replay.Client]:
    server = replay.Server([replay.Table("t", selector, **options)], seed=7)  # type: ignore[arg-type]
    client = server.client()
    client.insert_batch({"x": np.arange(len(priorities))}, {"t": np.array(priorities)})
    return server, client


def draws(client: replay.Client, n: int) -> np.ndarray:
    return client.sample("t", n).data["x"].copy()


def test_t7_sum_tree_queries() -> None:
    tree, offsets = tree_arrays(4)
    tree[:4] = [3, 1, 4, 2]
    rebuild(tree, offsets)
    expected = {0: 0, 2.999: 0, 3: 1, 3.999: 1, 4: 2, 7.999: 2, 8: 3, 9.999: 3}
    leaves = np.zeros(8, np.int64)
    search_batch(tree, offsets, np.array(list(expected), np.float64), leaves, 8)
    assert leaves.tolist() == list(expected.values())
    assert [search(tree, offsets, float(q)) for q in expected] == list(expected.values())
    tree[2] = 0
    refresh(tree, offsets, np.array([2]), 1)
    assert total(tree, offsets) == 6
    search_batch(tree, offsets, np.array([4.0]), leaves, 1)
    assert leaves[0] == 3
    many = np.linspace(0, 6, 10_000, endpoint=False)
    found = np.zeros(10_000, np.int64)
    search_batch(tree, offsets, many, found, 10_000)
    assert set(found.tolist()) == {0, 1, 3}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.just(0.0) | st.floats(1e-300, 1e6), min_size=1, max_size=600), st.integers(0, 2**32))
def test_tree_agrees_with_prefix_sums(values: list[float], seed: int) -> None:
    tree, offsets = tree_arrays(len(values))
    rng = np.random.default_rng(seed)
    for at in rng.permutation(len(values)):
        tree[at] = values[at]
        refresh(tree, offsets, np.array([at]), 1)
    whole = total(tree, offsets)
    assert whole == pytest.approx(sum(values), rel=1e-12) and whole >= 0
    if whole > 0:
        queries = rng.random(50) * whole
        leaves = np.zeros(50, np.int64)
        search_batch(tree, offsets, queries.copy(), leaves, 50)
        assert all(values[leaf] > 0 for leaf in leaves)
        prefix = np.concatenate([[0.0], np.cumsum(values)])
        slack = 1e-9 * whole
        assert (prefix[leaves] <= queries + slack).all() and (queries < prefix[leaves + 1] + slack).all()


def test_t5_probabilities() -> None:
    server, client = make(replay.Prioritized(0.6), [1, 2, 3, 4])
    with server:
        batch = client.sample("t", 2000)
        by_value = dict(zip(batch.data["x"].tolist(), batch.info.probabilities.tolist(), strict=True))
        expected = [0.14822950, 0.22467391, 0.28655461, 0.34054197]
        assert [by_value[i] for i in range(4)] == pytest.approx(expected, abs=1e-8)


def test_t5_with_a_uniform_mix() -> None:
    expected = [0.14833127, 0.22469924, 0.28651806, 0.34045143]
    server, client = make(replay.Prioritized(0.6, uniform_mix=1e-3), [1, 2, 3, 4])
    with server:
        batch = client.sample("t", 2000)
        by_value = dict(zip(batch.data["x"].tolist(), batch.info.probabilities.tolist(), strict=True))
        assert [by_value[i] for i in range(4)] == pytest.approx(expected, abs=1e-8)
    server, client = make(replay.Prioritized(1.0, uniform_mix=0.5), [0, 1, 3])  # 1/6, 1/6 + 1/8, 1/6 + 3/8
    with server:
        counts = np.bincount(client.sample("t", 60_000).data["x"], minlength=3) / 60_000
        assert counts == pytest.approx([1 / 6, 7 / 24, 13 / 24], abs=0.01)
    with pytest.raises(ConfigError, match="uniform_mix"):
        replay.Prioritized(0.6, uniform_mix=1.5)
    with pytest.raises(ConfigError, match="remover"):
        replay.Table("t", remover=replay.Prioritized(-0.4, uniform_mix=0.1))


def test_t6_importance_weights() -> None:
    """T6: importance weights follow from the probabilities."""
    for alpha, beta, expected in [
        (0.6, 0.4, [1, 0.84674531, 0.76822936, 0.71697762]),
        (0.9, 0.6, [1, 0.68777091, 0.55252829, 0.47302882]),
    ]:
        server, client = make(replay.Prioritized(alpha), [1, 2, 3, 4])
        with server:
            batch = client.sample("t", 2000)
            raw = (batch.info.table_size * batch.info.probabilities) ** -beta
            weights = dict(zip(batch.data["x"].tolist(), (raw / raw.max()).tolist(), strict=True))
            assert [weights[i] for i in range(4)] == pytest.approx(expected, abs=1e-8)
            if alpha == 0.6:
                raws = dict(zip(batch.data["x"].tolist(), raw.tolist(), strict=True))
                hand = [1.23254318, 1.04365016, 0.94687585, 0.88370588]
                assert [raws[i] for i in range(4)] == pytest.approx(hand, abs=1e-8)


def test_t21_negative_eviction_exponent() -> None:
    server, client = make(replay.Prioritized(-0.4), [1, 2, 4])
    with server:
        batch = client.sample("t", 500)
        by_value = dict(zip(batch.data["x"].tolist(), batch.info.probabilities.tolist(), strict=True))
        assert [by_value[i] for i in range(3)] == pytest.approx([0.42877832, 0.32495320, 0.24626848], abs=1e-8)
        assert by_value[0] / by_value[2] == pytest.approx(1.74110113, abs=1e-7)


def test_prioritized_remover() -> None:
    """A prioritized remover evicts in proportion."""
    table = replay.Table("t", replay.Uniform(), replay.Prioritized(1.0), max_size=3)
    with replay.Server([table], seed=3) as server:
        client = server.client()
        evicted = np.zeros(2)
        client.insert_batch({"x": np.arange(3)}, {"t": np.zeros(3)})
        for _ in range(3000):  # only the two items with positive priority can be victims
            client.reset("t")
            client.insert_batch({"x": np.arange(4)}, {"t": np.array([0.0, 0.0, 3.0, 1.0])})
            left = set(client.sample("t", 40).data["x"].tolist())
            assert {0, 1} <= left
            evicted[0] += 2 not in left
            evicted[1] += 3 not in left
        assert evicted.sum() == 3000 and abs(evicted[0] - 2250) < 4 * np.sqrt(3000 * 0.75 * 0.25)


def test_fifo_lifo_uniform() -> None:
    server, client = make(replay.Fifo(), [1.0] * 5)
    with server:
        assert draws(client, 3).tolist() == [0, 0, 0]
        assert client.sample("t", 1).info.probabilities.tolist() == [1.0]
    server, client = make(replay.Lifo(), [1.0] * 5)
    with server:
        assert draws(client, 3).tolist() == [4, 4, 4]
    server, client = make(replay.Uniform(), [1.0] * 5)
    with server:
        batch = client.sample("t", 50_000)
        assert (batch.info.probabilities == 0.2).all()
        counts = np.bincount(batch.data["x"], minlength=5)
        assert abs(counts - 10_000).max() < 4 * np.sqrt(50_000 * 0.2 * 0.8)


def test_priority_zero() -> None:
    """Priority 0 is never drawn while any other is positive; with all at 0 the draw is uniform."""
    for exponent in (0.0, 0.6, 1.0):
        server, client = make(replay.Prioritized(exponent), [0.0, 1e-12, 0.0, 5.0])
        with server:
            assert set(draws(client, 20_000).tolist()) <= {1, 3}
    server, client = make(replay.Prioritized(0.6), [0.0] * 4)
    with server:
        batch = client.sample("t", 20_000)
        assert (batch.info.probabilities == 0.25).all()
        assert abs(np.bincount(batch.data["x"]) - 5000).max() < 4 * np.sqrt(20_000 * 0.25 * 0.75)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, -0.5, 1e308])
def test_bad_priorities_are_refused(bad: float) -> None:
    """Bad priorities are refused and the table goes on."""
    server, client = make(replay.Prioritized(2.0), [1.0, 2.0])
    with server:
        with pytest.raises(replay.InvalidItem, match="priority"):
            client.insert({"x": 9}, {"t": bad})
        keys = client.sample("t", 1).info.keys
        with pytest.raises(replay.InvalidItem):
            client.update_priorities("t", keys, [bad])
        assert client.info()["tables"]["t"]["size"] == 2
        assert client.sample("t", 10, timeout=1).data["x"].max() <= 1
        client.insert({"x": 3}, {"t": 1.0}, timeout=1)


def test_heaps_and_their_ties() -> None:
    server, client = make(replay.MinHeap(), [3.0, 1.0, 2.0, 1.0])
    with server:
        keys = client.info()
        assert draws(client, 2).tolist() == [1, 1]  # tie of 1 and 3: inserted first
        first = client.sample("t").info.keys
        client.update_priorities("t", first, [1.0])  # touched now: 3 is less recent
        assert draws(client, 1).tolist() == [3]
        client.update_priorities("t", client.sample("t").info.keys, [9.0])
        assert draws(client, 1).tolist() == [1]
        assert keys is not None
    server, client = make(replay.MaxHeap(), [3.0, 5.0, 2.0, 5.0])
    with server:
        assert draws(client, 1).tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_heap_order_agrees_with_sorting(seed: int, largest: bool) -> None:
    rng = np.random.default_rng(seed)
    selector = replay.MaxHeap() if largest else replay.MinHeap()
    table = replay.Table("t", selector, max_size=1000, max_times_sampled=1)
    with replay.Server([table]) as server:
        client = server.client()
        model: dict[int, tuple[float, int]] = {}
        for stamp in range(60):
            action = rng.integers(3)
            if action == 0 or not model:
                priority = float(rng.integers(5))
                model[client.insert({"x": 0}, {"t": priority})["t"]] = (priority, stamp)
            elif action == 1:
                key = int(rng.choice(list(model)))
                priority = float(rng.integers(5))
                client.update_priorities("t", [key], [priority])
                model[key] = (priority, stamp)
            else:
                sign = -1 if largest else 1
                expected = min(model, key=lambda k: (sign * model[k][0], model[k][1]))
                assert client.sample("t").info.keys.tolist() == [expected]
                del model[expected]


def test_same_seed_same_stream() -> None:
    streams = []
    for seed in (1, 1, 2):
        table = replay.Table("t", replay.Prioritized(0.6))
        with replay.Server([table], seed=seed) as server:
            client = server.client()
            client.insert_batch({"x": np.arange(100)}, {"t": np.linspace(0.1, 5, 100)})
            streams.append(client.sample("t", 500).data["x"].tolist())
    assert streams[0] == streams[1] != streams[2]


def test_frequencies_of_a_million_draws() -> None:
    """Frequencies by priority, by chi-square over a million draws."""
    rng = np.random.default_rng(0)
    priorities = rng.gamma(0.5, 2.0, 200) + 1e-3
    server, client = make(replay.Prioritized(0.6), priorities.tolist())
    with server:
        counts = np.zeros(200)
        for _ in range(100):
            counts += np.bincount(client.sample("t", 10_000).data["x"], minlength=200)
        p = priorities**0.6 / (priorities**0.6).sum()
        expected = p * 1e6
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 199) < 4 * np.sqrt(2 * 199)  # mean and sd of chi-square with 199 degrees of freedom
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected * (1 - p))).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_probabilities_sum_to_one(seed: int) -> None:
    """Probabilities sum to one after any history."""
    rng = np.random.default_rng(seed)
    table = replay.Table("t", replay.Prioritized(0.7), max_size=20)
    with replay.Server([table]) as server:
        client = server.client()
        for _ in range(30):
            client.insert_batch({"x": np.zeros(3)}, {"t": rng.random(3) * 10.0 ** rng.integers(-8, 8)})
            batch = client.sample("t", 5)
            client.update_priorities("t", batch.info.keys, rng.random(5))
            client.delete("t", batch.info.keys[:1])
        core = server.core.table("t")
        live = core.state.dense[: core.size]
        leaves = core.state.sel_tree[live]
        assert (leaves / core.mass).sum() == pytest.approx(1.0, rel=1e-12)
        assert core.mass == pytest.approx((core.state.values[live, 7] ** 0.7).sum(), rel=1e-12)

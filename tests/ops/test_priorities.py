"""T5-T7, T11, T12, T21 and T32 of specs/value.md, by the functions here and by the tables of shoal.replay."""

from __future__ import annotations

import numpy as np
import pytest

from shoal import replay
from shoal.ops import priorities, schedules
from shoal.replay.table import sum_tree as tree

P4 = [0.14822950, 0.22467391, 0.28655461, 0.34054197]
MIXED = [0.14833127, 0.22469924, 0.28651806, 0.34045143]
FOUR = np.array([1.0, 2.0, 3.0, 4.0])


def probabilities(priority, exponent, uniform_mix=0.0):
    """P(i) = p_i^exponent / sum, mixed with uniform. A priority of 0 is never drawn by its priority, whatever the exponent."""
    leaf = np.zeros(len(priority))
    np.power(priority, exponent, out=leaf, where=np.asarray(priority) > 0)
    return (1 - uniform_mix) * leaf / leaf.sum() + uniform_mix / len(leaf)


def near(got, want, tolerance=1e-6):
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=0)


def drawn(selector, values, count=200):
    """Probabilities that a table gives to items with these priorities, by index."""
    server = replay.Server([replay.Table("t", selector)])
    client = server.client()
    client.insert_batch({"i": np.arange(len(values))}, {"t": values})
    batch = client.sample("t", count)
    return dict(zip(batch.data["i"].tolist(), batch.info.probabilities.tolist(), strict=True))


def test_T5_probabilities():
    near(probabilities(FOUR, 0.6), P4)
    near(probabilities(FOUR, 0.6, 1e-3), MIXED)
    for mix, want in ((0.0, P4), (1e-3, MIXED)):
        got = drawn(replay.Prioritized(0.6, uniform_mix=mix), FOUR)
        near([got[i] for i in range(4)], want)


def test_priority_zero():
    for exponent in (0.0, 0.6):
        assert probabilities(np.array([0.0, 2.0, 2.0]), exponent).tolist() == [0, 0.5, 0.5]


def over_largest(probability, size, exponent):
    """As a learner uses them."""
    raw = priorities.importance_weights(probability, size, exponent)
    return raw / raw.max()


def test_T6_importance_weights():
    P = probabilities(FOUR, 0.6)
    near(priorities.importance_weights(P, 4, 0.4), [1.23254318, 1.04365016, 0.94687585, 0.88370588])
    near(over_largest(P, 4, 0.4), [1, 0.84674531, 0.76822936, 0.71697762])
    P = probabilities(FOUR, 0.9)
    near(P, [0.11066668, 0.20651132, 0.29745824, 0.38536376])
    near(over_largest(P, 4, 0.6), [1, 0.68777091, 0.55252829, 0.47302882])


def test_weights_of_two_tables():
    weights = over_largest(np.array([0.5, 0.1, 0.01]), np.array([10, 10, 100]), 1.0)
    near(weights, [0.2, 1.0, 1.0])


def test_uniform_weights():
    assert over_largest(np.full(8, 1 / 50), 50, 0.6).tolist() == [1.0] * 8


def test_T7_sum_tree():
    leaves, offsets = tree.tree_arrays(4)
    leaves[:4] = [3, 1, 4, 2]
    tree.rebuild(leaves, offsets)
    queries = {0: 0, 2.999: 0, 3: 1, 3.999: 1, 4: 2, 7.999: 2, 8: 3, 9.999: 3}
    assert {query: tree.search(leaves, offsets, float(query)) for query in queries} == queries
    leaves[2] = 0
    tree.rebuild(leaves, offsets)
    assert tree.total(leaves, offsets) == 6
    assert tree.search(leaves, offsets, 4.0) == 3
    assert {tree.search(leaves, offsets, float(u)) for u in np.linspace(0, 5.999, 600)} == {0, 1, 3}


def test_T11_epsilons_of_actors():
    eight = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    near(schedules.actor_epsilons(8), eight, 1e-9)
    near(schedules.actor_epsilons(8).mean(), 0.083279)
    near(schedules.actor_epsilons(4), [0.4, 0.0471556, 0.00555913, 0.00065536], 1e-7)
    near(schedules.actor_epsilons(256)[[1, 255]], [0.39006425, 0.00065536])
    near([schedules.actor_epsilons(360)[1], schedules.actor_epsilons(360).mean()], [0.39291691, 0.06264623])
    assert schedules.actor_epsilons(1).tolist() == [0.4]


def test_T12_sequence_priority():
    error = np.array([0.1, -0.5, 2.0, 0.4])
    near(priorities.sequence_priority(error, np.ones(4, bool), 0.9), 1.875)
    padded, valid = np.concatenate([error, [9.0, 9.0]]), np.array([1, 1, 1, 1, 0, 0], bool)
    near(priorities.sequence_priority(padded, valid, 0.9), 1.875)
    both = priorities.sequence_priority(np.stack([padded, padded], 1), np.stack([valid, ~valid], 1), 0.9)
    near(both, [1.875, 9.0])


def test_T21_eviction():
    want = [0.42877832, 0.32495320, 0.24626848]
    got = probabilities(np.array([1.0, 2.0, 4.0]), -0.4)
    near(got, want)
    near(got[0] / got[2], 1.74110113)


@pytest.mark.parametrize(("count", "some"), [(64, 0.22158039), (32, 0.11771909)])
def test_T32_demonstrations(count, some):
    rng, batches = np.random.default_rng(0), 40_000
    drawn = np.array([priorities.draw_demonstrations(rng, count, 1 / 256).sum() for _ in range(batches)])
    near(1 - (1 - 1 / 256) ** count, some)
    mean, variance = count / 256, count / 256 * (1 - 1 / 256)
    if count == 64:
        near([mean, variance], [0.25, 0.24902], 1e-5)
    assert abs(drawn.mean() - mean) < 4 * np.sqrt(variance / batches)
    assert abs((drawn > 0).mean() - some) < 4 * np.sqrt(some * (1 - some) / batches)
    assert abs(drawn.var() - variance) < 0.02
    assert not priorities.draw_demonstrations(rng, 1000, 0.0).any()
    assert priorities.draw_demonstrations(rng, 1000, 1.0).all()

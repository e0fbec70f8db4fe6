"""Running moments against NumPy on all the data at once; schedules at their ends."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ops import running, schedules


def moments(x):
    x = torch.as_tensor(x).double()
    mean = x.mean(0)
    return running.Moments(torch.tensor(float(len(x))).double(), mean, (x - mean).square().sum(0))


def packed_sums(x, shift):
    """Count, sum and sum of squares around a shift, as one vector that learners add up."""
    delta = x - shift.numpy()
    return torch.from_numpy(np.concatenate([[len(x)], delta.sum(0), np.square(delta).sum(0)]))


def check(got, data):
    assert float(got.count) == len(data)
    np.testing.assert_allclose(got.mean.numpy(), data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(running.variance(got).numpy(), data.var(0), rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.floats(-1e4, 1e4), st.integers(0, 2**31))
def test_merging(sizes, offset, seed):
    rng = np.random.default_rng(seed)
    chunks = [rng.normal(offset, 2.0, (n, 3)) for n in sizes]
    data = np.concatenate(chunks)
    if len(data) < 2:
        return
    total = running.empty((3,))
    for chunk in chunks:
        total = running.merge(total, moments(chunk))
    check(total, data)
    total = running.empty((3,))
    for chunk in reversed(chunks):
        total = running.merge(moments(chunk), total)
    check(total, data)


def test_sums_of_learners():
    """Rounds in which three learners add their packed sums relative to the shared, frozen mean."""
    rng = np.random.default_rng(0)
    state, seen = running.empty((4,)), []
    for round_ in range(5):
        shift = state.mean.clone()
        vectors = []
        for learner in range(3):
            seen.append(rng.normal(100 + round_ + 0.01 * learner, 0.1, (30, 4)))
            vectors.append(packed_sums(seen[-1], shift))
        state = running.merge_sums(state, running.unpack(torch.stack(vectors).sum(0), (4,)), shift)
    data = np.concatenate(seen)
    np.testing.assert_allclose(state.mean.numpy(), data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.variance(state).numpy(), data.var(0), rtol=1e-6)


def test_merging_nothing():
    m = moments(torch.randn(5, 2))
    for got in (running.merge(m, running.empty((2,))), running.merge(running.empty((2,)), m)):
        for a, b in zip(got, m, strict=True):
            torch.testing.assert_close(a, b)
    nothing = running.merge(running.empty((2,)), running.empty((2,)))
    assert torch.equal(running.variance(nothing), torch.ones(2).double())


def test_linear_schedule():
    assert [schedules.linear(f, 2.0, 0.0) for f in (-1, 0, 0.25, 1, 2)] == [2.0, 2.0, 1.5, 0.0, 0.0]

"""Running moments against NumPy on all the data at once; schedules at their ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.ops import running, schedules


def check(got, data):
    assert float(got.count) == len(data)
    np.testing.assert_allclose(got.mean.numpy(), data.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(running.variance(got).numpy(), data.var(0), rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.floats(-1e4, 1e4), st.integers(0, 2**31))
def test_merging_in_any_order_is_the_whole(sizes, offset, seed):
    rng = np.random.default_rng(seed)
    chunks = [rng.normal(offset, 2.0, (n, 3)) for n in sizes]
    data = np.concatenate(chunks)
    if len(data) < 2:
        return
    total = running.empty((3,))
    for chunk in chunks:
        total = running.merge(total, running.moments(torch.from_numpy(chunk)))
    check(total, data)
    total = running.empty((3,))
    for chunk in reversed(chunks):
        total = running.merge(running.moments(torch.from_numpy(chunk)), total)
    check(total, data)


def test_sums_all_reduced_by_several_learners():
    """Rounds in which three learners add their packed sums relative to the shared, frozen mean."""
    rng = np.random.default_rng(0)
    state, seen = running.empty((4,)), []
    for round_ in range(5):
        shift = state.mean.clone()
        vectors = []
        for learner in range(3):
            x = rng.normal(100 + round_, 0.1, (6, 5, 4))
            seen.append(x.reshape(-1, 4))
            part = running.sums(torch.from_numpy(x), shift, (0, 1))
            vectors.append(running.pack(part))
            assert vectors[-1].shape == (9,) and vectors[-1].dtype == torch.float64, learner
        state = running.merge_sums(state, running.unpack(torch.stack(vectors).sum(0), (4,)), shift)
    data = np.concatenate(seen)
    np.testing.assert_allclose(state.mean.numpy(), data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(running.variance(state).numpy(), data.var(0), rtol=1e-6)


def test_invalid_rows_change_nothing():
    x = torch.randn(4, 3, 2)
    valid = torch.ones(4, 3, dtype=torch.bool)
    valid[2:, 1] = False
    x[2:, 1] = torch.nan
    want = running.moments(x[valid])
    for got in (
        running.moments(x, (0, 1), valid),
        running.merge_sums(running.empty((2,)), running.sums(x, torch.ones(2), (0, 1), valid), torch.ones(2)),
    ):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="valid has shape"):
        running.moments(x, 0, valid)


def test_merging_nothing_changes_nothing():
    m = running.moments(torch.randn(5, 2))
    for got in (running.merge(m, running.empty((2,))), running.merge(running.empty((2,)), m)):
        for a, b in zip(got, m, strict=True):
            torch.testing.assert_close(a, b)
    nothing = running.merge(running.empty((2,)), running.empty((2,)))
    assert torch.equal(running.variance(nothing), torch.ones(2).double())


def test_scalars_float32_and_other_axes():
    x = torch.randn(7, 3)
    check(running.moments(x, (0, 1)), x.double().numpy().reshape(-1))
    got = running.moments(x, 1)
    torch.testing.assert_close(got.mean, x.double().mean(1))
    shifted = running.merge_sums(running.empty((7,)), running.sums(x, torch.zeros(7), 1), torch.zeros(7))
    torch.testing.assert_close(shifted.m2, got.m2)


def test_normalise():
    x = torch.tensor([[1.0, 5.0], [3.0, 500.0]])
    got = running.normalise(x, torch.tensor([2.0, 5.0]).double(), torch.tensor([4.0, 1.0]).double(), clip=10.0)
    torch.testing.assert_close(got, torch.tensor([[-0.5, 0.0], [0.5, 10.0]]))
    assert got.dtype == torch.float32
    torch.testing.assert_close(running.normalise(x, None, torch.tensor(4.0).double()), x / 2)


def test_schedules():
    assert schedules.constant(0.3, 7.0) == 7.0
    assert [schedules.linear(f, 2.0, 0.0) for f in (-1, 0, 0.25, 1, 2)] == [2.0, 2.0, 1.5, 0.0, 0.0]
    assert schedules.exponential(0.5, 1.0, 0.01) == pytest.approx(0.1)
    assert schedules.exponential(1.0, 1.0, 0.01) == pytest.approx(0.01)
    assert schedules.exponential(0.0, 0.3, 0.01) == 0.3
    with pytest.raises(ValueError, match="positive"):
        schedules.exponential(0.5, 1.0, 0.0)

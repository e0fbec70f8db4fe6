"""Ranks and estimates of evolution strategies: the numbers of specs/policy.md 11e."""

import numpy as np
import pytest

from shoal.ops.evolution import centred_ranks, noise_weights, shaped


def test_ranks_over_all_members():
    np.testing.assert_allclose(centred_ranks(np.array([10.0, -3, 5, 7])), [0.5, -0.5, -1 / 6, 1 / 6])
    np.testing.assert_allclose(noise_weights(np.array([10.0, -3, 5, 7]), True, 0.1, "ranks") * 4, [1, -1 / 3])


def test_ties_are_broken_by_order():
    np.testing.assert_allclose(centred_ranks(np.array([1.0, 1, 0, 1, 0])), [0, 0.25, -0.5, 0.5, -0.25])
    assert centred_ranks(np.array([3.0])).shape == (1,)


def test_mirrored_estimate_of_a_parabola():
    """F(x) = -x^2 at x = 1 with eps = 1 and sigma .1: the gradient is -2, without an error of the second order."""
    returns = np.array([-(1.1**2), -(0.9**2)])
    np.testing.assert_allclose(noise_weights(returns, True, 0.1, "raw") @ [1.0], -2.0, rtol=1e-12)


@pytest.mark.parametrize("mirrored", [True, False])
def test_estimate_of_a_linear_function(mirrored):
    """The estimate of a linear function is its gradient."""
    rng, slope = np.random.default_rng(0), np.array([1.0, -2.0, 0.5])
    estimates = []
    for _ in range(4000):
        noise = rng.standard_normal((4, 3))
        members = np.stack([noise, -noise], 1).reshape(-1, 3) if mirrored else noise
        estimates.append(noise_weights(0.1 * members @ slope + 7.0 * mirrored, mirrored, 0.1, "raw") @ noise)
    error = np.std(estimates, 0) / np.sqrt(len(estimates))
    assert (np.abs(np.mean(estimates, 0) - slope) < 3.5 * error).all()


def test_an_outlier_does_not_move_ranks():
    returns = np.array([1.0, 2, 3, 4])
    np.testing.assert_array_equal(centred_ranks(returns), centred_ranks(np.array([1.0, 2, 3, 4e9])))
    assert shaped(np.array([1.0, 2, 3, 4e9]), "normalised")[:3].std() < 1e-6  # what is left of the others
    np.testing.assert_array_equal(shaped(np.full(4, 5.0), "normalised"), np.zeros(4))

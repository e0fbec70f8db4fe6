"""T22-T25 of specs/value.md, and the density of SAC's policy: it integrates to 1 and agrees with its entropy and its gradients."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.ops import off_policy
from shoal.ops.distributions import tanh_gaussian_action, tanh_gaussian_entropy, tanh_gaussian_from_noise, tanh_gaussian_log_prob

tensor = torch.tensor


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), atol=tolerance, rtol=0)


# ---------------------------------------------------------------------------------------------- numbers worked by hand
def test_T22_density_of_a_squashed_gaussian():
    action, log_prob = tanh_gaussian_from_noise(tensor([[0.0]]), tensor([[0.0]]), tensor([[0.5]]))
    assert torch.equal(action, tanh_gaussian_action(tensor([[0.0]]), tensor([[0.0]]), tensor([[0.5]])))
    close(action, [[0.46211716]])
    close(log_prob, [-1.04393853 + 0.24022901])


def test_T23_smoothed_action_clipped_twice():
    """T23: a smoothed target action is clipped twice."""
    close(off_policy.smoothed_action(tensor([0.9]), tensor([3.5]), 0.2, 0.5), [1.0])  # noise 0.7 -> 0.5, 1.4 -> 1
    close(off_policy.smoothed_action(tensor([0.1]), tensor([-3.5]), 0.2, 0.5), [-0.4])
    close(1 + 0.99 * off_policy.clipped_double_q(tensor([[5.0], [4.0]])), [4.96])


def test_T24_the_soft_target():
    found = off_policy.soft_values(tensor([[5.0], [4.0]]), tensor([-0.8]), tensor([0.2]))
    close(1 + 0.99 * found, [5.1184])
    close(off_policy.soft_values(tensor([[5.0], [4.0]]), tensor([-0.8]), 0.0), [4.0])


def test_T25_temperature():
    """T25: the temperature falls while the entropy is above its target."""
    alpha = tensor(0.2, requires_grad=True)
    loss = off_policy.temperature_loss(alpha, tensor(0.8), -1.0)
    close(loss, 0.36)
    loss.backward()
    close(alpha.grad, 1.8)


def test_discrete_expectations():
    """Discrete expectations are sums over actions."""
    q = tensor([[[1.0, 3.0]], [[2.0, 1.0]]])  # two critics, one observation, two actions
    log_probs = tensor([[0.25, 0.75]]).log()
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    close(off_policy.expected_soft_values(q, log_probs, 0.1), [0.25 * 1 + 0.75 * 1 + 0.1 * entropy])
    close(off_policy.expected_soft_policy_loss(q, log_probs, 0.1), [-1 - 0.1 * entropy])


# ---------------------------------------------------------------------------------------------- densities
@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5), (0.3, -3.0)])
def test_probabilities_integrate_to_one(mean, log_std):
    """Over [-1, 1], on the grid that tanh makes of a fine one: without the correction, or with the wrong sign, it does not."""
    u = torch.linspace(mean - 12, mean + 12, 200_001, dtype=torch.float64)
    m, s = torch.full_like(u, mean), torch.full_like(u, log_std)
    action, log_prob = tanh_gaussian_from_noise(m.unsqueeze(1), s.unsqueeze(1), ((u - mean) / math.exp(log_std)).unsqueeze(1))
    assert float(torch.trapezoid(log_prob.exp(), action[:, 0])) == pytest.approx(1.0, abs=1e-4)
    inside = action[:, 0].abs() < 0.999
    torch.testing.assert_close(log_prob[inside], tanh_gaussian_log_prob(m.unsqueeze(1), s.unsqueeze(1), action)[inside], atol=1e-6,
                               rtol=1e-6)


def test_log_probabilities_and_entropy():
    """Sampled log probabilities agree with the entropy."""
    generator = torch.Generator().manual_seed(0)
    mean, log_std = tensor([0.4, -0.8]).expand(400_000, 2), tensor([-0.5, 0.3]).expand(400_000, 2)
    _, log_prob = tanh_gaussian_from_noise(mean, log_std, torch.randn(400_000, 2, generator=generator))
    error = 5 * float(log_prob.std()) / math.sqrt(400_000)
    assert float(-log_prob.mean()) == pytest.approx(float(tanh_gaussian_entropy(mean[0], log_std[0])), abs=error)


def test_gradients_flow_through_the_sample():
    """Of E[a] and E[log pi], by finite differences with the same noise."""
    noise = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)

    def score(p):
        action, log_prob = tanh_gaussian_from_noise(p[0].expand(2000, 1), p[1].expand(2000, 1), noise)
        return (action.mean() * 2 + log_prob.mean()).sum()

    score(params).backward()
    for k in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[k] = 1e-6
        close(params.grad[k], (score(params + step) - score(params - step)).item() / 2e-6, 1e-6)

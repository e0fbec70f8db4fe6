"""Losses of offline learning: golden numbers of specs/value.md, section 14."""

import torch

from shoal.ops import distributions as dist
from shoal.ops.offline import action_gap, advantage_weights, expectile_loss, sampled_logsumexp


def test_T41_gap_of_discrete_actions():
    q = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], requires_grad=True)
    found = action_gap(q, torch.tensor([0, 2]))
    torch.testing.assert_close(found, torch.tensor([2.40760596, 0.40760596]))
    found[0].backward()
    torch.testing.assert_close(q.grad[0], torch.tensor([-0.90996943, 0.24472847, 0.66524096]))


def test_T41_negative_log_likelihood():
    found = -dist.categorical_log_prob(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    torch.testing.assert_close(found, torch.tensor([1.40760596]))


def test_T42_expectile():
    torch.testing.assert_close(expectile_loss(torch.tensor([2.0, -2.0]), 0.7), torch.tensor([2.8, 1.2]))


def test_T43_advantage_weights_are_cut_off():
    found = advantage_weights(torch.tensor([0.5, 2.0, 1e4]), 3.0, 100.0)
    torch.testing.assert_close(found, torch.tensor([4.48168907, 100.0, 100.0]))


def test_T44_sampled_log_sum_exp():
    """Two uniform actions in one dimension, whose density is a half, and two of the policy."""
    log_prob = torch.tensor([-0.69314718, -0.69314718, -0.7, -0.2], requires_grad=True)
    q = torch.tensor([1.0, 2.0, 1.5, 2.5], requires_grad=True)
    torch.testing.assert_close((q - log_prob).detach(), torch.tensor([1.69314718, 2.69314718, 2.2, 2.7]))
    found = sampled_logsumexp(q, log_prob)
    torch.testing.assert_close(found.detach(), torch.tensor(3.78690007))
    torch.testing.assert_close(found.detach() - torch.tensor(4.0).log(), torch.tensor(2.40060571))
    found.backward()
    assert log_prob.grad is None and q.grad is not None

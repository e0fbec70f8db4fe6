"""Losses of offline learning: golden numbers of specs/value.md, section 14."""

import torch

from shoal.ops import distributions as dist
from shoal.ops.offline import advantage_weights, expectile_loss


def test_T41_negative_log_likelihood():
    found = -dist.categorical_log_prob(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    torch.testing.assert_close(found, torch.tensor([1.40760596]))


def test_T42_expectile():
    torch.testing.assert_close(expectile_loss(torch.tensor([2.0, -2.0]), 0.7), torch.tensor([2.8, 1.2]))


def test_T43_advantage_weights_are_cut_off():
    found = advantage_weights(torch.tensor([0.5, 2.0, 1e4]), 3.0, 100.0)
    torch.testing.assert_close(found, torch.tensor([4.48168907, 100.0, 100.0]))

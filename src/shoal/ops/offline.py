"""Losses of learning from recorded data alone, per element.

Papers: MARWIL (Wang et al. 2018, NeurIPS), CQL (Kumar et al. 2020, 2006.04779), TD3+BC (Fujimoto and Gu 2021, 2106.06860), IQL
(Kostrikov et al. 2021, 2110.06169). Losses have the shape of their inputs; importance weights are applied by the learner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.ops.value import chosen

__all__ = ["action_gap", "advantage_weights", "expectile_loss", "sampled_logsumexp"]


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """|tau - 1(u < 0)| u^2: above a half, values that are too small count more than values that are too large."""
    return torch.where(error < 0, 1.0 - expectile, expectile) * error.square()


@torch.no_grad()
def advantage_weights(advantage: Tensor, beta: float, limit: float) -> Tensor:
    """min(exp(beta A), limit): how much a recorded action counts."""
    return (beta * advantage).exp().clamp(max=limit)


def action_gap(q: Tensor, action: Tensor) -> Tensor:
    """log sum_a exp q(s, a) - q(s, a_data), ``[..., A]`` and ``[...]`` -> ``[...]``: what CQL of discrete actions keeps small."""
    return torch.logsumexp(q, -1) - chosen(q, action)


def sampled_logsumexp(q: Tensor, log_prob: Tensor) -> Tensor:
    """log sum exp of q over sampled actions, each divided by the density it was drawn with: ``[..., N]`` -> ``[...]``. As in the
    released program it is a sum, not a mean: the two differ by log N."""
    return torch.logsumexp(q - log_prob.detach(), -1)

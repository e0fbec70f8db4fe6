"""Targets and losses of actor-critics that learn from replay, per element.

Papers: TD3 (Fujimoto et al. 2018, 1802.09477), SAC (Haarnoja et al. 2018, 1812.05905), SAC of discrete actions (Christodoulou 2019,
1910.07207).

``q`` are the values of several critics, ``[count, ...]``. Actions lie in [-1, 1], and log-probabilities are densities there. Losses
have the shape of their inputs: importance weights are applied by the learner, never inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clipped_double_q", "expected_soft_policy_loss", "expected_soft_values", "smoothed_action", "soft_policy_loss",
           "soft_values", "temperature_loss"]


@torch.no_grad()
def smoothed_action(action: Tensor, noise: Tensor, std: float, limit: float) -> Tensor:
    """The target action of TD3: with clipped noise, so that the critic is smooth around it. ``noise`` is standard normal."""
    return (action + (std * noise).clamp(-limit, limit)).clamp(-1.0, 1.0)


def clipped_double_q(q: Tensor) -> Tensor:
    """The smallest of the critics' values."""
    return q.amin(0)


@torch.no_grad()
def soft_values(q_t: Tensor, log_prob: Tensor, alpha: Tensor | float) -> Tensor:
    """The bootstrap of SAC: the value of the next action with its entropy."""
    return clipped_double_q(q_t) - alpha * log_prob


def soft_policy_loss(q: Tensor, log_prob: Tensor, alpha: Tensor | float) -> Tensor:
    """What the actor of SAC descends; q and log_prob are of its own reparameterised action."""
    return alpha * log_prob - clipped_double_q(q)


@torch.no_grad()
def expected_soft_values(q_t: Tensor, log_probs: Tensor, alpha: Tensor | float) -> Tensor:
    """The same over discrete actions, without sampling: q_t ``[count, ..., A]`` and log_probs ``[..., A]`` -> ``[...]``."""
    return (log_probs.exp() * soft_values(q_t, log_probs, alpha)).sum(-1)


def expected_soft_policy_loss(q: Tensor, log_probs: Tensor, alpha: Tensor | float) -> Tensor:
    """What the actor of SAC descends, averaged over discrete actions. No gradient flows into the values."""
    return (log_probs.exp() * soft_policy_loss(q.detach(), log_probs, alpha)).sum(-1)


def temperature_loss(alpha: Tensor, entropy: Tensor, target_entropy: float) -> Tensor:
    """J(alpha) = alpha (H - target): alpha falls while the policy's entropy is above its target."""
    return alpha * (entropy.detach() - target_entropy)

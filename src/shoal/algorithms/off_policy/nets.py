"""What is learned: an actor, critics and, of sac, a temperature. The parts are named as the phases are."""

from __future__ import annotations

import math

import gymnasium as gym
import torch
from torch import Tensor, nn

from shoal.algorithms.common.plan import AlgorithmPlan
from shoal.nets import build_actor, build_critic, build_policy, build_squashed_actor, build_values

__all__ = ["DeterministicNet", "DiscreteSoftNet", "SoftNet", "Temperature"]


class DeterministicNet(nn.Module):
    """A deterministic actor and its critics (ddpg, td3)."""

    def __init__(self, plan: AlgorithmPlan, space: gym.spaces.Box, critics: int, seed: int) -> None:
        super().__init__()
        self.actor = build_actor(plan.seen_space, space, plan.net, seed)
        self.critic = build_critic(plan.seen_space, space, plan.net, seed + 1, critics)


class Temperature(nn.Module):
    """alpha, learned as its logarithm: it stays positive."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self) -> Tensor:
        return self.log_alpha.exp()


class SoftNet(nn.Module):
    """A squashed Gaussian actor, two critics and a temperature (sac)."""

    def __init__(self, plan: AlgorithmPlan, space: gym.spaces.Box, temperature: Temperature | None, seed: int) -> None:
        super().__init__()
        self.actor = build_squashed_actor(plan.seen_space, space, plan.net, seed)
        self.critic = build_critic(plan.seen_space, space, plan.net, seed + 1, 2)
        self.temperature = temperature


class DiscreteSoftNet(nn.Module):
    """A categorical actor, two critics and a temperature (sac with discrete actions)."""

    def __init__(self, plan: AlgorithmPlan, actions: int, temperature: Temperature | None, seed: int) -> None:
        super().__init__()
        self.actor = build_policy(plan.seen_space, actions, plan.net, seed)
        self.critic = build_values(plan.seen_space, actions, plan.net, seed + 1, 2)
        self.temperature = temperature

"""What is learned: an actor, critics and what else an algorithm has. The parts are named as the phases are."""

from __future__ import annotations

import math

import gymnasium as gym
import torch
from torch import Tensor, nn

from shoal.algorithms.common.plan import AlgorithmPlan
from shoal.nets import (
    GaussianActor,
    PolicyNetwork,
    StackedValues,
    build_actor,
    build_critic,
    build_gaussian_actor,
    build_policy,
    build_squashed_actor,
    build_values,
)

__all__ = ["ClonedNet", "DeterministicNet", "DiscreteSoftNet", "ImplicitNet", "SoftNet", "Temperature", "Tracked"]


class DeterministicNet(nn.Module):
    """A deterministic actor and its critics (ddpg, td3); `scaled` (td3_bc): with the mean size of what its actions are worth."""

    def __init__(self, plan: AlgorithmPlan, space: gym.spaces.Box, critics: int, seed: int, scaled: bool = False) -> None:
        super().__init__()
        self.actor = build_actor(plan.seen_space, space, plan.net, seed)
        self.critic = build_critic(plan.seen_space, space, plan.net, seed + 1, critics)
        self.scale = Tracked(1.0) if scaled else None


class Temperature(nn.Module):
    """alpha, learned as its logarithm: it stays positive."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(start)))

    def forward(self) -> Tensor:
        return self.log_alpha.exp()


class SoftNet(nn.Module):
    """A squashed Gaussian actor, two critics and a temperature (sac); cql may add a multiplier of its own loss."""

    multiplier: Temperature | None

    def __init__(self, plan: AlgorithmPlan, space: gym.spaces.Box, temperature: Temperature | None, seed: int) -> None:
        super().__init__()
        self.multiplier = None
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


class Tracked(nn.Module):
    """A mean over batches through which no gradient flows: a number that descends (x - value)^2 / 2 in a phase of its own.

    So several learners have the mean of their joined batch, like any parameter: with sgd and a learning rate of 1 that of the last
    batch, with a smaller rate a running mean.
    """

    def __init__(self, start: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(start))

    def loss(self, x: Tensor) -> Tensor:
        """Of each element."""
        return 0.5 * (self.value - x.detach()).square()

    def forward(self) -> Tensor:
        return self.value.detach()


def cloned_actor(plan: AlgorithmPlan, space: gym.spaces.Box | gym.spaces.Discrete, seed: int) -> GaussianActor | PolicyNetwork:
    """A policy that is fitted to recorded actions: a Gaussian, or logits."""
    if isinstance(space, gym.spaces.Box):
        return build_gaussian_actor(plan.seen_space, space, plan.net, seed)
    return build_policy(plan.seen_space, int(space.n), plan.net, seed)


def state_value(plan: AlgorithmPlan, seed: int) -> StackedValues:
    """V(s), as [1, N, 1]."""
    return build_values(plan.seen_space, 1, plan.net, seed, 1)


class ClonedNet(nn.Module):
    """A policy of recorded actions; with `values` (marwil) a value of states, and the mean square of advantages."""

    def __init__(self, plan: AlgorithmPlan, space: gym.spaces.Box | gym.spaces.Discrete, seed: int, values: bool = False) -> None:
        super().__init__()
        self.actor = cloned_actor(plan, space, seed)
        if values:
            self.value = state_value(plan, seed + 1)
            self.scale = Tracked(1.0)


class ImplicitNet(nn.Module):
    """A policy of recorded actions, two critics of them and a value of states (iql)."""

    def __init__(self, plan: AlgorithmPlan, space: gym.spaces.Box | gym.spaces.Discrete, seed: int) -> None:
        super().__init__()
        self.actor = cloned_actor(plan, space, seed)
        boxed = isinstance(space, gym.spaces.Box)
        self.critic = build_critic(plan.seen_space, space, plan.net, seed + 1, 2) if boxed else \
            build_values(plan.seen_space, int(space.n), plan.net, seed + 1, 2)  # type: ignore[union-attr]  # Discrete
        self.value = state_value(plan, seed + 2)

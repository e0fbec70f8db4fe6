"""Nets of actor-critics that learn from replay (DDPG, TD3, SAC): policies, and critics Q(s, a).

    observation ──torso──> features ──linear──> parameters of a policy                                PolicyNetwork
    observation ──torso──> features ──linear, tanh──> action in the bounds of the space               DeterministicActor
    observation ──torso──> features ──linear──> m, log s ──tanh(m + s z)──> action in [-1, 1]         SquashedGaussianActor
    observation ──torso──> features ──linear──> m ──tanh(m) + s z, cut off──> action in [-1, 1]       GaussianActor
    observation ──CNNs, or as it is──┬──MLP of net.hidden──linear──> Q(s, a), N times                 Critic
    action, scaled to [-1, 1] ───────┘

Nets work with actions in [-1, 1], flat [N, D]; `ActionRange` scales them to the bounds of the space and back. All of them read
single observations [N, ...]: they have no memory. Critics of the same shape are computed together (StackedValues): two small
products take as long as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.cores import in_float32
from shoal.nets.encoder import Observation, encoder
from shoal.nets.heads import ActionRange
from shoal.nets.net_config import NetConfig
from shoal.nets.torsos import ACTIVATIONS, orthogonal, set_orthogonal
from shoal.nets.trunk import seeded
from shoal.ops.distributions import gaussian_log_prob, tanh_gaussian_action, tanh_gaussian_from_noise, tanh_gaussian_log_prob

LOG_STD = (-20.0, 2.0)  # of the squashed Gaussian; gradients vanish only outside of it
PLAIN_LOG_STD = (-5.0, 2.0)  # of the Gaussian that is not squashed

__all__ = ["Critic", "DeterministicActor", "GaussianActor", "PolicyNetwork", "SquashedGaussianActor", "StackedValues",
           "bounded_range", "build_actor", "build_critic", "build_gaussian_actor", "build_policy", "build_squashed_actor",
           "build_values"]


def build_actor(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], config: NetConfig | None = None, seed: int | None = None
) -> DeterministicActor:
    """The actor for these spaces. ``seed`` makes the initial weights reproducible without touching the global generator."""
    config, box = _checked_box(action_space, config, "a deterministic actor")
    with seeded(seed):
        return DeterministicActor(observation_space, box, config)


def build_squashed_actor(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], config: NetConfig | None = None, seed: int | None = None
) -> SquashedGaussianActor:
    """The stochastic actor for these spaces. ``seed`` as for build_actor."""
    config, box = _checked_box(action_space, config, "a squashed Gaussian actor")
    with seeded(seed):
        return SquashedGaussianActor(observation_space, box, config)


def build_gaussian_actor(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], config: NetConfig | None = None, seed: int | None = None
) -> GaussianActor:
    """The stochastic actor for these spaces that is fitted to recorded actions. ``seed`` as for build_actor."""
    config, box = _checked_box(action_space, config, "a Gaussian actor")
    with seeded(seed):
        return GaussianActor(observation_space, box, config)


def build_critic(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    config: NetConfig | None = None,
    seed: int | None = None,
    count: int = 1,
) -> Critic:
    """``count`` independent critics for these spaces. ``seed`` as for build_actor."""
    config, box = _checked_box(action_space, config, "a critic of actions")
    with seeded(seed):
        return Critic(observation_space, box, config, count)


def build_policy(
    observation_space: gym.Space[Any], outputs: int, config: NetConfig | None = None, seed: int | None = None
) -> PolicyNetwork:
    """A net with this many policy parameters: means and log deviations, or logits. ``seed`` as for build_actor."""
    config = _checked(config, "this kind of policy")
    with seeded(seed):
        return PolicyNetwork(observation_space, outputs, config)


def build_values(
    observation_space: gym.Space[Any], actions: int, config: NetConfig | None = None, seed: int | None = None, count: int = 1
) -> StackedValues:
    """``count`` independent nets of action values: observation -> Q [count, N, actions]. ``seed`` as for build_actor."""
    config = _checked(config, "a critic of discrete actions")
    with seeded(seed):
        return StackedValues(observation_space, 0, actions, config, count)


def bounded_range(action_space: spaces.Box) -> ActionRange:
    """Between [-1, 1] and the bounds of the space, which must be finite."""
    return ActionRange(action_space, "an actor or critic in [-1, 1]", "use a Gaussian policy, for instance with ppo")


class PolicyNetwork(nn.Module):
    """observation [N, ...] -> parameters of a policy [N, outputs], in float32. They start near 0."""

    def __init__(self, observation_space: gym.Space[Any], outputs: int, config: NetConfig) -> None:
        super().__init__()
        self.torso = encoder(observation_space, config)
        self.out = orthogonal(nn.Linear(self.torso.features, outputs), 0.01)

    def forward(self, observation: Observation) -> Tensor:
        return in_float32(self.out, self.torso(observation))


class DeterministicActor(PolicyNetwork):
    """observation [N, ...] -> action [N, *shape], within the bounds of the action space. It starts near their middle."""

    def __init__(self, observation_space: gym.Space[Any], action_space: spaces.Box, config: NetConfig) -> None:
        super().__init__(observation_space, torch.Size(action_space.shape).numel(), config)
        self._range, self._shape = bounded_range(action_space), action_space.shape

    def unit(self, observation: Observation) -> Tensor:
        """The action in [-1, 1], flat [N, D]."""
        return torch.tanh(super().forward(observation))

    def forward(self, observation: Observation) -> Tensor:
        unit = self.unit(observation)
        return self._range.scaled(unit).reshape(len(unit), *self._shape)


class SquashedGaussianActor(PolicyNetwork):
    """A policy tanh(m + s z), z standard normal, whose m and s depend on the observation (SAC). It starts near m = 0, s = 1.

    Its actions lie in [-1, 1], flat [N, D], and so do their densities.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: spaces.Box, config: NetConfig) -> None:
        super().__init__(observation_space, 2 * torch.Size(action_space.shape).numel(), config)

    def sample(self, observation: Observation, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions made of standard normal ``noise`` [N, D], and their log-probabilities [N]; gradients flow through both."""
        return tanh_gaussian_from_noise(*self.parameters_of(observation), noise)

    def samples(self, observation: Observation, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Several actions [N, K, D] for each observation, made of ``noise`` [N, K, D], and their log-probabilities [N, K]."""
        mean, log_std = super().forward(observation).unsqueeze(1).chunk(2, -1)
        return tanh_gaussian_from_noise(mean, log_std.clamp(*LOG_STD), noise)

    def action(self, observation: Observation, noise: Tensor) -> Tensor:
        """The actions of `sample`."""
        return tanh_gaussian_action(*self.parameters_of(observation), noise)

    def unit_log_prob(self, observation: Observation, unit: Tensor) -> Tensor:
        """[N] of actions in [-1, 1], flat [N, D]; less exact where tanh is flat."""
        return tanh_gaussian_log_prob(*self.parameters_of(observation), unit)

    def parameters_of(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """m and log s, [N, D] each."""
        mean, log_std = super().forward(observation).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def unit(self, observation: Observation) -> Tensor:
        """The median action."""
        return torch.tanh(super().forward(observation).chunk(2, -1)[0])


class GaussianActor(PolicyNetwork):
    """A policy tanh(m) + s z, z standard normal, cut off at [-1, 1] when it acts; s is learned, the same everywhere (IQL).

    Nothing is squashed but the mean, so that recorded actions at the bounds have a density. It is one in [-1, 1]^D.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: spaces.Box, config: NetConfig) -> None:
        size = torch.Size(action_space.shape).numel()
        super().__init__(observation_space, size, config)
        self.log_std = nn.Parameter(torch.zeros(size))
        self._range = bounded_range(action_space)

    def parameters_of(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Mean and log deviation, [N, D] each."""
        mean = self.unit(observation)
        return mean, self.log_std.clamp(*PLAIN_LOG_STD).expand_as(mean)

    def unit(self, observation: Observation) -> Tensor:
        """The mean."""
        return torch.tanh(super().forward(observation))

    def action(self, observation: Observation, noise: Tensor) -> Tensor:
        """Actions made of standard normal ``noise`` [N, D]."""
        return torch.addcmul(self.unit(observation), self.log_std.clamp(*PLAIN_LOG_STD).exp(), noise).clamp(-1.0, 1.0)

    def log_prob(self, observation: Observation, action: Tensor) -> Tensor:
        """[N] of actions [N, *shape] within the bounds of the space."""
        return self.unit_log_prob(observation, self.recorded(action))

    def unit_log_prob(self, observation: Observation, unit: Tensor) -> Tensor:
        """[N] of actions in [-1, 1], flat [N, D]."""
        return gaussian_log_prob(self.unit(observation), self.log_std.clamp(*PLAIN_LOG_STD), unit)

    def recorded(self, action: Tensor) -> Tensor:
        """Actions [N, *shape] of the environment as they lie in [-1, 1], flat [N, D]."""
        return self._range.unit(action.flatten(1))


class Critic(nn.Module):
    """observation [N, ...], action [N, *shape] -> Q [count, N]. The critics share no weights."""

    def __init__(self, observation_space: gym.Space[Any], action_space: spaces.Box, config: NetConfig, count: int) -> None:
        super().__init__()
        self.values = StackedValues(observation_space, torch.Size(action_space.shape).numel(), 1, config, count)
        self._range = bounded_range(action_space)

    def of_unit(self, observation: Observation, unit: Tensor) -> Tensor:
        """Q [count, N] of actions in [-1, 1], flat [N, D]."""
        found: Tensor = self.values(observation, unit)
        return found.squeeze(2)

    def forward(self, observation: Observation, action: Tensor) -> Tensor:
        return self.of_unit(observation, self._range.unit(action.flatten(1)))


class StackedLinear(nn.Module):
    """The weights of linear layers [count, N, inputs] -> [count, N, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int, gain: float = math.sqrt(2)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(count, 1, outputs))
        for weight in self.weight:
            set_orthogonal(weight, gain)


class StackedMLP(nn.Module):
    """[count, N, inputs] -> [count, N, outputs]: dense layers with activations, then a linear one."""

    def __init__(self, count: int, inputs: int, sizes: Sequence[int], outputs: int, activation: str) -> None:
        super().__init__()
        widths = [inputs, *sizes]
        self.layers = nn.ModuleList(StackedLinear(count, i, o) for i, o in pairwise(widths))
        self.out = StackedLinear(count, widths[-1], outputs, 1.0)
        self._activation = ACTIVATIONS[activation]
        *self._hidden, self._last = [(layer.weight, layer.bias) for layer in (*self.layers, self.out)]  # faster than modules

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in self._hidden:
            x = self._activation(torch.baddbmm(bias, x, weight.mT))
        weight, bias = self._last
        return torch.baddbmm(bias, x, weight.mT)


class StackedValues(nn.Module):
    """observation [N, ...], and `inputs` more numbers [N, inputs] -> values [count, N, outputs]. The nets share no weights.

    The numbers join before the dense layers (Fujimoto et al. 2018). Values are float32 under autocast too, as those of QNetwork.
    """

    def __init__(self, observation_space: gym.Space[Any], inputs: int, outputs: int, config: NetConfig, count: int) -> None:
        super().__init__()
        first = encoder(observation_space, replace(config, hidden=()))  # vectors as they are, images through CNNs
        learned = any(True for _ in first.parameters())
        more = (encoder(observation_space, replace(config, hidden=())) for _ in range(count - 1 if learned else 0))
        self.torsos = nn.ModuleList([first, *more])
        self.mlp = StackedMLP(count, first.features + inputs, config.hidden, outputs, config.activation)
        self.count = count

    def forward(self, observation: Observation, inputs: Tensor | None = None) -> Tensor:
        if len(self.torsos) == 1:
            x = self.torsos[0](observation)
            x = (x if inputs is None else torch.cat([x, inputs], 1)).expand(self.count, -1, -1)
        else:
            seen = [torso(observation) for torso in self.torsos]
            x = torch.stack(seen if inputs is None else [torch.cat([one, inputs], 1) for one in seen])
        return in_float32(self.mlp, x)


def _checked_box(action_space: gym.Space[Any], config: NetConfig | None, who: str) -> tuple[NetConfig, spaces.Box]:
    if not isinstance(action_space, spaces.Box):
        raise ConfigError(f"{who} needs Box actions, but the action space is {action_space}")
    bounded_range(action_space)
    return _checked(config, who), action_space


def _checked(config: NetConfig | None, who: str) -> NetConfig:
    config = config or NetConfig()
    config.validate()
    if config.recurrent != "none":
        raise ConfigError(f"--net.recurrent is {config.recurrent!r}, but {who} has no memory; use --net.recurrent none")
    if config.prev_action_reward:
        raise ConfigError(f"{who} does not see the previous action and reward; drop --net.prev-action-reward")
    return config

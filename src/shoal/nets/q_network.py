"""The action-value net: a trunk, and a head that gives one value for each discrete action.

    observation ──Trunk──> features ──> Q(s, .)                       plain
                                   ├── hidden ──> V(s)      ┐
                                   └── hidden ──> A(s, .)   ┴──> Q = V + A - mean A     dueling

With atoms (C51) the head gives the logits of a distribution of returns for each action, V and A are those of every atom, and Q is
the distribution's mean. With noisy_sigma the layers of the head are noisy ones (noisy.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.cores import State, in_float32
from shoal.nets.encoder import Observation
from shoal.nets.heads import Categorical
from shoal.nets.net_config import NetConfig
from shoal.nets.noisy import NoisyHead
from shoal.nets.torsos import MLP, orthogonal
from shoal.nets.trunk import Trunk, TrunkNetwork, seeded
from shoal.ops import c51
from shoal.ops.value import dueling

__all__ = ["HeadConfig", "QNetwork", "QOutput", "build_q"]


@dataclass(frozen=True)
class HeadConfig:
    """What an algorithm says of its head."""

    dueling: bool = False
    hidden: int = 64
    """Units of each stream of a dueling head."""
    zero: bool = False
    """All action values begin at 0 (with atoms in the middle of their range), so that the greedy action is the first one."""
    atoms: int = 0
    """Atoms of the distributions of returns; 0 for plain values."""
    value_min: float = -10.0
    """What the first atom stands for."""
    value_max: float = 10.0
    """What the last atom stands for."""
    noisy_sigma: float = 0.0
    """What the deviations of noisy layers begin with; 0 for plain layers."""


class QOutput(NamedTuple):
    """Of unroll, with a leading T, and of step, without."""

    q: Tensor
    """Action values [T, B, A]."""
    state: State
    """Recurrent state after the last step, [B, H] each; {} for feed-forward nets."""
    states: State
    """Of unroll: the state after every step, [T, B, H] each."""


def build_q(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], config: NetConfig, head: HeadConfig, seed: int | None = None
) -> QNetwork:
    """The net for these spaces. ``seed`` makes the initial weights reproducible without touching the global generator."""
    config.validate()
    if not isinstance(action_space, gym.spaces.Discrete):
        raise ConfigError(f"action values need Discrete actions, but the action space is {action_space}")
    with seeded(seed):
        return QNetwork(observation_space, int(action_space.n), config, head)


class QNetwork(TrunkNetwork):
    """See the module. A is the number of actions, Z that of atoms."""

    support: Tensor

    def __init__(self, observation_space: gym.Space[Any], actions: int, config: NetConfig, head: HeadConfig) -> None:
        super().__init__()
        self.actions, self.atoms = actions, head.atoms
        self.trunk = Trunk(observation_space, config, Categorical(actions).encode, actions)
        features, gain, each = self.trunk.features, 0.0 if head.zero else 1.0, max(head.atoms, 1)
        self.streams: MLP | None = None
        self.noisy: NoisyHead | None = None
        if head.noisy_sigma > 0:
            self.noisy = NoisyHead(features, each, actions * each, head.noisy_sigma, gain, head.hidden if head.dueling else 0)
        elif head.dueling:
            self.streams = MLP(features, (2 * head.hidden,), "relu")  # both hidden layers side by side
            self.value_out, self.out = nn.Linear(head.hidden, each), nn.Linear(head.hidden, actions * each)
            orthogonal(self.value_out, gain)
            orthogonal(self.out, gain)
        else:
            self.out = orthogonal(nn.Linear(features, actions * each), gain)
        support = torch.linspace(head.value_min, head.value_max, head.atoms)
        self.register_buffer("support", support, persistent=False)  # the atoms [Z]

    @property
    def noise_size(self) -> int:
        """How many normal random numbers the noise of a pass is made of; 0 without noisy layers."""
        return 0 if self.noisy is None else self.noisy.noise_size

    def forward(self, observation: Observation, noise: Tensor | None = None) -> Tensor:
        """Action values [N, A] of single observations [N, ...]: only for nets without memory.

        `noise` [noise_size] is for all rows, [N, noise_size] for each its own; None computes without.
        """
        return self._values(self._read(self.trunk.torso(observation), noise))

    def logits(self, observation: Observation, noise: Tensor | None = None) -> Tensor:
        """With atoms: the logits [N, A, Z] that `forward` gives the means of."""
        return self._read(self.trunk.torso(observation), noise)

    def unroll(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> QOutput:
        """A sequence [T, B, ...], without noise."""
        x, state, states = self.trunk.unroll(observation, first, state, prev_action, prev_reward)
        return QOutput(self._values(self._read(x)), state, states)

    def estimate(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> QOutput:
        """One step [B, ...] for acting, without noise. ``first=None`` means that no episode starts."""
        x, state = self.trunk.step(observation, first, state, prev_action, prev_reward)
        return QOutput(self._values(self._read(x)), state, {})

    step = torch.no_grad()(estimate)  # for acting

    def _values(self, found: Tensor) -> Tensor:
        return c51.expected(found, self.support) if self.atoms else found

    def _read(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """In float32 under autocast too: the values of two actions may differ by less than bfloat16 tells apart."""
        return in_float32(self._head, x, noise)

    def _head(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Action values [..., A], or with atoms logits [..., A, Z]."""
        value: Tensor | None = None
        if self.noisy is not None:
            value, found = self.noisy(x, noise)
        elif self.streams is None:
            found = F.linear(x, self.out.weight, self.out.bias)
        else:
            for_value, for_actions = self.streams(x).chunk(2, -1)
            value, found = self.value_out(for_value), self.out(for_actions)
        if not self.atoms:
            return found if value is None else dueling(value, found)
        found = found.unflatten(-1, (self.actions, self.atoms))
        return found if value is None else dueling(value.unsqueeze(-2), found, -2)

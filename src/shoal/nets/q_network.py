"""The action-value net: torso, core, and a head that gives one value for each discrete action.

    observation ──torso──> features ──core──> features ──> Q(s, .)                       plain
                                                       ├── hidden ──> V(s)      ┐
                                                       └── hidden ──> A(s, .)   ┴──> Q = V + A - mean A     dueling

`unroll` and `step` are those of the actor-critic: time folded into the batch for everything but the LSTM, the state and
the previous action and reward put to zero where an episode starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.nets.config import NetConfig
from shoal.nets.cores import LSTMCore, PassThrough, State, autocasting
from shoal.nets.encoder import Observation, encoder
from shoal.nets.sequences import fold, lead, previous_step
from shoal.nets.torsos import MLP, orthogonal
from shoal.ops.value import dueling

__all__ = ["HeadConfig", "QNetwork", "QOutput", "build_q"]


@dataclass(frozen=True)
class HeadConfig:
    """What an algorithm says of its head."""

    dueling: bool = False
    hidden: int = 64
    """Units of each stream of a dueling head."""
    zero: bool = False
    """All action values begin at 0, so that the greedy action is the first one."""


class QOutput(NamedTuple):
    """Of unroll, with a leading T, and of step, without."""

    q: Tensor
    """Action values [T, B, A]."""
    state: State
    """Recurrent state after the last step, [B, H] each; {} for feed-forward nets."""
    states: State
    """Of unroll: the state after every step, [T, B, H] each."""


def build_q(
    observation_space: gym.Space, action_space: gym.Space, config: NetConfig, head: HeadConfig, seed: int | None = None
) -> QNetwork:
    """The net for these spaces. ``seed`` makes the weights reproducible without touching the global generator."""
    config.validate()
    if not isinstance(action_space, gym.spaces.Discrete):
        raise ConfigError(f"action values need Discrete actions, but the action space is {action_space}")
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return QNetwork(observation_space, int(action_space.n), config, head)


class QNetwork(nn.Module):
    """See the module. A is the number of actions."""

    def __init__(self, observation_space: gym.Space, actions: int, config: NetConfig, head: HeadConfig) -> None:
        super().__init__()
        self.actions = actions
        self._uses_previous = config.prev_action_reward
        self.torso = encoder(observation_space, config)
        width = self.torso.features + (actions + 1 if config.prev_action_reward else 0)
        self.core = LSTMCore(width, config.lstm_size) if config.recurrent == "lstm" else PassThrough(width)
        features = self.core.features
        if head.dueling:
            self.streams = MLP(features, (2 * head.hidden,), "relu")  # both hidden layers side by side
            self.value_out, self.out = nn.Linear(head.hidden, 1), nn.Linear(head.hidden, actions)
            orthogonal(self.value_out, 0.0 if head.zero else 1.0)
        else:
            self.streams = None
            self.out = nn.Linear(features, actions)
        orthogonal(self.out, 0.0 if head.zero else 1.0)

    @property
    def recurrent(self) -> bool:
        """Whether there is a state to carry."""
        return isinstance(self.core, LSTMCore)

    def initial_state(self, B: int) -> State:
        """State before the first step of an episode; {} for feed-forward nets."""
        return self.core.initial_state(B)

    def forward(self, observation: Observation) -> Tensor:
        """Action values [N, A] of observations [N, ...] that stand alone: nets without memory only."""
        return self._read(self.torso(observation))

    def unroll(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> QOutput:
        """A sequence [T, B, ...]."""
        T, B = lead(observation)
        x = self.torso(fold(observation)).unflatten(0, (T, B))
        if self._uses_previous:
            x = torch.cat([x, previous_step(self._encode, first, prev_action, prev_reward)], -1)
        x, state, states = self.core(x, state, first)
        return QOutput(self._read(x), state, states)

    @torch.no_grad()
    def step(
        self,
        observation: Observation,
        first: Tensor | None,
        state: State,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> QOutput:
        """One step [B, ...] for acting, without gradients. ``first=None`` means that no episode starts."""
        x = self.torso(observation)
        if self._uses_previous:
            x = torch.cat([x, previous_step(self._encode, first, prev_action, prev_reward)], 1)
        x, state = self.core.step(x, state, first)
        return QOutput(self._read(x), state, {})

    def _read(self, x: Tensor) -> Tensor:
        """In float32 under autocast too: bfloat16 has two to three digits, and the values of two actions may differ by less."""
        if not autocasting():
            return self._head(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._head(x.float())

    def _head(self, x: Tensor) -> Tensor:
        if self.streams is None:
            return F.linear(x, self.out.weight, self.out.bias)
        value, advantage = self.streams(x).chunk(2, -1)
        return dueling(self.value_out(value), self.out(advantage))

    def _encode(self, action: Tensor) -> Tensor:
        return F.one_hot(action.long(), self.actions).float()
